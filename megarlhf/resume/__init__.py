"""What a run needs to go on after it was stopped or killed: resume points, the lock of its directory, signals."""
