"""Corrections of class probabilities for the client's label frequencies, and their exponents."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.metrics import log_loss

from pfl_sklearn.priors import DirichletPrior, SparseDirichletPrior
from pfl_sklearn.priors._label_shift import (
    exponent_losses,
    log_frequencies_of_others,
    shift_labels,
    shrunken_exponents,
)

N_LABELS = 5
GRID = np.linspace(0, 1, 21)


def task(m, n_rows, exponents, seed, kind=DirichletPrior):
    """Rows of m clients: log-probabilities of models that lack a power of pi_i / pi, labels, codes.

    Returns those of the training rows, of as many new rows, the clients' counts and the prior.
    """
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(N_LABELS, 3))
    population = rng.dirichlet(np.full(N_LABELS, 5.0))
    frequencies = np.maximum(rng.dirichlet(2 * population, m), 1e-9)
    codes = np.repeat(np.arange(m), n_rows)
    tables = []
    for _ in range(2):
        uniform = rng.uniform(size=(len(codes), 1))
        labels = (frequencies.cumsum(axis=1)[codes] < uniform).sum(axis=1).clip(0, N_LABELS - 1)
        x = centres[labels] + rng.normal(size=(len(codes), 3))
        logs = -0.5 * ((x[:, None] - centres) ** 2).sum(axis=2) + np.log(population)
        held = (1 - np.broadcast_to(exponents, m))[codes, None]
        logs = log_softmax(logs + held * np.log(frequencies / population)[codes], axis=1)
        tables.append((logs, labels, codes))
    counts = np.zeros((m, N_LABELS))
    np.add.at(counts, (codes, tables[0][1]), 1)
    return *tables, counts, kind().fit_counts(counts)


def losses_of(rows, counts, prior):
    logs, labels, codes = rows
    others = log_frequencies_of_others(prior, counts, codes, labels)
    return exponent_losses(logs, labels, codes, np.log(prior.mean), others, len(counts))


def mean_loss(rows, counts, prior, exponents):
    """Log-loss on new rows of clients with these exponents (m,)."""
    logs, labels, codes = rows
    own = prior.log_frequencies(counts)[codes]
    exponents = np.broadcast_to(exponents, len(counts))
    shifted = shift_labels(logs, np.log(prior.mean), own, exponents[codes])
    return log_loss(labels, np.exp(shifted), labels=np.arange(N_LABELS))


def test_bayes_rule():
    rng = np.random.default_rng(0)
    proba, population, own = (rng.dirichlet(np.ones(4), n) for n in (6, 1, 6))
    logs = [np.log(each) for each in (proba, population[0], own)]
    full = np.exp(shift_labels(*logs))
    expected = proba * own / population
    np.testing.assert_allclose(full, expected / expected.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(shift_labels(*logs, 0.0), logs[0])
    half = shift_labels(logs[0], logs[1], logs[2], np.array([0, 0.5, 1, 0.5, 0, 1]))
    np.testing.assert_allclose(half[[0, 2]], [logs[0][0], np.log(full[2])])
    expected = proba[1] * np.sqrt(own[1] / population[0])
    np.testing.assert_allclose(np.exp(half[1]), expected / expected.sum())


def test_clients_alike_are_not_corrected():
    prior = DirichletPrior([0.2, 0.3, 0.5], 1e12)
    logs = np.log(np.random.default_rng(0).dirichlet(np.ones(3), 8))
    own = prior.log_frequencies(np.array([[50, 0, 0]]))[0]
    np.testing.assert_allclose(shift_labels(logs, np.log(prior.mean), own), logs, atol=1e-9)


@pytest.mark.parametrize("kind", [DirichletPrior, SparseDirichletPrior])
def test_a_row_does_not_see_its_own_label(kind):
    (_, labels, codes), _, counts, prior = task(6, 8, 1.0, 0, kind)
    others = log_frequencies_of_others(prior, counts, codes, labels)
    for row in range(0, 48, 5):
        rest = np.delete(np.arange(48), row)
        rest = rest[codes[rest] == codes[row]]
        left = np.bincount(labels[rest], minlength=N_LABELS)
        np.testing.assert_allclose(others[row], prior.log_frequencies(left[None])[0])


def test_losses_are_log_losses():
    rows, _, counts, prior = task(4, 6, 1.0, 0)
    logs, labels, codes = rows
    others = log_frequencies_of_others(prior, counts, codes, labels)
    found = losses_of(rows, counts, prior)
    assert found.shape == (4, 21)
    for at in (0, 7, 20):
        shifted = np.exp(shift_labels(logs, np.log(prior.mean), others, GRID[at]))
        for client in range(4):
            mine = codes == client
            expected = log_loss(
                labels[mine], shifted[mine], normalize=False, labels=range(N_LABELS)
            )
            assert found[client, at] == pytest.approx(expected)


@pytest.mark.parametrize("exponent", [0.0, 0.4, 1.0])
def test_exponents_of_clients_that_are_alike(exponent):
    """Little data: all clients take nearly the exponent that minimizes the loss of all."""
    rows, _, counts, prior = task(300, 10, exponent, 0)
    found = shrunken_exponents(losses_of(rows, counts, prior))
    logs, labels, codes = rows
    others = log_frequencies_of_others(prior, counts, codes, labels)

    def total(t):
        shifted = shift_labels(logs, np.log(prior.mean), others, t)
        return -shifted[np.arange(len(labels)), labels].sum()

    best = minimize_scalar(total, bounds=(0, 1), method="bounded").x
    assert np.mean(found) == pytest.approx(best, abs=0.06)
    assert np.std(found) < 0.12


@pytest.mark.parametrize("n_rows", [3, 10, 60])
@pytest.mark.parametrize("kind", ["none", "half", "full", "either", "any"])
def test_shrunken_exponents_lose_to_no_simple_rule(n_rows, kind):
    """On new rows, against one exponent for all, each client's own best, none, and the full one.

    The last two know the truth in the first and third kind, where estimates must lose a little.
    """
    lost = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        true = {"none": 0.0, "half": 0.5, "full": 1.0, "any": rng.uniform(size=50)}
        true["either"] = rng.integers(0, 2, 50).astype(float)
        rows, new, counts, prior = task(50, n_rows, true[kind], seed)
        losses = losses_of(rows, counts, prior)
        common, own = GRID[losses.sum(axis=0).argmin()], GRID[losses.argmin(axis=1)]
        rules = [shrunken_exponents(losses), np.full(50, common), own, np.zeros(50), np.ones(50)]
        lost.append([mean_loss(new, counts, prior, each) for each in rules])
    shrunken, common, own, none, full = np.mean(lost, axis=0)
    assert shrunken < min(common, own) + 0.005
    assert shrunken < min(none, full) + 0.05 / n_rows


def test_exponents_without_evidence():
    """A client without rows takes the others' mean; no rows at all mean no correction."""
    rows, _, counts, prior = task(40, 60, 1.0, 0)
    losses = np.vstack([losses_of(rows, counts, prior), np.zeros(21)])
    found = shrunken_exponents(losses)
    assert found[-1] == pytest.approx(found[:-1].mean(), abs=0.05)
    np.testing.assert_allclose(shrunken_exponents(np.zeros((3, 21))), 0, atol=1e-12)


def test_one_client_takes_its_own_best():
    losses = 300 * (GRID[None] - 0.35) ** 2
    np.testing.assert_allclose(shrunken_exponents(losses), [0.35])


def test_clients_that_differ_beyond_chance_keep_their_own():
    best = np.array([0.1, 0.9, 0.5, 0.2, 0.7])
    losses = 1e4 * (GRID - best[:, None]) ** 2
    np.testing.assert_allclose(shrunken_exponents(losses), best, atol=1e-3)


def test_the_correction_is_worth_it():
    """A population model, clients of 20 rows: the full correction against none."""
    _, new, counts, prior = task(100, 20, 1.0, 0)
    none, full = (mean_loss(new, counts, prior, t) for t in (0.0, 1.0))
    assert full < none - 0.15
