"""CollaborativeMean as a stream: promises, calls, intervals, bad input."""

import copy
import itertools
import math
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy import stats
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import pfl_sklearn
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.online import CollaborativeMean, _collaborative_mean
from pfl_sklearn.privacy import PrivacyLedger, gdp_epsilon, gdp_mu, search_cost
from pfl_sklearn.privacy._mechanisms._square_root import SquareRootSums
from tests.helpers.interruption import interrupt_everywhere
from tests.helpers.streams import LABELS, PRINTED, PRIVATE, stream

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")


def test_a_broadcast_promises_the_same_against_everybody():
    X, y, groups, _ = stream(3)
    report = CollaborativeMean(**PRIVATE).fit(X, y, groups=groups).privacy_
    assert (report.epsilon, report.epsilon_per_recipient) == pytest.approx((1, 1))
    assert (report.unit, report.relation, report.delta) == ("row", "replace_one", 1e-6)
    assert report.epsilon_whole_client > 1e6  # of a horizon of 30,000
    assert "if all rows of a client are replaced" in str(report)


def test_cost_of_all_values_without_a_horizon_is_that_of_the_values_so_far():
    X, y, groups, _ = stream(3)
    model = CollaborativeMean(**{**PRIVATE, "horizon": None}).fit(
        X[:200], y[:200], groups=groups[:200]
    )
    assert model.privacy_.epsilon_whole_client == pytest.approx(1)
    assert any("so far" in one for one in model.privacy_.assumptions)
    model.partial_fit(X, y, groups=groups)
    assert model.privacy_.epsilon_whole_client > 1.5


@pytest.mark.parametrize(
    ("mechanism", "weights"),
    [("sqrt", "blue"), ("sqrt", "last"), ("tree", "last"), ("pm1", "blue"), ("pm2", "last")],
)
def test_messages_are_unbiased_with_the_stated_variance(mechanism, weights):
    """Half of the noise would be noticed: 4 standard errors of the variance are .27."""
    X, y, groups, means = stream(40, np.repeat([0, 1, 2], 150))
    model = CollaborativeMean(
        mechanism=mechanism,
        weights=weights,
        schedule="broadcast",
        noise_variance=1 / 12,
        **{**PRIVATE, "horizon": 40},
    ).fit(X, y, groups=groups)
    errors = (model.received_means_ - means) / model.received_stds_
    assert errors.mean() == pytest.approx(0, abs=4 / math.sqrt(450))
    assert errors.var() == pytest.approx(1, abs=4 * math.sqrt(2 / 450))


SETTINGS = [
    {},
    {"decision": "test"},
    PRIVATE,
    {**PRIVATE, "horizon": None, "decision": "test"},
    {**PRIVATE, "mechanism": "tree", "noise_variance": 0.1},
    {**PRIVATE, "mechanism": "pm1", "noise_variance": 0.1, "decision": "test"},
    {**PRIVATE, "mechanism": "pm1", "noise_variance": 0.1},
    {**PRIVATE, "mechanism": "pm2", "noise_variance": 0.1, "decision": "test", "weights": "blue"},
    {**PRIVATE, "mechanism": "pm2", "schedule": "broadcast", "weights": "mom"},
    {
        **PRIVATE,
        "mechanism": "pm1",
        "schedule": "restricted",
        "noise_variance": 0.1,
        "decision": "test",
    },
]
every = pytest.mark.parametrize("params", SETTINGS, ids=repr)


@pytest.mark.slow_but_first
@every
def test_a_stream_in_parts_is_the_same_stream(params):
    """Messages do not depend on how rows are split into calls, nor on a round trip by pickle."""
    X, y, groups, _ = stream(30, np.repeat([0, 1], 6))
    whole = CollaborativeMean(**params).fit(X, y, groups=groups)
    parts = CollaborativeMean(**params)
    for rows in np.split(np.arange(len(y)), [12, 24, 36, 180]):
        parts.partial_fit(X[rows], y[rows], groups=groups[rows])
        parts = pickle.loads(pickle.dumps(parts))
    np.testing.assert_allclose(parts.received_means_, whole.received_means_, rtol=1e-12)
    # Classes are looked for from where they were found the last time.
    np.testing.assert_allclose(parts.means_, whole.means_, atol=0.02 * whole.stds_.min())


@every
def test_agents_come_late_and_fall_silent(params):
    """Only the order of an agent's own rows counts; a late agent has its own clock."""
    rng = np.random.default_rng(0)
    X, y, groups, _ = stream(12, np.repeat([0, 1], 4))
    model = CollaborativeMean(**params)
    first = np.isin(groups, [1, 2, 5, 6]) | (rng.random(len(y)) < 0.3) & (groups == 7)
    model.partial_fit(X[first], y[first], groups=groups[first])
    assert model.clients_.tolist() == [1, 2, 5, 6, 7]
    model.partial_fit(X[~first], y[~first], groups=groups[~first])
    assert model.clients_.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert model.n_samples_per_client_.tolist() == [12] * 8
    np.testing.assert_allclose(model.local_means_, y.reshape(12, 8).mean(axis=0))
    assert np.isfinite(model.means_).all()
    assert (model.stds_ > 0).all()


@pytest.mark.parametrize("weights", ["last", "mom", "wmom", "blue"])
@pytest.mark.parametrize("schedule", ["broadcast", "round_robin"])
def test_weights_without_noise_are_those_asked_for(weights, schedule):
    """Equations (1) and (2) of the paper by a loop; without noise the last mean is the best one."""
    n, n_steps = 4, 20
    X, y, groups, _ = stream(n_steps, np.arange(n) % 3)
    model = CollaborativeMean(
        mechanism="pm1", weights=weights, schedule=schedule, noise_variance=0.25, decision="test"
    ).fit(X, y, groups=groups)
    rows, everybody = y.reshape(n_steps, n), np.arange(1, n_steps + 1)
    for recipient, sender in itertools.permutations(range(n), 2):
        turn = sender - (sender > recipient)
        times = everybody if schedule == "broadcast" else everybody[turn :: n - 1]
        received = (..., sender) if schedule == "broadcast" else (recipient, sender)
        k = len(times)
        first = {"mom": 1, "wmom": 2 ** int(math.log2(k))}.get(weights, k)
        share = [1 / (k - first + 1) if j >= first else 0.0 for j in range(1, k + 1)]
        mean, variance = 0.0, 0.0
        for i, t in enumerate(times):
            mean += share[i] * rows[:t, sender].mean()
            later = sum(w / t_j for w, t_j in zip(share[i:], times[i:], strict=True))
            variance += 0.25 * (t - (times[i - 1] if i else 0)) * later**2
        precision = 1e-12 if schedule == "broadcast" else 1e-6  # pairs hold single precision
        assert model.received_means_[received] == pytest.approx(mean, rel=precision)
        assert model.received_stds_[received] == pytest.approx(math.sqrt(variance), rel=precision)


@pytest.mark.parametrize("mechanism", ["sqrt", "tree", "pm1", "pm2"])
def test_automatic_weights_without_noise_are_the_last_ones(mechanism):
    X, y, groups, _ = stream(20, np.repeat([0, 1], 6))
    params = {"mechanism": mechanism, "schedule": "broadcast"}
    model = CollaborativeMean(**params).fit(X, y, groups=groups)
    np.testing.assert_allclose(model.received_means_, model.local_means_, rtol=1e-12)


def test_the_default_finds_the_classes_of_the_paper():
    X, y, groups, means = stream(600)
    y = means[groups] + (y - means[groups]) * 1.7  # an sd of .49
    local = (y.reshape(600, 200).mean(axis=0) - means) ** 2
    wide = {**PRIVATE, "bounds": (-0.2, 2.2)}
    for params, least in ((wide, 0.4), ({}, 0.1)):
        model = CollaborativeMean(**params).fit(X, y, groups=groups)
        assert ((model.means_ - means) ** 2).mean() < least * local.mean()
        inside = np.abs(model.means_ - means) < 1.96 * model.stds_
        assert inside.mean() > 0.9
    same = model.classes_of_.toarray()
    assert (same == (LABELS[:, None] == LABELS)).mean() > 0.99


def test_estimated_variances_cost_no_epsilon():
    """Values and squares together change by no more than values alone; agents' variances differ."""
    rng = np.random.default_rng(0)
    sd = np.repeat([0.05, 0.2], 40)
    y = np.clip(0.5 + sd * rng.standard_normal((2000, 80)), 0, 1).ravel()
    groups = np.tile(np.arange(80), 2000)
    model = CollaborativeMean(epsilon=4.0, bounds=(0, 1), horizon=2000, random_state=0)
    model.fit(np.zeros((len(y), 1)), y, groups=groups)
    found = np.sqrt(model._stream._read_messages()[1].variances)
    assert np.abs(found[:40] - 0.05).mean() < 0.03
    assert np.abs(found[40:] - 0.2).mean() < 0.03


def test_square_of_a_value_costs_nothing_next_to_it():
    from pfl_sklearn.online._variances import value_and_square

    values = value_and_square(np.linspace(-0.5, 0.5, 401), True)
    apart = np.linalg.norm(values[:, :, None] - values[:, None], axis=0)
    assert apart.max() == pytest.approx(1, rel=1e-12)


def test_values_are_clipped_and_counted():
    X, y = np.zeros((4, 1)), np.array([0.2, 5.0, -3.0, 0.4])
    model = CollaborativeMean(bounds=(0, 1)).fit(X, y, groups=[0, 0, 1, 1])
    assert model.n_clipped_ == 2
    assert model.local_means_.tolist() == pytest.approx([0.6, 0.2])
    model.partial_fit(X[:1], [9.0], groups=[1])
    assert model.n_clipped_ == 3
    strict = CollaborativeMean(bounds=(0, 1), out_of_bounds="error")
    with pytest.raises(ValueError, match=r"y\[1\] = 5 is outside the bounds \(0, 1\)"):
        strict.fit(X, y, groups=[0, 0, 1, 1])


def test_bounds_and_variances_of_every_client():
    X, y = np.zeros((4, 1)), np.array([0.2, 0.4, 12.0, 19.0])
    params = {"bounds": {"a": (0, 1), "b": (10, 20)}, "noise_variance": {"a": 0.1, "b": 9.0}}
    model = CollaborativeMean(epsilon=8.0, horizon=4, random_state=0, **params)
    model.fit(X, y, groups=list("aabb"))
    std = np.sqrt(2) * gdp_mu(8.0, 1e-6)
    assert model.received_stds_[1] > 10 / std / 2 > model.received_stds_[0] * 3
    for handed in (model.release(), model.for_client("a")):  # without ids of others
        assert handed.bounds is handed.noise_variance is None
    with pytest.raises(ValueError, match=r"bounds has no entry for client 'c'"):
        model.partial_fit(X[:1], y[:1], groups=["c"])
    assert model.n_samples_per_client_.tolist() == [2, 2]


BAD = [
    ({"epsilon": 1.0}, r"bounds must be given when epsilon is finite"),
    ({"epsilon": 1.0, "bounds": (0, 1), "delta": 0}, r"delta must be above 0"),
    ({"epsilon": 1.0, "bounds": (1, 0)}, r"bounds must be a pair .*\(1, 0\)"),
    ({"epsilon": 1.0, "bounds": (0, math.inf)}, r"bounds must be a pair"),
    ({"epsilon": 1.0, "bounds": (-1e200, 1e200)}, r"bounds must be a pair .* and 1e150"),
    ({"epsilon": 1.0, "bounds": (0, 1e-300)}, r"bounds must be a pair .* 1e-150 apart"),
    ({"bounds": {0: (0, 1), 1: (2, 1)}}, r"bounds of client 1 must be .*got \(2, 1\)"),
    ({"bounds": {0: (0, 1), 1: (0, 1e13)}}, r"bounds of all clients must be alike"),
    ({"epsilon": 1.0, "bounds": 3.0}, r"bounds"),
    ({"mechanism": "pm1"}, r"noise_variance must be given where pairs"),
    ({"noise_variance": {1: 2.0}}, r"noise_variance has no entry for client 0"),
    (
        {"noise_variance": {0: -1.0, 1: 2.0}},
        r"noise_variance of client 0 must be a positive, finite number",
    ),
    ({"noise_variance": {0: "a", 1: 2.0}}, r"client 0 must be .*; got 'a'"),
    ({"schedule": "round_robin"}, r"schedule='round_robin' does not go with mechanism='sqrt'"),
    ({"weights": "mom"}, r"weights='mom' does not go with mechanism='sqrt'; use 'auto' or 'blue'"),
    ({"accounting": "printed"}, r"accounting='printed' is for mechanism='pm1' and 'pm2'"),
    ({**PRINTED, "mechanism": "pm1", "epsilon": 2.0}, r"printed' holds for epsilon up to 1"),
    ({**PRINTED, "mechanism": "pm2", "horizon": None}, r"needs a horizon"),
    ({"decision": "oracle"}, r"decision='oracle' needs labels"),
    ({"mechanism": "pm1", "noise_variance": 1.0, "schedule": "restricted"}, r"decision='test'"),
    ({"horizon": 1}, r"horizon=1, but client 0 would have 2 rows; none of this call was used"),
]


@pytest.mark.parametrize(("params", "error"), BAD, ids=repr)
def test_bad_parameters(params, error):
    model = CollaborativeMean(**params)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=error):
        model.fit(np.zeros((4, 1)), [0.1, 0.2, 0.3, 0.4], groups=[0, 0, 1, 1])
    assert vars(model) == before


def test_bad_calls_change_nothing():
    X, y, groups, _ = stream(3, np.repeat([0, 1], 2))
    model = CollaborativeMean(**{**PRIVATE, "horizon": 4}).fit(X, y, groups=groups)
    state = pickle.dumps(model)
    for X_bad, y_bad, ids, error in (
        (X[:2], y[:2], [0, 0], r"horizon=4, but client 0 would have 5 rows"),
        (X[:2], [0.1, math.nan], [0, 1], r"NaN"),
        (X[:2], y[:2], ["a", "b"], r"ids"),
        (X[:2], y[:3], [0, 1], r"inconsistent"),
        (X[:2], y[:2], None, r"began with groups"),
        (np.zeros((2, 3)), y[:2], [0, 1], r"features"),
    ):
        with pytest.raises(ValueError, match=error):
            model.partial_fit(X_bad, y_bad, groups=ids)
    assert pickle.dumps(model) == state
    model.set_params(epsilon=2.0)
    with pytest.raises(ValueError, match=r"epsilon was 1.0 when this stream began and is 2.0 now"):
        model.partial_fit(X[:1], y[:1], groups=[0])
    bounds = list(PRIVATE["bounds"])
    model.set_params(epsilon=1, n_jobs=2, bounds=bounds).partial_fit(X[:1], y[:1], groups=[0])


def test_dicts_may_grow_but_not_change():
    X, y = np.zeros((2, 1)), np.array([0.2, 12.0])
    bounds = {"a": (0, 1), "b": (10, 20)}
    model = CollaborativeMean(epsilon=8.0, bounds=bounds, random_state=0).fit(
        X, y, groups=["a", "b"]
    )
    bounds["c"] = (5, 6)
    model.partial_fit(X, [0.1, 5.5], groups=["a", "c"])
    assert model.n_clipped_ == 0
    bounds["b"] = (0, 20)
    with pytest.raises(ValueError, match=r"bounds of client 'b' was \(10, 20\) when this stream"):
        model.partial_fit(X[:1], [0.1], groups=["a"])
    model.set_params(bounds={"a": (0, 1)})
    with pytest.raises(ValueError, match=r"bounds of client 'b' was \(10, 20\) .* is None now"):
        model.partial_fit(X[:1], [0.1], groups=["a"])


SHARES = ("means_", "stds_", "local_means_", "received_means_", "n_samples_per_client_", "clients_")


@pytest.mark.parametrize(
    "params",
    [
        {"mechanism": "tree", "weights": "wmom"},
        {"mechanism": "pm1", "noise_variance": 0.25, "schedule": "restricted", "decision": "test"},
    ],
    ids=str,
)
def test_an_interrupted_call_leaves_the_stream_as_it_was(params):
    """Whatever the step: the next call is as if there had been no interruption."""
    X, y, groups, _ = stream(3, np.repeat([0, 1], 2))
    late = np.where(groups == 3, 7, groups)  # one falls silent, another one joins
    model = CollaborativeMean(**{**PRIVATE, **params}).fit(X, y, groups=groups)
    whole = copy.deepcopy(model).partial_fit(X, y, groups=late)
    before, state = dict(vars(model)), pickle.dumps(model)
    assert interrupt_everywhere(lambda: model.partial_fit(X, y, groups=late), every=80) > 20
    assert vars(model) == before
    assert pickle.dumps(pickle.loads(state)) == pickle.dumps(pickle.loads(pickle.dumps(model)))
    model.partial_fit(X, y, groups=late)
    for name in SHARES:
        np.testing.assert_array_equal(getattr(model, name), getattr(whole, name))
    assert model.privacy_ == whole.privacy_


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("seed", [0, None])
def test_noise_of_copies(copied, seed):
    """Without a seed a copy draws its own: equal noise would show the difference of their rows."""
    X, y, groups, _ = stream(2, np.repeat([0, 1], 2))
    model = CollaborativeMean(**{**PRIVATE, "random_state": seed}).fit(X, y, groups=groups)
    one, other = (copied(model).partial_fit(X, y, groups=groups) for _ in range(2))
    assert (one.received_means_ == other.received_means_).all() == (seed is not None)
    assert (one.received_means_ == other.received_means_).any() == (seed is not None)


@pytest.mark.parametrize("seed", [0, None])
def test_noise_of_an_interrupted_call(seed):
    """Without a seed it is never drawn again; with one it is, so that the call can be repeated."""
    X, y, groups, _ = stream(1, np.repeat([0, 1], 2))
    model = CollaborativeMean(**{**PRIVATE, "random_state": seed}).fit(X, y, groups=groups)
    drawn, draw = [], SquareRootSums.advance

    def drawing(mechanism, registers, index, rng):
        drawn.append(draw(mechanism, registers, index, rng))
        if len(drawn) == 1:
            raise KeyboardInterrupt
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SquareRootSums, "advance", drawing)
        with pytest.raises(KeyboardInterrupt):
            model.partial_fit(X, y, groups=groups)
        model.partial_fit(X, 1 - y, groups=groups)
    interrupted, released = drawn
    assert (interrupted == released).all() == (seed is not None)


@pytest.mark.parametrize("noise_variance", [None, 400.0])
def test_noise_that_hides_the_variance_leaves_agents_alone(noise_variance):
    """Where noise is far above the spread of values, agents rely on themselves from the start."""
    shops = np.tile(np.arange(100), 30)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        means = rng.choice([100.0, 200.0, 300.0], 100)
        params = {"epsilon": 1.0, "bounds": (0, 500), "horizon": 365, "random_state": seed}
        model = CollaborativeMean(**params, noise_variance=noise_variance)
        before = 0
        for t in (1, 2, 3, 5, 10, 30):
            X = np.zeros(((t - before) * 100, 1))
            y = means[shops[: len(X)]] + rng.normal(0, 20, len(X))
            model.partial_fit(X, y, groups=shops[: len(X)])
            before = t
            alone = np.mean((model.local_means_ - means) ** 2)
            assert np.mean((model.means_ - means) ** 2) < 1.1 * alone


@pytest.mark.parametrize(("bounds", "outlier"), [(None, 30.0), ((-50, 50), 0.0)])
@pytest.mark.parametrize(("between", "least"), [(0.03, 0.8), (0.3, 0.92)])
def test_intervals_where_means_differ_little_for_their_range(between, least, outlier, bounds):
    """Means without classes, in a range that is wide or that an outlier makes wide.

    Own means have a standard error of .042: whether there are differences of .03 is uncertain.
    """
    groups, covered, errors = np.tile(np.arange(100), 50), [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        means = rng.normal(0, between, 100)
        means[0] += outlier
        y = means[groups] + rng.normal(0, 0.3, len(groups))
        model = CollaborativeMean(bounds=bounds).fit(np.zeros((len(y), 1)), y, groups=groups)
        lower, upper = model.credible_interval()
        covered.append(np.mean((lower < means) & (means < upper)))
        errors.append(np.mean((model.means_ - means) ** 2) / (0.09 / 50))
    assert np.mean(covered) > least
    assert np.mean(errors) < 1.02


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
def test_a_single_value_has_no_variance():
    model = CollaborativeMean().fit(np.zeros((1, 1)), [7.0])
    assert model.stds_.tolist() == [math.inf]
    model = CollaborativeMean(bounds=(0, 10)).fit(np.zeros((1, 1)), [7.0])
    assert 3 < model.stds_[0] <= 5
    model = CollaborativeMean().fit(np.zeros((2, 1)), [7.0, 9.0])
    # Student's distribution with one degree of freedom, and half of one more for the prior.
    half = model.credible_interval()[1] - 8.0
    assert 4 < half < stats.t(1).ppf(0.975)


def test_one_value_of_each_agent():
    """Intervals are wide before anybody has two values."""
    rng = np.random.default_rng(0)
    means = rng.normal(0, 5, 200)
    y = means + rng.normal(size=200)
    model = CollaborativeMean().fit(np.zeros((200, 1)), y, groups=np.arange(200))
    assert (np.abs(model.means_ - means) < 1.96 * model.stds_).mean() > 0.9


def _covered(model, means, level=0.95):
    lower, upper = model.credible_interval(level)
    return np.mean((lower <= means) & (means <= upper))


@pytest.mark.parametrize(("epsilon", "n_steps"), [(1.0, 20), (8.0, 100), (math.inf, 5)])
def test_rare_events(n_steps, epsilon):
    """Of 0/1 values, which often are all 0, the variance goes with the mean by chance."""
    covered, errors, z = [], [], []
    groups = np.tile(np.arange(100), n_steps)
    for seed in range(5):
        y = (np.random.default_rng(seed).random(len(groups)) < 0.05) * 1.0
        params = {"epsilon": epsilon, "bounds": (0, 1), "horizon": 100, "random_state": seed}
        model = CollaborativeMean(**params).fit(np.zeros((len(y), 1)), y, groups=groups)
        covered.append(_covered(model, 0.05))
        errors.append(np.mean((model.means_ - 0.05) ** 2) / (0.0475 / n_steps))
        z.append((model.population_mean_ - 0.05) / model.population_mean_std_)
    assert np.mean(covered) > 0.9
    assert np.mean(errors) < 0.9
    assert abs(np.mean(z)) < 1.5


@pytest.mark.parametrize("epsilon", [1.0, math.inf])
def test_bounds_that_are_far_too_wide(epsilon):
    """Of all clients, or of one whose values are like those of the others."""
    groups = np.tile(np.arange(60), 50)
    rng = np.random.default_rng(0)
    means = rng.uniform(0.3, 0.7, 60)
    y = means[groups] + 0.1 * rng.normal(size=len(groups))
    for bounds in ((0, 1e4), dict.fromkeys(range(1, 60), (-1, 2)) | {0: (0, 1e4)}):
        model = CollaborativeMean(epsilon=epsilon, bounds=bounds, horizon=50, random_state=0)
        model.fit(np.zeros((len(y), 1)), y, groups=groups)
        assert _covered(model, means) > 0.88
        alone = np.mean((model.local_means_ - means) ** 2)
        assert np.mean((model.means_ - means) ** 2) < 1.1 * alone


def test_intervals_of_few_values_at_any_level():
    rng = np.random.default_rng(0)
    means, groups = rng.uniform(0.3, 0.7, 600), np.tile(np.arange(600), 3)
    y = means[groups] + 0.1 * rng.normal(size=len(groups))
    model = CollaborativeMean(epsilon=1.0, bounds=(-1, 2), horizon=50, random_state=0)
    model.fit(np.zeros((len(y), 1)), y, groups=groups)
    for level in (0.5, 0.8, 0.99):
        # A Student's distribution is wider in the tails and narrower in the middle.
        assert _covered(model, means, level) == pytest.approx(level, abs=0.05)


def test_a_value_at_a_bound_is_inside():
    for low, high in ((-9.9, 6.3), (0.1, 0.7), (-0.3, 1.1)):
        model = CollaborativeMean(bounds=(low, high), out_of_bounds="error")
        model.fit(np.zeros((4, 1)), [low, high, low, high], groups=[0, 0, 1, 1])
        assert model.n_clipped_ == 0


def test_means_lie_in_the_clients_own_bounds():
    rng = np.random.default_rng(0)
    bounds, groups = {0: (0, 1), 1: (0, 100), 2: (0, 1)}, np.tile(np.arange(3), 2)
    for seed in range(10):
        model = CollaborativeMean(epsilon=0.1, bounds=bounds, noise_variance=9.0, random_state=seed)
        model.fit(np.zeros((6, 1)), rng.random(6), groups=groups)
        assert (model.means_ >= 0).all()
        assert (model.means_ <= [1, 100, 1]).all()
        assert 0 <= model.population_mean_ <= 100


def test_long_horizons_cost_nothing():
    y = [0.2, 0.4]
    for horizon in (10**9, 10**18):
        model = CollaborativeMean(epsilon=1.0, bounds=(0, 1), horizon=horizon, random_state=0)
        model.fit(np.zeros((2, 1)), y, groups=[0, 1])
        assert model.privacy_.epsilon_whole_client > 1e9


def test_labels_are_checked():
    X, y = np.zeros((4, 1)), np.arange(4.0)
    model = CollaborativeMean(decision="oracle", noise_variance=1.0)
    with pytest.raises(ValueError, match=r"labels must be a dict, or hold one label for each of"):
        model.fit(X, y, groups=[0, 0, 1, 1], labels=[1, 2, 3])
    with pytest.raises(ValueError, match=r"labels has no entry for client 1"):
        model.fit(X, y, groups=[0, 0, 1, 1], labels={0: "a"})
    with pytest.raises(ValueError, match=r"the label of client 1 is missing"):
        model.fit(X, y, groups=[0, 0, 1, 1], labels=[1.0, math.nan])
    with pytest.raises(ValueError, match=r"labels go with decision='oracle'"):
        CollaborativeMean().fit(X, y, groups=[0, 0, 1, 1], labels=[1, 2])
    model.fit(X, y, groups=[0, 0, 1, 1], labels=pd.Series(["b", "a", "a"], index=[2, 1, 0]))
    assert model.means_ == pytest.approx([1.5, 1.5])
    with pytest.raises(
        ValueError, match=r"label of client 1 was 'a' when it joined and is 'c' now"
    ):
        model.partial_fit(X[:1], [7.0], groups=[1], labels={1: "c"})
    with pytest.raises(ValueError, match=r"its index has duplicates"):
        model.partial_fit(X[:1], [7.0], groups=[2], labels=pd.Series(["b", "c"], index=[2, 2]))
    model.partial_fit(X[:1], [7.0], groups=[2], labels={2: "b"})
    assert model.means_ == pytest.approx([1.5, 1.5, 7.0])


def test_a_handed_out_model_does_not_go_on():
    X, y, groups, _ = stream(3, np.repeat([0, 1], 2))
    model = CollaborativeMean(**PRIVATE).fit(X, y, groups=groups)
    for handed in (model.for_client(1), model.release()):
        with pytest.raises(ValueError, match=r"without the stream's state"):
            handed.partial_fit(X[:1], y[:1], groups=[1])
        with pytest.raises(NotFittedError):
            handed.classes_of_  # noqa: B018


def test_a_stream_is_charged_once(tmp_path):
    X, y, groups, _ = stream(3, np.repeat([0, 1], 2))
    ledger = PrivacyLedger(tmp_path / "ledger", budget=1.3, delta=1e-6, unit="row")
    model = CollaborativeMean(**{**PRIVATE, "random_state": None}, ledger=ledger)
    for _ in range(3):
        model.partial_fit(X, y, groups=groups)
    assert ledger.total() == pytest.approx(1.0)
    with pytest.raises(pfl_sklearn.privacy.BudgetExceeded):
        model.fit(X, y, groups=groups)
    assert model.n_samples_per_client_.tolist() == [9] * 4
    pairs = CollaborativeMean(mechanism="pm1", noise_variance=1.0, ledger=ledger, **PRIVATE)
    with pytest.raises(ValueError, match=r"a ledger cannot hold messages between pairs"):
        pairs.fit(X, y, groups=groups)


@every
@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
def test_an_agent_alone(params):
    y = np.array([0.2, 0.6, 0.7])
    model = CollaborativeMean(**params).fit(np.zeros((3, 1)), y)
    assert model.means_ == pytest.approx([0.5], abs=1e-12)
    assert model.classes_of_.toarray().tolist() == [[True]]
    model.partial_fit(np.zeros((1, 1)), [0.1])
    assert model.predict(np.zeros((2, 1))) == pytest.approx([0.4, 0.4])


def test_summary_and_intervals():
    X, y, groups, _ = stream(5, np.repeat([0, 1], 2))
    model = CollaborativeMean().fit(X, y, groups=groups)
    table = model.summary()
    assert isinstance(table, pd.DataFrame)
    assert table.index.tolist() == [0, 1, 2, 3]
    assert (table["lower"] < table["mean"]).all()
    lower, upper = model.credible_interval(0.5)
    assert (upper - lower < table["upper"] - table["lower"]).all()
    mean, std = model.predict(X[:3], groups=[0, 99, 1], return_std=True)
    assert mean[:2] == pytest.approx([model.means_[0], model.population_mean_])
    assert std[1] >= model.population_std_


@pytest.mark.parametrize(
    ("decision", "warned"), [("test", True), ("oracle", True), ("mixture", False)]
)
def test_pairs_that_take_minutes_are_announced(monkeypatch, decision, warned):
    monkeypatch.setattr(_collaborative_mean, "_MANY_PAIRS", 100)
    monkeypatch.setattr(_collaborative_mean, "_PAIRS_PER_SECOND", 100 / 120)
    groups = np.tile(np.arange(10), 3)
    labels = np.zeros(10) if decision == "oracle" else None
    model = CollaborativeMean(decision=decision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(groups[:, None], np.arange(30.0), groups=groups, labels=labels)
        model.partial_fit(groups[:, None], np.arange(30.0), groups=groups)
    texts = [str(each.message) for each in caught if "pairs" in str(each.message)]
    assert len(texts) == 2 * warned
    assert all("1.0e+02 pairs of 10 agents" in text and "2 min" in text for text in texts)


def test_searches_and_wrappers():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"day": np.repeat(np.arange(30), 12), "shop": np.tile(np.arange(12), 30)})
    y = np.repeat([0.0, 3.0], 6)[table["shop"]] + rng.normal(size=360)
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(
            make_pipeline(FunctionTransformer(), CollaborativeMean()),
            {"collaborativemean__decision": ["test", "mixture"]},
            cv=ClientKFold(2, random_state=0),
            scoring=ClientScorer("neg_mean_squared_error"),
        ).fit(table[["day"]], y, groups=table["shop"])
        assert search.best_score_ > -1.3
        predicted = search.best_estimator_.predict(table[["day"]], groups=table["shop"])
    assert np.mean((predicted - y) ** 2) < 1.2
    column = ClientColumn(CollaborativeMean(), "shop")
    folds = ClientKFold(2, client_column="shop", random_state=0)
    scores = cross_validate(column, table, y, cv=folds, scoring="neg_mean_squared_error")
    assert scores["test_score"].mean() > -1.3
    assert column.fit(table, y).clients_.tolist() == list(range(12))


def test_cost_of_a_search():
    X, y, groups, _ = stream(6, np.repeat([0, 1], 3))
    private = CollaborativeMean(**{**PRIVATE, "random_state": None})
    with sklearn.config_context(enable_metadata_routing=True):
        scorer = ClientScorer("neg_mean_squared_error")
        search = GridSearchCV(private, {"decision": ["test", "mixture"]}, cv=3, scoring=scorer)
        search.fit(X, y, groups=groups)
    cost = search_cost(search)
    assert (cost.unit, cost.relation) == ("row", "replace_one")
    assert cost.epsilon == pytest.approx(gdp_epsilon(gdp_mu(1.0, 1e-6) * math.sqrt(7), 1e-6))
