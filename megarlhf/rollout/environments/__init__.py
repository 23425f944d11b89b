"""Environments that answer the model's turns: the user's interface, its processes, and the text between turns."""
