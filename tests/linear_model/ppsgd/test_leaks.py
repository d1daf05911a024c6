"""What a private fit must not reveal about one client, and what copies must not carry."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.callback import ScoringMonitor
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn import GaussianMean, PPSGDClassifier, PPSGDRegressor
from pfl_sklearn._rounds.checkpoint import Checkpoint
from pfl_sklearn.linear_model import DivergenceError
from pfl_sklearn.linear_model._ppsgd._run import divergence_advice
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.privacy import PrivacyLedger, auditing
from tests.helpers.callbacks import StopAfter
from tests.helpers.ppsgd import table

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

NOISE = {"noise_multiplier": 1.5, "clip_norm": 0.7, "learning_rate": 0.05}


@pytest.mark.parametrize(
    ("size", "sparse", "average", "alpha"),
    [
        (1e60, False, True, 0.05),
        (1e200, True, False, 0.05),
        (1e300, False, False, math.inf),
        (1e300, True, True, 0.0),
    ],
)
def test_no_client_can_end_a_private_fit(size, sparse, average, alpha):
    """A client that diverges keeps its model, and affects others by its message alone."""
    X, y, groups = table()
    loud = X.copy()
    loud[groups == groups[0]] = size
    rows = csr_array(loud) if sparse else loud
    model = PPSGDRegressor(alpha=alpha, n_rounds=7, random_state=0, average=average, **NOISE)
    model.fit(rows, y, groups=groups)
    assert model.n_rounds_ == 7
    assert np.isfinite(model.coef_).all()
    assert np.isfinite(model.population_coef_).all()
    with pytest.raises(DivergenceError, match="learning_rate"):
        PPSGDRegressor(n_rounds=40, learning_rate=0.05).fit(rows, y, groups=groups)


@pytest.mark.parametrize(("sparse", "size"), [(False, 1.0), (True, 1e150), (False, 1e300)])
def test_a_client_moves_a_round_by_no_more_than_the_clip_norm(size, sparse):
    X, y, groups = table()
    own = groups == groups[0]
    found = []
    for value in (0.0, size):
        rows = X.copy()
        rows[own] = value
        rows = csr_array(rows) if sparse else rows
        model = PPSGDRegressor(
            alpha=math.inf,
            n_rounds=1,
            random_state=0,
            weighting="clients",
            fit_intercept=False,
            **NOISE,
        ).fit(rows, y, groups=groups)
        found.append(model.population_coef_)
    moved = np.linalg.norm(found[1] - found[0]) * len(np.unique(groups)) / 0.05
    assert moved <= 0.7 * (1 + 1e-5)


@pytest.mark.parametrize("estimator", [GaussianMean(noise_variance=1.0), PPSGDRegressor()])
def test_copies_carry_no_callbacks(estimator):
    if not hasattr(estimator, "set_callbacks"):
        estimator._skl_callbacks = ["kept scores"]
        params = {"epsilon": 1.0, "clip_norm": 1.0}
    else:
        estimator.set_callbacks(ScoringMonitor(scoring={"r2": ClientScorer("r2")}))
        params = {"n_rounds": 3, **NOISE}
    X, y, groups = table()
    model = estimator.set_params(**params).fit(X, y, groups=groups)
    for copy in (model.release(), model.for_client(groups[0])):
        assert not hasattr(copy, "_skl_callbacks")


def test_what_was_handed_out_does_not_go_on():
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=3, **NOISE).fit(X, y, groups=groups)
    for copy in (model.release(), model.for_client(groups[0])):
        with pytest.raises(ValueError, match=r"PPSGDRegressor.*release.*for_client"):
            copy.partial_fit(X, y, groups=groups)
        with pytest.raises(ValueError, match=r"PPSGDRegressor.*release.*for_client"):
            copy.set_params(warm_start=True).fit(X, y, groups=groups)
        assert copy.set_params(warm_start=False).fit(X, y, groups=groups).n_rounds_ == 3


def test_rounds_that_are_run_again_have_the_same_noise(tmp_path, monkeypatch):
    """Killed after a checkpoint and resumed without a seed: each round has one release only."""
    X, y, groups = table()
    seen = {}
    released = PPSGDRegressor(n_rounds=9, checkpoint_every=4, **NOISE)
    released.set_params(checkpoint=tmp_path / "run", fit_intercept=False)
    original = Checkpoint.observe

    def observe(self, state):
        original(self, state)
        seen.setdefault(state.round, set()).add(state.server["coef"].tobytes())
        if state.round == 6 and len(seen) == 6 and not observe.resumed:
            raise KeyboardInterrupt

    observe.resumed = False
    monkeypatch.setattr(Checkpoint, "observe", observe)
    with pytest.raises(KeyboardInterrupt):
        released.fit(X, y, groups=groups)
    observe.resumed = True
    model = released.fit(X, y, groups=groups)
    assert model.n_rounds_ == 9
    assert sorted(seen) == list(range(1, 10))
    assert all(len(values) == 1 for values in seen.values())
    again = released.fit(X, y, groups=groups).population_coef_
    assert len(seen[9]) == 2, again


def test_a_checkpoint_belongs_to_one_ledger(tmp_path, monkeypatch):
    X, y, groups = table()
    path = tmp_path / "ledger"
    model = PPSGDRegressor(n_rounds=5, checkpoint=tmp_path / "run", checkpoint_every=2, **NOISE)
    model.set_params(ledger=PrivacyLedger(path, relation="zero_out"))

    def fail(self, state, original=Checkpoint.observe):
        original(self, state)
        if state.round == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoint, "observe", fail)
        model.fit(X, y, groups=groups)
    path.unlink()
    model.set_params(ledger=PrivacyLedger(path, relation="zero_out"))
    with pytest.raises(ValueError, match=r"checkpoint.*ledger="):
        model.fit(X, y, groups=groups)
    assert not model.ledger.entries


def test_when_a_callback_stopped_local_rounds_is_not_protected():
    X, y, groups = table()
    model = PPSGDRegressor(alpha=0.0, epsilon=1.0, clip_norm=1.0, learning_rate=0.05, n_rounds=9)
    assert model.fit(X, y, groups=groups).privacy_.epsilon == 0
    stopped = model.set_callbacks(StopAfter(2)).fit(X, y, groups=groups)
    assert stopped.privacy_.epsilon == math.inf
    assert "ended the rounds early" in stopped.privacy_.warnings[-1]


def test_local_rounds_move_no_bound():
    """Their counts have no noise, so later rounds must not start from what followed from them."""
    X, y, groups = table()
    model = PPSGDRegressor(
        alpha=0.0, epsilon=1.0, clip_norm=1.0, clip_quantile=0.5, learning_rate=0.05, n_rounds=9
    )
    assert set(model.fit(X, y, groups=groups).history_["clip_norm"]) == {1.0}


@pytest.mark.parametrize("clip_norm", [1e-200, 1e101])
def test_what_cannot_be_released_is_not_charged(tmp_path, clip_norm):
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger", relation="zero_out")
    model = PPSGDRegressor(ledger=ledger, **{**NOISE, "clip_norm": clip_norm})
    for call in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=r"clip_norm.*\[1e-100, 1e100\]"):
            call(X, y, groups=groups)
    assert not ledger.entries


@pytest.mark.slow
def test_other_clients_know_who_is_in_a_sample_of_a_fixed_size():
    """One client of 20 takes part in one round; it is client 0 if no other local model moved.

    The event: client 0 took part, and w moved far in the direction of its message. It occurs far
    more often with a message at +1 than with one at -1, which the figure for outsiders rules out.
    All seeds here sample client 0, which happens with probability 1/20. Normal probabilities of the
    event are .37 and .05: the bounds from 500 fits each have a log ratio of 1.2 or more.
    """
    delta, threshold, n_fits = 1e-3, 1.5, 500
    sampling = (np.random.Generator(np.random.PCG64((seed, 1))) for seed in itertools.count())
    seeds = (k for k, rng in enumerate(sampling) if rng.choice(20, 1, False, shuffle=False)[0] == 0)
    model = PPSGDRegressor(
        n_rounds=1,
        client_fraction=0.05,
        sampling="fixed",
        noise_multiplier=1.5,
        clip_norm=1.0,
        delta=delta,
        learning_rate=1.0,
        fit_intercept=False,
    )
    counts = {1: 0, -1: 0}
    for k, seed in enumerate(itertools.islice(seeds, n_fits)):
        sign = 1 if k % 2 else -1
        y = np.full(20, 0.5)
        y[0] = 10 * sign
        model.set_params(random_state=seed).fit(np.ones((20, 1)), y, groups=np.arange(20))
        assert not model.local_coef_[1:].any()
        change = float(model.population_coef_[0])
        if abs(change) > threshold:
            counts[1 if change * sign > 0 else -1] += 1
    least = auditing._binomial_lower(counts[1], n_fits, 5e-4) / 20 - delta
    most = (1 - auditing._binomial_lower(n_fits - counts[-1], n_fits, 5e-4)) / 20
    audited, report = math.log(least / most), model.privacy_
    assert report.epsilon_outsiders == pytest.approx(0.687, abs=1e-3)
    assert report.epsilon_outsiders < audited < report.epsilon == pytest.approx(3.033, abs=1e-3)


@pytest.mark.parametrize("call", ["fit", "partial_fit"])
def test_rounds_are_charged_before_ids_are_read(tmp_path, call):
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger", relation="zero_out")
    model = PPSGDRegressor(n_rounds=7, ledger=ledger, **NOISE)
    unknown = np.where(groups == groups[0], np.nan, 1.0)
    with pytest.raises(ValueError, match="groups"):
        getattr(model, call)(X, y, groups=unknown)
    (entry,) = ledger.entries
    assert [event["n_rounds"] for event in entry["events"]] == [7]


def test_with_noise_the_number_of_rounds_never_depends_on_rows():
    X, y, groups = table()
    few = np.arange(len(y)) % 5 == 0
    for rows in (slice(None), few):
        model = PPSGDRegressor(n_rounds=7, batch_size=2, **NOISE)
        model.partial_fit(X[rows], y[rows], groups=groups[rows])
        assert model.n_rounds_ == 7
        model.partial_fit(X[rows], y[rows], groups=groups[rows])
        assert model.n_rounds_ == sum(event.n_rounds for event in model._progress.spent) == 14
        without = PPSGDRegressor(n_rounds=7, batch_size=2, learning_rate=0.05)
        without.partial_fit(X[rows], y[rows], groups=groups[rows])
        assert without.n_rounds_ == -(-np.unique(groups[rows], return_counts=True)[1].max() // 2)


def test_nobody_learns_how_many_took_part():
    """The number of clients of a round, in whatever is handed on."""
    X, y, groups = table()
    noise = {**NOISE, "noise_multiplier": 15.0}  # whose epsilon in sampled rounds is computed fast
    model = PPSGDRegressor(n_rounds=6, client_fraction=0.5, random_state=0, **noise)
    model.fit(X, y, groups=groups)
    assert len(set(model.history_["n_clients"])) > 1
    secret = [model.history_["n_clients"].tolist(), model._progress]
    for copy in (model.release(), model.for_client(groups[0])):
        kept = vars(copy)
        assert not {"history_", "_progress"} & set(kept)
        for value in kept.values():
            assert value is not secret[1]
            assert np.asarray(value, dtype=object).tolist() != secret[0]
    assert "history_" in model.privacy_.not_released


def test_hardly_ever_taking_part_is_no_protection_of_who_does():
    X, y, groups = table()
    model = PPSGDRegressor(client_fraction=1e-6, n_rounds=2, **NOISE).fit(X, y, groups=groups)
    assert any("at most delta" in text for text in model.privacy_.warnings)


@pytest.mark.parametrize("form", [csr_array, np.asarray])
def test_advice_on_divergence_is_for_this_table(form):
    """To scale features that are scaled would not help, and private rows are not described."""
    X, y, groups = table()
    fit = PPSGDRegressor(learning_rate=1e3, n_rounds=400, alpha=1.0).fit
    with pytest.raises(DivergenceError, match=r"learning_rate=1000 is too large, .*unit scale"):
        fit(form(X), y, groups=groups)
    with pytest.raises(DivergenceError, match=r"learning_rate=1000 .*these features.*[Ss]cale"):
        fit(form(1e4 * X), y, groups=groups)
    loud = SimpleNamespace(features=1e4 * X, y=y), SimpleNamespace(features=X, y=y)
    assert len({divergence_advice(rows, 0.1, private=True) for rows in loud}) == 1


@pytest.mark.parametrize(("form", "weighting"), [(csr_array, "samples"), (np.asarray, "clients")])
@pytest.mark.parametrize(
    ("params", "rate"),
    [
        ({"learning_rate": 40.0}, "learning_rate=40 "),
        ({"learning_rate": "theory", "smoothness": 0.01}, "smoothness=0.01, .*[Rr]aise smoothness"),
    ],
)
def test_rounds_that_diverge_and_stay_finite(form, weighting, params, rate):
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=30, weighting=weighting, random_state=0, **params)
    with pytest.raises(DivergenceError, match=rf"training loss of \S+e\+\d+, .* constant.*{rate}"):
        model.fit(form(X), y, groups=groups)
    model.set_params(noise_multiplier=1.0, clip_norm=1.0)  # its loss is nobody's business
    assert model.fit(form(X), y, groups=groups).n_rounds_ == 30


def test_a_loss_of_a_few_times_that_of_a_constant_is_a_warning():
    X, _, groups = table()
    labels = np.random.default_rng(0).integers(0, 2, len(X))  # no loss of these is near 0
    model = PPSGDClassifier(learning_rate=60.0, n_rounds=6, batch_size=2, random_state=0)
    with pytest.warns(
        ConvergenceWarning, match=r"constant has 0\.6.*learning_rate=60 is too large"
    ):
        model.fit(X, labels, groups=groups)
    assert model.n_rounds_ == 6


def test_a_large_client_that_is_hardly_ever_sampled_is_no_divergence():
    """It has one row of 10001, but as much of the loss as any other client."""
    rng = np.random.default_rng(0)
    groups = np.r_[np.repeat(np.arange(50), 200), 50]
    X, y = rng.normal(size=(len(groups), 2)), 0.01 * rng.normal(size=len(groups))
    y[-1] = 3000
    model = PPSGDRegressor(n_rounds=10, client_fraction=0.05, random_state=0)
    assert model.fit(X, y, groups=groups).n_rounds_ == 10


def test_a_new_client_whose_steps_diverge():
    X, y, groups = table()
    model = PPSGDRegressor(learning_rate=0.01, alpha=1.0, n_rounds=40, random_state=0)
    model.fit(X, y, groups=groups).set_params(learning_rate=10.0)
    with pytest.raises(
        DivergenceError, match=r"training loss of .* at client 99,.*learning_rate=10 "
    ):
        model.personalize(X[:6], y[:6], groups=[99] * 6)
    assert 99 not in model.clients_
