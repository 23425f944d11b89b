"""Samples: records as token ids, their order, limits and storage."""
