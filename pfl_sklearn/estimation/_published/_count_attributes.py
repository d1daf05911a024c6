"""Published proportions and rates: checks, release, fitted attributes and report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.estimation._published._base import (
    published_report,
    refuse_left_out,
    refuse_unused,
)
from pfl_sklearn.estimation._published._counts import CountFamily, ReleasedCounts, published_counts
from pfl_sklearn.privacy import DiscreteLaplaceMechanism, PrivacyReport
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._report import VALID_TABLES
from pfl_sklearn.statistics import ClientStatistics

_LEAST_EPSILON = 0.01  # the work grows with the number of counts that noise may hide
_MOST_OF_STATISTICS = 1e11  # triangles are good to 1e-15: whole numbers up to it are exact
_PUBLISHED = (
    *("means_", "stds_", "local_means_", "noise_std_", "shrinkage_", "population_mean_"),
    *("population_mean_std_", "prior_", "icc_"),
)


def check_published_counts(
    params: Any, prior: Any, family: CountFamily, unused: tuple[str, ...], weights: Any
) -> None:
    """Refuse parameters that do not go together, before any data is touched."""
    refuse_unused(params, unused)
    if params.epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {_LEAST_EPSILON} to publish counts, whose noise would have "
            f"a standard deviation above {math.sqrt(2) / _LEAST_EPSILON:.0f}; got {params.epsilon}."
        )
    if not isinstance(prior, family.priors.conjugate):
        raise ValueError(
            f"publish='clients' needs a {family.priors.conjugate.__name__}; got "
            f"prior={params.prior!r}."
        )
    if weights is not None:
        raise ValueError("sample_weight is not supported with publish='clients'.")


def check_published_totals(statistics: ClientStatistics, totals: Floats) -> None:
    """Refuse totals (m,) of statistics that are not those of rows, each of its own value."""
    refuse_left_out(statistics)
    if totals.max() > _MOST_OF_STATISTICS:
        raise ValueError(
            f"publish='clients' needs sums of at most {_MOST_OF_STATISTICS:g} by client, which "
            f"statistics hold exactly; got {totals.max():.6g}. Fit with the rows."
        )


def publish_counts(
    params: Any, prior: Any, family: CountFamily, counts: Integers, sizes: Floats, *assumptions: str
) -> tuple[dict[str, Any], PrivacyReport, float]:
    """Fitted attributes, the report, and the spread of a release of counts (m,) of sizes (m,)."""
    mechanism = DiscreteLaplaceMechanism(1, params.epsilon)
    rng = None if params.random_state is None else noise_generator(params.random_state)[0]
    noisy = mechanism.privatize(np.rint(counts).astype(np.int64), rng)
    # From here on only what was released and what is public is read.
    known = prior._require_known() if prior.is_known else None
    released = ReleasedCounts(noisy, np.asarray(sizes, dtype=float), mechanism.scale)
    posterior = published_counts(family, released, known, params.target == "table")
    priors = family.priors(posterior.a, posterior.b, posterior.weights)
    mean, std = priors.mean()
    moments = priors.moments()
    attributes = {
        "means_": posterior.means,
        "stds_": posterior.stds,
        "local_means_": noisy / sizes,
        "noise_std_": mechanism.noise_std / np.asarray(sizes, dtype=float),
        "shrinkage_": posterior.pooled,
        "prior_": prior if prior.is_known else priors.matched(),
        "population_mean_": mean,
        "population_mean_std_": std,
        "icc_": family.priors.icc(*moments),
        "_posterior_is_exact": False,
        "_priors": None,
        "_intervals": posterior,
    }
    facts = {
        **mechanism.facts(),
        "epsilon": params.epsilon,
        "mechanism": "discrete Laplace mechanism on the count of every client",
    }
    report = published_report(
        params, _PUBLISHED, facts, len(noisy), *assumptions, tables=VALID_TABLES
    )
    return attributes, report, math.sqrt(moments[1])
