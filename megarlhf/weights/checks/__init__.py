"""Is what arrived right: digests, certificates, comparisons."""
