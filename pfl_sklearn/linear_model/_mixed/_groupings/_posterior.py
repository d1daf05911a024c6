"""Posterior uncertainty of clients, levels and population in a model with several groupings."""

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._mixed._groupings._products import CELLS_AT_ONCE


class Frame(NamedTuple):
    """Columns of the data whose coefficients vary together, and the way back from the fit's."""

    positions: np.ndarray  # (q,), among the p columns
    back: np.ndarray  # (q, q), from coefficients of the fit's columns to those of the data's

    def columns(self, x):
        """Columns (n, q) of the fit, from rows x (n, p) of the data."""
        return x[:, self.positions] @ self.back


class SharedLevels(NamedTuple):
    """Posterior whose copies know all levels but no client, so that a model may be handed out."""

    posterior: Any

    def __deepcopy__(self, memo):
        # A slice would be a view, which holds on to the arrays of all clients.
        return SharedLevels(self.posterior.of_clients(np.arange(0)))


class GroupingsPosterior(NamedTuple):
    """Gaussian posterior of all effects and the population's coefficients, given the variances.

    A row of client i has the predictor z'b_i + w'u with u the outer effects and the population's
    coefficients, and the variance ``noise * (|L_i^-1 R'z|^2 + |H'(w - T_i'L_i^-1 R'z)|^2)``. For
    large groupings H (r, s) holds draws, so its part is right to a share of (2 s)^-1/2.
    """

    whitening: np.ndarray  # (m, q, q), L_i^-1 R'
    explained: Any  # sparse (m q, r), the rows T_i of all clients
    inverse_root: np.ndarray  # (r, s), H
    roots: list  # (q, q) of every grouping's ratio, clients first
    noise: float
    frames: list  # Frame of every grouping
    population: Frame  # of the free columns of the population
    n_levels: tuple  # of the groupings after the clients

    def of_clients(self, clients):
        """The posterior of the given clients alone, with all levels."""
        q = self.whitening.shape[1]
        at = np.arange(len(self.whitening))[clients]
        rows = (at[:, None] * q + np.arange(q)).ravel()
        return self._replace(whitening=self.whitening[clients], explained=self.explained[rows])

    @property
    def given_population(self):
        """The posterior given the population's coefficients."""
        # The last columns of the triangular root H are the population's error.
        n_kept = self.inverse_root.shape[1] - self.population.back.shape[1]
        return self._replace(inverse_root=self.inverse_root[:, :n_kept])

    def variances(self, x, codes, levels=None):
        """Variance (n,) of predictors of rows x (n, p), of clients and of levels (n,).

        A code of -1 is a client or level that the fit did not see. Without `levels` effects of
        levels are left out.
        """
        frames = self.frames[1:] if levels is not None else []
        columns = [frame.columns(x) for frame in frames]
        # Of an unknown level all that is known is its variance.
        extra = np.zeros(len(x))
        for k, (values, level) in enumerate(zip(columns, levels or [], strict=True)):
            unknown = level < 0
            extra[unknown] += np.sum((values[unknown] @ self.roots[k + 1]) ** 2, axis=1)
        outer = self._outer_rows(columns, levels or [], self.population.columns(x))
        return self.noise * (self._squares(self.frames[0].columns(x), codes, outer) + extra)

    def coefficient_variances(self):
        """Variances (m, p) of the clients' coefficients."""
        m, p = len(self.whitening), len(self._all_columns)
        codes = np.repeat(np.arange(m), p)
        return self.variances(np.tile(np.eye(p), (m, 1)), codes).reshape(m, p)

    def shrinkage(self):
        """Posterior over prior variance (m, p) of the coefficients, given everything else."""
        result = np.ones((len(self.whitening), len(self._all_columns)))
        positions, back = self.frames[0]
        prior = np.sum((back @ self.roots[0]) ** 2, axis=1)
        varies = prior > 0
        known = np.sum((self.whitening @ back.T) ** 2, axis=1)
        result[:, positions[varies]] = known[:, varies] / prior[varies]
        return result

    def level_variances(self, k, conditional):
        """Variances (L, q) of the effects of grouping k (0: clients), in the data's columns.

        `conditional` on the population's coefficients they are those of lme4's ``condVar``: blocks
        of the inverse equations of all effects, without the population's columns.
        """
        posterior = self.given_population if conditional else self
        root, back = posterior.inverse_root, self.frames[k].back
        n_kept = root.shape[1]
        if k > 0:
            blocks = root[level_slices(self.n_levels, self.frames)[k - 1]]
            blocks = back @ blocks.reshape(self.n_levels[k - 1], len(back), -1)
            return self.noise * np.sum(blocks**2, axis=2)
        m, q = self.whitening.shape[:2]
        pulled = self.whitening @ back.T
        result = np.sum(pulled**2, axis=1)
        for part in row_slices(m, q * max(n_kept, 1), CELLS_AT_ONCE):
            rows = self.explained[part.start * q : part.stop * q] @ root
            errors = pulled[part].transpose(0, 2, 1) @ rows.reshape(-1, q, n_kept)
            result[part] += np.sum(errors**2, axis=2)
        return self.noise * result

    def deviation_variances(self, conditional):
        """Variances (m, p) of the clients' deviations, as `level_variances`; 0 for the common."""
        result = np.zeros((len(self.whitening), len(self._all_columns)))
        result[:, self.frames[0].positions] = self.level_variances(0, conditional)
        return result

    @property
    def _all_columns(self):
        return np.arange(self.population.back.shape[0])

    def _outer_rows(self, columns, levels, population):
        """Sparse rows (n, r) of the outer effects and the population's coefficients."""
        values, at = outer_entries(columns, levels, population, self.n_levels, self.frames)
        ends = np.arange(len(at) + 1) * at.shape[1]
        return sparse.csr_array(
            (values.ravel(), at.ravel(), ends), (len(at), self.inverse_root.shape[0])
        )

    def _squares(self, inner, codes, outer):
        """Variance (n,) over the noise of rows of clients, from their inner and outer columns."""
        (n, q), seen = inner.shape, codes >= 0
        result = np.empty(n)
        for part in row_slices(n, self.inverse_root.shape[1] + q * q, CELLS_AT_ONCE):
            at = np.maximum(codes[part], 0)
            known = np.where(seen[part, None], inner[part], 0.0)
            if len(self.whitening):
                pulled = (self.whitening[at] @ known[..., None])[..., 0]
                places = (at[:, None] * q + np.arange(q)).ravel()
                ends = np.arange(len(at) + 1) * q
                size = (len(at), self.explained.shape[0])
                pull = sparse.csr_array((pulled.ravel(), places, ends), size)
                left = outer[part] - pull @ self.explained
            else:
                pulled, left = known, outer[part]
            prior = np.where(seen[part, None], 0.0, inner[part]) @ self.roots[0]
            result[part] = np.sum(pulled**2, axis=1) + np.sum(prior**2, axis=1)
            result[part] += np.sum((left @ self.inverse_root) ** 2, axis=1)
        return result


def level_slices(n_levels, frames):
    """Places among the outer effects of the groupings after the clients."""
    sizes = [n * len(frame.positions) for n, frame in zip(n_levels, frames[1:], strict=True)]
    ends = np.cumsum(sizes, dtype=int)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def outer_entries(columns, levels, population, n_levels, frames):
    """Entries (n, k) of rows of the outer effects and the population's, and their places.

    `columns` (n, q) and `levels` (n,) are of every grouping after the clients, or of none.
    """
    slices, parts, places = level_slices(n_levels, frames), [], []
    for values, level, at in zip(columns, levels, slices, strict=False):
        q, seen = values.shape[1], (level >= 0)[:, None]
        parts.append(np.where(seen, values, 0.0))
        places.append(at.start + np.where(seen, level[:, None] * q + np.arange(q), 0))
    shared = slices[-1].stop + np.arange(population.shape[1])
    places.append(np.broadcast_to(shared, population.shape))
    return np.hstack([*parts, population]), np.hstack(places)


class Layout(NamedTuple):
    """Where the rows' groupings stand in the equations, which order them by size."""

    back: np.ndarray  # (K,), position in the equations of every grouping of the rows
    frames: list  # Frame of every grouping
    population: Frame

    def posterior(self, equations):
        """GroupingsPosterior at the equations' variances."""
        at = self._outer_places(equations)
        return GroupingsPosterior(
            equations.whitening,
            sparse.csr_array(equations.explained[:, at]),
            equations.inverse_root[at],
            [equations.roots[k] for k in self.back],
            equations.noise,
            self.frames,
            self.population,
            tuple(equations.products.n_levels[k] for k in self.back[1:]),
        )

    def covariances(self, equations):
        """Covariances (q, q) of every grouping, in the data's columns."""
        backs = [
            frame.back @ equations.roots[k] for k, frame in zip(self.back, self.frames, strict=True)
        ]
        return [equations.noise * back @ back.T for back in backs]

    def solution(self, equations):
        """Effects (L, q) of every grouping, and the population's coefficients, of the fit."""
        effects, coefficients = equations.solution
        return [effects[k] for k in self.back], coefficients

    def _outer_places(self, equations):
        products = equations.products
        places = [np.arange(s.start, s.stop) for s in products.outer_slices]
        places = [places[k - 1] for k in self.back[1:]]
        population = np.arange(products.n_outer_effects, len(products.outer_target))
        return np.concatenate([*places, population])
