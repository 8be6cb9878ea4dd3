"""Answers read by the `response_template` that a checkpoint brings (transformers' declarative format)."""
