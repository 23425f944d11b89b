"""The rehearsal held against real runs."""
