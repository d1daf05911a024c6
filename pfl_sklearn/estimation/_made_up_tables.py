"""Made-up tables of means, proportions and rates, to plan fits of them."""

from typing import Any, ClassVar

import numpy as np

from pfl_sklearn._planning import Guess, MadeUpTable, PlansErrors
from pfl_sklearn.priors import BetaPrior, GammaPrior, GaussianPrior


class _PlansMeans(PlansErrors):
    """What made-up tables of all kinds have in common."""

    _guesses = (False, False)

    def _planned_values(self, model):
        return np.atleast_1d(model.population_mean_), model.means_.reshape(len(model.means_), -1)


class PlansGaussianMeans(_PlansMeans):
    """Normal rows around normal means."""

    _guessed_kind, _guesses = GaussianPrior, (True, False)

    def _made_up(self, guess: Guess, rng: Any) -> MadeUpTable:
        codes, sizes = guess.codes, guess.sizes
        theta = guess.population.sample(len(sizes), rng)
        y = theta[codes, 0] + np.sqrt(guess.noise_variance) * rng.normal(size=len(codes))
        X = np.zeros((len(y), 1))
        means = np.bincount(codes, y)[:, None] / sizes[:, None]
        mean = guess.population.known_mean(1)

        def fit(model):
            if model.clients is not None:  # whose ids are made up, too
                model.set_params(clients=np.arange(len(sizes)))
            return model.fit(X, y, groups=codes)

        return MadeUpTable(fit, mean, theta, means)


class _PlansCounts(_PlansMeans):
    """Counts around values of a conjugate prior, which a subclass draws."""

    _counts: ClassVar[Any]

    def _made_up(self, guess: Guess, rng: Any) -> MadeUpTable:
        theta = guess.population.sample(len(guess.sizes), rng)
        counts = self._counts(theta[:, 0], guess.sizes, rng)
        mean = np.array([guess.population.moments()[0]])
        shares = (counts / guess.sizes)[:, None]
        return MadeUpTable(lambda model: model.fit_counts(counts, guess.sizes), mean, theta, shares)


class PlansProportions(_PlansCounts):
    """Successes of trials."""

    _guessed_kind = BetaPrior

    @staticmethod
    def _counts(theta, sizes, rng):
        return rng.binomial(sizes.astype(np.int64), theta)


class PlansRates(_PlansCounts):
    """Events of an exposure."""

    _guessed_kind, _takes_exposure = GammaPrior, True

    @staticmethod
    def _counts(theta, sizes, rng):
        return rng.poisson(theta * sizes)
