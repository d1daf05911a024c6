"""Published means under a Gaussian prior."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from sklearn.utils import check_consistent_length

from pfl_sklearn._clients import Array, encode_clients, format_id, match_clients
from pfl_sklearn._typing import Floats, Integers, TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import read_rows
from pfl_sklearn.estimation._published._base import published_report, refuse_unused
from pfl_sklearn.estimation._published._population import (
    KnownPopulation,
    PublishedPosterior,
    plausible_populations,
)
from pfl_sklearn.estimation._published._release import (
    public_grid,
    release_means,
    release_with_sizes,
    sums_of_rows,
    sums_of_statistics,
)
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.statistics import ClientStatistics

_LEAST_EPSILON = 1e-3  # the noise of a single row is a thousand times its range, and more
_ENOUGH_ROWS = 4.0  # standard deviations of their noise; below, means are drawn to the middle
_OF_OTHER_RELEASES = ("clip_norm", "noise_variance_bound", "n_bits", "participants")
_PUBLISHED = (
    *("means_", "stds_", "local_means_", "noise_std_", "shrinkage_", "population_mean_"),
    *("population_mean_std_", "prior_", "noise_variance_", "icc_", "log_likelihood_"),
)


def check_published_means(params: Any, prior: Any, sample_weight: Any) -> None:
    """Refuse parameters that do not go together, before any data is touched."""
    refuse_unused(params, _OF_OTHER_RELEASES)
    public_grid(params.bounds, params.grid)
    if not isinstance(prior, GaussianPrior) or prior.covariance_type == "diag":
        raise ValueError(
            "publish='clients' needs a Gaussian prior with one variance; got "
            f"prior={params.prior!r}."
        )
    if sample_weight is not None:
        raise ValueError(
            "sample_weight is not supported with publish='clients': a row of a large weight would "
            "need as much more noise."
        )
    if params.epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {_LEAST_EPSILON} to publish means; got {params.epsilon}."
        )
    if params.clients is not None:
        listed_clients(params.clients)
        if params.target == "table":
            raise ValueError(
                "clients goes with target='population': a client that may have no rows has no mean "
                "of its table; got target='table'."
            )


def check_separable(params: Any, n_rows: Integers) -> None:
    """Refuse the target of a population that means of single rows do not tell from their rows."""
    if params.target == "population" and params.noise_variance is None and n_rows.max() == 1:
        raise ValueError(
            "every client has one row, so the variance of a row is not identifiable apart from "
            "that between clients; expected target='table', or a noise_variance."
        )


def listed_clients(clients: Any) -> Array:
    """Sorted ids (m,) of a public list, or ValueError."""
    if np.ndim(clients) != 1 or not hasattr(clients, "__getitem__") or isinstance(clients, dict):
        raise ValueError(
            f"clients must be a list, an array or a column of ids; got {reprlib.repr(clients)}."
        )
    ids, codes = encode_clients(clients, len(clients), "clients")
    counts = np.bincount(codes, minlength=len(ids))
    if len(ids) == 0 or counts.max() > 1:
        what = f"{format_id(ids[counts.argmax()])} twice" if len(ids) else "none"
        raise ValueError(f"clients must name one client or more, and each once; got {what}.")
    return ids


def check_has_groups(params: Any, groups: TableLike) -> None:
    """Refuse a list of clients without the clients of the rows, before the ledger is charged."""
    if params.clients is not None and groups is None:
        raise ValueError(
            "clients needs groups, the client id of every row; got groups=None. If groups was "
            "given to a scikit-learn tool, turn routing on: "
            "sklearn.set_config(enable_metadata_routing=True)."
        )


def published_of_rows(params: Any, prior: Any, X: TableLike, y: Floats, groups: TableLike) -> Any:
    """Ids (m,), fitted attributes and report of a release of the rows y (n,) or (n, 1)."""
    if y.ndim > 1 and y.shape[1] > 1:
        raise ValueError(f"publish='clients' needs one output; got y of shape {y.shape}.")
    y = y.ravel()
    if params.clients is None:
        ids, codes = read_rows(params, X, y, groups, None).clients
    else:
        check_consistent_length(X, y)
        ids = listed_clients(params.clients)
        codes = match_clients(groups, len(y), ids, of_known="clients")
        y, codes = y[codes >= 0], codes[codes >= 0]
    sums = sums_of_rows(y, codes, len(ids), public_grid(params.bounds, params.grid))
    return ids, *_published(params, prior, sums)


def published_of_statistics(params: Any, statistics: ClientStatistics) -> Any:
    """Ids (m,), fitted attributes and report of a release of statistics of cut rows."""
    if params.clients is not None:
        raise ValueError(
            "fit_statistics does not take clients, because sums are as exact as numbers of rows "
            "allow, which would not be public; fit with the rows."
        )
    grid = public_grid(params.bounds, params.grid)
    sums = sums_of_statistics(statistics, params.bounds, grid)
    # The ledger is charged for statistics that fit alone.
    prior = params._charged_prior(None)
    return statistics.clients, *_published(params, prior, sums)


def _published(params, prior, sums):
    """Fitted attributes and the report of a release of RowSums."""
    has_list = params.clients is not None
    if not has_list:
        check_separable(params, sums.n_rows)
    grid = public_grid(params.bounds, params.grid)
    noise = known_vector("noise_variance", params.noise_variance, 1, "finite and non-negative")
    mean, between = prior.known_mean(1), prior.known_variances(1)
    known = KnownPopulation(
        *(None if value is None else float(value[0]) for value in (mean, between, noise))
    )
    release = release_with_sizes if has_list else release_means
    made = release(sums, grid, params.epsilon, noise is not None, params.random_state)
    # From here on only what was released and what is public is read.
    if made.sizes is not None and known.mean is None:
        _warn_of_few_rows(made)
    nodes = plausible_populations(made.released, known)
    attributes = _attributes(params, prior, made.released, nodes)
    sizes = squares = ""
    if made.sizes is not None:
        sizes = (
            f", on its number of rows (epsilon {made.sizes.epsilon:.3g}, noise sd "
            f"{made.sizes.noise_std:.3g})"
        )
    if made.squares is not None:
        squares = f", and on the squares of rows around them (epsilon {made.squares.epsilon:.3g})"
    step = grid.step / 2 if has_list else grid.step
    facts = {
        **made.sums.facts(),
        "epsilon": params.epsilon,
        "mechanism": "discrete Laplace mechanism on the sum of every client (epsilon "
        f"{made.sums.epsilon:.3g}){sizes}{squares}",
        "noise_std": step * made.sums.noise_std,
        "sensitivity": step * grid.n_steps,
    }
    low, high = grid.bounds
    assumptions = [
        f"bounds = ({low:.6g}, {high:.6g}) and the grid of {grid.n_steps} steps are public"
    ]
    if sums.rounding:
        assumptions.append("rows were cut to bounds before their statistics were computed")
    return attributes, published_report(params, _PUBLISHED, facts, len(sums.n_rows), *assumptions)


def _warn_of_few_rows(made):
    """Warn of noised numbers of rows that do not tell how many there are in all."""
    noise = np.sqrt(len(made.released.n_rows)) * made.sizes.noise_std
    if made.n_rows <= _ENOUGH_ROWS * noise:
        warn_caller(
            f"the noised numbers of rows add up to {made.n_rows}, and their noise has a standard "
            f"deviation of {noise:.0f}: the population's mean is drawn to the middle of bounds, "
            "and its error is too small. Take a larger epsilon, or public numbers of rows "
            "(clients=None).",
            UserWarning,
        )


def _attributes(params, prior, released, nodes):
    """Fitted attributes by name; all of them follow from the release."""
    posterior = PublishedPosterior(released, nodes, params.target == "table")
    means, stds, shrinkage = posterior.moments()
    weights = nodes.weights
    mean = weights @ nodes.means
    mean_variance = weights @ (nodes.means - mean) ** 2
    between, noise = weights @ nodes.taus**2, weights @ nodes.sigmas**2
    single = released.squares is None and params.noise_variance is None
    if single:  # the variance of a row is part of that between clients
        noise = np.nan
    return {
        "n_samples_per_client_": released.n_rows,
        "means_": means,
        "stds_": stds,
        "local_means_": released.means,
        "noise_std_": np.sqrt(2) * released.scales,
        "shrinkage_": shrinkage,
        "prior_": prior.with_values(np.array([mean]), np.array([between])),
        "noise_variance_": float(noise),
        "population_mean_": float(mean),
        "population_mean_std_": float(np.sqrt(mean_variance)),
        "icc_": float(between / (between + noise)) if between + noise != 0 else 0.0,
        "log_likelihood_": nodes.log_likelihood,
        "_new_client_std": float(np.sqrt(between + mean_variance)),
        "_intervals": posterior,
    }
