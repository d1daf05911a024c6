"""Private linear regressions from statistics whose rows were scaled to the bounds beforehand."""

import numpy as np

from pfl_sklearn.linear_model._mixed._reduction import sum_of_clients, table_of_statistics
from pfl_sklearn.linear_model._private._linear_release import (
    PrivateTable,
    check_numbers,
    private_sizes,
    sends_messages,
    shape_of_messages,
)
from pfl_sklearn.statistics._clipping import scaled_triangles


def check_clipped_statistics(params, prior, design, statistics):
    """Raise ValueError if statistics allow no private fit; no sum of rows is read.

    Numbers of rows are, unless they are protected.
    """
    for name in ("feature_bound", "target_bound"):
        bound = getattr(statistics, name)
        if bound is None:
            raise ValueError(
                "a private fit needs statistics of rows that were scaled to its bounds; these were "
                "not. Make them by from_rows, from_frame or from_chunks with "
                f"feature_bound={params.feature_bound!r} and target_bound={params.target_bound!r}; "
                "from_moments cannot scale rows."
            )
        if bound != getattr(params, name):
            raise ValueError(
                f"{name}={getattr(params, name)!r} must be that of the statistics, whose rows were "
                f"scaled to {name}={bound!r}; give the same numbers."
            )
    sizes = statistics.n_samples_per_client
    check_numbers(params, prior, design, np.zeros(0, int) if private_sizes(params) else sizes)
    usual = params.relation == "replace_one" and design.fit_intercept
    if not usual and sends_messages(prior, len(sizes), params):
        raise ValueError(
            "rows of statistics are scaled as for relation='replace_one' with an intercept; got "
            f"relation={params.relation!r} and fit_intercept={design.fit_intercept}. Fit the rows."
        )


def private_table_of_statistics(design, statistics, prior, options):
    """PrivateTable of ClientStatistics whose rows were scaled to the bounds."""
    shape = shape_of_messages(statistics.n_features, design.fit_intercept, options)
    exact, total = table_of_statistics(statistics, design), None
    if sends_messages(prior, exact.n_clients, options):
        # Features in the order of the prior, which is that of the rows' messages.
        at = [0, *(k for k in design.order if k), statistics.n_features + 1]
        parts = []
        for block in statistics._blocks():
            triangles = statistics._triangles(block, clipped=True)[..., at]
            if options.unit == "client":  # the mean over its rows, whatever their number
                triangles /= np.sqrt(exact.sizes[block])[:, None, None]
            message = shape._summed(*scaled_triangles(shape, triangles))
            parts.append((np.arange(block.start, block.stop), message))
        total = sum_of_clients(parts, exact.n_clients)
    return PrivateTable(shape, total, exact)
