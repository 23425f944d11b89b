"""Checks of data and rewards before a run."""
