"""GGUF: llama.cpp's format of one file, in which a model's tensors are often quantized."""
