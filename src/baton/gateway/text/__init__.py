"""Between text and tokens: `tokenizer`, `chat_template`, `prompts` in; `detokenizer`, stop strings out."""
