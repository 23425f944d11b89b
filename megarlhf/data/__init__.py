"""From files on disk to token ids: sources, templates, tokenizers, samples, and the order they come in."""
