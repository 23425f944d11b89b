"""The formats in which a directory keeps a tokenizer, each read into a fast tokenizer of transformers."""
