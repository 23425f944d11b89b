"""Model architectures, and the places of their tensors in each system."""
