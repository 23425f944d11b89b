"""megarlhf: alignment of language models at Megatron scale."""

__version__ = "0.1.0"
