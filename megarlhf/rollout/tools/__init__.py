"""Tools as a ready environment: their descriptions, the calls that a model writes, and what executes them."""
