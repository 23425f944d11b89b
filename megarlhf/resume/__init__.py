"""Resume points, the lock of a run directory, and stop signals: all that a stopped or killed run needs to go on."""
