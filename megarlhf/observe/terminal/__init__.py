"""Progress on the terminal."""
