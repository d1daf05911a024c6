"""Tables of the population of a mixed model, and confidence intervals of its components."""

import numpy as np
from scipy.special import ndtri

from pfl_sklearn._client_tables import SummaryTable
from pfl_sklearn.linear_model._algebra import row_slices

_BLOCK_CELLS = 1 << 22  # numbers of a block of clients, whose products are a few times as many


def covariance_rows(names, covariance):
    """Rows of a summary, as dicts, of a covariance (q, q) between clients."""
    rows, sds = [], np.sqrt(np.diag(covariance))
    for j, name in enumerate(names):
        rows.append(variance_row("between", name, covariance[j, j]))
        for k in np.flatnonzero(covariance[j, :j]):
            # A variance may underflow to 0 where the covariance does not.
            product = sds[j] * sds[k]
            correlation = covariance[j, k] / product if product > 0 else np.nan
            row = {"part": "between", "term": f"{names[k]}, {name}"}
            rows.append({**row, "estimate": covariance[j, k], "correlation": correlation})
    return rows


def variance_row(part, term, variance):
    """Row of a summary, as a dict."""
    return {"part": part, "term": term, "estimate": variance, "sd": np.sqrt(variance)}


def summary_table(rows):
    """DataFrame of rows of a summary; what a row does not say is NaN."""
    columns = ["part", "term", "estimate", "std_error", "sd", "correlation"]
    return SummaryTable(rows, columns=columns).set_index(["part", "term"]).astype(float)


def intervals_table(names, fixed, random_names, components, noise):
    """DataFrame of bounds, indexed by part ("fixed", "between", "within") and term.

    Parameters
    ----------
    names : list of str
        Names of the population coefficients.
    fixed : pair of ndarrays of shape (p,)
    random_names : list of str
        Names of the q coefficients that vary.
    components : pair of ndarrays of shape (q, q), or None
        Bounds of the covariance between clients; None if it was given.
    noise : pair of floats, or None
    """
    rows = [("fixed", name, *bounds) for name, *bounds in zip(names, *fixed, strict=True)]
    if components is not None:
        lower, upper = components
        for j, name in enumerate(random_names):
            rows.append(("between", name, lower[j, j], upper[j, j]))
            # A covariance that the family fixes at 0 has bounds without length, and no row.
            for k in np.flatnonzero(np.isfinite(lower[j, :j]) & (upper[j, :j] != lower[j, :j])):
                term = f"{random_names[k]}, {name}"
                rows.append(("between", term, lower[j, k], upper[j, k]))
    if noise is not None:
        rows.append(("within", "residual", *noise))
    table = SummaryTable(rows, columns=["part", "term", "lower", "upper"])
    return table.set_index(["part", "term"])


def directions(shape, covariance, back):
    """Symmetric matrices (a, q, q) along which a family lets a covariance move; None if given.

    `back` (q, q) leads from deviations of the columns that have the family's shape to those of the
    data.
    """
    q = len(covariance)
    if shape is None:
        return None
    # Without a variance the direction is that of the family's shape.
    if shape == "spherical" or q == 1:
        size = np.trace(covariance)
        return (covariance / size if size > 0 else back @ back.T / q)[None]
    if shape == "diag":
        return back.T[:, :, None] * back.T[:, None, :]
    pairs = [(j, k) for j in range(q) for k in range(j + 1)]
    entries = np.zeros((len(pairs), q, q))
    for entry, (j, k) in zip(entries, pairs, strict=True):
        entry[j, k] = entry[k, j] = 1.0
    return entries


def component_bounds(posterior, moved, covariance, noise, n_rows, n_outputs, level):
    """Normal bounds of a covariance (q, q) and of the noise variance, from expected information.

    Parameters
    ----------
    posterior : RowPosterior
    moved : ndarray of shape (a, q, q) or None
        Directions of the family; None if the covariance was given.
    covariance : ndarray of shape (q, q)
    noise : float or None
        Estimated noise variance; None if there is none, or if it was given.
    n_rows : int
    n_outputs : int
        Number of linear predictors, in which deviations are alike.
    level : float
    """
    q, z, unit = len(covariance), ndtri(0.5 + level / 2), posterior.noise
    covariance = covariance / unit  # an exact fit leaves a noise whose squares underflow
    steps = covariance[None] if moved is None else moved
    information = _expected_information(posterior, steps, n_rows, n_outputs)
    if moved is None:  # the ratio to the noise variance falls as that rises
        errors = 1 / (np.array([-1.0, 1.0]) @ information @ np.array([-1.0, 1.0]))
        return None, _around(noise, z * np.sqrt(errors))
    if noise is None:
        information = information[:-1, :-1]
    # Directions that no row informs on leave the information singular.
    errors = np.linalg.pinv(information, hermitian=True)
    gradient = moved.reshape(len(moved), -1).T
    # In the ratio to the noise variance the covariance is a product, so the noise's error counts.
    if noise is not None:
        gradient = np.column_stack([gradient, covariance.ravel()])
    stds = np.sqrt(np.maximum(np.einsum("ka,ab,kb->k", gradient, errors, gradient), 0.0))
    lower, upper = (unit * (covariance + sign * z * stds.reshape(q, q)) for sign in (-1, 1))
    # Covariances may be negative, variances may not.
    np.fill_diagonal(lower, np.maximum(np.diag(lower), 0.0))
    return (lower, upper), None if noise is None else _around(noise, z * np.sqrt(errors[-1, -1]))


def _around(noise, half):
    """Bounds of a noise variance, symmetric on the logarithmic scale, which keeps them above 0."""
    return noise * np.exp(-half), noise * np.exp(half)


def _expected_information(posterior, moved, n_rows, n_outputs):
    """Expected information (a + 1, a + 1) on the directions and on the log of the noise variance.

    The directions are those of the covariance over the noise variance.
    """
    p, q = len(posterior.scale) // n_outputs, moved.shape[1]
    at = (np.arange(n_outputs)[:, None] * p + np.arange(q)).ravel()
    scale = posterior.scale[at]
    steps = np.array([np.kron(np.eye(n_outputs), step) for step in moved])
    steps /= np.multiply.outer(scale, scale)
    a = len(steps)
    information = np.zeros((a + 1, a + 1))
    information[a, a] = n_rows / 2  # of a log variance: 1/2 per row, whatever the covariance
    for part in row_slices(len(posterior.rows), len(at) ** 2 * a, _BLOCK_CELLS):
        rows = posterior.whitened(part)[:, :, at]
        pulled = np.einsum("bij,ajk->abik", rows.transpose(0, 2, 1) @ rows, steps)
        information[a, :a] += 0.5 * np.einsum("abii->a", pulled)
        information[:a, :a] += 0.5 * np.einsum("abij,cbji->ac", pulled, pulled, optimize=True)
    information[:a, a] = information[a, :a]
    return information
