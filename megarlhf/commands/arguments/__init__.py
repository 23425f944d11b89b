"""Command lines: parsers, completion, the list of keys."""
