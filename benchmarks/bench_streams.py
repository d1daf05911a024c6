"""CollaborativeMean against a plain loop over agents, many agents, and memory.

The peer is Algorithm 1 of Yakimenka et al. in plain Python: PM-I with its latest means, round
robin, the test at every step for everybody that was heard. It runs a few steps at the end of a
stream, where they cost the most, and its time is scaled to all of them. Ours is one call.
"""

import math
import os
import random
import statistics
import warnings

import numpy as np
from timing import compare, peak_above_input, seconds

from pfl_sklearn.online import CollaborativeMean

WIDTH, SIGMA2, NOISE = math.sqrt(3), 0.25, 84.23


class PlainAgents:
    """All agents of the printed scheme, one after another."""

    def __init__(self, n_agents):
        n = self.n = n_agents
        self.t = 0
        self.sums = [0.0] * n
        self.noise = [[0.0] * n for _ in range(n)]
        self.heard = [[None] * n for _ in range(n)]  # (mean, variance)
        self.count = [[0] * n for _ in range(n)]
        self.estimates = [0.0] * n

    def step(self, values, estimate=True):
        self.t += 1
        t, n, std = self.t, self.n, math.sqrt(NOISE)
        for a, value in enumerate(values):
            self.sums[a] += value
        turn = (t - 1) % (n - 1)
        for a in range(n):
            b = turn + (turn >= a)
            self.noise[a][b] += random.gauss(0, std)
            self.count[a][b] += 1
            mean = (self.sums[b] + self.noise[a][b]) / t
            self.heard[a][b] = mean, SIGMA2 / t + self.count[a][b] * NOISE / t**2
        if estimate:
            quantile = statistics.NormalDist().inv_cdf(1 - 0.025 / math.log(t + 1))
            self.estimates = [self._estimate(a, quantile) for a in range(n)]

    def _estimate(self, a, quantile):
        own, variance = self.sums[a] / self.t, SIGMA2 / self.t
        total, precision = own / variance, 1 / variance
        for heard in self.heard[a]:
            if heard is not None and abs(own - heard[0]) < quantile * math.sqrt(
                variance + heard[1]
            ):
                total += heard[0] / heard[1]
                precision += 1 / heard[1]
        return total / precision


def plain(n_agents, n_steps, estimate):
    """Seconds of the peer for all steps, from a round and 50 further steps."""
    agents, rng = PlainAgents(n_agents), np.random.default_rng(0)
    for _ in range(n_agents):
        agents.step(rng.random(n_agents).tolist(), estimate=False)
    rows = rng.random((50, n_agents)).tolist()
    return seconds(lambda: [agents.step(row, estimate) for row in rows]) / 50 * n_steps


def rows(n_agents, n_steps):
    y = np.random.default_rng(0).random(n_agents * n_steps)
    return np.broadcast_to(np.zeros(1), (len(y), 1)), y, np.tile(np.arange(n_agents), n_steps)


def pairwise():
    n_agents, n_steps = 200, 30_000
    X, y, groups = rows(n_agents, n_steps)
    model = CollaborativeMean(
        epsilon=1.0,
        bounds=(0.0, WIDTH),
        noise_variance=SIGMA2,
        mechanism="pm1",
        decision="test",
        accounting="printed",
    )
    ours = statistics.median(seconds(lambda: model.fit(X, y, groups=groups)) for _ in range(3))
    for name, estimate, target in (
        ("estimates at every step", True, ">= 100x"),
        ("no estimate but the last", False, "-"),
    ):
        peer = plain(n_agents, n_steps, estimate)
        print(
            f"| PM-I, 200 agents x 30,000 steps in one call; plain Python, {name} | {peer:.3g} | "
            f"{ours:.3g} | {peer / ours:.0f}x | {target} |",
            flush=True,
        )


def many_agents():
    """The same rows again and again, 20 steps a call."""
    X, y, groups = rows(100_000, 20)
    for name, more in (("known variance", {"noise_variance": 1 / 12}), ("unknown variance", {})):
        model = CollaborativeMean(epsilon=1.0, bounds=(0, 1), horizon=1000, **more)
        taken = []

        def stream(model=model, taken=taken):
            for _ in range(50):
                taken.append(seconds(lambda: model.partial_fit(X, y, groups=groups)))

        peak = peak_above_input(stream) if memory_is_measured() else math.nan
        if not taken:
            stream()
        print(
            f"| 100,000 agents x 1,000 steps, square root, {name}: s; peak above input | "
            f"{sum(taken):.3g} s | {peak:.0f} MB | - | < 60 s, < 2 GB |",
            flush=True,
        )


def one_step_more():
    """A step costs the same late in a stream: 1,000 agents, calls of a step."""
    for horizon in (30_000, None):
        _one_step_more(horizon)


def _one_step_more(horizon):
    X, y, groups = rows(1000, 1)
    model = CollaborativeMean(
        epsilon=1.0, bounds=(0, 1), horizon=horizon, noise_variance=1 / 12, decision="oracle"
    )
    labels = dict.fromkeys(range(1000), 0)

    def steps():
        for _ in range(200):
            model.partial_fit(X, y, groups=groups, labels=labels)

    model.partial_fit(X, y, groups=groups, labels=labels)
    early = seconds(steps)
    more = rows(1000, 5000)
    model.partial_fit(*more[:2], groups=more[2], labels=labels)
    late = seconds(steps)
    print(
        f"| 1,000 agents, a call a step, horizon {horizon}: from 5,201; from 2 | "
        f"{late / 200:.3g} | {early / 200:.3g} | {late / early:.2f}x | about 1x |",
        flush=True,
    )


def memory_is_measured():
    return os.access("/proc/self/clear_refs", os.W_OK)


def measure_memory():
    if not memory_is_measured():
        return
    X, y, groups = rows(10_000, 1)
    pairs = CollaborativeMean(
        epsilon=1.0, bounds=(0, 1), noise_variance=1 / 12, mechanism="pm1", decision="test"
    )
    more = rows(10_000, 100)

    def every_pair():
        pairs.partial_fit(X, y, groups=groups)
        for _ in range(100):  # an estimate for everybody at every call would take minutes
            pairs._stream.senders.take(more[2], more[1][None] - 0.5)
        pairs.partial_fit(X, y, groups=groups)

    peak = peak_above_input(every_pair)
    print(
        f"| 10,000 agents, PM-I, a message of every pair: peak above input | - | - | {peak:.0f} MB"
        " | < 2 GB |",
        flush=True,
    )


def main():
    warnings.simplefilter("ignore")
    measure_memory()
    pairwise()
    one_step_more()
    many_agents()
    compare(
        "200 agents x 1,000 steps, tree; square root",
        *(
            lambda kind=kind: CollaborativeMean(
                epsilon=1.0, bounds=(0, 1), horizon=1000, mechanism=kind, noise_variance=1 / 12
            ).fit(*rows(200, 1000)[:2], groups=rows(200, 1000)[2])
            for kind in ("tree", "sqrt")
        ),
        "-",
        pairs=3,
    )


if __name__ == "__main__":
    main()
