"""PPSGD: additive global and local linear models."""
