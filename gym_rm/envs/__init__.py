"""What does Gymnasium see? Conversations as observations, replies as actions, scores as rewards."""
