"""Numbers from responses: rewards, batches of a role, statistics. Used by `rl` and by `eval`."""
