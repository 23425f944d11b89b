"""Files of torch.save, without loading them."""
