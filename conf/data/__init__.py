"""Which text, its tokenizer, and how long the packs are."""
