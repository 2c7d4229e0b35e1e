"""Scorers that combine functions, reward models or other scorers; one file per scorer."""
