"""Megatron-Core's parallelism: process groups, schedules, optimizer."""
