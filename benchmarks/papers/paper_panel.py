"""What regenerate.py needs of a panel: a figure or a table of a paper."""

from collections.abc import Callable
from typing import Any, NamedTuple

HEADER = ["", "Printed", "As printed, here", "By default, here"]


class Panel(NamedTuple):
    """A panel: how it is computed, and what the page says of it."""

    name: str  # of the file of its results
    paper: str  # "A", "B" or "C"
    title: str
    settings: str  # as the paper has them, and what it leaves open
    compute: Callable[[], dict]  # figures, as JSON takes them
    rows: Callable[[dict], list]  # of its table, from the figures
    why: Callable[[dict], str]  # where and why they differ from those printed
    header: list = HEADER
    draw: Any = None  # ``draw(ax, figures)``, or of a list of axes; None without a picture
    minutes: float = 0.5  # about, of one core
    grid: tuple = (1, 1)  # rows and columns of the picture
    again: Any = None  # of panels that take minutes: a part of their figures, in seconds
