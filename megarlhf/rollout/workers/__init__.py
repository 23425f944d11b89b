"""Processes that run the user's code, so that it can hang, exit or crash without harming a rank."""
