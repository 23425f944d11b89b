"""The commands that generate and evaluate without training."""
