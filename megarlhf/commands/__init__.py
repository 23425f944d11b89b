"""The commands; no logic."""
