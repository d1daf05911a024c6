"""Estimates that follow streams of values.

Agents receive values one at a time, exchange noisy messages and know their means at any time.
"""

from pfl_sklearn.online._collaborative_mean import CollaborativeMean

__all__ = ["CollaborativeMean"]
