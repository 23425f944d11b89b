"""The configuration that `megarlhf init` writes."""
