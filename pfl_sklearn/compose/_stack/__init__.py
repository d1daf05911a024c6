"""Stacks: base estimators, a personalized final one, and the choice of the parts that predict."""
