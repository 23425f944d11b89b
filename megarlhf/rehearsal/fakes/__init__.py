"""Stand-ins for what a run reads and starts: engine, weights, data, resume points."""
