"""The run directory: which run owns it, and whether a start may go on with an earlier run."""
