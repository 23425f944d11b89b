"""The formats of checkpoints, a folder each."""
