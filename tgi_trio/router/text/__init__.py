"""Text: tokenizer pool, incremental detokeniser, stop strings, chat templates, answers."""
