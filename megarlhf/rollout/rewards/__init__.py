"""Rewards: numbers for responses, from rules and from models."""
