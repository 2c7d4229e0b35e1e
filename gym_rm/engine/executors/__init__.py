"""Executors: each loads a model and runs its forward. One file per executor."""
