"""Reinforcement learning: the loop and its stages."""
