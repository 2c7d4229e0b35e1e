"""Loading of checkpoints."""
