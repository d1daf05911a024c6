"""Training of nets: from a recipe to the steps of clients. The methods stand beside it."""
