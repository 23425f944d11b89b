"""Parts that both formats of Megatron share: arguments and the tracker file."""
