"""Stacks: base estimators under a personalized one, their parts, and what of these predicts."""
