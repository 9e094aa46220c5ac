"""Makes the embedded model: its corpus, its tokenizer, its training and its questions."""
