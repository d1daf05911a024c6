"""Mixed models with a link and several groupings, with all effects in one dense matrix."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag

from pfl_sklearn.linear_model._mixed._groupings._link_equations import LinkModel


class DenseLinkModel(NamedTuple):
    """Laplace's approximation for the rows of a LinkModel."""

    model: LinkModel
    Z: np.ndarray  # (n, e), of all effects, grouping by grouping

    @classmethod
    def of(cls, model):
        return cls(model, np.hstack([each.indicator().toarray() for each in model.groupings]))

    def covariance(self, covariances):
        """Covariance (e, e) of all effects, from those (q, q) of every grouping."""
        pairs = zip(self.model.groupings, covariances, strict=True)
        return block_diag(*(np.kron(np.eye(each.n_levels), S) for each, S in pairs))

    def mode(self, population, covariances):
        """Mode of the effects (e,), and the matrix of their equations."""
        inverse = np.linalg.inv(self.covariance(covariances))
        effects = np.zeros(len(inverse))
        for _ in range(50):
            terms = self.model.terms(self.predictors(population, effects))
            H = self.Z.T @ (terms.curvature[:, 0] * self.Z) + inverse
            slope = self.Z.T @ terms.score[:, 0] - inverse @ effects
            effects = effects + np.linalg.solve(H, slope)
            if slope @ slope < 1e-24:
                break
        return effects, H

    def predictors(self, population, effects):
        return self.model.offset + self.model.design.columns @ population + self.Z @ effects

    def criterion(self, population, covariances):
        """Minus twice the log-likelihood, with the penalty of the population."""
        effects, H = self.mode(population, covariances)
        V = self.covariance(covariances)
        value = self.model.terms(self.predictors(population, effects)).value.sum()
        square = effects @ np.linalg.solve(V, effects)
        penalty = population @ self.model.penalty @ population
        return np.linalg.slogdet(H)[1] + np.linalg.slogdet(V)[1] + square + penalty - 2 * value
