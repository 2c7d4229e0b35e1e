"""Hidden states and values of a model."""
