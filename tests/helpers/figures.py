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


def assert_rows_do_not_overlap(figure):
    """Boxes of the legend and of each label: below the axes, one below the other, in the figure."""
    figure.canvas.draw()
    first = figure.axes[0]
    legend = (figure.legends or [first.get_legend()])[0].get_window_extent()
    labels = [ax.xaxis.label.get_window_extent() for ax in figure.axes]
    for box in labels:
        assert legend.y1 < box.y0 < box.y1 < first.get_window_extent().y0
    names = [text.get_window_extent() for text in first.get_yticklabels()]
    for box in (legend, *labels, first.get_window_extent(), *names):
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    return legend, *labels
