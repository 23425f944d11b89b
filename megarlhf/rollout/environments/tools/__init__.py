"""Tools as a ready environment."""
