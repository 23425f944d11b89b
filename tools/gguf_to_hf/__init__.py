"""Conversion of GGUF files, llama.cpp's format, to Hugging Face directories."""
