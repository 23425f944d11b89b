"""Records of a run on disk: metrics, tables of samples, the run directory."""
