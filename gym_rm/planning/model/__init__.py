"""What is in a model? Parameters, operations and cache, from its configuration."""
