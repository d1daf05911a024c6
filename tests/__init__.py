"""Tests of the package; the folders mirror its own."""
