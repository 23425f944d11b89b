"""Packing of sequences into micro-batches, with shared beginnings stored once."""
