"""Tokenizers from the files of a directory."""
