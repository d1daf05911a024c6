"""Rounds of nets that go on until the loss of held-out rows is flat."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from joblib import parallel_config
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNetRegressor
from skorch.callbacks import LRScheduler
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from pfl_sklearn._rounds.rows import CatchingUp
from pfl_sklearn._rounds.stopping import split_rows
from pfl_sklearn.linear_model import DivergenceError
from pfl_sklearn.neural_network import (
    MLP,
    AdaPeDClassifier,
    FedAvgClassifier,
    FedAvgRegressor,
    LocalNetClassifier,
    LocalNetRegressor,
    _adaped,
    _training,
)
from pfl_sklearn.neural_network._engine import _held_out
from pfl_sklearn.priors import DirichletPrior
from tests.helpers.callbacks import StopAfter
from tests.helpers.fitted_rounds import parts_of, state_of
from tests.helpers.interruption import interrupt
from tests.helpers.net_fits import fit
from tests.helpers.nets import N_CLASSES, N_INPUTS, SIZES, Convolutions, Normed, recipe, table
from tests.helpers.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
FLAT = {"n_rounds": None, "tol": 0.02, "max_rounds": 40, "local_steps": 3, "random_state": 3}
PRIOR = DirichletPrior(np.full(N_CLASSES, 1 / N_CLASSES), 3.0)
MODELS = {
    "fedavg": lambda: FedAvgClassifier(recipe(), client_fraction=0.6, **FLAT),
    "tuned": lambda: FedAvgClassifier(recipe(), fine_tune_steps=4, label_prior=PRIOR, **FLAT),
    "head": lambda: FedAvgClassifier(recipe(), head=1.0, label_prior=PRIOR, **FLAT),
    "local": lambda: LocalNetClassifier(recipe(), label_prior=PRIOR, client_fraction=0.6, **FLAT),
    "adaped": lambda: AdaPeDClassifier(
        recipe(), label_prior=PRIOR, personal_start="global", personal_start_round=6, **FLAT
    ),
}
every = pytest.mark.parametrize("name", ["fedavg", "local", *slow(["tuned", "adaped"])])


def fitted(model, data):
    X, y, groups = data
    return clone(model).fit(X, y, groups=groups)


def noisy():
    """A table in which half of the labels are wrong, so that nets soon learn too much."""
    X, y, groups = table()
    rng = np.random.default_rng(1)
    return X, np.where(rng.random(len(y)) < 0.5, rng.integers(0, N_CLASSES, len(y)), y), groups


def parts(sizes, fraction=0.2, seed=3):
    """Numbers of the rows to train on and of those held out, of a table in client order."""
    codes = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng((seed, 0, 0))
    return split_rows(codes, len(sizes), fraction, rng)


@pytest.fixture
def checks(monkeypatch):
    """States that the rule saw, with their losses; the first check has its number of rounds."""
    seen, original = [], _held_out.flat_rule

    def watched(*args, **given):
        rule = original(*args, **given)

        def losses(state):
            found = rule.losses(state)
            seen.append((state.copy(), found[1]))
            return found

        return replace(rule, losses=losses)

    monkeypatch.setattr(_held_out, "flat_rule", watched)
    return seen


@every
def test_the_models_are_those_of_the_lowest_loss(name, checks, monkeypatch):
    monkeypatch.setattr(_training, "_FEWEST_ROUNDS", 3)
    model = fitted(MODELS[name]().set_params(local_steps=10, max_rounds=18), noisy())
    losses = [loss for _, loss in checks]
    best, _ = checks[int(np.argmin(losses))]
    assert 0 < model.n_rounds_ == best.round < checks[-1][0].round
    assert len(model.history_["loss"]) == best.round
    np.testing.assert_array_equal(model.population_parameters_, best.server["global"])
    personal = state_of(model).clients.get("personal")
    np.testing.assert_equal(personal, best.clients.get("personal"))


@every
def test_the_loss_is_that_of_what_clients_predict_with(name, checks):
    """By predictions of a model that stopped there; the last phase is not judged."""
    X, y, groups = table()
    model = MODELS[name]().set_params(max_rounds=9)
    whole = fitted(model, (X, y, groups))
    kept, apart = parts(SIZES)
    weights = 1 / np.bincount(groups[kept])[groups[apart]]
    for state, loss in checks:
        engines = whole._engines
        nets = model._nets(state.server, state.clients)
        each = np.broadcast_to(nets, (len(SIZES), nets.shape[-1]))
        offsets = state.clients.get("offset")
        found = np.array(
            [
                engines.client.outputs(
                    each[groups[i]],
                    X[i : i + 1],
                    None if offsets is None else offsets[groups[i]][None],
                )[0, y[i]]
                for i in apart
            ]
        )
        assert loss == pytest.approx(weights @ -np.log(found) / weights.sum(), rel=1e-9)


@every
def test_held_out_rows_are_not_trained_on(name, checks):
    """Whatever they and their labels are, rounds up to the same number are the same."""
    X, y, groups = table()
    _, apart = parts(SIZES)
    assert 0.15 * len(y) < len(apart) <= 0.2 * len(y)
    fits = []
    for scale in (1.0, -3.0):
        checks.clear()
        rows, labels = X.copy(), y.copy()
        rows[apart] *= scale
        if scale < 0:
            labels[apart] = (y[apart] + 1) % N_CLASSES
        fitted(MODELS[name]().set_params(max_rounds=8), (rows, labels, groups))
        fits.append([(state, loss) for state, loss in checks if state.round == 7])
    ((one, loss),), ((other, another),) = fits
    np.testing.assert_equal(one.server, other.server)
    np.testing.assert_equal(one.clients, other.clients)
    assert loss != another


def test_without_rows_held_out_the_training_loss_is_judged(checks):
    X, y, groups = table()
    fitted(MODELS["fedavg"]().set_params(validation_fraction=0, max_rounds=2), (X, y, groups))
    alone = np.arange(len(SIZES))  # clients of one row have none to spare
    fitted(MODELS["local"]().set_params(max_rounds=2), (X[alone], y[alone], alone))
    assert all(np.isfinite(loss) for _, loss in checks)
    assert len(checks[0][0].schedule["order"]) == len(y)


@pytest.mark.parametrize("name", ["tuned", *slow(["head"])])
def test_the_last_phase_has_all_rows(name):
    """It follows held-out rows, and labels as all rows have them."""
    X, y, groups = table()
    _, apart = parts(SIZES)
    model, fits = MODELS[name](), []
    for change in (None, "rows", "labels"):
        rows, labels = X.copy(), y.copy()
        if change == "rows":
            rows[apart] *= -3
        if change == "labels":
            labels[apart] = (y[apart] + 1) % N_CLASSES
        stopped = clone(model).set_callbacks(StopAfter(3))
        fits.append(stopped.fit(rows, labels, groups=groups))
    whole, *others = fits
    for other in others:
        np.testing.assert_array_equal(other.population_parameters_, whole.population_parameters_)
        assert np.any(other.parameters_ != whole.parameters_, axis=1).sum() > 4
    assert whole.n_samples_per_client_.tolist() == SIZES.tolist()
    counts = np.zeros((len(SIZES), N_CLASSES))
    np.add.at(counts, (groups, y), 1)
    np.testing.assert_array_equal(whole._label_counts, counts)


def test_the_last_phase_takes_the_learning_rate_after_the_rounds():
    """Not that after the last round that there might have been."""
    net = recipe(callbacks=[LRScheduler(ExponentialLR, gamma=0.5)])
    model = FedAvgClassifier(net, fine_tune_steps=3, **{**FLAT, "n_rounds": 6})
    stopped = fit(clone(model).set_callbacks(StopAfter(3)))
    whole = fit(model.set_params(n_rounds=3))
    np.testing.assert_array_equal(stopped.parameters_, whole.parameters_)


@pytest.mark.parametrize("net", [Normed, *slow([Convolutions])])
@pytest.mark.slow
def test_other_modules_are_judged_in_evaluation_mode(net, checks):
    shape = (1, 8, 8) if net is Convolutions else (N_INPUTS,)
    X, y, groups = table(shape)
    model = LocalNetClassifier(recipe(net), **{**FLAT, "max_rounds": 6})
    whole = fitted(model, (X, y, groups))
    kept, apart = parts(SIZES)
    weights = 1 / np.bincount(groups[kept])[groups[apart]]
    state, loss = checks[-1]
    own = state.clients["personal"][groups[apart]]
    engine, rows = whole._engines.client, X[apart][:, None]
    found = [engine.outputs(v, x)[0, k] for v, x, k in zip(own, rows, y[apart], strict=True)]
    assert loss == pytest.approx(weights @ -np.log(found) / weights.sum(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tuned", "adaped"])
def test_the_same_bits(name, tmp_path, monkeypatch):
    model, data = MODELS[name]().set_params(max_rounds=5), table()
    whole = fitted(model, data)
    with parallel_config("threading"):
        again = fitted(clone(model).set_params(n_jobs=2), data)
    np.testing.assert_equal(parts_of(again), parts_of(whole))
    resumed = clone(model).set_params(checkpoint=tmp_path / "run", checkpoint_every=2)
    interrupt(clone(resumed), data, 3)
    assert list(tmp_path.iterdir())
    again = fitted(resumed, data)
    np.testing.assert_equal(parts_of(again), parts_of(whole))
    assert list(tmp_path.iterdir()) == []
    for part in ("_rounds.rows.NUMBERS_OF_A_BLOCK", "neural_network._engine._engine._MOST_STACKED"):
        monkeypatch.setattr(f"pfl_sklearn.{part}", 1)
    np.testing.assert_equal(parts_of(fitted(model, data)), parts_of(whole))


@pytest.mark.slow
def test_callbacks_warm_starts_and_partial_fits():
    X, y, groups = table()
    model = MODELS["local"]().set_params(warm_start=True, max_rounds=8)
    stop = StopAfter(4)
    stopped = clone(model).set_callbacks(stop).fit(X, y, groups=groups)
    assert stopped.n_rounds_ == 4
    plain = fitted(model, (X, y, groups))
    first = plain.n_rounds_
    before = plain.fit(X, y, groups=groups).n_rounds_
    assert before >= first
    assert plain.set_params(n_rounds=before + 4).fit(X, y, groups=groups).n_rounds_ == before + 4
    plain.set_params(n_rounds=None).partial_fit(X, y, groups=groups)
    assert plain.n_rounds_ == before + 7  # 14 rows, three times four of 60 percent in a round


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_with_noise_the_data_have_no_say():
    """As many rounds for any data, known from the parameters alone, and no row held out."""
    X, y, groups = table(sizes=np.full(3, 4))
    noise = {"noise_multiplier": 1.0, "clip_norm": 0.3, "local_steps": 1}
    given = {**FLAT, **noise}
    model = AdaPeDClassifier(recipe(), personal_start="global", **given)
    (event,) = model._privacy_events()
    assert event.n_rounds == 100
    found = fitted(model, (X, y, groups))
    assert found.n_rounds_ == found.privacy_.rounds == 100
    asked = fitted(clone(model).set_params(n_rounds=100, validation_fraction=0.5), (X, y, groups))
    np.testing.assert_equal(parts_of(found), parts_of(asked))


@pytest.mark.slow
def test_nets_that_no_round_improves_are_said_to_be_untrained():
    X, y, groups = table(sizes=np.full(3, 12))
    noise = np.random.default_rng(0).integers(0, 3, len(y))
    model = LocalNetClassifier(recipe(lr=0.5), **{**FLAT, "max_rounds": 12, "local_steps": 50})
    with pytest.warns(ConvergenceWarning, match=r"no round of LocalNetClassifier.*untrained"):
        assert model.fit(X, noise, groups=groups).n_rounds_ == 0


def test_held_out_rows_may_leave_a_client_one_row_to_train_on():
    X, y, groups = table(sizes=np.full(4, 2))
    model = FedAvgClassifier(recipe(Normed), **{**FLAT, "validation_fraction": 0.5})
    with pytest.raises(ValueError, match=r"clients, the first of them .* one row to train on"):
        model.fit(X, y, groups=groups)
    model.set_params(n_rounds=2).fit(X, y, groups=groups)


@pytest.mark.slow
def test_personal_nets_make_up_for_missed_rounds_on_all_rows(monkeypatch):
    """After the rounds, in which some rows were held out."""
    X, y, groups = table()
    used = []

    class Spy(CatchingUp):
        def draw(self, rows, *rest):
            found = super().draw(rows, *rest)
            if not self.now:
                used.extend((len(rows.y), len(members)) for members, _ in found)
            return found

    monkeypatch.setattr(_adaped, "CatchingUp", Spy)
    model = AdaPeDClassifier(recipe(), train_unsampled=2, client_fraction=0.4, **FLAT)
    state = state_of(model.fit(X, y, groups=groups))
    missed = state.phase_arrays["personal"] != state.clients["personal"]
    assert {size for size, _ in used} == {len(y)}
    assert sum(n for _, n in used) == missed.any(axis=1).sum() > 0


def test_rounds_that_are_not_enough():
    model = LocalNetClassifier(recipe(), **{**FLAT, "max_rounds": 2})
    with pytest.warns(ConvergenceWarning, match=r"LocalNetClassifier.*max_rounds=2\b.*tol"):
        assert fitted(model, table()).n_rounds_ <= 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(clone(model).set_params(n_rounds=2), table())


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_rounds_that_diverge(rate):
    X, _, groups = table()
    net = NeuralNetRegressor(nn.Linear(N_INPUTS, 1), lr=rate, batch_size=4)
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        fitted(FedAvgRegressor(net, **FLAT), (X, X[:, 0], groups))


@pytest.mark.parametrize(
    ("cls", "criterion"), [(FedAvgRegressor, nn.MSELoss), *slow([(LocalNetRegressor, nn.L1Loss)])]
)
@pytest.mark.slow
def test_regressors(cls, criterion):
    X, _, groups = table(sizes=np.full(6, 30))
    y = 1e3 * (np.column_stack([X[:, 0], np.abs(X[:, 1])]) + 5)
    net = NeuralNetRegressor(MLP, criterion=criterion, lr=0.1, batch_size=20)
    given = {**FLAT, "tol": 0.1, "local_steps": 10, "max_rounds": 200}
    model = cls(net, **given).fit(X, y, groups=groups)
    assert model.score(X, y, groups=groups) > 0.5
    assert 5 < model.n_rounds_ < 200


def test_losses_of_constants():
    rng = np.random.default_rng(0)
    y, weights = rng.normal(size=(50, 2)) + 3, rng.random(50)
    mean = np.average(y, axis=0, weights=weights)
    squares = np.average((y - mean) ** 2, axis=0, weights=weights).mean()
    assert _held_out.constant_loss(nn.MSELoss(), y, weights) == pytest.approx(squares)
    sizes = np.abs(y - np.median(y, axis=0)).mean()
    assert _held_out.constant_loss(nn.L1Loss(), y, np.ones(50)) == pytest.approx(sizes)
    labels = np.array([0, 0, 2, 1])
    expected = -np.log(0.5) / 2 - np.log(0.25) / 2
    found = _held_out.constant_loss(nn.CrossEntropyLoss(), labels, np.ones(4))
    assert found == pytest.approx(expected)
    assert _held_out.constant_loss(nn.HuberLoss(), y, weights) == 0
