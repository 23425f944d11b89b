"""The demo in which a language model learns to use a tool."""
