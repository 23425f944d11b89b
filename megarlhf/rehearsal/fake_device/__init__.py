"""A device that holds shapes and no numbers, and the patches that let the program run on it."""
