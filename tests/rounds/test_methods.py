"""Methods that are not PPSGD on the same loop: FedAvg, APFL, and a message of two parts."""

import joblib
import numpy as np
import pytest

from pfl_sklearn._rounds import rows as rounds_rows
from pfl_sklearn._rounds.loop import (
    LastPhase,
    Method,
    Plan,
    Sampling,
    Update,
    run_rounds,
    start,
)
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn._rounds.rows import ClientRows, Reshuffled
from pfl_sklearn.privacy import ClippedSum
from tests.helpers.rounds_methods import apfl, distilled, fedavg

SIZES, D, STEP = np.array([3, 9, 4, 9, 6, 3, 12, 5]), 3, 0.1
N, RATE, SEED = len(SIZES), 0.6, (1, 2)
METHODS = {
    "fedavg": lambda: fedavg(N, D, STEP, RATE * N),
    "fine-tuned": lambda: fedavg(N, D, STEP, RATE * N, fine_tuning=3),
    "apfl": lambda: apfl(N, D, STEP, RATE * N, 0.3),
    "distilled": lambda: distilled(N, D, STEP, RATE * N),
}
every_method = pytest.mark.parametrize("name", METHODS)


def table():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(SIZES.sum(), D))
    y = X @ [1.0, -1.0, 0.5] + np.repeat(rng.normal(size=N), SIZES) * X[:, 0]
    return ClientRows(X, y, np.cumsum([0, *SIZES]), np.arange(N), Reshuffled(4, 3))


def run(name, n_rounds=12, mechanism=None, state=None, rate=RATE, **plan):
    rows, method = table(), METHODS[name]()
    release = JointSum(mechanism or ClippedSum(None), method.messages)
    state = start(method, rows, release) if state is None else state
    return run_rounds(method, rows, state, Plan(n_rounds, Sampling(rate), SEED, **plan), release)


def assert_same(one, other):
    for group in ("server", "clients", "schedule", "own"):
        first, second = getattr(one, group), getattr(other, group)
        assert first.keys() == second.keys()
        for key in first:
            np.testing.assert_array_equal(first[key], second[key])
    np.testing.assert_equal(one.history, other.history)


def batches_of_each_round(n_rounds):
    """Who took part, and each client's rows (3, b), drawn from the same streams once more."""
    rows = table()
    state = rows.schedule.start(rows, N)
    generators = Plan(n_rounds, Sampling(RATE), SEED).generators(0)
    for t in range(n_rounds):
        rng = next(generators)
        sampled = Sampling(RATE).draw(rng, N)
        found = {}
        for members, numbers in rows.schedule.draw(rows, sampled, state, t, rng):
            found |= dict(zip(sampled[members].tolist(), numbers, strict=True))
        yield sorted(found.items())


def slope(weights, X, y):
    return X.T @ (X @ weights - y) / len(y)


def test_fedavg_client_by_client():
    rows, weights = table(), np.zeros(D)
    for batches in batches_of_each_round(12):
        changes = []
        for _, numbers in batches:
            own = weights.copy()
            for batch in numbers:
                own -= STEP * slope(own, rows.X[batch], rows.y[batch])
            changes.append(own - weights)
        weights = weights + np.sum(changes, axis=0) / (RATE * N)
    np.testing.assert_allclose(run("fedavg").server["global"], weights, rtol=1e-12)


def test_apfl_client_by_client():
    rows, weights = table(), np.zeros(D)
    local, mixing = np.zeros((N, D)), np.full(N, 0.5)
    for batches in batches_of_each_round(12):
        changes = []
        for i, numbers in batches:
            shared = weights.copy()
            for batch in numbers:
                X, y, a = rows.X[batch], rows.y[batch], mixing[i]
                change = slope(a * local[i] + (1 - a) * shared, X, y)
                mixing[i] = np.clip(a - 0.3 * (local[i] - shared) @ change, 0, 1)
                local[i] -= STEP * a * change
                shared -= STEP * slope(shared, X, y)
            changes.append(shared - weights)
        weights = weights + np.sum(changes, axis=0) / (RATE * N)
    state = run("apfl")
    np.testing.assert_allclose(state.server["global"], weights, rtol=1e-12)
    np.testing.assert_allclose(state.clients["local"], local, rtol=1e-12)
    np.testing.assert_allclose(state.clients["mixing"], mixing, rtol=1e-12)


def test_two_parts_client_by_client():
    """Clipped together to 0.2."""
    rows, weights, spread = table(), np.zeros(D), 2.0
    personal, clipped = np.zeros((N, D)), []
    for batches in batches_of_each_round(12):
        changes, n_clipped = [], 0
        for i, numbers in batches:
            shared, own = weights.copy(), spread
            for batch in numbers:
                gap = personal[i] - shared
                personal[i] -= STEP * (slope(personal[i], rows.X[batch], rows.y[batch]) + gap / own)
                shared += STEP * gap / own
                own = max(own - STEP * (0.5 / own - 0.5 * gap @ gap / own**2), 0.5)
            change = np.append(shared - weights, own - spread)
            norm = np.linalg.norm(change)
            n_clipped += norm > 0.2
            changes.append(change * min(1, 0.2 / norm))
        total = np.sum(changes, axis=0) / (RATE * N) if changes else np.zeros(D + 1)
        weights, spread = weights + total[:D], spread + total[D]
        clipped.append(n_clipped / len(batches) if batches else 0.0)
    state = run("distilled", mechanism=ClippedSum(0.2))
    np.testing.assert_allclose(state.server["global"], weights, rtol=1e-12)
    np.testing.assert_allclose(state.server["spread"], spread, rtol=1e-12)
    np.testing.assert_allclose(state.clients["personal"], personal, rtol=1e-12)
    np.testing.assert_allclose(state.history["clipped"], clipped)
    assert 0 < np.mean(clipped) < 1


NOISY = ClippedSum(0.3, 0.5, 0.5)


@every_method
def test_blocks_and_workers_change_no_bit(monkeypatch, name):
    whole = run(name, mechanism=NOISY)
    with joblib.parallel_config("threading"):
        assert_same(run(name, mechanism=NOISY, n_jobs=2), whole)
    monkeypatch.setattr(rounds_rows, "NUMBERS_OF_A_BLOCK", 1)
    assert_same(run(name, mechanism=NOISY), whole)


@every_method
@pytest.mark.parametrize("interrupted", [1, 7])
def test_interrupted_rounds_are_the_same_bits(name, interrupted):
    """A last phase that ran in between leaves no trace in later rounds."""
    whole = run(name, mechanism=NOISY)
    first = run(name, n_rounds=interrupted, mechanism=NOISY)
    assert_same(run(name, mechanism=NOISY, state=first.copy()), whole)


@every_method
def test_rounds_without_anybody(name):
    state = run(name, n_rounds=40, rate=0.02, mechanism=NOISY)
    assert 0 in state.history["n_clients"]
    assert all(np.isfinite(values).all() for values in state.server.values())


def test_the_last_phase_is_each_clients_own():
    """Three steps from the global model, on rows that nobody else decides on."""
    state, rows = run("fine-tuned"), table()
    assert state.own.keys() == {"tuned"}
    np.testing.assert_array_equal(state.server["global"], run("fedavg").server["global"])
    rng = Plan(12, Sampling(RATE), SEED).late_generator(12, 1 << 101)
    rows = rows._replace(schedule=Reshuffled(4, 3))
    schedule = rows.schedule.start(rows, N)
    for members, numbers in rows.schedule.draw(rows, np.arange(N), schedule, 12, rng):
        for i, batches in zip(members, numbers, strict=True):
            own = state.server["global"].copy()
            for batch in batches:
                own -= STEP * slope(own, rows.X[batch], rows.y[batch])
            np.testing.assert_allclose(state.own["tuned"][i], own, rtol=1e-12)


def test_no_last_phase_leaves_nothing():
    assert run("fedavg").own == {}


def test_a_last_phase_that_starts_from_the_clients_arrays_leaves_them_alone():
    """Its first arrays may be the clients' own, or a broadcast one."""
    plain, rows = METHODS["apfl"](), table()

    def first(server, clients):
        shared = np.broadcast_to(server["global"], (N, D))
        return {"local": clients["local"], "shared": shared}

    def update(server, t, batch, clients, own):
        assert t in (4, 9)
        more = {name: values + 1 for name, values in own.items()}
        return Update({}, more, np.zeros(len(batch.X)))

    method = plain._replace(last_phase=LastPhase(first, update, Reshuffled(4, 1)))
    release, states = JointSum(ClippedSum(None), plain.messages), []
    for each in (plain, method):
        state = start(each, rows, release)
        for n_rounds in (4, 9):
            plan = Plan(n_rounds, Sampling(RATE), SEED)
            state = run_rounds(each, rows, state, plan, release, lambda state: bool(state.own))
            assert state.round == n_rounds  # what was left is not seen in the rounds that go on
        states.append(state)
    for name in ("local", "mixing"):
        np.testing.assert_array_equal(states[1].clients[name], states[0].clients[name])
    np.testing.assert_array_equal(states[1].own["local"], states[0].clients["local"] + 1)
    np.testing.assert_array_equal(states[1].own["shared"][3], states[0].server["global"] + 1)


@pytest.mark.parametrize("earlier", [None, "tuned"])
def test_a_last_phase_after_another_one_knows_what_that_one_left(earlier):
    """Whatever an earlier run had in its last phase, which may have been another one."""
    plain, rows = METHODS["fedavg"](), table()

    def count(server, t, batch, clients, own):
        sizes = np.full(len(batch.X), float(batch.X.shape[2]))
        return Update({}, {"size": sizes}, np.zeros(len(batch.X)))

    def compare(server, clients):
        return {"share": clients["size"] / clients["size"].sum()}

    def halve(server, t, batch, clients, own):
        assert own.keys() == {"share"}
        return Update({}, {"share": own["share"] / 2}, np.zeros(len(batch.X)))

    first = LastPhase(lambda *_: {"size": np.zeros(N)}, count, Reshuffled(None, 1))
    second = LastPhase(compare, halve, Reshuffled(4, 1), after=first)
    release = JointSum(ClippedSum(None), plain.messages)
    state = start(plain, rows, release)
    if earlier:
        state.own = {"tuned": np.ones((N, D))}
    method = plain._replace(last_phase=second)
    state = run_rounds(method, rows, state, Plan(2, Sampling(RATE), SEED), release)
    sizes = np.diff(rows.offsets)
    assert state.own.keys() == {"size", "share"}
    np.testing.assert_array_equal(state.own["size"], sizes)
    np.testing.assert_allclose(state.own["share"], sizes / sizes.sum() / 2)


@every_method
def test_a_view_of_the_state_cannot_be_written(name):
    """Also where the server's state holds a number."""
    state = run(name).view()
    for group in (state.server, state.clients, state.schedule, state.own):
        for values in group.values():
            assert not values.flags.writeable


def test_a_client_cannot_write_the_servers_state():
    method, rows = METHODS["fedavg"](), table()

    def cheat(server, t, batch, clients):
        server["global"] += batch.y.sum()

    release = JointSum(ClippedSum(None), method.messages)
    plan = Plan(1, Sampling(1.0), SEED)
    with pytest.raises(ValueError, match="read-only"):
        cheating = method._replace(client_update=cheat)
        run_rounds(cheating, rows, start(method, rows, release), plan, release)


@pytest.mark.slow
def test_a_method_without_messages():
    """Every client by itself."""

    def update(server, t, batch, clients):
        return Update({}, {"seen": clients["seen"] + 1}, np.zeros(len(batch.X)))

    method = Method(lambda: ({}, {"seen": np.zeros(N)}), update, lambda server, *_: server, {})
    rows, release = table(), JointSum(ClippedSum(1.0, 1.0), {})
    state = start(method, rows, release)
    run_rounds(method, rows, state, Plan(5, Sampling(1.0), SEED, n_jobs=2), release)
    np.testing.assert_array_equal(state.clients["seen"], 5)


@pytest.mark.parametrize("protected", [False, True])
def test_a_client_whose_last_phase_overflows(protected):
    method, rows = METHODS["fine-tuned"](), table()
    rows.X[rows.offsets[2] : rows.offsets[3]] = 1e200
    release = JointSum(ClippedSum(1.0), method.messages)
    state, plan = start(method, rows, release), Plan(3, Sampling(RATE), SEED)
    with np.errstate(all="ignore"):
        run_rounds(method, rows, state, plan, release, protected=protected)
    if protected:
        np.testing.assert_array_equal(state.own["tuned"][2], state.server["global"])
        assert np.isfinite(state.own["tuned"]).all()
    else:
        assert state.round < 3 or not np.isfinite(state.own["tuned"][2]).all()
