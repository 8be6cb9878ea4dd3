"""Between text and tokens: `tokenizer`, `encoding`, `chat_template` in; `detokenizer` out."""
