"""Errors of single clients' posterior means against fine grids: the table in the user guide.

    python benchmarks/posterior_means.py          # a few minutes

Clients have 1, 3 and 10 rows and d standard normal effects; slopes have half the spread of the
intercept. The last column is the normal density around the mean to third order.
"""

import numpy as np
from scipy.special import expit

from pfl_sklearn.linear_model._mixed._client_posterior import (
    EffectPosterior,
    axis_nodes,
    normal_moments,
    weighted_nodes,
)
from pfl_sklearn.linear_model._mixed._families import Binomial, Poisson
from pfl_sklearn.linear_model._mixed._laplace import (
    LAST_DECREMENT,
    Primal,
    choose_mode_system,
    find_mode,
)
from pfl_sklearn.linear_model._mixed._predictions import (
    PredictorLaw,
    averaged_exponentials,
    averaged_probabilities,
)
from pfl_sklearn.linear_model._mixed._table import RowStack

N_CLIENTS, SIZES = 40, (1, 3, 10)
FINE = {2: 41, 3: 25, 4: 15, 5: 9, 6: 7}  # nodes an axis, at most 120,000 in all
SPREADS = {0.5: (2, 3, 4, 5, 6), 1.0: (2, 3, 4, 5, 6), 2.0: (2, 3)}  # where those are exact enough
BASE = {"counts": -1.5, "classes": -2.5}  # times sd; the log odds


def drawn(kind, d, sd, n, rng):
    """A RowStack of clients, the effects' factor (d, d), and a new row (b, d) of each."""
    x, z = rng.normal(size=(N_CLIENTS, n, d)), rng.normal(size=(N_CLIENTS, d))
    x[..., 0], z[:, 0] = 1.0, 1.0
    factor = np.diag(np.append(sd, np.full(d - 1, sd / 2)))
    level = BASE[kind] * (sd if kind == "counts" else 1.0)
    predictors = level + np.einsum("bnd,d,bd->bn", x, factor.diagonal(), rng.normal(size=z.shape))
    if kind == "counts":
        y = rng.poisson(np.exp(predictors))
    else:
        y = (rng.random(predictors.shape) < expit(predictors)).astype(int)
    offset = np.full(y.shape, level)
    return RowStack(np.arange(N_CLIENTS), x, y, np.ones(y.shape), offset), factor, z


def means(outcome, stack, factor, z, effects, n_axis):
    """The same by nodes, or without an `n_axis` by the normal density."""
    features, offset = stack.x @ factor, stack.offset[..., None]
    rows = outcome, features, offset, stack.y, stack.w, effects[..., None]
    spread = np.zeros(0)
    if n_axis is None:
        posterior = EffectPosterior(factor, 1, 1, *normal_moments(*rows), None, None)
        weight = outcome.terms(offset + features @ effects[..., None], stack.y, stack.w).curvature
        loadings = z @ factor
        inverse = np.linalg.inv(Primal(features).system(weight))
        spread = np.einsum("bd,bde,be->b", loadings, inverse, loadings)
    else:
        posterior = EffectPosterior(factor, 1, n_axis, None, *weighted_nodes(*rows, n_axis))
    predictors = stack.offset[:, :1] + np.einsum("bd,bd->b", z @ factor, effects)[:, None]
    codes = np.arange(len(z))
    law = PredictorLaw(predictors, np.eye(1), posterior, z, codes, lambda at, _: spread[at])
    if isinstance(outcome, Poisson):
        return np.exp(averaged_exponentials(law))
    return averaged_probabilities(law)[:, 1]


def main():
    for kind, outcome in (("counts", Poisson()), ("classes", Binomial())):
        for sd, dimensions in SPREADS.items():
            cells = []
            for d in dimensions:
                errors, third, rng = [], [], np.random.default_rng(0)
                n_axis = axis_nodes(d, sd * np.sqrt(1 + (d - 1) / 4), 15)
                for n in SIZES:
                    stack, factor, z = drawn(kind, d, sd, n, rng)
                    form = choose_mode_system(stack.x, factor)
                    state = np.zeros((N_CLIENTS, min(n, d), 1))
                    offset = stack.offset[..., None]
                    mode = find_mode(form, outcome, offset, stack, state, LAST_DECREMENT)
                    effects = form.effects(mode.state)[..., 0]
                    exact = means(outcome, stack, factor, z, effects, FINE[d])
                    errors.append(means(outcome, stack, factor, z, effects, n_axis) / exact - 1)
                    third.append(means(outcome, stack, factor, z, effects, None) / exact - 1)
                cells.append(f"{np.abs(errors).max():.3f} ({n_axis})")
            print(kind, sd, *cells, f"{np.abs(third).max():.3f}", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
