"""Fixed effects and variance components as a table."""

import numpy as np
import pandas as pd

_COLUMNS = ["estimate", "std_error", "sd", "correlation"]


def components_table(names, coefficients, std_errors, random_names, covariance, noise=None):
    """DataFrame of what a mixed model estimates for the population.

    Parameters
    ----------
    names : list of str
        Of the population coefficients (p,).
    coefficients, std_errors : ndarrays of shape (p,)
    random_names : list of str
        Of the coefficients that vary by client (q,).
    covariance : ndarray of shape (q, q)
        Between clients.
    noise : float or None
        Variance within clients, if there is one.

    Returns
    -------
    DataFrame
        Indexed by part ("fixed", "between", "within") and term.
    """
    rows = [
        ("fixed", name, value, error, np.nan, np.nan)
        for name, value, error in zip(names, coefficients, std_errors, strict=True)
    ]
    sds = np.sqrt(np.diag(covariance))
    for j, name in enumerate(random_names):
        rows.append(("between", name, covariance[j, j], np.nan, sds[j], np.nan))
        for k in np.flatnonzero(covariance[j, :j]):
            correlation = covariance[j, k] / (sds[j] * sds[k]) if sds[j] * sds[k] > 0 else np.nan
            term = f"{random_names[k]}, {name}"
            rows.append(("between", term, covariance[j, k], np.nan, np.nan, correlation))
    if noise is not None:
        rows.append(("within", "residual", noise, np.nan, np.sqrt(noise), np.nan))
    table = pd.DataFrame(rows, columns=["part", "term", *_COLUMNS])
    return table.set_index(["part", "term"])
