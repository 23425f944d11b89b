"""Records as conversations, pairs and prompts, before any template."""
