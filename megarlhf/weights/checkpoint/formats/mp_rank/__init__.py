"""Megatron's checkpoints of a file for each model-parallel rank."""
