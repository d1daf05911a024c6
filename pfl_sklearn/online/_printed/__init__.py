"""Algorithms as the papers print them, for their figures."""
