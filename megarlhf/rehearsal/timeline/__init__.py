"""Simulated time: the trace of each rank, messages between ranks, deadlocks."""
