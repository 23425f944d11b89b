"""Public functions and classes: import them from `megarlhf`, not from here."""
