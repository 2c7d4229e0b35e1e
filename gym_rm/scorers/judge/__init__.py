"""Language models that grade replies."""
