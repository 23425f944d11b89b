"""What moves: copy plans, pure data."""
