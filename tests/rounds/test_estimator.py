"""The life of an estimator on rounds that is not PPSGD: FedAvg with a last phase."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone

from pfl_sklearn._rounds.checkpoint import describe_parameters
from pfl_sklearn.linear_model import DivergenceError
from tests.helpers.callbacks import StopAfter
from tests.helpers.fedavg_estimator import FedAvgRegressor, Recipe
from tests.helpers.interruption import interrupt

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

PRIVATE = {"noise_multiplier": 1.0, "clip_norm": 0.5, "client_fraction": 0.5}


def table(seed=0):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(12), rng.integers(1, 9, 12))
    X = rng.normal(size=(len(groups), 3)).astype(np.float32)
    return X, X @ [1.0, 2.0, 0.0] + rng.normal(size=len(groups)), groups


def model_of(**params):
    return FedAvgRegressor(Recipe(0.1), random_state=3, **params)


def assert_same_fit(one, other):
    np.testing.assert_array_equal(one.global_, other.global_)
    np.testing.assert_array_equal(one.tuned_, other.tuned_)
    np.testing.assert_equal(one.history_, other.history_)
    assert one.privacy_ == other.privacy_


@pytest.mark.parametrize(
    "params", [{"client_fraction": 0.5}, {"noise_multiplier": 1.0, "clip_norm": 0.5}], ids=str
)
def test_warm_start_and_resumed_fits_are_the_same_bits(tmp_path, params):
    data = X, y, groups = table()
    whole = model_of(n_rounds=8, **params).fit(X, y, groups=groups)
    warm = model_of(n_rounds=3, warm_start=True, **params).fit(X, y, groups=groups)
    tuned = warm.tuned_.copy()
    warm.set_params(n_rounds=8).fit(X, y, groups=groups)
    assert (warm.tuned_ != tuned).any()
    np.testing.assert_array_equal(warm.tuned_, whole.tuned_)
    np.testing.assert_array_equal(warm.global_, whole.global_)
    np.testing.assert_array_equal(warm.n_samples_per_client_, np.bincount(groups))
    assert warm.privacy_.epsilon == pytest.approx(whole.privacy_.epsilon)
    model = model_of(n_rounds=8, checkpoint=tmp_path / "run", **params)
    interrupt(clone(model), data, 5)
    assert_same_fit(clone(model).fit(X, y, groups=groups), whole)


def test_a_parameter_that_the_text_of_a_component_hides(tmp_path):
    data = X, y, groups = table()
    model = model_of(checkpoint=tmp_path / "run")
    interrupt(model, data, 3)
    model.set_params(recipe__lr=0.2)
    with pytest.raises(ValueError, match=r"recipe__lr=0\.1.*0\.2"):
        model.fit(X, y, groups=groups)
    model.set_params(recipe=Recipe(0.1)).fit(X, y, groups=groups)
    assert model.n_rounds_ == 5


@pytest.mark.parametrize("ids", ["name", "object"])
def test_ids_beyond_ascii(tmp_path, ids):
    X, y, groups = table()
    names = np.array([f"Zürich {k}" for k in groups], dtype=object if ids == "object" else None)
    model = model_of(checkpoint=tmp_path / "run")
    interrupt(model, (X, y, names), 3)
    assert model.fit(X, y, groups=names).clients_[0] == "Zürich 0"


def loss_of(scale):
    return lambda error: scale * error


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda error: error, lambda error: 2 * error),
        (loss_of(1.0), loss_of(2.0)),
        ({"f": loss_of(1.0)}, {"f": loss_of(2.0)}),
        (np.sum, np.mean),
        (StopAfter, Recipe),
        ([1.0, 2.0], (1.0, 2.0)),
        (np.zeros(2), np.zeros(3)),
    ],
)
def test_parameters_of_any_kind_are_distinguished(first, second):
    seen = [describe_parameters(Recipe(lr))["lr"][0] for lr in (first, first, second)]
    assert seen[0] == seen[1] != seen[2]


def test_new_clients_join_in_a_partial_fit():
    X, y, groups = table()
    model, first = model_of(), groups < 6
    model.partial_fit(X[first], y[first], groups=groups[first])
    tuned = model.tuned_.copy()
    model.partial_fit(X[~first], y[~first], groups=groups[~first])
    assert model.clients_.tolist() == list(range(12))
    assert model.n_rounds_ == 4
    np.testing.assert_array_equal(model.n_samples_per_client_, np.bincount(groups))
    np.testing.assert_array_equal(model.tuned_[:6], tuned)  # clients without rows keep theirs
    assert (model.tuned_[6:] != model.global_).any(axis=1).all()


def test_callbacks_see_the_state_and_cannot_change_it():
    X, y, groups = table()
    seen = []

    class Watch(StopAfter):
        def on_fit_task_end(self, estimator, context, *, fitted_estimator=None):
            if context.task_name == "round":
                found = fitted_estimator.global_
                assert not found.flags.writeable
                seen.append(found.copy())
            return super().on_fit_task_end(estimator, context)

    model = model_of(n_rounds=6).set_callbacks(Watch(4)).fit(X, y, groups=groups)
    assert model.n_rounds_ == 4
    np.testing.assert_array_equal(seen[-1], model.global_)
    assert len({tuple(values) for values in seen}) == 4


def test_the_round_and_the_client_that_diverged_are_named():
    X, y, groups = table()
    names = np.array([f"clinic {i:02d}" for i in range(12)])[groups]
    y[groups == 7] = 1e200
    with np.errstate(all="ignore"):
        with pytest.raises(DivergenceError, match=r"in round 0 .*, at client clinic 07: "):
            model_of().fit(X, y, groups=names)
        y[groups == 9] = 1e200
        with pytest.raises(DivergenceError, match=r"in round 0 .*, at 2 clients, .* clinic 07: "):
            model_of().fit(X, y, groups=names)
        slow = FedAvgRegressor(Recipe(1e60), n_rounds=20, random_state=0)
        with pytest.raises(DivergenceError, match=r"in round [1-9]\d* \(counted from 0\), at "):
            slow.fit(*table()[:2], groups=groups)
        # The loss is that before the round, so it does not show what the last one does.
        once = FedAvgRegressor(Recipe(1e100), n_rounds=1, random_state=0)
        with pytest.raises(DivergenceError, match=r"diverged after 1 round, at 12 clients"):
            once.fit(*table()[:2], groups=groups)


def seeded_in_part(seeds):
    """A model whose first three rounds have the first seed, and one round more each other seed."""
    X, y, groups = table()
    model = FedAvgRegressor(
        Recipe(0.1),
        n_rounds=3,
        noise_multiplier=1.0,
        clip_norm=0.5,
        warm_start=True,
        random_state=seeds[0],
    ).fit(X, y, groups=groups)
    for number, seed in enumerate(seeds[1:]):
        model = pickle.loads(pickle.dumps(model))
        model.set_params(random_state=seed, n_rounds=4 + number).fit(X, y, groups=groups)
    return model


def seeds_said(model):
    return [text for text in model.privacy_.warnings if text.startswith("random_state was given")]


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ([None, None], []),
        ([0, 0], ["given: anyone"]),
        ([0, 1, np.random.RandomState(2)], ["given: anyone"]),
        ([0, None], [" 0 to 2, of 4 "]),
        ([0, None, 0], [" 0 to 2 and 4, of 5 "]),
    ],
    ids=["none", "one seed", "three seeds", "earlier", "between"],
)
def test_the_report_says_which_rounds_had_a_seed(seeds, said):
    model = seeded_in_part(seeds)
    assert model.privacy_.noise_reproducible == bool(said)
    assert len(seeds_said(model)) == len(said)
    assert all(part in text for part, text in zip(said, seeds_said(model), strict=True))


def test_a_partial_fit_and_a_resumed_fit_remember_the_seed(tmp_path):
    data = X, y, groups = table()
    model = seeded_in_part([0])
    more = pickle.loads(pickle.dumps(model)).set_params(random_state=None, n_rounds=1)
    more.partial_fit(X, y, groups=groups)
    model.set_params(random_state=None, n_rounds=9, checkpoint=tmp_path / "run", checkpoint_every=2)
    interrupt(model, data, 6)
    model.fit(X, y, groups=groups)
    for each, n_rounds in ((more, 4), (model, 9)):
        assert each.privacy_.noise_reproducible
        assert f" 0 to 2, of {n_rounds} rounds" in seeds_said(each)[0]


def test_a_seed_of_no_round_is_no_seed():
    X, y, groups = table()
    model = seeded_in_part([None])
    model.set_params(random_state=0).fit(X, y, groups=groups)  # all rounds were run before
    assert not model.privacy_.noise_reproducible
    assert seeds_said(model) == []
