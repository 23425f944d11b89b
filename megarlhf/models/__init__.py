"""GPT models out of Megatron-Core parts."""
