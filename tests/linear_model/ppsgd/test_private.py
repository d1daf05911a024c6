"""PPSGD with noise: what it is, what it protects, what is spent, and what is refused."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn.privacy import (
    BudgetExceeded,
    ClippedSum,
    PrivacyLedger,
    PrivacyWarning,
    SampledGaussian,
    events_epsilon,
    gdp_epsilon,
)
from pfl_sklearn.theory import ppsgd_noise_std
from tests.helpers.audits import effect_size
from tests.helpers.callbacks import StopAfter
from tests.helpers.frozen import assert_frozen, freeze
from tests.helpers.ppsgd import SEED, assert_same_fit, table

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

NOISE = {"noise_multiplier": 1.5, "clip_norm": 0.7, "learning_rate": 0.05}
MUCH = {**NOISE, "noise_multiplier": 15.0}  # whose epsilon in sampled rounds is computed fast
# Noise without a seed is measured to six standard deviations: a test with up to three such
# figures fails by chance in fewer than 1 of 1e8 runs.
FAR = 6


@pytest.mark.parametrize(
    ("weighting", "sparse", "q", "sampling", "alpha"),
    [
        ("samples", False, 1.0, "poisson", 0.01),
        ("clients", False, 1.0, "poisson", math.inf),
        ("samples", True, 1.0, "poisson", 1.0),
        pytest.param("samples", False, 0.5, "fixed", 1.0, marks=pytest.mark.slow),
        pytest.param("clients", True, 0.5, "poisson", 0.01, marks=pytest.mark.slow),
    ],
)
def test_the_noise_on_w_is_that_of_the_paper(weighting, sparse, q, sampling, alpha):
    """Rows of zeros: w is T steps alpha eta on noise of z C / (q M), in each of 3000 features."""
    sizes, T, d = np.array([2, 5, 30, 7, 1, 3]), 9, 3000
    X = np.zeros((sizes.sum(), d))
    model = PPSGDRegressor(
        alpha=alpha,
        client_fraction=q,
        sampling=sampling,
        weighting=weighting,
        n_rounds=T,
        fit_intercept=False,
        **MUCH,
    ).fit(csr_array(X) if sparse else X, np.ones(len(X)), groups=np.repeat(np.arange(6), sizes))
    std = ppsgd_noise_std(
        15.0, 0.7, 6, batch_sizes=np.minimum(sizes, 10), client_fraction=q, weighting=weighting
    )
    eta = 0.05 / max(alpha, 1 / (6 * q)) if math.isfinite(alpha) else None
    step = 0.05 if eta is None else alpha * eta
    expected = math.sqrt(T) * step * std
    assert model.population_coef_.std() == pytest.approx(expected, rel=FAR / math.sqrt(2 * d))
    assert abs(model.population_coef_.mean()) < FAR * expected / math.sqrt(d)
    assert not model.local_coef_.nnz if sparse else not model.local_coef_.any()


@pytest.mark.parametrize("sparse", [False, True])
def test_the_noise_on_the_average_iterate(sparse):
    """The noise of round k is in the T - k iterates after it that are averaged."""
    X, T, d = np.zeros((5, 4000)), 7, 4000
    model = PPSGDRegressor(alpha=math.inf, n_rounds=T, average=True, fit_intercept=False, **NOISE)
    model.fit(csr_array(X) if sparse else X, np.ones(5), groups=np.arange(5))
    share = np.arange(T) / T
    expected = 0.05 * 1.5 * 0.7 / 5 * math.sqrt(np.sum(share**2))
    assert model.population_coef_.std() == pytest.approx(expected, rel=FAR / math.sqrt(2 * d))


@pytest.mark.parametrize("sparse", [False, True])
def test_the_noise_of_a_moving_bound_follows_it(sparse):
    X = np.zeros((12, 4000))
    model = PPSGDRegressor(
        alpha=math.inf,
        n_rounds=6,
        clip_quantile=0.1,
        fit_intercept=False,
        weighting="clients",
        **NOISE,
    ).fit(csr_array(X) if sparse else X, np.ones(12), groups=np.arange(12))
    bounds = model.history_["clip_norm"]
    assert bounds[0] == 0.7
    assert len(set(bounds)) == 6
    z = ClippedSum(0.7, 1.5, 0.1).sum_noise_multiplier
    assert z > 1.5
    expected = 0.05 * z * np.sqrt(np.sum(bounds**2)) / 12
    assert model.population_coef_.std() == pytest.approx(expected, rel=FAR / math.sqrt(8000))


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_an_audit_finds_the_stated_mu(sparse):
    """With and without a client whose message is always at the bound: mu = sqrt(rounds) / z = 2."""

    def score(canary, seed):
        n = 6 + canary
        X, y = np.zeros((n, 2)), np.zeros(n)
        X[0, 0] = 1e-3  # so that somebody else has the feature, too
        if canary:
            X[-1, 0], y[-1] = 30.0, 1e9
        model = PPSGDRegressor(
            alpha=math.inf,
            n_rounds=4,
            learning_rate=1.0,
            clip_norm=1.0,
            noise_multiplier=1.0,
            weighting="clients",
            fit_intercept=False,
            random_state=seed,
        ).fit(csr_array(X) if sparse else X, y, groups=np.arange(n))
        return model.population_coef_[0] * n

    seeds = np.random.SeedSequence(0).generate_state(120).tolist()
    scores = [[score(canary, seed) for seed in seeds[canary::2]] for canary in (1, 0)]
    mu, error = effect_size(*scores)
    assert abs(mu - 2.0) < 4 * error


@pytest.fixture
def totals(monkeypatch):
    """Sums of clipped messages of every round, before the noise."""
    seen, release = [], ClippedSum.release

    def spy(self, messages, bound, n_expected, rng):
        exact = dataclasses.replace(self, noise_multiplier=0.0)
        seen.append(release(exact, messages, bound, n_expected, rng).total)
        return release(self, messages, bound, n_expected, rng)

    monkeypatch.setattr(ClippedSum, "release", spy)
    return seen


@pytest.mark.parametrize(
    ("value", "where", "weighting"),
    [(1.0, "first", "samples"), (1e70, "last", "clients"), (-1e150, "last", "samples")],
)
def test_a_client_moves_the_first_sum_by_the_bound_at_most(totals, value, where, weighting):
    """And no bit of what the others add up to: their sum and its own part are the whole."""
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=1, alpha=math.inf, random_state=0, shuffle=False, weighting=weighting, **NOISE
    )
    clone(model).fit(X, y, groups=groups)
    own = np.full((2, 3), value)
    client = np.full(2, -1 if where == "first" else 99)
    clone(model).fit(np.vstack([X, own]), np.r_[y, value, value], groups=np.r_[groups, client])
    without, with_client = totals
    moved = np.linalg.norm(with_client - without)
    assert 0 < moved <= 0.7 * (1 + 1e-12)
    if value != 1.0:
        assert moved == pytest.approx(0.7)


def test_what_the_report_says():
    X, y, groups = table()
    model = PPSGDRegressor(epsilon=2.0, delta=1e-3, clip_norm=0.7, learning_rate=0.05)
    report = model.fit(X, y, groups=groups).privacy_
    assert (report.unit, report.relation, report.trust) == ("client", "zero_out", "central")
    assert report.rounds == 100
    assert report.sampling_rate == 1
    assert 1.99 < report.epsilon <= 2.0
    assert report.epsilon == pytest.approx(gdp_epsilon(10 / model.noise_multiplier_, 1e-3))
    assert report.noise_std == pytest.approx(0.7 * model.noise_multiplier_)
    assert report.sensitivity == 0.7
    assert dict(report.epsilon_under)["replace_one"] == pytest.approx(
        gdp_epsilon(20 / model.noise_multiplier_, 1e-3)
    )
    assert "all other clients together" in report.adversary
    assert {"population_coef_", "the population model of every round"} <= set(report.released)
    for name in ("local_coef_", "coef_", "history_", "clients_"):
        assert name in report.not_released
    assert not report.noise_reproducible
    text = " ".join(str(report).split())
    assert "joint differential privacy" in text
    assert "one client's contribution replaced by nothing (zero_out)" in text
    assert report == type(report).from_dict(report.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "relation"), [("poisson", "zero_out"), ("fixed", "replace_one")]
)
def test_epsilon_of_sampled_rounds(sampling, relation):
    X, y, groups = table()
    model = PPSGDRegressor(
        client_fraction=0.25, sampling=sampling, n_rounds=30, delta=1e-3, **MUCH
    ).fit(X, y, groups=groups)
    event = SampledGaussian(15.0, 30, 0.25, sampling)
    assert model.privacy_.relation == relation
    assert model.privacy_.epsilon == pytest.approx(events_epsilon([event], 1e-3, relation))
    report = model.privacy_
    other = "replace_one" if relation == "zero_out" else "zero_out"
    under = pytest.approx(events_epsilon([event], 1e-3, other))
    assert dict(report.epsilon_under) == {other: under}
    secret = "nobody but the server learns how many clients take part in a round"
    if sampling == "poisson":
        assert any(secret in assumed for assumed in report.assumptions)
        assert report.epsilon_outsiders is None
    else:
        assert model.history_["n_clients"].tolist() == [2] * 30
        assert secret not in str(report)
        outsiders = events_epsilon([event], 1e-3, relation, "outsiders")
        assert report.epsilon_outsiders == outsiders < report.epsilon
        assert f"outsiders epsilon = {outsiders:.4g}" in " ".join(str(report).split())
    assert report == type(report).from_dict(report.to_dict())


def test_alpha_0_releases_nothing():
    X, y, groups = table()
    ledger_free = PPSGDRegressor(alpha=0, epsilon=1.0, clip_norm=1.0, learning_rate=0.1)
    model = ledger_free.fit(X, y, groups=groups)
    assert model.privacy_.epsilon == 0
    assert not model.population_coef_.any()
    assert model.population_intercept_ == 0
    assert model.noise_multiplier_ == 0
    plain = PPSGDRegressor(alpha=0, learning_rate=0.1, shuffle=False, n_rounds=5)
    private = clone(plain).set_params(epsilon=1.0, clip_norm=1e-9).fit(X, y, groups=groups)
    np.testing.assert_array_equal(private.coef_, plain.fit(X, y, groups=groups).coef_)
    assert not model.release().predict(X).any()


@pytest.mark.parametrize("params", [{}, {"clip_quantile": 0.4, "average": True}], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
def test_warm_starts_are_the_same_bits_and_add_up(params, sparse):
    X, y, groups = table()
    X = csr_array(X * (X > 0)) if sparse else X
    model = PPSGDRegressor(
        warm_start=True, batch_size=3, random_state=SEED, delta=1e-3, **NOISE, **params
    )
    whole = clone(model).set_params(n_rounds=40).fit(X, y, groups=groups)
    spent = []
    for n_rounds in (15, 16, 40):
        spent.append(model.set_params(n_rounds=n_rounds).fit(X, y, groups=groups).privacy_.epsilon)
    report, model.privacy_ = model.privacy_, whole.privacy_
    assert_same_fit(model, whole)
    assert report.epsilon == pytest.approx(whole.privacy_.epsilon, rel=1e-3)
    assert report.rounds == 40
    assert spent == sorted(set(spent))


def test_epsilons_add_up_beyond_what_was_asked():
    X, y, groups = table()
    model = PPSGDRegressor(
        epsilon=1.0, delta=1e-3, clip_norm=1.0, learning_rate=0.05, n_rounds=20, warm_start=True
    ).fit(X, y, groups=groups)
    z = model.noise_multiplier_
    model.set_params(n_rounds=80)
    with pytest.warns(PrivacyWarning, match=r"epsilon = 1\b.*\b2\.302\b"):
        model.fit(X, y, groups=groups)
    assert model.noise_multiplier_ == z
    assert model.privacy_.epsilon == pytest.approx(gdp_epsilon(math.sqrt(80) / z, 1e-3), rel=1e-3)
    model.partial_fit(X, y, groups=groups)  # 80 rounds for another epsilon of 1
    spent = model._progress.spent
    assert [event.n_rounds for event in spent] == [20, 60, 80]
    mu = math.sqrt(sum(event.n_rounds / event.noise_multiplier**2 for event in spent))
    assert model.privacy_.epsilon == pytest.approx(gdp_epsilon(mu, 1e-3), rel=1e-3)
    assert model.noise_multiplier_ == pytest.approx(2 * z, rel=1e-3)


def test_privacy_is_not_regained():
    """Rounds without noise, before or after, leave nothing to promise."""
    X, y, groups = table()
    bare = {"noise_multiplier": None, "clip_norm": None}
    for first, second in ((bare, NOISE), (NOISE, bare)):
        model = PPSGDRegressor(learning_rate=0.05, n_rounds=5).set_params(**first)
        model.partial_fit(X, y, groups=groups)
        model.set_params(**second).partial_fit(X, y, groups=groups)
        assert model.privacy_.epsilon == math.inf
        with pytest.raises(ValueError, match=r"release.*PPSGDRegressor.*epsilon"):
            model.release()
        if first is bare:
            assert "before these had no noise" in model.privacy_.warnings[0]


@pytest.mark.parametrize("sparse", [False, True])
def test_new_bounds_and_multipliers_hold_from_then_on(sparse):
    """Rows of zeros: what is added to w in the second call is its own noise."""
    X, groups = np.zeros((8, 4000)), np.arange(8)
    X = csr_array(X) if sparse else X
    model = PPSGDRegressor(
        alpha=math.inf, learning_rate=1.0, weighting="clients", fit_intercept=False
    )
    model.partial_fit(X, np.ones(8), groups=groups)
    assert not model.population_coef_.any()
    for z, bound in ((1.0, 8.0), (2.0, 800.0), (0.5, 0.08)):
        before = model.population_coef_.copy()
        model.set_params(noise_multiplier=z, clip_norm=bound, n_rounds=1)
        model.partial_fit(X, np.ones(8), groups=groups)
        added = (model.population_coef_ - before).std()
        assert added == pytest.approx(z * bound / 8, rel=FAR / math.sqrt(8000))
        assert model.history_["clip_norm"][-1] == bound


def test_a_callback_that_ends_the_rounds_costs_the_promise():
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=20, warm_start=True, **NOISE)
    model.set_callbacks(StopAfter(6)).fit(X, y, groups=groups)
    assert model.n_rounds_ == 6
    assert model.privacy_.epsilon == math.inf
    assert "callback ended the rounds early" in model.privacy_.warnings[-1]
    model.set_callbacks().fit(X, y, groups=groups)
    assert model.n_rounds_ == 20
    assert model.privacy_.epsilon == math.inf
    watched = PPSGDRegressor(n_rounds=20, **NOISE).set_callbacks(StopAfter(100))
    assert math.isfinite(watched.fit(X, y, groups=groups).privacy_.epsilon)


def arrays(value, path=""):
    """All arrays that an object holds, by path."""
    if isinstance(value, np.ndarray):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from arrays(item, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from arrays(item, f"{path}[{i}]")
    elif hasattr(value, "__dict__"):
        yield from arrays(vars(value), path)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_release_holds_the_population_alone(sparse, tmp_path):
    X, y, groups = table()
    X = csr_array(X) if sparse else X
    model = PPSGDClassifier(
        random_state=3,
        checkpoint=tmp_path / "x",
        ledger=PrivacyLedger(tmp_path / "ledger"),
        **NOISE,
    ).fit(X, y > 0, groups=groups)
    released = model.release()
    held = {"._population", ".classes_", *(f"._server.{name}" for name in released._server)}
    assert {path for path, _ in arrays(released)} == held
    noise = released._server.keys() - {"coef"}
    assert noise <= {"settled", "variance"}
    assert not any(released._server[name].any() for name in noise)
    for name in ("_progress", "history_", "_local", "n_samples_per_client_", "clients_"):
        assert not hasattr(released, name)
        assert hasattr(model, name)
    for name in ("random_state", "ledger", "checkpoint"):
        assert getattr(released, name) is None
    text = pickle.dumps(released)
    assert len(text) < 6000
    assert str(tmp_path).encode() not in text
    own = model.for_client(3)
    assert own._local is not model._local
    assert not hasattr(own, "history_")
    assert not hasattr(own, "_progress")
    copied = pickle.loads(pickle.dumps(model))
    assert_same_fit(copied, model)
    assert not hasattr(clone(model), "population_coef_")
    np.testing.assert_array_equal(
        copied.predict_proba(X, groups=groups), model.predict_proba(X, groups=groups)
    )


AUTO = {"noise_multiplier": 1.0, "learning_rate": "auto"}
FEW = {"client_fraction": 0.05, "sampling": "fixed"}


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, r"epsilon=1\.0\b.*noise_multiplier=1\.0\b"),
        (
            {"epsilon": 1.0, "clip_norm": None, "learning_rate": "theory", "smoothness": 2.0},
            r"learning_rate='theory'.*clip_norm=None.*normalizes",
        ),
        ({"epsilon": 1.0, "noise_multiplier": 0.0}, r"epsilon=1\.0\b.*noise_multiplier=0\.0\b"),
        ({"clip_quantile": 0.5, "clip_norm": None}, r"clip_quantile=0.5.*clip_norm"),
        ({"epsilon": 1.0, "delta": 0.0}, r"delta.*\b0\b"),
        (AUTO, r"learning_rate='auto'.*clip_norm=1\.0.*'theory'.*smoothness"),
        ({"epsilon": 1.0, "learning_rate": "theory"}, r"learning_rate='theory'.*smoothness"),
        (FEW, r"client_fraction=0\.05.*\b8 clients.*sampling='fixed'"),
    ],
    ids=str,
)
def test_what_is_refused(params, error, tmp_path):
    """Before anything is written to the ledger, if the parameters alone are wrong."""
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger")
    shared = {"clip_norm": 1.0, "learning_rate": 0.1, "ledger": ledger}
    model = PPSGDRegressor(**{**shared, **params})
    before = dict(vars(model))
    for fit in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=error):
            fit(X, y, groups=groups)
    assert vars(model) == before
    if "client_fraction=" not in error:  # needs the number of clients
        assert ledger.entries == []


def test_a_step_that_theory_gives_may_be_used_with_noise():
    X, y, groups = table()
    model = PPSGDRegressor(epsilon=1.0, clip_norm=1.0, learning_rate="theory", smoothness=50.0)
    first = clone(model).fit(X, y, groups=groups).learning_rate_
    assert clone(model).fit(100 * X, -y, groups=groups).learning_rate_ == first


def test_a_budget_is_kept_before_rows_of_a_later_call_are_read(tmp_path):
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(1.6, 1e-3), relation="zero_out")
    model = PPSGDRegressor(epsilon=1.0, delta=1e-3, clip_norm=1.0, learning_rate=0.1, ledger=ledger)
    for _ in range(2):
        model.partial_fit(X, y, groups=groups)
    before = freeze(model)
    with pytest.raises(BudgetExceeded, match=r"PPSGDRegressor.*epsilon = 1\b.*\b1\.6\b"):
        model.partial_fit(np.full_like(X, np.nan), y, groups=groups)
    assert_frozen(model, before)
    assert len(ledger.entries) == 2


def test_the_ledger_has_what_every_call_adds(tmp_path):
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger", delta=1e-3, relation="zero_out")
    model = PPSGDRegressor(n_rounds=20, warm_start=True, delta=1e-3, ledger=ledger, **NOISE)
    model.fit(X, y, groups=groups)
    model.set_params(n_rounds=50).fit(X, y, groups=groups)
    model.fit(X, y, groups=groups)  # nothing was left to do
    model.partial_fit(X, y, groups=groups)
    events = [entry["events"] for entry in ledger.entries]
    assert [sum(event["n_rounds"] for event in found) for found in events] == [20, 30, 0, 50]
    assert ledger.total() == pytest.approx(model.privacy_.epsilon, rel=1e-3)
