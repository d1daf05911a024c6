"""Base of all priors: parameters that are given or estimated, their checks, and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import numpy as np
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import BaseEstimator
from pfl_sklearn._typing import Floats, Integers, RandomState, TableLike

# Probabilities written with about nine digits still sum to 1.
_PROBABILITY_TOLERANCE = 1e-8


class Prior(BaseEstimator):
    """Distribution whose parameters are given (known), or None and estimated by a fit.

    A fit returns a new, known prior and does not change this one; parameters that were given are
    kept. Its parameters can be passed back in as known ones.
    """

    _estimated: ClassVar[tuple[str, ...]]  # parameters that a fit estimates if they are None
    _all_or_none: ClassVar[bool] = False  # whether they must be given together

    @property
    def is_known(self) -> bool:
        """Whether all parameters that a fit would estimate are given."""
        values = {name: getattr(self, name) for name in self._estimated}
        are_given = [value is not None for value in values.values()]
        if self._all_or_none and any(are_given) and not all(are_given):
            raise ValueError(
                f"{type(self).__name__} needs both {' and '.join(values)} or neither; got "
                f"{', '.join(f'{name}={value!r}' for name, value in values.items())}."
            )
        return all(are_given)

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> Floats:
        """Clients' parameters (n_samples, d), drawn from a known prior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.
        """
        self._require_known()
        return self._draw(n_samples, check_random_state(random_state))

    def log_prob(self, theta: TableLike) -> Floats:
        """Log density of clients' parameters under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per row; frequencies of labels sum to 1.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
            Points have log probabilities, minus infinity elsewhere. Densities of frequencies are
            with respect to all but the last of a client's labels.

        Raises
        ------
        ValueError
            If a covariance is singular or infinite, because there is no density then.
        """
        return self._log_prob(check_array(theta, dtype=float))

    _draw: Any  # n_samples and a RandomState to draws (n_samples, d)
    _log_prob: Any  # parameters (n_clients, d) to log densities (n_clients,)

    def _require_known(self) -> tuple[Any, ...]:
        """Values of the parameters of a known prior, as they were given."""
        if not self.is_known:
            *names, last = self._estimated
            wanted = f"{', '.join(names)} and {last}" if names else last
            raise ValueError(
                f"this {type(self).__name__} is not known yet; give {wanted}, or fit it."
            )
        return tuple(getattr(self, name) for name in self._estimated)


class CountPrior(Prior):
    """Methods that priors of proportions and rates share.

    Where the parameter is a rate, successes are events, and trials the exposure.
    """

    _fit_counts: Any
    _posterior: Any
    _posterior_quantiles: Any

    def log_prob(self, theta: TableLike) -> Floats:
        """Log density (n_clients,) of proportions or rates, or log weight of the nearest point.

        Parameters
        ----------
        theta : array-like of shape (n_clients,) or (n_clients, 1)
            One proportion or rate per client.
        """
        return self._log_prob(one_per_client(theta))

    def fit_counts(
        self, successes: Integers, trials: Integers, counts: Floats, method: str
    ) -> Self:
        """Fit the prior to a table of counts.

        Parameters
        ----------
        successes, trials, counts : ndarrays of shape (n_pairs,)
            Distinct pairs, of successes and trials or of events and exposure, with numbers of
            clients.
        method : {"ml", "moments"}
            Maximum marginal likelihood, or moments; a grid has only "ml".
        """
        if self.is_known:
            return clone(self)
        return self._fit_counts(successes, trials, counts, method)

    def posterior(self, successes: Integers, trials: Integers) -> tuple[Floats, Floats]:
        """Posterior means and variances (n_clients,) of proportions or rates given counts.

        Parameters
        ----------
        successes, trials : ndarrays of shape (n_clients,)
            Each client's successes and trials, or events and exposure.
        """
        return self._posterior(successes, trials)

    def posterior_quantiles(
        self, successes: Integers, trials: Integers, tails: Iterable[float]
    ) -> list[Floats]:
        """Quantiles (n_clients,) of the clients' posteriors, a list by `tails`.

        Parameters
        ----------
        successes, trials : ndarrays of shape (n_clients,)
            As in :meth:`posterior`.
        tails : iterable of float in [0, 1]
            Lower-tail probabilities of the quantiles, such as 0.05 and 0.95.
        """
        return self._posterior_quantiles(successes, trials, tails)


def one_per_client(theta: TableLike) -> Floats:
    """Proportions or rates (n_clients,) from a vector or a column."""
    return check_array(theta, dtype=float, ensure_2d=False).ravel()


def minimum_from(
    starts: list[tuple[float, float]],
    function: Callable[[Any], tuple[float, Floats]],
    bounds: list[tuple[float, float]],
) -> Floats:
    """Point within bounds at the minimum of a function with slopes, from the best of starts."""
    optimum = minimize(
        function,
        min(starts, key=lambda point: function(point)[0]),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        # To rounding: a looser end would depend on the start.
        options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 500},
    )
    return optimum.x


def known_vector(name: str, value: Any, d: int, wanted: str = "finite") -> Floats | None:
    """A given number or vector as a vector (d,), checked; None if it is not given.

    `wanted` is what it must be: "finite", "finite and non-negative" or "finite and above 0".
    """
    if value is None:
        return None
    vector = np.asarray(value, dtype=float)
    in_range = {
        "finite": np.isfinite(vector),
        "finite and non-negative": np.isfinite(vector) & (vector >= 0),
        "finite and above 0": np.isfinite(vector) & (vector > 0),
    }
    if vector.shape not in ((), (1,), (d,)) or not in_range[wanted].all():
        raise ValueError(f"{name} must be {wanted}, a number or of shape ({d},); got {value!r}.")
    return np.broadcast_to(vector, (d,)).copy()


def is_distribution(weights: Floats) -> bool:
    """Whether weights are probabilities: not negative, and with sum 1."""
    return bool((weights >= 0).all() and abs(weights.sum() - 1) <= _PROBABILITY_TOLERANCE)
