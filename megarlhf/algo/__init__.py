"""The mathematics of alignment: pure functions of tensors that import torch and nothing of ours."""
