"""Between text and tokens: `tokenizer`, `encoding`, `chat_template`, `prompts` in; `detokenizer` out."""
