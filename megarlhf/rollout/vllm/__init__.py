"""vLLM as the rollout engine."""
