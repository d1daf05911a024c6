"""Audits of Gaussian rounds: the Gaussian-DP parameter mu that a worst-case client can measure."""

import math

import numpy as np

from pfl_sklearn.privacy import ClippedSum


def effect_size(first, second):
    """Distance of two normal samples of scores in standard deviations, which is mu; and its error.

    With 60 scores a side, mu = 2 has a standard error of .22 and mu = 4, of half the noise, one of
    .32: a test at four standard errors accepts the first and misses the second in 1 of 5,000 cases.
    """
    n, pooled = len(first), math.sqrt((np.var(first, ddof=1) + np.var(second, ddof=1)) / 2)
    size = (np.mean(first) - np.mean(second)) / pooled
    return size, math.sqrt(2 / n + size**2 / (4 * n))


def measured_mu(model, data, canary, directions, module, name, monkeypatch, n_fits=60):
    """Mu of all rounds, and its error, from a client whose message is one of two `directions`.

    The message is a million times a direction; the others' messages, made by the function `name` of
    a `module`, are known. A score is the likelihood ratio of all rounds.
    """
    X, y, groups = data
    first, second = np.array(directions, dtype=float)
    side, scores, fits = True, [], {True: [], False: []}
    send, release = getattr(module, name), ClippedSum.release

    def sent(batch, *args):
        made = send(batch, *args)
        messages = made[0] if isinstance(made, tuple) else made
        clients = batch.clients if hasattr(batch, "clients") else batch[0]
        messages[clients == canary] = 1e6 * (first if side else second)
        return made

    def spy(self, messages, bound, n_expected, rng):
        released = release(self, messages, bound, n_expected, rng)
        others = np.delete(messages, canary, axis=0)
        rest = released.total - release(ClippedSum(1.0), others, bound, n_expected, rng).total
        scores.append(rest @ (first - second) / self.noise_multiplier**2)
        return released

    monkeypatch.setattr(module, name, sent)
    monkeypatch.setattr(ClippedSum, "release", spy)
    for seed in range(2 * n_fits):
        side = seed % 2 == 0
        scores.clear()
        model.set_params(random_state=seed).fit(X, y, groups=groups)
        fits[side].append(sum(scores))
    return effect_size(fits[True], fits[False])
