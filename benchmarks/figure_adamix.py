"""Errors of AdaMix as printed, and of fits to the marginal likelihood: Table 3 of its paper.

m = 1000 clients in d = 50 dimensions, coefficients around 1 or around -1 with variance .001, noise
variance .1, and 10, 20 or 30 rows a client. The published algorithm estimates no noise variance, so
it is run with the true one and with 1, which is the squared loss without a scale. Some minutes on
one core.

    python benchmarks/figure_adamix.py
"""

import argparse
import warnings

import numpy as np

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior, GaussianPrior

N_CLIENTS, N_FEATURES, SPREAD, NOISE = 1000, 50, 0.001, 0.1
N_ROWS = (10, 20, 30)
TRUTH = GaussianMixturePrior(
    2, means=np.outer([1, -1], np.ones(N_FEATURES)), covariances=SPREAD, weights=[0.5, 0.5]
)
PRINTED = {"prior": GaussianMixturePrior(2), "method": "printed", "max_iter": 500}
MODELS = {
    "local, of minimum norm": {"prior": GaussianPrior(covariance=np.inf)},
    "one Gaussian": {"prior": GaussianPrior()},
    "AdaMix as printed, noise variance .1": {**PRINTED, "noise_variance": NOISE},
    "AdaMix as printed, noise variance 1": {**PRINTED, "noise_variance": 1.0},
    "two points, marginal likelihood": {"prior": DiscretePrior(2)},
    "two Gaussians, marginal likelihood": {"prior": GaussianMixturePrior(2)},
    "the true mixture, known": {"prior": TRUTH, "noise_variance": NOISE},
}


def clients(n_rows, seed):
    """Rows, targets, clients of the rows, and the clients' coefficients."""
    rng = np.random.default_rng(seed)
    theta = rng.choice([-1.0, 1.0], size=(N_CLIENTS, 1)) + np.zeros(N_FEATURES)
    theta += np.sqrt(SPREAD) * rng.normal(size=theta.shape)
    groups = np.repeat(np.arange(N_CLIENTS), n_rows)
    X = rng.normal(size=(len(groups), N_FEATURES))
    y = np.einsum("nd,nd->n", X, theta[groups]) + np.sqrt(NOISE) * rng.normal(size=len(groups))
    return X, y, groups, theta


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    for n in N_ROWS:
        X, y, groups, theta = clients(n, seed)
        for name, params in MODELS.items():
            model = PersonalizedLinearRegression(fit_intercept=False, **params)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # 500 steps are not to the end
                coef = model.fit(X, y, groups=groups).coef_
            error = np.mean(np.sum((coef - theta) ** 2, axis=1))
            print(f"n = {n}, {name}: {error:.3g}", flush=True)


if __name__ == "__main__":
    main()
