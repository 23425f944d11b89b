"""Programs beside the package; not installed."""
