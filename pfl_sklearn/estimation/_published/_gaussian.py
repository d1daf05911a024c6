"""Published means under a Gaussian prior."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfl_sklearn._clients import Array
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.estimation._published._base import published_report, refuse_unused
from pfl_sklearn.estimation._published._population import (
    KnownPopulation,
    PublishedPosterior,
    plausible_populations,
)
from pfl_sklearn.estimation._published._release import public_grid, release_means
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.priors._prior import known_vector
from pfl_sklearn.privacy import PrivacyReport

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


def check_separable(params: Any, n_rows: Integers) -> None:
    """Refuse the target of a population that means of single rows do not tell from their rows."""
    if params.target == "population" and params.noise_variance is None and n_rows.max() == 1:
        raise ValueError(
            "every client has one row, so the variance of a row is not identifiable apart from "
            "that between clients; expected target='table', or a noise_variance."
        )


def published_means(
    params: Any, prior: Any, ids: Array, codes: Integers, y: Floats
) -> tuple[dict[str, Any], PrivacyReport]:
    """Fitted attributes and the report of a release of the means of rows y (n,)."""
    n_rows = np.bincount(codes, minlength=len(ids))
    check_separable(params, n_rows)
    grid = public_grid(params.bounds, params.grid)
    noise = known_vector("noise_variance", params.noise_variance, 1, "finite and non-negative")
    mean, between = prior.known_mean(1), prior.known_variances(1)
    known = KnownPopulation(
        *(None if value is None else float(value[0]) for value in (mean, between, noise))
    )
    made = release_means(
        y, codes, n_rows, grid, params.epsilon, noise is not None, params.random_state
    )
    # From here on only what was released and what is public is read.
    nodes = plausible_populations(made.released, known)
    attributes = _attributes(params, prior, made.released, nodes)
    attributes["noise_std_"] = grid.step * made.sums.noise_std / n_rows
    low, high = grid.bounds
    squares = ""
    if made.squares is not None:
        squares = f", and on the squares of rows around them (epsilon {made.squares.epsilon:.3g})"
    facts = {
        **made.sums.facts(),
        "epsilon": params.epsilon,
        "mechanism": "discrete Laplace mechanism on the sum of every client (epsilon "
        f"{made.sums.epsilon:.3g}){squares}",
        "noise_std": grid.step * made.sums.noise_std,
        "sensitivity": high - low,
    }
    bounds = f"bounds = ({low:.6g}, {high:.6g}) and the grid of {grid.n_steps} steps are public"
    return attributes, published_report(params, _PUBLISHED, facts, len(ids), bounds)


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
