"""Attention over padded rows, packed rows and rows with shared prompts."""
