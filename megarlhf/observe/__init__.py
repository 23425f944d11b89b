"""Output of a run: metrics on disk, progress on the terminal, and reports."""
