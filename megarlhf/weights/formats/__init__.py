"""Checkpoint formats on disk."""
