"""Displays draw on figures of matplotlib, which keeps them until they are closed."""

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")
