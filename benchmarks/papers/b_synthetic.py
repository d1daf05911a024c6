"""Excess risk of PPSGD against rounds at full size: Figure 1a of its paper.

N = 1000 clients, d = 100 features, ten fresh rows of every client in a round, one pass, everybody
sampled, clip norm 10; the best of the eleven step sizes at each number of rounds. All rows of a
thousand rounds would be 8 GB, so that they are drawn ten rounds at a time, and all runs take them
in turn on the loop that PPSGDRegressor runs on. Twenty minutes on one core. With --check a few
rounds are compared with ``PPSGDRegressor.partial_fit`` on the same rows, bit by bit.

    python benchmarks/figure_ppsgd.py                                            # the figure
    python benchmarks/figure_ppsgd.py --alpha-q 0 1 --sigma 10 --rounds 300 --seed 1
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import numpy as np
import pandas as pd

from pfl_sklearn import PPSGDRegressor
from pfl_sklearn._rounds.loop import Run, Sampling, run_rounds, start
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn._rounds.rows import ClientRows, InTurn
from pfl_sklearn._rounds.run import seeds
from pfl_sklearn._rounds.step_sizes import step_sizes
from pfl_sklearn.datasets import make_ppsgd_regression
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES, ppsgd
from pfl_sklearn.privacy import ClippedSum
from pfl_sklearn.theory import linear_excess_risk

N, D, BATCH, CLIP_NORM, TAU, AT_ONCE = 1000, 100, 10, 10.0, 0.01, 10
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8)
ALPHA_Q = (0, 0.1, 0.3, 1, 3, 10, 30, 100, math.inf)
SIGMA = (0, 10, 100)


def chunks(clients, n_chunks, seed):
    """Rows of ten rounds at a time: features (N * 100, D) and targets, in client order."""
    rng = np.random.default_rng([seed, 1])
    scale = np.sqrt(clients.feature_variance)
    for _ in range(n_chunks):
        X = rng.standard_normal((N, AT_ONCE * BATCH, D))
        X *= scale
        y = np.matmul(X, clients.coef[:, :, None])[:, :, 0]
        y += TAU * rng.standard_normal(y.shape)
        yield X.reshape(-1, D), y.reshape(-1)


class SharedRows(ClientRows):
    """Rows whose blocks are cut once for all runs, which use the same ones in the same round."""

    cut = {}

    def blocks(self, sampled, state, t, rng, workers=1):
        at = int(state["used"][0])
        if at in self.cut:
            state["used"] += BATCH
        else:
            self.cut[at] = super().blocks(sampled, state, t, rng, workers)
        return self.cut[at]


def runs_of(alphas, sigmas, rows):
    """Method, release and state of every run, by (alpha Q, sigma, step)."""
    found = {}
    for alpha_q, sigma, step in itertools.product(alphas, sigmas, STEPS):
        if alpha_q == 0 and sigma != sigmas[0]:
            continue  # nothing is released, and noise makes no difference
        steps = step_sizes(alpha_q / N, step, N)
        method = ppsgd(N, (D, 1), LOSSES["squared_error"], steps, float(N), None, False)
        release = JointSum(ClippedSum(CLIP_NORM, float(sigma)), method.messages)
        found[alpha_q, sigma, step] = method, release, start(method, rows, release)
    return found


def risks(n_rounds, seed, alphas=ALPHA_Q, sigmas=SIGMA):
    """Rows of (alpha Q, sigma, step, rounds, excess risk)."""
    clients = make_ppsgd_regression(N, 1, D, noise_std=TAU, random_state=seed)
    runs, found, begun = None, [], time.perf_counter()
    _, entropy = seeds(seed)
    offsets, schedule = np.arange(N + 1) * AT_ONCE * BATCH, InTurn(np.full(N, BATCH))
    for X, y in chunks(clients, n_rounds // AT_ONCE, seed):
        rows = SharedRows(X, y[:, None], offsets, np.arange(N), schedule)
        rows.cut.clear()
        runs = runs_of(alphas, sigmas, rows) if runs is None else runs
        for key, (method, release, state) in list(runs.items()):
            n_rounds = state.round + AT_ONCE
            run_rounds(Run(method, rows, release, Sampling(1.0), n_rounds, entropy), state)
            coef = state.server["coef"][:, 0] + state.clients["local"][:, :, 0]
            risk = linear_excess_risk(coef, clients.coef, clients.feature_variance)
            if not risk < 1e9:
                del runs[key]  # diverged
                continue
            found.append((*key, state.round, risk))
        print(f"{found[-1][3]} rounds, {time.perf_counter() - begun:.0f} s", flush=True)
    return pd.DataFrame(found, columns=["alpha_q", "sigma", "step", "rounds", "risk"])


def best_steps(table, sigmas):
    """Best risk over steps: rounds by (sigma, alpha Q), that of alpha = 0 under every sigma."""
    local = table[table["alpha_q"] == 0]
    local = pd.concat([local.assign(sigma=sigma) for sigma in sigmas])
    whole = pd.concat([local, table[table["alpha_q"] > 0]])
    return whole.groupby(["rounds", "sigma", "alpha_q"])["risk"].min().unstack([1, 2])


def crossing(local, other):
    """Last recorded rounds at which another alpha is no worse than local learning; None if now."""
    behind = local.index[~(local < other)]
    if len(behind) and behind[-1] == local.index[-1]:
        return None
    return int(behind[-1]) if len(behind) else 0


def check(seed):
    """Compare two runs of twenty rounds with the estimator on the same rows."""
    clients = make_ppsgd_regression(N, 1, D, noise_std=TAU, random_state=seed)
    table = risks(20, seed).set_index(["alpha_q", "sigma", "step", "rounds"])["risk"]
    who = np.repeat(np.arange(N), AT_ONCE * BATCH)
    for alpha_q, sigma, step in ((1, 10, 0.4), (math.inf, 100, 0.1)):
        model = PPSGDRegressor(
            alpha=alpha_q / N,
            learning_rate=step,
            weighting="clients",
            fit_intercept=False,
            shuffle=False,
            clip_norm=CLIP_NORM,
            noise_multiplier=float(sigma),
            n_rounds=AT_ONCE,
            random_state=seed,
        )
        for X, y in chunks(clients, 2, seed):
            model.partial_fit(X, y, groups=who)
        risk = linear_excess_risk(model.coef_, clients.coef, clients.feature_variance)
        print(alpha_q, sigma, step, risk, risk == table[alpha_q, sigma, step, 20])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--alpha-q", type=float, nargs="+", default=ALPHA_Q)
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMA)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("output/ppsgd_figure.csv"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        check(options.seed)
        return
    table = risks(options.rounds, options.seed, options.alpha_q, options.sigma)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output, index=False)
    best = best_steps(table, options.sigma)
    print(best.loc[best.index % 50 == 0].T.to_string(float_format="%.3g"))
    for sigma, alpha_q in best.columns:
        if sigma > 0 and alpha_q > 0:
            last = crossing(best[sigma, 0], best[sigma, alpha_q])
            print(f"sigma {sigma:g}, alpha Q {alpha_q:g}: local learning wins after {last} rounds")


if __name__ == "__main__":
    main()
