"""Watching a run: phases, slow ranks, hanging ranks, profiles."""
