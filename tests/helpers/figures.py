"""What a display has drawn."""

import numpy as np


def lines_of(ax):
    """Drawn lines by label."""
    return {line.get_label(): line.get_xydata() for line in ax.lines}


def segments_of(ax):
    """Drawn collections of segments (n, 2, 2): the intervals, then any connections."""
    return [np.array(collection.get_segments()) for collection in ax.collections]


def legend_of(holder):
    return [text.get_text() for text in holder.get_texts()]


def assert_nothing_is_cut_off(figure):
    figure.canvas.draw()
    box = figure.get_tightbbox()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= figure.get_figwidth()
    assert box.y1 <= figure.get_figheight()
