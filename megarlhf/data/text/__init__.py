"""Conversations as text."""
