"""The demonstration: a task small enough to align a model on a laptop."""
