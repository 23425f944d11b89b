"""Checks of the machines that a run is to use: kernels, memory, nodes, environment."""
