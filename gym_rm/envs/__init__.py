"""Gymnasium environments: conversations as observations, replies as actions, scores as rewards."""
