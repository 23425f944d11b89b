"""The training loops, a page each."""
