"""Records from files, datasets and generators."""
