"""Regression of positive numbers: what a family that the package does not have takes."""

from functools import partial

import numpy as np
from scipy.special import digamma, gammaln, zeta
from scipy.stats import gamma
from sklearn.utils import check_array

from pfl_sklearn._compat import fit_context
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn.base import ClientRegressorMixin
from pfl_sklearn.linear_model._link import LinkRegression, checked_offset
from pfl_sklearn.linear_model._mixed._families import LogLink, bounded_exp
from pfl_sklearn.linear_model._mixed._posterior import skewed_bounds
from pfl_sklearn.linear_model._mixed._predictions import averaged_responses, response_bounds


class Gamma(LogLink):
    """Gamma responses with the mean exp(u) and the variance dispersion * mean^2.

    The state is the response over its mean.
    """

    needs_repeats = has_dispersion = True
    discrete = False

    def __init__(self, dispersion=1.0):
        self.dispersion, self._k = dispersion, 1 / dispersion

    def with_dispersion(self, dispersion):
        return Gamma(max(dispersion, 1e-12))

    def least_dispersion(self, mean):
        return 0.0

    def dispersion_by_moments(self, y, mean, w):
        return 0.5 * (w @ (y / mean - 1) ** 2) / w.sum()

    def evaluate(self, u, y):
        ratio = y * bounded_exp(-u)
        return -self._k * (u + ratio), ratio

    def score(self, state, y):
        return self._k * (state - 1)

    def curvature(self, state, y):
        return self._k * state

    def curvature_slope(self, state, y):
        return -self._k * state

    def constants(self, y):
        return self._k * np.log(self._k) - gammaln(self._k) + (self._k - 1) * np.log(y)

    def variance(self, mean):
        return self.dispersion * mean**2

    def distribution(self, mean):
        return gamma(self._k, scale=mean / self._k)

    def threshold(self, y):
        return np.log(y) - digamma(self._k) + np.log(self._k), zeta(2, self._k)


@with_parameters
class GammaRegression(ClientRegressorMixin, LinkRegression):
    """Gamma regression with coefficients that vary by client."""

    _likelihood = "poisson"  # the priors that go with counts
    _scale, _separated = "log means", "small responses from large ones"
    _population_attributes = (*LinkRegression._population_attributes, "dispersion_")

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, *, groups=None, sample_weight=None, offset=None):
        return self._fit_link(X, y, groups, sample_weight, partial(checked_offset, offset))

    def _checked_response(self, y, with_offset=False):
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
        if not (y > 0).all():
            raise ValueError(f"y must be above 0; got {y.min():g}.")
        return y

    def _family_of(self, y):
        return Gamma(), y, {}

    def _fitted_state(self, state, table, estimates):
        fitted = super()._fitted_state(state, table, estimates)
        return {**fitted, "dispersion_": estimates.family.dispersion}

    def _variance_within(self, name):
        return float(zeta(2, 1 / self.dispersion_))

    def predict(self, X, *, groups=None, offset=None, integrate=True):
        law, _ = self._predictor_law(X, groups, offset)
        if not integrate:
            return np.exp(law.predictors[:, 0])
        return averaged_responses(law, self._row_family)[:, 0]

    def predict_interval(self, X, *, groups=None, offset=None, level=0.95, new_row=False):
        law, x = self._predictor_law(X, groups, offset)
        modes, moments = law.predictors[:, 0], self._posterior_moments(x, law)
        if new_row:
            return response_bounds(self._row_family, modes + moments[0], moments[1], level)
        return tuple(map(np.exp, skewed_bounds(modes, moments, level)))
