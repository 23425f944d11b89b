"""Accuracy against time with long-tailed responses, drawn whole and in slices."""
