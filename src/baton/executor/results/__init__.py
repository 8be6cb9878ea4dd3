"""What a step gives, made of logits and hidden states: tokens (sampled, and within constraints),
log-probabilities, vectors of prompts, the experts that were chosen.
"""
