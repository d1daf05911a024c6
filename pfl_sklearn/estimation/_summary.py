"""The clients of a fitted estimator of means as a table."""

import numpy as np
import pandas as pd


def client_summary(estimator, level):
    """DataFrame with one row per client, or per client and output."""
    estimator._require_fitted("means_")
    lower, upper = estimator.credible_interval(level)
    columns = {
        "n_samples": estimator.n_samples_per_client_,
        "local_mean": estimator.local_means_,
        "mean": estimator.means_,
        "std": estimator.stds_,
        "lower": lower,
        "upper": upper,
        "shrinkage": estimator.shrinkage_,
    }
    index = pd.Index(estimator.clients_, name="client")
    if estimator.means_.ndim == 2:
        d = estimator.means_.shape[1]
        index = pd.MultiIndex.from_product([index, range(d)], names=["client", "output"])
        columns = {
            name: np.repeat(values, d) if values.ndim == 1 else values.ravel()
            for name, values in columns.items()
        }
    return pd.DataFrame(columns, index=index)
