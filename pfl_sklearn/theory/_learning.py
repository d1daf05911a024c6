"""Learning one model per client: the error of local regressions, and the prior behind AdaPeD."""

from typing import Any

import numpy as np
from scipy.special import betaln, xlog1py, xlogy

from pfl_sklearn._typing import Floats
from pfl_sklearn.theory._checks import check_numbers, check_one_of

_SUM_TOLERANCE = 1e-9  # of shares that are rounded


def local_coef_error(X: Any, noise_variance: float, coef: Any = None) -> float:
    r"""Expected squared error of one client's coefficients, by least squares on its own rows.

    .. math:: E \|\hat\theta - \theta\|^2
              = \sigma^2 \operatorname{tr} \bigl( (X^\top X)^+ \bigr) + \|\theta - X^+ X \theta\|^2

    Equation (53) (ICLR) of Ozkara et al. (2023), which has the first part only. That is right with
    linearly independent columns. The estimate of minimum norm, which the paper takes otherwise,
    also misses the part of the coefficients that no row has to do with.

    Parameters
    ----------
    X : array-like of shape (n_rows, d)
        Features of the client's rows; no intercept is added.
    noise_variance : float, >= 0
        Variance of the targets around their means.
    coef : array-like of shape (d,) or None, default=None
        True coefficients. Needed if columns depend linearly on others, as with fewer rows than
        features.

    Returns
    -------
    float
        Summed over the coefficients.

    Raises
    ------
    ValueError
        If an argument is out of its range, or `coef` is needed and missing.

    Examples
    --------
    With ten orthogonal rows for 50 coefficients of 1, the other 40 are estimated by 0:

    >>> import numpy as np
    >>> from pfl_sklearn.theory import local_coef_error
    >>> round(local_coef_error(np.eye(10, 50), 0.1, np.ones(50)), 6)
    41.0
    """
    X = np.asarray(X, dtype=float)
    if X.ndim != 2:
        raise ValueError(f"X must be of shape (n_rows, d); got an array of shape {X.shape}.")
    check_numbers("finite", X=X)
    check_numbers("finite and at least 0", noise_variance=noise_variance)
    _check_scalar("noise_variance", noise_variance)
    _, lengths, directions = np.linalg.svd(X, full_matrices=False)
    # As numpy.linalg.matrix_rank has it.
    longest = lengths.max(initial=0.0) * max(X.shape) * np.finfo(float).eps
    seen = lengths > longest
    error = noise_variance * np.sum(lengths[seen] ** -2.0)
    if coef is None:
        if seen.sum() < X.shape[1]:
            raise ValueError(
                f"coef must be given where columns depend on others: X has {X.shape[1]} columns "
                f"and rank {seen.sum()}; got None."
            )
        return float(error)
    coef = np.asarray(coef, dtype=float)
    if coef.shape != X.shape[1:]:
        raise ValueError(f"coef must be of shape {X.shape[1:]}; got shape {coef.shape}.")
    check_numbers("finite", coef=coef)
    missed = coef - directions[seen].T @ (directions[seen] @ coef)
    return float(error + missed @ missed)


def distillation_log_density(
    probabilities: Any,
    population_probabilities: Any,
    psi: float,
    input_shares: Any = None,
    *,
    version: str = "sound",
) -> float | Floats:
    r"""Log density of a client's classifier under the prior that makes distillation a penalty.

    .. math:: p(q) = c(\psi) \exp \Bigl( -\psi \sum_x p(x) \,
              \mathrm{KL} \bigl( p_\mu(x) \,\|\, q(x) \bigr) \Bigr)

    For two classes, and finitely many inputs x. The probabilities q(x) of class 1 are then
    independent, with beta distributions of parameters :math:`1 + \psi p(x) p_\mu(x)` and
    :math:`1 + \psi p(x) (1 - p_\mu(x))`. Equation (57) (ICLR) of Ozkara et al. (2023). The
    parameters there are :math:`1 + p_\mu(x) / (\psi p(x))` and
    :math:`1 + (1 - p_\mu(x)) / (\psi p(x))`, with which the density does not integrate to 1.

    Parameters
    ----------
    probabilities : array-like of shape (..., n_inputs), in (0, 1)
        Probability of class 1 that the client's model gives to each input.
    population_probabilities : array-like of shape (n_inputs,), in (0, 1)
        The same of the population's model.
    psi : float, > 0
        How close clients are to the population. (AdaPeD's loss has 1 / (2 psi) in its place.)
    input_shares : array-like of shape (n_inputs,) or None, default=None
        Share p(x) of each input, above 0 and 1 in sum; None: equal shares.
    version : {"sound", "printed"}, default="sound"
        Normalizing constant: the right one, or the printed one.

    Returns
    -------
    float or ndarray of shape (...)

    Raises
    ------
    ValueError
        If an argument is out of its range, or shapes differ.

    Examples
    --------
    >>> from pfl_sklearn.theory import distillation_log_density
    >>> round(distillation_log_density([0.5], [0.5], psi=2.0), 4)  # that of Beta(2, 2): log 1.5
    0.4055
    """
    q, shared = (np.asarray(each, float) for each in (probabilities, population_probabilities))
    if shared.ndim != 1 or not len(shared) or q.shape[-1:] != shared.shape:
        raise ValueError(
            "probabilities must be of shape (..., n_inputs) and population_probabilities of shape "
            f"(n_inputs,); got {q.shape} and {shared.shape}."
        )
    check_numbers("in (0, 1)", probabilities=q, population_probabilities=shared)
    check_numbers("finite and above 0", psi=psi)
    _check_scalar("psi", psi)
    check_one_of("version", version, ("sound", "printed"))
    given = np.full(shared.shape, 1 / len(shared)) if input_shares is None else input_shares
    shares = np.asarray(given, dtype=float)
    check_numbers("finite and above 0", input_shares=shares)
    if shares.shape != shared.shape or abs(shares.sum() - 1) > _SUM_TOLERANCE:
        raise ValueError(
            f"input_shares must be {len(shared)} numbers that sum to 1; got {input_shares!r}."
        )
    weights = psi * shares
    exponent = weights * (xlogy(shared, q) + xlog1py(1 - shared, -q))
    counts = weights if version == "sound" else 1 / weights
    constant = betaln(1 + counts * shared, 1 + counts * (1 - shared))
    result = np.sum(exponent - constant, axis=-1)
    return float(result) if q.ndim == 1 else result


def _check_scalar(name, value):
    if np.ndim(value):
        raise ValueError(f"{name} must be a single number; got shape {np.shape(value)}.")
