"""A real language model through the whole pipeline: SFT, a reward model, PPO and GRPO."""
