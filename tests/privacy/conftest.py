"""Fixtures of the tests of privacy."""

import pytest


@pytest.fixture
def path(tmp_path):
    """Where a privacy ledger is to be."""
    return tmp_path / "ledger.jsonl"
