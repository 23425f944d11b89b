"""Models on disk: opened, converted, exported, compared."""
