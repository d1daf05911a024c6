"""Accounting: events, their composition to a total epsilon, and calibration of noise."""
