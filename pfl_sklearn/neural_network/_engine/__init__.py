"""Training of neural networks: from a recipe to the steps of clients. All methods use it."""
