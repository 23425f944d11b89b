"""Whether two versions of this repository compute the same numbers: `python -m tools.equality COMMIT`."""
