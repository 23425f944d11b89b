"""Measurements of the machine at hand, for the cost model."""
