"""From logits to tokens: every sampling parameter, batched, and each row as if it were alone."""
