"""Priors of label frequencies: exact likelihoods and posteriors, limits, simulated populations."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln, xlogy

from pfl_sklearn.priors import DirichletPrior, SparseDirichletPrior
from pfl_sklearn.priors._dirichlet import squared_norm_of_mean
from pfl_sklearn.priors._label_counts import log_rising
from tests.helpers.slow import slow

MEAN4 = np.array([0.1, 0.2, 0.3, 0.4])
SPARSE4 = SparseDirichletPrior(
    mean=MEAN4, concentration=3.0, weights=[0.1, 0.4, 0.2, 0.3], sparse_concentration=0.7
)
COUNTS4 = np.array([[0, 0, 0, 0], [5, 0, 0, 0], [0, 1, 0, 9], [2, 0, 1, 1], [3, 3, 1, 2]])
both = pytest.mark.parametrize("kind", [DirichletPrior, SparseDirichletPrior])


def orders(counts):
    """Log of the number of orders in which the labels of each client may come."""
    return gammaln(counts.sum(axis=1) + 1) - gammaln(counts + 1).sum(axis=1)


def components(prior):
    """Every set of labels that a client may have, as a (probability, Dirichlet parameters) pair."""
    n_labels = len(prior.mean)
    found = [(prior.weights[-1], prior.concentration * np.asarray(prior.mean))]
    for size in range(1, n_labels):
        sets = list(itertools.combinations(range(n_labels), size))
        for labels in sets:
            shapes = np.zeros(n_labels)
            shapes[list(labels)] = prior.sparse_concentration
            found.append((prior.weights[size - 1] / len(sets), shapes))
    return found


def enumerated(prior, counts):
    """Likelihood, posterior mean, and posterior of the number of labels, set by set."""
    joint, means, sizes = [], [], []
    for chance, shapes in components(prior):
        has = shapes > 0
        inside = counts[~has].sum() == 0
        if has.sum() == 1:
            likelihood = float(inside)
        else:
            multinomial = stats.dirichlet_multinomial(shapes[has], int(counts.sum()))
            log_orders = orders(counts[None, has])[0]
            likelihood = np.exp(multinomial.logpmf(counts[has]) - log_orders) if inside else 0.0
        joint.append(chance * likelihood)
        means.append((counts * has + shapes) / (counts[has].sum() + shapes.sum()))
        sizes.append(has.sum())
    posterior = np.array(joint) / np.sum(joint)
    numbers = np.bincount(sizes, posterior, len(counts) + 1)[1:]
    return np.sum(joint), posterior @ np.array(means), numbers


@pytest.mark.parametrize("base", [1e-9, 0.3, 9.999, 10.0, 1e3, 1e6, 1e12])
def test_rising_factorials(base):
    for count in (0, 1, 2, 7, 5000):
        exact = math.fsum(math.log(base + j) for j in range(count))
        assert log_rising(base, count) == pytest.approx(exact, rel=1e-13, abs=1e-12)


def test_dirichlet_likelihood_is_scipys():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 2000, (40, 4))
    for concentration in (0.01, 3.0, 1e6):
        prior = DirichletPrior(MEAN4, concentration)
        expected = [
            stats.dirichlet_multinomial(concentration * MEAN4, row.sum()).logpmf(row)
            for row in counts
        ]
        np.testing.assert_allclose(prior.log_likelihood(counts) + orders(counts), expected, 1e-9)


def test_dirichlet_fit_is_the_maximum_of_scipys_likelihood():
    rng = np.random.default_rng(0)
    counts = np.array([rng.multinomial(n, rng.dirichlet(5 * MEAN4)) for n in [3, 8, 30, 90] * 20])
    fitted = DirichletPrior().fit_counts(counts)

    def value(concentration):
        shapes = concentration * fitted.mean
        return sum(stats.dirichlet_multinomial(shapes, row.sum()).logpmf(row) for row in counts)

    best = value(fitted.concentration)
    assert best > value(0.99 * fitted.concentration)
    assert best > value(1.01 * fitted.concentration)
    assert fitted.concentration == pytest.approx(5, rel=0.3)


@pytest.mark.parametrize("counts", COUNTS4, ids=str)
def test_sparse_prior_agrees_with_enumeration(counts):
    likelihood, mean, numbers = enumerated(SPARSE4, counts)
    table = counts[None]
    np.testing.assert_allclose(np.exp(SPARSE4.log_likelihood(table))[0], likelihood, rtol=1e-10)
    np.testing.assert_allclose(SPARSE4.posterior(table)[0][0], mean, rtol=1e-10)
    np.testing.assert_allclose(np.exp(SPARSE4.log_frequencies(table))[0], mean, rtol=1e-10)
    np.testing.assert_allclose(SPARSE4.label_numbers(table)[0], numbers, atol=1e-12)


def test_posterior_means_are_chances_of_the_next_label():
    """p(counts and one more row of k) / p(counts), whatever the prior is."""
    for prior in (SPARSE4, DirichletPrior(MEAN4, 3.0)):
        for k in range(4):
            ahead = prior.log_likelihood(COUNTS4 + np.eye(4)[k]) - prior.log_likelihood(COUNTS4)
            np.testing.assert_allclose(prior.log_frequencies(COUNTS4)[:, k], ahead, rtol=1e-9)


def population(kind, m, n_labels, rng):
    """Label frequencies (m, K) of clients: equal or unequal ones of some labels, or all labels."""
    if kind == "alike":
        return np.tile(rng.dirichlet(np.ones(n_labels)), (m, 1))
    if kind == "skewed":
        return rng.dirichlet(np.full(n_labels, 0.3), m)
    if kind == "around":
        return rng.dirichlet(5 * rng.dirichlet(np.ones(n_labels)), m)
    if kind == "mixed":
        some = rng.uniform(size=(m, 1)) < 0.5
        return np.where(some, *(population(k, m, n_labels, rng) for k in ("equal", "around")))
    size = min(3, n_labels - 1)
    place = rng.uniform(size=(m, n_labels)).argsort(axis=1).argsort(axis=1)
    draws = np.ones((m, n_labels)) if kind == "equal" else rng.exponential(size=(m, n_labels))
    theta = np.where(place < size, draws, 0.0)
    return theta / theta.sum(axis=1, keepdims=True)


def divergence(theta, log_frequencies):
    """Mean Kullback-Leibler divergence of the clients' frequencies from the estimates, in nats."""
    return np.mean(np.sum(xlogy(theta, theta) - theta * log_frequencies, axis=1))


def divergences(kind, m, n_labels, n_rows, seed):
    """Of the Dirichlet prior's estimates, the sparse prior's, and the shares of labels seen."""
    rng = np.random.default_rng(seed)
    theta = population(kind, m, n_labels, rng)
    counts = rng.multinomial(np.resize(n_rows, m), theta)
    logs = [p().fit_counts(counts).log_frequencies(counts) for p in PAIR]
    cut = np.maximum(counts / counts.sum(axis=1, keepdims=True), 1e-6)
    return [divergence(theta, log) for log in (*logs, np.log(cut))]


PAIR = (DirichletPrior, SparseDirichletPrior)


@pytest.mark.parametrize(
    ("kind", "dirichlet", "sparse"),
    [("unequal", 0.093, 0.067), *slow([("equal", 0.092, 0.001), ("skewed", 0.145, 0.145)])],
)
@pytest.mark.slow
def test_known_divergences_at_twenty_rows(kind, dirichlet, sparse):
    """Ten labels, of which clients have three equal ones, three unequal ones, or all."""
    found = np.mean([divergences(kind, 500, 10, 20, seed) for seed in range(3)], axis=0)
    np.testing.assert_allclose(found[:2], [dirichlet, sparse], rtol=0.02, atol=1e-3)
    assert found[2] > 2 * found[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "unequal", "skewed", "around", "alike", "mixed"])
@pytest.mark.parametrize(
    ("m", "n_labels", "n_rows"), [(60, 10, [3, 10, 30, 300]), (5, 10, 3), (5, 2, 20), (60, 62, 60)]
)
def test_the_sparse_prior_never_loses(kind, m, n_labels, n_rows):
    found = [divergences(kind, m, n_labels, n_rows, seed)[:2] for seed in range(2)]
    dirichlet, sparse = np.mean(found, axis=0)
    assert sparse < 1.05 * dirichlet + 0.006


def test_writers_of_characters(data_home):
    """Held-out labels of 206 writers: the sparse prior does not lose, and both beat no prior."""
    table = np.load(data_home / "femnist_206writers.npz")
    writer = np.unique(table["writer"], return_inverse=True)[1]
    counts = np.zeros((2, 206, 62))
    held_out = np.random.default_rng(0).integers(0, 2, len(writer))
    np.add.at(counts, (held_out, writer, table["y"]), 1)
    seen, new = counts
    dirichlet, sparse = (kind().fit_counts(seen) for kind in PAIR)
    losses = [
        -np.sum(new * logs) / new.sum()
        for logs in (
            sparse.log_frequencies(seen),
            dirichlet.log_frequencies(seen),
            np.log(dirichlet.mean),
        )
    ]
    assert losses[0] < losses[1] + 0.002
    assert losses[1] < losses[2]


@pytest.mark.slow
@both
def test_twenty_thousand_clients_take_seconds(kind):
    rng = np.random.default_rng(0)
    theta = rng.dirichlet(np.full(62, 0.3), 1000)
    counts = rng.multinomial(50, np.tile(theta, (20, 1)))
    start = time.process_time()
    fitted = kind().fit_counts(counts)
    assert time.process_time() - start < 5
    assert fitted.concentration == pytest.approx(62 * 0.3, rel=0.05)


# Limits -------------------------------------------------------------------------------------------
@both
def test_frequencies_are_positive_and_sum_to_one(kind):
    rng = np.random.default_rng(0)
    fitted = kind().fit_counts(np.eye(62, dtype=int)[rng.integers(0, 62, 300)] * 1000)
    counts = np.zeros((4, 62))
    counts[1, 3], counts[2, :5], counts[3] = 1e9, 1e12, 1.0
    logs = fitted.log_frequencies(counts)
    assert np.isfinite(logs).all()
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-9)
    mean, variance = fitted.posterior(counts)
    np.testing.assert_allclose(mean, np.exp(logs))
    assert (variance >= 0).all()


@both
def test_one_client_is_its_own_population(kind):
    counts = np.array([[30, 10, 0]])
    fitted = kind().fit_counts(counts)
    ratio = fitted.log_frequencies(counts) - np.log(fitted.mean)
    np.testing.assert_allclose(ratio[0, :2], 0, atol=0.04)
    assert ratio[0, 2] < 0.1


@both
def test_clients_of_one_row_say_nothing_about_each_other(kind):
    """No client differs from the population by more than what its one row may say."""
    counts = np.eye(3, dtype=int)[[0, 0, 1, 2, 2, 2]]
    fitted = kind().fit_counts(counts)
    np.testing.assert_allclose(fitted.mean, (6 * np.array([2, 1, 3]) / 6 + 1 / 3) / 7)
    ratio = fitted.log_frequencies(counts) - np.log(fitted.mean)
    if kind is DirichletPrior:
        assert fitted.concentration == pytest.approx(1e6)
        np.testing.assert_allclose(ratio, 0, atol=1e-5)
    assert np.isfinite(ratio).all()


@both
def test_clients_alike_get_the_population(kind):
    counts = np.tile([40, 50, 10], (200, 1))
    fitted = kind().fit_counts(counts)
    assert fitted.concentration == pytest.approx(1e6)
    np.testing.assert_allclose(fitted.mean, [0.4, 0.5, 0.1], atol=1e-4)
    np.testing.assert_allclose(fitted.log_frequencies(counts), np.log([[0.4, 0.5, 0.1]] * 200), 0.1)


@both
def test_clients_of_a_single_label(kind):
    """Further labels are rare by as much as the rows say: 1,000 with none."""
    counts = np.eye(4, dtype=int)[np.arange(50) % 4] * 20
    fitted = kind().fit_counts(counts)
    own = np.exp(fitted.log_frequencies(counts)).max(axis=1)
    assert np.all((own > 0.999) & (own < 1 - 1e-6))


@both
def test_a_label_that_nobody_has(kind):
    rng = np.random.default_rng(0)
    counts = np.zeros((50, 4), dtype=int)
    counts[:, :3] = rng.multinomial(20, rng.dirichlet(np.ones(3), 50))
    fitted = kind().fit_counts(counts)
    assert 0 < fitted.mean[3] < 1e-3
    logs = fitted.log_frequencies(counts)
    assert np.isfinite(logs).all()
    assert np.exp(logs[:, 3]).max() < 0.01


@both
def test_one_label_and_clients_without_rows(kind):
    np.testing.assert_allclose(kind().fit_counts([[3], [0]]).log_frequencies([[3], [0]]), 0)
    fitted = kind().fit_counts([[3, 1, 2], [0, 0, 0], [4, 5, 0]])
    same = kind().fit_counts([[3, 1, 2], [4, 5, 0]])
    np.testing.assert_allclose(fitted.mean, same.mean)
    assert fitted.concentration == pytest.approx(same.concentration)
    empty = kind().fit_counts(np.zeros((3, 4)))
    np.testing.assert_allclose(empty.log_frequencies(np.zeros((1, 4))), np.log(0.25))


def test_a_dirichlet_prior_is_a_sparse_one_without_sparse_clients():
    sparse = SparseDirichletPrior(MEAN4, 3.0, [1e-13, 1e-13, 1e-13, 1 - 3e-13], 1.0)
    dense = DirichletPrior(MEAN4, 3.0)
    for got, expected in zip(sparse.posterior(COUNTS4), dense.posterior(COUNTS4), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@both
def test_clients_are_averaged_by_their_weights(kind):
    counts = np.array([[90, 10], [1, 9], [5, 5]])
    equal, by_rows = kind().fit_counts(counts), kind().fit_counts(counts, counts.sum(axis=1))
    smooth = np.array([0.5, 0.5]) / 121
    np.testing.assert_allclose(equal.mean, np.array([0.5, 0.5]) * 120 / 121 + smooth)
    np.testing.assert_allclose(by_rows.mean, np.array([0.8, 0.2]) * 120 / 121 + smooth)


def test_sparse_fit_is_a_maximum():
    """No weight can be moved towards another, nor alpha or a, without loss, the one more client
    that counts towards the weights included."""
    rng = np.random.default_rng(1)
    some, full = (population(kind, 150, 5, rng) for kind in ("unequal", "around"))
    counts = rng.multinomial(np.resize([4, 20, 50], 300), np.concatenate([some, full]))
    fitted = SparseDirichletPrior().fit_counts(counts)

    def value(**changes):
        prior = SparseDirichletPrior(**{**fitted.get_params(), **changes})
        return prior.log_likelihood(counts).sum() + np.log(prior.weights).mean()

    best = value() + 1e-4
    for a, b in itertools.permutations(range(5), 2):
        moved = np.array(fitted.weights)
        step = 0.02 * moved[a]
        moved[a], moved[b] = moved[a] - step, moved[b] + step
        assert value(weights=moved) < best
    for factor in (0.95, 1.05):
        assert value(concentration=factor * fitted.concentration) < best
    for factor in (0.5, 2.0):
        assert value(sparse_concentration=factor * fitted.sparse_concentration) < best


def test_what_is_given_is_kept():
    counts = COUNTS4[1:]
    for name, value in SPARSE4.get_params().items():
        fitted = SparseDirichletPrior(**{name: value}).fit_counts(counts)
        np.testing.assert_array_equal(getattr(fitted, name), value)
        assert fitted.is_known
    again = fitted.fit_counts(counts)
    np.testing.assert_array_equal(again.weights, fitted.weights)
    np.testing.assert_array_equal(again.mean, fitted.mean)


@both
@pytest.mark.parametrize(
    ("counts", "weights", "error"),
    [
        ([[1, -2]], None, r"counts.*negative.*-2"),
        ([[1, np.nan]], None, "NaN"),
        ([[1, 2]], [1.0, 1.0], r"client_weights.*\b1\b.*\(2,\)"),
        ([[1, 2]], [0.0], "client_weights.*not all 0"),
    ],
)
def test_bad_counts(kind, counts, weights, error):
    with pytest.raises(ValueError, match=error):
        kind().fit_counts(counts, weights)


@both
def test_counts_of_other_labels(kind):
    known = SPARSE4 if kind is SparseDirichletPrior else DirichletPrior(MEAN4, 3.0)
    with pytest.raises(ValueError, match=rf"mean of {kind.__name__}.*\b3\b.*\b4\b"):
        known.fit_counts([[1, 2, 3]])


# Sums over clients --------------------------------------------------------------------------------
def test_the_squared_norm_of_the_mean_is_unbiased():
    """With few clients, and noise of the size of the frequencies."""
    rng = np.random.default_rng(0)
    shares = rng.multinomial(7, rng.dirichlet(2 * MEAN4, (10_000, 5))) / 7
    noise = 0.2 * rng.normal(size=(10_000, 5))
    average = shares.mean(axis=1) + noise[:, :4]
    square = np.sum(shares**2, axis=(1, 2)) / 5 + noise[:, 4]
    pairs = zip(average, square, strict=True)
    found = [squared_norm_of_mean(each, its_square, 5, 0.2) for each, its_square in pairs]
    assert np.mean(found) == pytest.approx(MEAN4 @ MEAN4, abs=5 * np.std(found) / 100)


def test_concentration_from_sums():
    """Without noise, and with noise that is known."""
    rng = np.random.default_rng(0)
    n_rows = np.resize([2, 5, 20, 100], 20_000)
    counts = rng.multinomial(n_rows, rng.dirichlet(6 * MEAN4, len(n_rows)))
    shares = counts / n_rows[:, None]
    for noise in (0.0, 250.0):
        draws = []
        for _ in range(1 if noise == 0 else 150):
            total = shares.sum(axis=0) + noise * rng.normal(size=4)
            square = np.sum(shares**2) + noise * rng.normal() / 10
            fitted = DirichletPrior().fit_sums(total, square, n_rows, noise)
            draws.append([1 / fitted.concentration, *fitted.mean])
        assert np.mean(draws, axis=0)[0] == pytest.approx(1 / 6, rel=0.03)
        np.testing.assert_allclose(np.mean(draws, axis=0)[1:], MEAN4, atol=0.01)


@pytest.mark.parametrize("square", [-50.0, 0.0, 30.0, 100.0, 1e6])
@pytest.mark.parametrize("total", [np.zeros(3), [-9.0, 4.0, 500.0], [33.0, 33.0, 33.0]], ids=str)
@pytest.mark.parametrize("n_rows", [np.ones(100), np.full(100, 20), [7.0], [0.0]], ids=len)
def test_any_noisy_sums_give_a_valid_prior(square, total, n_rows):
    for prior in (DirichletPrior(), DirichletPrior(mean=[0.2, 0.2, 0.6])):
        fitted = prior.fit_sums(np.asarray(total), square, n_rows, noise_std=5.0)
        assert fitted.is_known
        assert 0 < fitted.concentration < math.inf
        assert np.isfinite(fitted.log_frequencies([[5, 0, 0]])).all()


def test_clients_are_never_more_alike_than_the_noise_can_tell():
    n_rows, total = np.full(100, 20), np.array([50.0, 50.0])
    exact = DirichletPrior().fit_sums(total, 50.0, n_rows)
    assert exact.concentration == pytest.approx(1e6)
    own = (0.5 - 1 / 20) / (1 - 1 / 20)
    noisy = DirichletPrior().fit_sums(total, 50.0, n_rows, noise_std=3.0)
    assert noisy.concentration == pytest.approx((1 - own) / 0.03)


def test_labels_lie_no_lower_than_the_noise():
    fitted = DirichletPrior().fit_sums(np.array([90.0, 20.0, -10.0]), 60.0, np.full(100, 20), 3.0)
    assert fitted.mean.min() >= 0.03 / 1.03
    np.testing.assert_allclose(fitted.mean, np.array([0.85, 0.15, 0.03]) / 1.03)
