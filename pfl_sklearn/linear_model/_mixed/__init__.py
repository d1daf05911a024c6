"""Mixed models: clients' coefficients around a population's, under a prior."""
