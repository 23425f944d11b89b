"""Resume points: when they are due, how they are written, found and loaded."""
