"""What a model is, and where its tensors stand in each system."""
