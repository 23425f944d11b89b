"""Copy plans: pure data that says which elements move between which ranks."""
