"""Methods that are not PPSGD on the same loop: FedAvg, APFL, and a message of two parts."""

import copy

import joblib
import numpy as np
import pytest

from pfl_sklearn._rounds import rows as rounds_rows
from pfl_sklearn._rounds.loop import LastPhase, Method, Sampling, Update
from pfl_sklearn._rounds.rows import ClientRows, Reshuffled
from pfl_sklearn.privacy import ClippedSum
from tests.helpers.round_loop import assert_same_state, generators_of, plan_of, run_method
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


def run(name, n_rounds=12, mechanism=None, state=None, rate=RATE, n_jobs=None):
    plan = plan_of(n_rounds, rate, SEED, n_jobs)
    return run_method(METHODS[name](), table(), plan, mechanism, state)


def batches_of_each_round(n_rounds):
    """Who took part, and each client's rows (3, b), drawn from the same streams once more."""
    rows = table()
    state = rows.schedule.start(rows, N)
    generators = generators_of(plan_of(n_rounds, RATE, SEED))
    for t in range(n_rounds):
        rng = next(generators)
        sampled = Sampling(RATE).draw(rng, N)
        found = {}
        for members, numbers in rows.schedule.draw(rows, sampled, state, t, rng):
            found |= dict(zip(sampled[members].tolist(), numbers, strict=True))
        yield sorted(found.items())


def slope(weights, X, y):
    return X.T @ (X @ weights - y) / len(y)


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


@pytest.mark.slow_but_first
@every_method
def test_blocks_and_workers_change_no_bit(monkeypatch, name):
    whole = run(name, mechanism=NOISY)
    with joblib.parallel_config("threading"):
        assert_same_state(run(name, mechanism=NOISY, n_jobs=2), whole)
    monkeypatch.setattr(rounds_rows, "NUMBERS_OF_A_BLOCK", 1)
    assert_same_state(run(name, mechanism=NOISY), whole)


@every_method
def test_interrupted_rounds_are_the_same_bits(name):
    """A last phase that ran in between leaves no trace in later rounds."""
    whole = run(name, mechanism=NOISY)
    first = run(name, n_rounds=7, mechanism=NOISY)
    before = copy.deepcopy(first)
    assert_same_state(run(name, mechanism=NOISY, state=first.copy()), whole)
    assert_same_state(first, before)  # the copy shared nothing


def test_the_last_phase_is_each_clients_own():
    """Three steps from the global model, on rows that nobody else decides on."""
    state, rows = run("fine-tuned"), table()
    assert state.phase_arrays.keys() == {"tuned"}
    np.testing.assert_array_equal(state.server["global"], run("fedavg").server["global"])
    rng = plan_of(12, RATE, SEED).late_generator(12, 1 << 101)
    rows = rows._replace(schedule=Reshuffled(4, 3))
    schedule = rows.schedule.start(rows, N)
    for members, numbers in rows.schedule.draw(rows, np.arange(N), schedule, 12, rng):
        for i, batches in zip(members, numbers, strict=True):
            own = state.server["global"].copy()
            for batch in batches:
                own -= STEP * slope(own, rows.X[batch], rows.y[batch])
            np.testing.assert_allclose(state.phase_arrays["tuned"][i], own, rtol=1e-12)


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
    states = []
    for each in (plain, method):
        state = None
        for n_rounds in (4, 9):
            plan = plan_of(n_rounds, RATE, SEED)
            state = run_method(
                each, rows, plan, state=state, observe=lambda seen: bool(seen.phase_arrays)
            )
            assert state.round == n_rounds  # what was left is not seen in the rounds that go on
        states.append(state)
    for name in ("local", "mixing"):
        np.testing.assert_array_equal(states[1].clients[name], states[0].clients[name])
    np.testing.assert_array_equal(states[1].phase_arrays["local"], states[0].clients["local"] + 1)
    np.testing.assert_array_equal(
        states[1].phase_arrays["shared"][3], states[0].server["global"] + 1
    )


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
    state = run_method(plain, rows, plan_of(0, RATE, SEED))
    if earlier:
        state.phase_arrays = {"tuned": np.ones((N, D))}
    method = plain._replace(last_phase=second)
    state = run_method(method, rows, plan_of(2, RATE, SEED), state=state)
    sizes = np.diff(rows.offsets)
    assert state.phase_arrays.keys() == {"size", "share"}
    np.testing.assert_array_equal(state.phase_arrays["size"], sizes)
    np.testing.assert_allclose(state.phase_arrays["share"], sizes / sizes.sum() / 2)


@every_method
def test_a_view_of_the_state_cannot_be_written(name):
    """Also where the server's state holds a number."""
    state = run(name).view()
    for group in (state.server, state.clients, state.schedule, state.phase_arrays):
        for values in group.values():
            assert not values.flags.writeable


def test_a_client_cannot_write_the_servers_state():
    method, rows = METHODS["fedavg"](), table()

    def cheat(server, t, batch, clients):
        server["global"] += batch.y.sum()

    with pytest.raises(ValueError, match="read-only"):
        run_method(method._replace(client_update=cheat), rows, plan_of(1))


@pytest.mark.slow
def test_a_method_without_messages():
    """Every client by itself."""

    def update(server, t, batch, clients):
        return Update({}, {"seen": clients["seen"] + 1}, np.zeros(len(batch.X)))

    method = Method(lambda: ({}, {"seen": np.zeros(N)}), update, lambda server, *_: server, {})
    state = run_method(method, table(), plan_of(5, n_jobs=2), ClippedSum(1.0, 1.0))
    np.testing.assert_array_equal(state.clients["seen"], 5)


@pytest.mark.parametrize("protected", [False, True])
def test_a_client_whose_last_phase_overflows(protected):
    method, rows = METHODS["fine-tuned"](), table()
    rows.X[rows.offsets[2] : rows.offsets[3]] = 1e200
    plan = plan_of(3, RATE, SEED)
    with np.errstate(all="ignore"):
        state = run_method(method, rows, plan, ClippedSum(1.0), protected=protected)
    if protected:
        np.testing.assert_array_equal(state.phase_arrays["tuned"][2], state.server["global"])
        assert np.isfinite(state.phase_arrays["tuned"]).all()
    else:
        assert state.round < 3 or not np.isfinite(state.phase_arrays["tuned"][2]).all()
