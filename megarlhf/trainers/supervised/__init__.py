"""The loop and the losses of `sft`, `rm` and `dpo`."""
