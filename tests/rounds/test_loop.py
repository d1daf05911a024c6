"""The loop over rounds: sampling, streams, rows in turn, blocks, and what is recorded."""

import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from pfl_sklearn import PPSGDRegressor
from pfl_sklearn._rounds.checkpoint import Checkpoint
from pfl_sklearn._rounds.loop import Method, Sampling, Update
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn._rounds.rows import ClientRows, InTurn
from pfl_sklearn._rounds.step_sizes import step_sizes
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES, ppsgd
from pfl_sklearn.privacy import ClippedSum
from tests.helpers.callbacks import StopAfter
from tests.helpers.round_loop import generators_of, plan_of, run_method

SIZES = np.array([1, 7, 2, 7, 5, 1, 12, 3])


def table(sizes=SIZES, d=3, seed=0):
    """Rows (n, d), targets (n, 1), offsets."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(sizes.sum(), d))
    return X, X @ np.ones((d, 1)) + rng.normal(size=(len(X), 1)), np.cumsum([0, *sizes])


def client_rows(batch_size=3, sizes=SIZES, d=3):
    X, y, offsets = table(sizes, d)
    schedule = InTurn(np.minimum(sizes, batch_size))
    return ClientRows(X, y, offsets, np.arange(len(sizes)), schedule)


def least_squares(n_clients, d=3, average=False, rate=1.0):
    steps = step_sizes(0.2, 0.05, rate * n_clients)
    return ppsgd(n_clients, (d, 1), LOSSES["squared_error"], steps, rate * n_clients, None, average)


def run(rows, plan, mechanism=None, observe=None, **options):
    method = least_squares(rows.n_clients, rows.X.shape[1], rate=plan.sampling.rate, **options)
    return run_method(method, rows, plan, mechanism, observe=observe)


def membership(sampling, n_clients, n_draws, seed=0):
    """Who takes part (n_draws, n_clients)."""
    rng, found = np.random.default_rng(seed), np.zeros((n_draws, n_clients), dtype=bool)
    for row in found:
        drawn = sampling.draw(rng, n_clients)
        assert (np.diff(drawn) > 0).all()
        row[drawn] = True
    return found


def agreement(found, probability):
    """P-value of the counts (k,) of events with this probability in n draws, by chi-square."""
    n = len(found)
    expected = n * probability
    statistic = np.sum((found.sum(axis=0) - expected) ** 2) / (expected * (1 - probability))
    return stats.chi2.sf(statistic, found.shape[1])


def test_poisson_sampling_takes_every_client_by_itself():
    n, q, draws = 12, 0.3, 2_000
    found = membership(Sampling(q), n, draws)
    assert 1e-4 < agreement(found, q) < 1 - 1e-4
    sizes = np.bincount(found.sum(axis=1), minlength=n + 1)
    expected = draws * stats.binom.pmf(np.arange(n + 1), n, q)
    keep = expected > 5
    tail = np.array([sizes[~keep].sum(), expected[~keep].sum()])
    statistic = np.sum((sizes[keep] - expected[keep]) ** 2 / expected[keep])
    statistic += (tail[0] - tail[1]) ** 2 / tail[1]
    assert stats.chi2.sf(statistic, keep.sum()) > 1e-4
    covariances = np.cov(found.T)[np.triu_indices(n, 1)]
    assert np.abs(covariances).max() < 5 * q * (1 - q) / np.sqrt(draws)


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(0.5, 6), Sampling(1.0)])
def test_sampled_clients_are_dropped_by_chance(sampling):
    """Each by itself, by draws after those of the sample, which stays as it is without them."""
    n, dropped, draws = 12, 0.25, 2_000
    found = membership(sampling._replace(dropped=dropped), n, draws)
    assert 1e-4 < agreement(found, 0.75 * sampling.rate) < 1 - 1e-4
    share = found.sum() / membership(sampling, n, draws).sum()
    assert share == pytest.approx(0.75, abs=6 * np.sqrt(2 / (draws * n * sampling.rate)))
    covariances = np.cov(found.T)[np.triu_indices(n, 1)]
    # Members of a sample of a fixed number exclude one another, and so do fewer those that stay.
    exclusion = 0 if sampling.n_fixed is None else 0.75**2 * 0.25 / (n - 1)
    assert np.abs(covariances + exclusion).max() < 6 * 0.25 / np.sqrt(draws)
    for seed in range(20):
        before, after = (np.random.default_rng(seed) for _ in range(2))
        sampled = sampling.draw(before, n)
        stay = sampling._replace(dropped=dropped).draw(after, n)
        np.testing.assert_array_equal(stay, sampled[before.random(len(sampled)) >= dropped])


def test_fixed_sampling_takes_every_set_alike():
    n, k, draws = 6, 3, 2_000
    found = membership(Sampling(k / n, k), n, draws)
    assert (found.sum(axis=1) == k).all()
    sets, counts = np.unique(found, axis=0, return_counts=True)
    assert len(sets) == 20
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("sampling", [Sampling(1e-6), Sampling(1e-6, 10)])
def test_a_draw_costs_what_the_sampled_clients_cost(sampling):
    rng = np.random.default_rng(0)
    tracemalloc.start()
    drawn = sampling.draw(rng, 10_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(drawn) < 40
    assert peak < 100_000


def test_everybody_takes_part_without_a_draw():
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(Sampling(1.0).draw(rng, 5), np.arange(5))
    assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("first", [0, 5])
def test_streams_of_rounds_are_jumps(first):
    generators = generators_of(plan_of(10, 1.0, (7, 1)), first)
    for t in range(first, first + 4):
        expected = np.random.Generator(np.random.PCG64((7, 1)).jumped(t)).normal(size=5)
        rng = next(generators)
        np.testing.assert_array_equal(rng.normal(size=5), expected)
        rng.integers(0, 100, size=t, dtype=np.uint32)  # leaves half a word behind


def test_without_entropy_every_run_differs():
    draws = [next(generators_of(plan_of(1, seed=None))).random() for _ in range(3)]
    assert len(set(draws)) == 3


def test_rows_are_taken_in_turn():
    """The first column is the number of the row: every row comes up once before any comes twice."""
    rows, seen = client_rows(batch_size=3), {}
    rows.X[:, 0] = np.arange(len(rows.X))

    def init():
        return {"coef": np.zeros((3, 1))}, {"me": np.arange(8.0)[:, None]}

    def client_update(server, t, batch, clients):
        me, n = clients["me"], len(batch.X)
        for client, numbers in zip(me[:, 0].astype(int).tolist(), batch.X[:, :, 0], strict=True):
            seen.setdefault(client, []).append(numbers.astype(int).tolist())
        return Update({"coef": np.zeros((n, 3, 1))}, clients, np.zeros(n))

    method = Method(init, client_update, lambda server, total, t: server, {"coef": (3, 1)})
    state = run_method(method, rows, plan_of(40, 0.5, (3,)))
    for client, batches in seen.items():
        taken, size = np.concatenate(batches).tolist(), SIZES[client]
        own = np.arange(rows.offsets[client], rows.offsets[client + 1])
        assert {len(batch) for batch in batches} == {min(size, 3)}
        assert state.schedule["used"][client] == len(taken)
        for start_of_pass in range(0, len(taken) - size + 1, size):
            np.testing.assert_array_equal(taken[start_of_pass : start_of_pass + size], own)


class Spy(NamedTuple):
    """Release that keeps what it was given."""

    inner: ClippedSum
    seen: list

    def start(self):
        return self.inner.start()

    def release(self, messages, bound, n_expected, rng):
        self.seen.append(messages.copy())
        return self.inner.release(messages, bound, n_expected, rng)


NOISY = ClippedSum(1.0, 0.5, 0.5)


def test_messages_come_in_the_order_of_clients():
    rows, spy = client_rows(batch_size=100), Spy(ClippedSum(1e6), [])
    state = run(rows, plan_of(1, 1.0, (0,)), spy)
    X, y, offsets = table()
    for i, message in enumerate(spy.seen[0]):
        own = slice(offsets[i], offsets[i + 1])
        np.testing.assert_allclose(message, -X[own].T @ y[own] / SIZES[i], rtol=1e-12)
    expected = [np.mean(y[offsets[i] : offsets[i + 1]] ** 2) / 2 for i in range(8)]
    assert state.history["loss"] == pytest.approx([np.mean(expected)])


def test_bytes_are_counted_for_every_message():
    history = run(client_rows(d=3), plan_of(4, 0.5)).history
    assert len(set(history["n_clients"])) > 1
    assert history["bytes_sent"] == [24 * n for n in history["n_clients"]]


def test_an_empty_round_is_noise():
    spy = Spy(NOISY, [])
    states = []
    run(client_rows(), plan_of(60, 0.05, (0,)), spy, lambda s: states.append(s.copy()))
    taken = np.array(states[-1].history["n_clients"])
    assert 10 < (taken == 0).sum() < 60
    assert [len(messages) for messages in spy.seen] == taken.tolist()
    empty = np.flatnonzero(taken == 0)
    for t in empty[empty > 0]:
        assert (states[t].server["coef"] != states[t - 1].server["coef"]).all()
        np.testing.assert_array_equal(states[t].clients["local"], states[t - 1].clients["local"])
    assert np.isnan(np.array(states[-1].history["loss"])[empty]).all()
    assert np.isfinite(np.array(states[-1].history["loss"])[taken > 0]).all()


def test_releases_get_the_expected_number_of_clients(monkeypatch):
    """A constant. How many take part is a secret that moving bounds would tell."""
    seen, release = [], JointSum.release

    def spy(self, messages, bound, n_expected, rng):
        seen.append(n_expected)
        return release(self, messages, bound, n_expected, rng)

    monkeypatch.setattr(JointSum, "release", spy)
    state = run(client_rows(), plan_of(20, 0.4, (0,)))
    assert seen == [0.4 * len(SIZES)] * 20
    assert len(set(state.history["n_clients"])) > 2


def test_noise_of_a_round_does_not_depend_on_the_clients():
    """With nobody's message different from 0 the noise is left, the same for any rows."""
    plan = plan_of(1, 1.0, (4,))
    totals = []
    for scale in (0.0, 1e-30):
        rows = client_rows()
        rows.y[:] *= scale
        totals.append(run(rows, plan, ClippedSum(1.0, 2.0)).server["coef"])
    np.testing.assert_array_equal(*totals)
    noise = np.random.Generator(np.random.PCG64((4,))).standard_normal((3, 1)) * 2.0
    steps = step_sizes(0.2, 0.05, 8)
    np.testing.assert_allclose(totals[0], -steps.population / 8 * noise, rtol=1e-5)


@pytest.mark.parametrize("last", [2, 3])
def test_a_checkpoint_is_written_after_callbacks_that_may_end_the_rounds(
    last, tmp_path, monkeypatch
):
    X, y, _ = table()
    stop = StopAfter(last)
    monkeypatch.setattr(Checkpoint, "observe", lambda self, state: stop.calls.append("checkpoint"))
    model = PPSGDRegressor(n_rounds=3, checkpoint=tmp_path / "run").set_callbacks(stop)
    model.fit(X, y[:, 0], groups=np.repeat(np.arange(len(SIZES)), SIZES))
    assert model.n_rounds_ == last
    calls = [call for call in stop.calls if call in ("end round", "checkpoint")]
    assert calls == ["end round", "checkpoint"] * last
