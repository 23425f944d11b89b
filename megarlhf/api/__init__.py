"""Modules that code of the user may import; `from megarlhf import NAME` gives the same."""
