"""Null distributions of likelihood ratios, by the extension of a smaller model to a larger one.

A likelihood ratio behaves like the squared length of a normal vector's projection onto a cone: the
directions in which the larger model extends the smaller one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import comb
from scipy.stats import chi2

from pfl_sklearn._typing import Floats
from pfl_sklearn._warnings import format_names
from pfl_sklearn.linear_model._mixed._identifiability import n_covariance_parameters

if TYPE_CHECKING:  # that module imports this one
    from pfl_sklearn.inspection._likelihood_ratio import ComparableModel

SHIFT_OF_SCALE = 1e-6  # share of a column's mean that is added to its scale
_DRAWS = 20_000  # the standard error of a p-value of 0.05 is then 0.0015
_DRAWN_NUMBERS = 1 << 22  # in all matrices together, 32 MB
_FEWEST_DRAWS = 200  # enough for large matrices, whose weights vary little

names_in = partial(format_names, most=5)


class ChiBarSquare(NamedTuple):
    """Mixture of chi-square distributions; 0 degrees of freedom mean a point mass at 0."""

    degrees_of_freedom: tuple[int, ...]
    weights: tuple[float, ...]

    def plus(self, n_linear: int) -> ChiBarSquare:
        """The distribution with an independent chi-square variable of `n_linear` degrees added."""
        return ChiBarSquare(tuple(k + n_linear for k in self.degrees_of_freedom), self.weights)

    def plus_independent(self, other: ChiBarSquare) -> ChiBarSquare:
        """The distribution of the sum with an independent variable of another one."""
        weights: dict[int, float] = {}
        for k, weight in zip(self.degrees_of_freedom, self.weights, strict=True):
            for j, share in zip(other.degrees_of_freedom, other.weights, strict=True):
                weights[k + j] = weights.get(k + j, 0.0) + weight * share
        return ChiBarSquare(tuple(sorted(weights)), tuple(weights[k] for k in sorted(weights)))

    def tail(self, value: float) -> float:
        """Probability of at least `value`."""
        if value <= 0:  # includes the point mass at 0
            return 1.0
        tails = [chi2.sf(value, k) if k else 0.0 for k in self.degrees_of_freedom]
        return float(np.dot(self.weights, tails))


class SimulatedCone(NamedTuple):
    """Simulated distribution: explained shares of the squared length of normal vectors."""

    n_dimensions: int
    shares: Floats  # (n_draws,)

    def tail(self, value: float) -> float:
        """Probability of at least `value`."""
        if value <= 0:
            return 1.0
        with np.errstate(divide="ignore"):
            return float(np.mean(chi2.sf(value / self.shares, self.n_dimensions)))


_NOTHING_NEW = ChiBarSquare((0,), (1.0,))  # the statistic is always 0


def null_of_independent_variances(r: int) -> ChiBarSquare:
    """Distribution for r new variances whose estimates are uncorrelated."""
    return ChiBarSquare(tuple(range(r + 1)), tuple(float(comb(r, k)) / 2**r for k in range(r + 1)))


def null_of_full_covariance(r: int) -> ChiBarSquare:
    r"""Distribution for a new covariance (r, r): projections onto semidefinite matrices.

    A symmetric normal matrix whose projection has rank s, with eigenvalues :math:`\lambda_i > 0`
    and :math:`-\mu_j < 0`, has the squared length of s (s + 1) / 2 + a degrees of freedom, where a
    counts successes in trials of probabilities :math:`\lambda_i / (\lambda_i + \mu_j)`. That
    follows from the product of :math:`\lambda_i + \mu_j` in the density of the eigenvalues.
    """
    size = r * (r + 1) // 2
    if r <= 2:  # closed forms, so that the usual tests do not depend on draws
        half = 0.5 if r == 1 else np.sqrt(0.125)
        weights = np.array([0.5, 0.5] if r == 1 else [0.5 - half, half, half, 0.5 - half])
    else:
        weights = _semidefinite_weights(_eigenvalues(r))
        weights = (weights + weights[::-1]) / 2  # the cone is its own dual
    return ChiBarSquare(tuple(range(size + 1)), tuple(map(float, weights)))


def null_of_low_rank(q: int, rank: int, n_linear: int, *, at_zero: bool) -> SimulatedCone:
    """Distribution for loadings (q, rank) added to a ridge, which is also new if `at_zero`."""
    values = _eigenvalues(q)
    bottom, top = values[:, : q - rank], values[:, q - rank :]
    ridge = bottom.mean(axis=1, keepdims=True)
    total, residual = np.sum(values**2, axis=1), np.sum((bottom - ridge) ** 2, axis=1)
    n_dimensions = q * (q + 1) // 2 + n_linear
    # The best low-rank fit keeps the largest eigenvalues; the ridge is the mean of the others.
    if at_zero:  # ridge and loadings are then variances, and none may be negative
        ridge = np.maximum(ridge, 0.0)
        residual = np.sum((bottom - ridge) ** 2, axis=1)
        residual += np.sum(np.minimum(top, 0.0) ** 2, axis=1)
    else:  # the smaller model has a ridge already, so that direction is not new
        total, n_dimensions = total - q * values.mean(axis=1) ** 2, n_dimensions - 1
    # Linear parameters explain their directions completely. Seed 1: independent of eigenvalues.
    linear = np.random.default_rng(1).chisquare(n_linear, len(values)) if n_linear else 0.0
    return SimulatedCone(
        n_dimensions, np.maximum(total - residual + linear, 0.0) / (total + linear)
    )


def _eigenvalues(r):
    """Ascending eigenvalues (n_draws, r) of symmetric normal matrices, seeded."""
    # Entries off the diagonal have half the variance of those on it, as in a vector of the lower
    # triangle with entries off the diagonal multiplied by the root of 2.
    n_draws = max(min(_DRAWS, _DRAWN_NUMBERS // r**2), _FEWEST_DRAWS)
    drawn = np.random.default_rng(0).standard_normal((n_draws, r, r))
    return np.linalg.eigvalsh((drawn + drawn.transpose(0, 2, 1)) / 2)


def _semidefinite_weights(values):
    """Weights (r (r + 1) / 2 + 1,) of the degrees of freedom, from eigenvalues (n_draws, r)."""
    r = values.shape[1]
    weights, ranks = np.zeros(r * (r + 1) // 2 + 1), np.sum(values > 0, axis=1)
    for s in np.unique(ranks):
        of_rank = values[ranks == s]
        above, below = of_rank[:, r - s :], -of_rank[:, : r - s]
        odds = above[:, :, None] / (above[:, :, None] + below[:, None, :])
        odds = odds.reshape(len(of_rank), s * (r - s))
        least = s * (s + 1) // 2
        weights[least : least + odds.shape[1] + 1] += _successes(odds).sum(axis=0)
    return weights / len(values)


def _successes(odds):
    """Distributions (n, k + 1) of the number of successes in trials of probabilities (n, k)."""
    chances = np.zeros((len(odds), odds.shape[1] + 1))
    chances[:, 0] = 1.0
    for k in range(odds.shape[1]):
        p = odds[:, k, None]
        chances[:, 1 : k + 2] = chances[:, 1 : k + 2] * (1 - p) + chances[:, : k + 1] * p
        chances[:, 0] *= 1 - p[:, 0]
    return chances


def extension(smaller: ComparableModel, larger: ComparableModel) -> ChiBarSquare | SimulatedCone:
    """Null distribution of the likelihood ratio of a smaller and a larger model.

    Raises ValueError unless the smaller one is a special case with a comparable likelihood.
    """
    one, two = smaller.evidence, larger.evidence
    if one.n_parameters > two.n_parameters:
        raise ValueError(
            f"smaller has more parameters than larger ({one.n_parameters} and "
            f"{two.n_parameters}); give the smaller model first."
        )
    _check_criteria(smaller, larger)
    n_linear, noise = _further_coefficients(smaller, larger), _further_noise(one.form, two.form)
    # A model without dispersion, such as Poisson, has 0: the boundary.
    if noise and one.form.noise == 0:
        reference = _further_covariance(smaller, larger, n_linear)
        if isinstance(reference, ChiBarSquare):
            # The new variance is 0 half of the time.
            return reference.plus_independent(null_of_independent_variances(1))
    reference = _further_covariance(smaller, larger, n_linear + noise)
    for before, after in _grouping_pairs(smaller, larger):
        # Without low-rank covariances, which do not go with groupings, nothing is simulated.
        reference = reference.plus_independent(_further_covariance(before, after, 0))
    if reference == _NOTHING_NEW:
        raise ValueError("smaller and larger are the same model; there is nothing to test.")
    return reference


def _grouping_pairs(smaller, larger):
    """Both models for each grouping of the larger one, as if its levels were the clients."""
    before, after = dict(smaller.evidence.groupings), dict(larger.evidence.groupings)
    for name in before:
        if name not in after:
            raise ValueError(f"smaller has the grouping {name!r}, which larger lacks.")
    for name, grouping in after.items():
        # A model without a grouping has that of variance 0.
        zero = {"varying": np.zeros(0, dtype=np.intp), "shape": "zero", "rank": 0}
        form = before[name].form if name in before else smaller.evidence.form._replace(**zero)
        pair = (smaller, form), (larger, grouping.form)
        yield tuple(
            model._replace(evidence=model.evidence._replace(form=form), grouping=name)
            for model, form in pair
        )


def _check_criteria(smaller, larger):
    """Raise ValueError unless both log-likelihoods are of one kind."""
    one, two = (model.evidence.form.criterion for model in (smaller, larger))
    if one != two and {one, two} == {"reml", "ml"}:
        raise ValueError(
            f"smaller has method={one!r} and larger method={two!r}; fit both by the same method."
        )
    # "exact": without differences between clients there is no integral to approximate.
    if one != two and "exact" not in (one, two):
        raise ValueError(
            f"the log-likelihood of smaller is by {one} and that of larger by {two}; fit both with "
            "quadrature='laplace'."
        )
    # A restricted likelihood is one of contrasts, which depend on the population columns.
    if one == "reml" and smaller.free != larger.free:
        raise ValueError(
            "restricted likelihoods compare only with the same population coefficients, and "
            f"{names_in(sorted(smaller.free ^ larger.free))} are in one model only; fit both with "
            "method='ml'."
        )


def _further_coefficients(smaller, larger):
    """Number of population coefficients that the larger model has beyond the smaller one."""
    lacking = [name for name in smaller.names if name not in larger.names]
    if lacking:
        raise ValueError(f"smaller has the columns {names_in(lacking)}, which larger lacks.")
    first, second = (model.evidence.form.means for model in (smaller, larger))
    values = np.zeros_like(second)
    values[:, [larger.names.index(name) for name in smaller.names]] = first
    is_known = ~np.isnan(second)
    differs = np.any(is_known & ~(values == second), axis=0)
    if differs.any():
        names = [larger.names[k] for k in np.flatnonzero(differs)]
        raise ValueError(
            f"larger has known means of {names_in(names)}, but smaller estimates them or has other "
            "values."
        )
    return larger.evidence.n_coefficients - smaller.evidence.n_coefficients


def _further_noise(one, two):
    """1 if the larger model alone estimates the noise variance, else 0."""
    if two.noise is not None and one.noise != two.noise:
        noise = "estimates it" if one.noise is None else f"has {one.noise}"
        raise ValueError(f"larger has noise_variance={two.noise}, and smaller {noise}.")
    # A known noise variance is no parameter; an estimated one is.
    return int(one.noise != two.noise)


def _further_covariance(smaller, larger, n_linear):
    """Null distribution for the larger model's covariance, with `n_linear` further parameters."""
    one, two = smaller.evidence.form, larger.evidence.form
    first = [larger.names.index(smaller.names[k]) for k in one.varying]
    n_before, n_after, varying = len(first), len(two.varying), set(two.varying.tolist())
    before, after = (n_covariance_parameters(f.shape, len(f.varying), f.rank) for f in (one, two))
    same_columns = set(first) == varying
    if one.shape == "given" and _holds_given(smaller, larger, same_columns):
        return _NOTHING_NEW.plus(n_linear + after)
    if (
        one.shape == "given"
        or two.shape == "given"
        or not set(first) <= varying
        or not _contains(one, two, same_columns)
    ):
        raise ValueError(
            f"smaller has {smaller.covariance_name}, which is not a special case of larger's, "
            f"{larger.covariance_name}."
        )
    # A full covariance stays full at any origin of the columns; other shapes do not.
    if two.shape in ("spherical", "diag", "low_rank") and not _same_centres(smaller, larger):
        raise ValueError(
            "the covariances have their shapes at different column centres; give both priors "
            "the same centered, and let the intercept vary in both models, or take "
            "covariance_type='full'."
        )
    n_new = n_after - n_before
    if one.shape == two.shape == "zero":
        return _NOTHING_NEW.plus(n_linear)
    if two.shape == "low_rank" and (one.shape, one.rank) != (two.shape, two.rank):
        rank, at_zero = two.rank - one.rank, one.shape == "zero"
        return null_of_low_rank(n_after - one.rank, rank, n_linear, at_zero=at_zero)
    if not n_new:  # without a new variance no parameter is on the boundary
        return _NOTHING_NEW.plus(n_linear + after - before)
    if two.shape == "full":
        # Covariances among old columns, and between old and new ones, are linear parameters.
        inner = n_covariance_parameters("full", n_before) - before
        return null_of_full_covariance(n_new).plus(n_linear + inner + n_before * n_new)
    if two.shape == "spherical":  # one new variance for all columns
        return null_of_independent_variances(1).plus(n_linear)
    return null_of_independent_variances(n_new).plus(n_linear + n_before - before)


def _contains(one, two, same_columns):
    """Whether a covariance is a special case of another one, of at least the same columns."""
    if one.shape == "zero" or two.shape == "full":
        return True
    if two.shape == "diag":
        # For one column all shapes are the same: a variance.
        return one.shape in ("spherical", "diag") or len(one.varying) == 1
    if two.shape == "spherical":
        return one.shape == "spherical" and same_columns
    lower = one.shape == "low_rank" and one.rank <= two.rank
    return two.shape == "low_rank" and same_columns and (one.shape == "spherical" or lower)


def _holds_given(smaller, larger, same_columns):
    """Whether the larger model has, or can estimate, the smaller model's given covariance."""
    covariance, two = smaller.evidence.form.covariance, larger.evidence.form
    at = [larger.names.index(name) for name in smaller.names]
    embedded = np.zeros((len(larger.names), len(larger.names)))
    embedded[np.ix_(at, at)] = covariance
    if two.shape == "given":
        return bool(np.array_equal(embedded, two.covariance))
    # A singular covariance is on the boundary, where the distribution differs.
    inside = embedded[np.ix_(two.varying, two.varying)]
    return same_columns and two.shape == "full" and np.linalg.matrix_rank(inside) == len(inside)


def _same_centres(smaller, larger):
    """Whether coefficients vary around the same centre of the columns in both models."""
    one, two = smaller.evidence.form, larger.evidence.form
    slopes = [k for k in one.varying if not (k == 0 and smaller.fitted.fit_intercept)]
    if not slopes:
        return True
    at = [larger.names.index(smaller.names[k]) for k in slopes]
    scales = np.sqrt(np.diag(smaller.evidence.moments.covariance))[slopes]
    apart = abs(one.centre[slopes] - two.centre[at])
    return bool(np.all(apart <= SHIFT_OF_SCALE * (scales + abs(one.centre[slopes]))))
