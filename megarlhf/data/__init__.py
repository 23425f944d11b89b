"""Files on disk become token ids: sources, templates, tokenizers, samples, and their order."""
