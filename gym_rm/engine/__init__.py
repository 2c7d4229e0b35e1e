"""Reward models: from conversations to rewards."""
