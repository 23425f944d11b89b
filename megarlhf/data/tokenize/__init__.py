"""Tokenization by worker processes, and the cache of its results."""
