"""How far fits of mixed models end below the best of 20 starts, on small random designs.

Run with ``python benchmarks/fuzz.py``; it prints a table and the worst designs.
"""

import argparse
import time
import warnings

import numpy as np
from joblib import Parallel, delayed
from scipy.optimize import minimize

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.linear_model._mixed._normal_rows import _variance_search
from pfl_sklearn.priors import GaussianPrior

TYPES = "diag", "full", "low_rank"
STARTS = 20
ALLOWED = 1e-3  # nats
NO_MAXIMUM = ".*fit the rows of every client exactly.*posterior means"


def draw_design(seed):
    """Rows of 3 to 20 clients with 1 to 4 features of all units, and few or many rows."""
    rng = np.random.default_rng(seed)
    m, d = rng.integers(4, 21), rng.integers(1, 5)
    sizes = rng.integers(1, rng.integers(3, 12), size=m)
    codes = np.repeat(np.arange(m), sizes)
    X = rng.normal(size=(len(codes), d))
    theta = rng.normal(size=(m, d + 1)) * rng.choice([0.0, 0.1, 1.0, 10.0], size=d + 1)
    y = theta[codes, 0] + np.sum(X * theta[codes, 1:], axis=1) + rng.normal(size=len(codes))
    unit, zero = 10.0 ** rng.integers(-3, 4, size=d), rng.choice([0.0, 3.0, 100.0], size=d)
    return unit * (X + zero), y, codes


def best_of_starts(X, y, codes, covariance_type, seed):
    """Log-likelihood of the best of 20 random starts of a search of its own."""
    captured = {}

    def capture(likelihood, factor, max_iter, tol):
        captured.update(likelihood=likelihood, factor=factor)
        raise StopIteration

    searched = _variance_search.search_factor
    _variance_search.search_factor = capture
    try:
        model(covariance_type).fit(X, y, groups=codes)
    except StopIteration:
        pass
    finally:
        _variance_search.search_factor = searched
    likelihood, factor = captured["likelihood"], captured["factor"]

    def objective(parameters):
        lower = factor.matrix(parameters)
        point = likelihood.at(lower)
        slope = 2 * likelihood.slope_matrix(point) @ lower
        return point.criterion, factor.pull_back(slope)

    rng = np.random.default_rng(seed)
    found = []
    for _ in range(STARTS):
        start = rng.normal(size=len(factor.start)) * 10.0 ** rng.uniform(-2, 2)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                run = minimize(
                    objective,
                    start,
                    jac=True,
                    method="L-BFGS-B",
                    options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-8},
                    bounds=[(-1e7, 1e7)] * len(start),
                )
            except np.linalg.LinAlgError:
                continue
        if np.isfinite(run.fun):
            found.append(-0.5 * run.fun)
    return max(found)


def model(covariance_type):
    """The regression under test."""
    return PersonalizedLinearRegression(
        GaussianPrior(covariance_type=covariance_type), random="all"
    )


def shortfall(seed, covariance_type):
    """Nats below the best start, and whether a warning said that something is wrong."""
    X, y, codes = draw_design(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("error", message=NO_MAXIMUM)
        try:
            fitted = model(covariance_type).fit(X, y, groups=codes)
        except ValueError:
            return None
        except UserWarning:  # posterior means are no maximum, and take a second
            return None
    if not np.isfinite(fitted.log_likelihood_):
        return None
    best = best_of_starts(X, y, codes, covariance_type, seed)
    return max(best - fitted.log_likelihood_, 0.0), bool(caught)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--designs", type=int, default=300)
    n_designs = parser.parse_args().designs
    print("| covariance | designs | largest shortfall, nats | above 1e-3 | of these unwarned | s |")
    print("|---|---|---|---|---|---|")
    for covariance_type in TYPES:
        start = time.perf_counter()
        jobs = (delayed(shortfall)(seed, covariance_type) for seed in range(n_designs))
        found = enumerate(Parallel(n_jobs=-1)(jobs))
        values = {seed: value for seed, value in found if value is not None}
        short = {seed: value for seed, value in values.items() if value[0] > ALLOWED}
        silent = {seed: value[0] for seed, value in short.items() if not value[1]}
        largest = max(value[0] for value in values.values())
        seconds = time.perf_counter() - start
        print(
            f"| {covariance_type} | {len(values)} | {largest:.2g} | {len(short)} | {len(silent)} "
            f"| {seconds:.0f} |",
            flush=True,
        )
        worst = sorted(silent, key=silent.get, reverse=True)[:10]
        if worst:
            print("  unwarned:", ", ".join(f"seed {seed}: {silent[seed]:.2g}" for seed in worst))


if __name__ == "__main__":
    main()
