"""Logistic regressions of clients under a population prior."""
