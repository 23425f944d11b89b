"""Rollout: engines that sample responses with the actor's weights, and what rewards them."""
