"""Weights in any system as placements of logical tensors, and the copy plans between them."""
