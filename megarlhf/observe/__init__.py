"""What a run shows of itself: metrics on disk, progress on the terminal, and the report."""
