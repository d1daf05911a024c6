"""Made-up rows, to plan fits of regressions."""

from typing import Any

import numpy as np

from pfl_sklearn._planning import Guess, MadeUpTable, PlansErrors
from pfl_sklearn.priors import GaussianPrior


class PlansRegressions(PlansErrors):
    """Responses given linear predictors whose coefficients are normal.

    A subclass draws them (`_draw_response`).
    """

    _guessed_kind, _guesses = GaussianPrior, (False, True)

    def _made_up(self, guess: Guess, rng: Any) -> MadeUpTable:
        codes, m = guess.codes, len(guess.sizes)
        rows = rng.randint(len(guess.X), size=len(codes))
        X = guess.X.iloc[rows] if hasattr(guess.X, "iloc") else np.asarray(guess.X)[rows]
        design = np.asarray(X, dtype=float)
        if self.fit_intercept:  # type: ignore[attr-defined]
            design = np.column_stack([np.ones(len(design)), design])
        mean = guess.population.known_mean(design.shape[1])
        covariance = guess.population.known_covariance(design.shape[1])
        coefficients = rng.multivariate_normal(mean, covariance, size=m)
        predictors = np.einsum("np,np->n", design, coefficients[codes])
        y = self._draw_response(predictors, guess.noise_variance, rng)  # type: ignore[attr-defined]
        return MadeUpTable(lambda model: model.fit(X, y, groups=codes), mean, coefficients)

    def _planned_values(self, model):
        population = np.atleast_1d(model.population_coef_).ravel()
        clients = model.coef_.reshape(len(model.coef_), -1)
        if model.fit_intercept:
            population = np.append(model.population_intercept_, population)
            clients = np.column_stack([model.intercept_, clients])
        return population, clients

    def _planned_names(self, p):
        names = [f"x{j}" for j in range(p - self.fit_intercept)]  # type: ignore[attr-defined]
        return ["intercept", *names] if self.fit_intercept else names  # type: ignore[attr-defined]
