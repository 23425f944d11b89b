"""A run, whatever it trains: directory, resume, exports, skipped steps, failures."""
