"""Private selection: its account by exact distributions, its scores, and what it refuses."""

import contextlib
import math
import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import sklearn
from dp_accounting import dp_event, privacy_accountant, rdp
from scipy.special import logsumexp
from scipy.stats import binom, kstest, logser, norm, uniform
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.callback import ScoringMonitor
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    PPSGDClassifier,
    PPSGDRegressor,
    PrivacyWarning,
    SingleClientWarning,
    privacy_of,
)
from pfl_sklearn.metrics import ClientScorer, known_clients
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV, _trials
from pfl_sklearn.model_selection._selection_plan import plan_selection
from pfl_sklearn.model_selection._trials import (
    HeldOutScore,
    RoutedRows,
    best_trial,
    draw_candidates,
    held_out_rows,
)
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import (
    BudgetExceeded,
    GaussianEvent,
    PrivacyLedger,
    PureEvent,
    SampledGaussian,
    events_epsilon,
    gdp_delta,
    gdp_mu,
    search_cost,
    selection_epsilon,
)
from pfl_sklearn.privacy._mechanisms._noise import draw_n_trials, stopping_probability

DELTA = 1e-5
DISTRIBUTIONS = ("geometric", "poisson", "logarithmic")
every_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
GENERATOR = np.random.default_rng(0)
N_CLIENTS = 100
GROUPS = np.repeat(np.arange(N_CLIENTS), 6)
Y = GENERATOR.normal(size=N_CLIENTS)[GROUPS] + GENERATOR.normal(size=len(GROUPS))
X = GENERATOR.normal(size=(len(Y), 1))
FRAME = pd.DataFrame({"site": GROUPS, "x": X[:, 0]})
MEAN = GaussianMean(noise_variance=1.0)
CLIPS = {"clip_norm": [0.5, 1.0, 3.0]}
SCORES = {"score_range": (-10.0, 0.0)}


def select(estimator=MEAN, params=CLIPS, **options):
    return PrivateSelectCV(estimator, params, **{"epsilon": 2.0, **SCORES, **options})


def fitted(search, data=X, y=Y, groups=GROUPS):
    return search.fit(data, y, **({} if groups is None else {"groups": groups}))


def seeded(search, *args, seed=1):
    """Fit with a seed under which there is a trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return fitted(search.set_params(random_state=seed), *args)


# What it costs.


@pytest.mark.parametrize(
    ("n", "distribution", "epsilon"),
    [
        *((9, "geometric", 9.11), (9, "poisson", 10.05), (9, "logarithmic", 8.14)),
        (1, "geometric", 5.37),  # no selection
    ],
)
def test_golden_values(n, distribution, epsilon):
    """Rounds with noise multiplier 1 on a twentieth of the clients, 200 of them."""
    how = {"delta": DELTA, "relation": "zero_out", "distribution": distribution}
    found = selection_epsilon([SampledGaussian(1.0, 200, rate=0.05)], expected_trials=n, **how)
    assert found == pytest.approx(epsilon, abs=5e-3)


def test_one_expected_poisson_trial_may_be_two():
    event, how = [GaussianEvent(None, 0.5)], {"expected_trials": 1, "delta": DELTA}
    one, poisson = (selection_epsilon(event, **how, distribution=d) for d in DISTRIBUTIONS[:2])
    assert poisson > 1.005 * one


@pytest.mark.parametrize(
    ("events", "relation"),
    [
        ([GaussianEvent(0.3, 0.5, n_releases=3)], "replace_one"),
        ([GaussianEvent(0.3, 0.5)], "add_remove"),
        ([SampledGaussian(2.0, 50)], "replace_one"),
        ([GaussianEvent(None, 0.5, mu_zero_out=0.3)], "zero_out"),
        ([SampledGaussian(3.0, 50, rate=0.2), GaussianEvent(0.2, None, 1, 0.2)], "zero_out"),
        ([PureEvent(0.7, 0.0, "replace_one"), GaussianEvent(None, 0.2)], "replace_one"),
        ([PureEvent(0.7, 0.0, "add_remove")], "add_remove"),
    ],
)
def test_events_by_hand(events, relation):
    """The composed events with their sensitivities converted, in dp-accounting's words."""
    gaussian = dp_event.GaussianDpEvent
    parts = {
        "GaussianEvent": lambda e: gaussian(
            1 / (getattr(e, f"mu_{relation}") * math.sqrt(e.n_releases))
        ),
        "SampledGaussian": lambda e: dp_event.SelfComposedDpEvent(_round(e, relation), e.n_rounds),
        "PureEvent": lambda e: dp_event.RandomizedResponseDpEvent(2 / (1 + math.exp(e.epsilon)), 2),
    }
    relations = privacy_accountant.NeighboringRelation
    # This accountant takes randomized response under replacement alone; its divergence is the same.
    replaced = relation == "replace_one" or isinstance(events[0], PureEvent)
    native = relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=native)
    trial = dp_event.ComposedDpEvent([parts[type(event).__name__](event) for event in events])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, 5.0, 1.0))
    found = selection_epsilon(events, expected_trials=5, delta=DELTA, relation=relation)
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def _round(event, relation):
    z = event.noise_multiplier / (2 if relation == "replace_one" else 1)
    gaussian = dp_event.GaussianDpEvent(z)
    if event.rate == 1:
        return gaussian
    return dp_event.PoissonSampledDpEvent(event.rate, gaussian)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_remove"])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 3.0])
def test_pure_trials_cost_at_least_randomized_response(epsilon, relation):
    """The odds of one answer to a yes-no question are e^epsilon, of several products of these."""
    how = {"expected_trials": 1, "delta": DELTA, "relation": relation}
    trial = [PureEvent(epsilon, 0.0, relation)]
    yes = 1 / (1 + math.exp(-epsilon))
    exact = math.log((yes - DELTA) / (1 - yes))
    assert exact <= selection_epsilon(trial, **how) <= 1.2 * exact + 0.02
    ten = selection_epsilon(trial * 10, **how)
    assert events_epsilon(trial * 10, DELTA, relation) <= ten <= 10.2 * epsilon


@pytest.mark.parametrize(("relation", "sensitivity"), [("replace_one", 2.0), ("zero_out", 1.0)])
def test_divergence_of_a_fixed_number_of_clients(relation, sensitivity):
    """Against a sum over who takes part: the order's moment of the losses of all rounds."""
    z, n_rounds, rate = 8.0, 50, 0.1
    rounds = SampledGaussian(z, n_rounds, rate, "fixed")
    found = selection_epsilon([rounds], expected_trials=1, delta=DELTA, relation=relation)
    orders = np.concatenate([np.linspace(1.05, 11, 200), np.arange(11, 200)])
    counts = np.arange(n_rounds + 1)
    mus = sensitivity * np.sqrt(counts) / z
    logs = binom.logpmf(counts, n_rounds, rate) + np.outer(orders * (orders - 1), mus**2 / 2)
    renyi = logsumexp(logs, axis=1) / (orders - 1)
    spent = renyi + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)
    assert found == pytest.approx(spent.min(), rel=2e-3)
    exact = events_epsilon([rounds], DELTA, relation)
    assert exact < found < 1.4 * exact
    best = selection_epsilon([rounds], expected_trials=5, delta=DELTA, relation=relation)
    assert found < best < 3 * found


def test_what_has_no_renyi_bound_is_infinite():
    how = {"expected_trials": 5, "delta": DELTA}
    assert selection_epsilon([SampledGaussian(1.0, 9, rate=0.1)], **how) == math.inf
    assert selection_epsilon([PureEvent(1.0, 1e-6, "replace_one")], **how) == math.inf
    assert selection_epsilon([GaussianEvent(None, None)], **how) == math.inf
    assert selection_epsilon([], **how) == 0


def generating(distribution, mean):
    """E[s^K], as a function of s."""
    if distribution == "poisson":
        return lambda s: np.exp(mean * (s - 1))
    if distribution == "fixed":
        return lambda s: s**mean
    stop = stopping_probability(mean, distribution)
    if distribution == "geometric":
        return lambda s: stop * s / (1 - (1 - stop) * s)
    return lambda s: np.log1p(-(1 - stop) * s) / np.log(stop)


def delta_of_best(distribution, mean, epsilon, probabilities, others):
    """Exact delta(epsilon) of the best of K draws from one finite distribution, or the other.

    The best of K is at most j with probability E[F(j)^K]; no draw at all is an outcome too.
    """
    pgf = generating(distribution, mean)
    first, second = (
        np.diff(pgf(np.clip(np.append(0.0, np.cumsum(p)), 0, 1)), prepend=0.0)
        for p in (probabilities, others)
    )
    both = (second - math.exp(epsilon) * first, first - math.exp(epsilon) * second)
    return max(np.maximum(excess, 0).sum() for excess in both)


def randomized_response(epsilon):
    low = 1 / (1 + math.exp(epsilon))
    return np.array([low, 1 - low]), np.array([1 - low, low])


def gaussian_bins(mu):
    """A Gaussian release in bins, which is post-processing: shifted up, and as it is."""
    edges = np.linspace(-9, 9 + mu, 4001)
    inner = [np.diff(norm.cdf(edges, centre)) for centre in (0.0, mu)]
    tails = [(norm.cdf(edges[0], c), norm.sf(edges[-1], c)) for c in (0.0, mu)]
    return [np.r_[low, body, high] for body, (low, high) in zip(inner, tails, strict=True)]


@every_distribution
@pytest.mark.parametrize(("mean", "delta"), [(2.0, 1e-5), (50.0, 1e-2)])
def test_the_account_covers_the_exact_distribution(distribution, mean, delta):
    """Null models, whose scores are all that the client moves."""
    how = {"expected_trials": mean, "distribution": distribution, "delta": delta}
    for size in (0.2, 1.0):
        claimed = selection_epsilon([PureEvent(size, 0.0, "replace_one")], **how)
        exact = delta_of_best(distribution, mean, claimed, *randomized_response(size))
        assert exact <= delta
        claimed = selection_epsilon([GaussianEvent(None, size)], **how)
        assert delta_of_best(distribution, mean, claimed, *gaussian_bins(size)) <= delta


def test_a_fixed_number_of_trials_is_convicted():
    """The best of nine at the price of one, or at that of a random number with mean nine."""
    how = {"expected_trials": 9, "delta": DELTA}
    event, pair = PureEvent(0.5, 0.0, "replace_one"), randomized_response(0.5)
    for claimed in (0.5, selection_epsilon([event], **how)):
        assert delta_of_best("fixed", 9, claimed, *pair) > 100 * DELTA
    mu = gdp_mu(1.0, DELTA)
    pair = gaussian_bins(mu)
    assert delta_of_best("fixed", 1, 1.0, *pair) == pytest.approx(DELTA, rel=0.01)
    assert delta_of_best("fixed", 200, 1.0, *pair) > 3 * DELTA
    assert delta_of_best("geometric", 9, 1.0, *pair) > DELTA  # a trial's epsilon is not the total


@pytest.mark.slow_but_first
@every_distribution
def test_the_calibrated_noise_is_covered_and_much_less_is_not(distribution):
    """What a client can move the released mean by, in a selection by that mean itself."""
    model = seeded(
        select(epsilon=3.0, holdout=(X, Y), distribution=distribution, expected_trials=5)
    )
    report = model.privacy_
    mu = report.sensitivity / report.noise_std
    assert mu == pytest.approx(gdp_mu(model.trial_params_["epsilon"], DELTA))
    assert delta_of_best(distribution, 5, 3.0, *gaussian_bins(mu)) <= DELTA
    assert delta_of_best(distribution, 5, 3.0, *gaussian_bins(2.5 * mu)) > DELTA


@every_distribution
def test_number_of_trials(distribution):
    rng = np.random.default_rng(0)
    drawn = np.array([draw_n_trials(9.0, distribution, rng) for _ in range(8000)])
    pgf = generating(distribution, 9.0)
    for s in (0.0, 0.3, 0.8, 0.95):
        values = s**drawn
        error = values.std() / math.sqrt(len(drawn))
        assert abs(values.mean() - pgf(s)) <= 4.5 * error + 1e-12
    assert drawn.mean() == pytest.approx(9.0, abs=0.5)
    assert drawn.min() == (0 if distribution == "poisson" else 1)


def test_logarithmic_numbers_have_the_mean_asked_for():
    for mean in (1.0, 1.01, 9.0, 1e4):
        stop = stopping_probability(mean, "logarithmic")
        assert mean == 1 or logser(1 - stop).mean() == pytest.approx(mean, rel=1e-6)
        assert draw_n_trials(mean, "logarithmic", np.random.default_rng(0)) >= 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("distribution", "epsilon"), [("geometric", 0.5), ("poisson", 8.0), ("logarithmic", 0.5)]
)
def test_trials_are_calibrated_to_the_total(distribution, epsilon):
    how = {"expected_trials": 6, "distribution": distribution}
    model = seeded(select(epsilon=epsilon, holdout=(X, Y), **how))
    event = GaussianEvent(None, gdp_mu(model.trial_params_["epsilon"], DELTA))
    spent = selection_epsilon([event], delta=DELTA, **how)
    assert 0.999 * epsilon < spent <= epsilon
    assert model.privacy_.epsilon == epsilon
    assert model.best_estimator_.epsilon == model.trial_params_["epsilon"] < epsilon


@pytest.mark.slow
def test_a_private_score_is_paid_for():
    public = fitted(select(holdout=(X, Y)))
    private = fitted(select(score_share=0.4))
    mus = [gdp_mu(model.trial_params_["epsilon"], DELTA) for model in (public, private)]
    assert math.hypot(mus[1], gdp_mu(0.4 * 2.0, DELTA)) == pytest.approx(mus[0], rel=1e-3)


class Rounds(RegressorMixin, BaseEstimator):
    """Spends rounds on Poisson samples, by a noise multiplier."""

    _privacy_relation = "zero_out"

    def __init__(
        self, alpha=1.0, n_rounds=200, epsilon=math.inf, noise_multiplier=None, delta=DELTA
    ):
        self.alpha = alpha
        self.n_rounds = n_rounds
        self.epsilon = epsilon
        self.noise_multiplier = noise_multiplier
        self.delta = delta

    def _privacy_events(self):
        if self.noise_multiplier is None:
            return None
        if self.alpha == 0:
            return ()
        return (SampledGaussian(self.noise_multiplier, self.n_rounds, rate=0.05),)

    def fit(self, X, y, groups=None):
        self.fitted_ = True
        return self

    def predict(self, X):
        return np.zeros(len(X))


def test_noise_multipliers_are_calibrated():
    grid = {"alpha": [0.0, 1.0, 10.0]}
    plan = plan_selection(select(Rounds(), grid, epsilon=9.114, expected_trials=9, holdout=(X, Y)))
    assert plan.params["noise_multiplier"] == pytest.approx(1.0, abs=2e-3)
    assert plan.params["epsilon"] == math.inf
    assert plan.relation == "zero_out"
    with pytest.raises(ValueError, match=r"param_distributions.*n_rounds=50"):
        plan_selection(select(Rounds(), {"n_rounds": [200, 50]}, holdout=(X, Y)))


# What the trials draw and how they are scored.


@pytest.mark.slow
def test_candidates_are_drawn_with_replacement():
    params = [{"clip_norm": [1.0, 2.0]}, {"clip_norm": uniform(5, 5), "noise_variance": [1.0]}]
    search = select(params=params, expected_trials=1e4, epsilon=math.inf)
    plan = SimpleNamespace(params={}, relation="replace_one", spending=())
    drawn = draw_candidates(search, plan, np.random.default_rng(1))
    listed = [each["clip_norm"] for each in drawn if len(each) == 1]
    spread = [each["clip_norm"] for each in drawn if len(each) == 2]
    n = len(drawn)
    assert n > 100
    assert abs(len(listed) - n / 2) < 4 * math.sqrt(n) / 2
    assert abs(listed.count(1.0) - len(listed) / 2) < 4 * math.sqrt(len(listed)) / 2
    assert kstest(spread, uniform(5, 5).cdf).pvalue > 1e-4


def test_held_out_rows():
    sizes = np.array([1, 2, 3, 4, 8, 100])
    codes = np.random.default_rng(0).permutation(np.repeat(np.arange(6), sizes))
    tested = held_out_rows(codes, sizes, 0.25, np.random.default_rng(1))
    assert np.bincount(codes[tested], minlength=6).tolist() == [0, 1, 1, 1, 2, 25]
    others = held_out_rows(codes, sizes, 0.25, np.random.default_rng(2))
    assert (tested != others).any()
    shares = np.mean(
        [held_out_rows(codes, sizes, 0.5, np.random.default_rng(seed)) for seed in range(400)],
        axis=0,
    )
    np.testing.assert_allclose(shares[sizes[codes] == 100], 0.5, atol=0.13)


def constant_clients(n=50, rows=4):
    """Clients whose rows are all alike, so that every hold-out is the same."""
    values = np.linspace(-1, 1, n)
    return np.zeros((n * rows, 1)), np.repeat(values, rows), np.repeat(np.arange(n), rows)


KNOWN = GaussianMean(GaussianPrior(mean=0.0, covariance=1.0), noise_variance=1.0, clip_norm=1.0)


def scores_of_constant_clients():
    """Minus squared errors (50,) of a client's row by a fit to its other three."""
    values = np.linspace(-1, 1, 50)
    model = KNOWN.fit(np.zeros((150, 1)), values.repeat(3), groups=np.arange(50).repeat(3))
    return -((values - model.means_) ** 2)


@pytest.mark.slow
def test_the_noise_on_scores():
    """Only the score is random: this model releases nothing. Half the noise fails by 5 s.d."""
    data, y, groups = constant_clients()
    search = select(
        KNOWN, {"method": ["reml"]}, expected_trials=1, score_range=(-0.05, 0.0), score_share=0.5
    )
    found = [seeded(search, data, y, groups, seed=k).best_score_ for k in range(60)]
    exact = np.mean(np.clip(scores_of_constant_clients(), -0.05, 0.0))
    std = 0.05 / gdp_mu(0.5 * 2.0, DELTA) / 50
    assert np.std(found) == pytest.approx(std, rel=0.25)
    assert np.mean(found) == pytest.approx(exact, abs=4.5 * std / math.sqrt(60))


def test_scores_without_privacy_are_exact():
    data, y, groups = constant_clients()
    search = select(KNOWN, {"method": ["reml"]}, epsilon=math.inf, score_range=None)
    exact = np.mean(scores_of_constant_clients())
    assert fitted(search, data, y, groups).best_score_ == pytest.approx(exact, rel=1e-12)
    wrapped = search.set_params(scoring=ClientScorer("neg_mean_squared_error", average="macro"))
    assert fitted(wrapped, data, y, groups).best_score_ == pytest.approx(exact, rel=1e-12)


def test_one_client_moves_the_sum_of_scores_by_one_at_most():
    """Whatever it has: outliers, and scores that are not defined."""
    data, y, groups = constant_clients(n=5)
    model = GaussianMean(noise_variance=1.0).fit(data, y, groups=groups)
    targets = [np.where(groups == 2, extreme, y) for extreme in (0.0, 1e180, -1e180)]
    for kind in (("neg_mean_squared_error", (-4.0, 0.0)), ("r2", (-1.0, 1.0))):
        shares = np.array([shares_of(model, data, changed, groups, *kind) for changed in targets])
        assert shares.min() >= 0
        assert shares.max() <= 1
        assert (np.delete(shares, 2, axis=1) == np.delete(shares, 2, axis=1)[0]).all()


class Picky(GaussianMean):
    """Refuses to predict for rows that are not finite, as estimators do that read them."""

    __module__ = GaussianMean.__module__

    def predict(self, X, *, groups=None):
        if not np.isfinite(X).all():
            raise ValueError("X contains NaN.")
        return super().predict(X, groups=groups)


def strict(estimator, X, y):
    """Scorer that tells what it saw."""
    if y.max() > 0.5:
        raise RuntimeError(f"the targets are {y}")
    if y.max() > 0:
        warnings.warn(f"a target is {y.max()}", stacklevel=2)
    return -np.mean((y - estimator.predict(X)) ** 2)


def shares_of(model, data, y, groups, scoring, bounds):
    """What the clients send of their scores to the mechanism."""
    received = []

    class Sum:
        def privatize(self, messages, rng):
            received.append(messages[:, 0])
            return messages.sum(axis=0)

    score = HeldOutScore(RoutedRows(data, y, {"groups": groups}), groups, scoring, bounds, Sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score(model, None)
    return received[0]


def test_scores_that_fail_are_the_lowest_and_leave_the_others_alone():
    data, y, groups = constant_clients(n=5)
    model = Picky(noise_variance=1.0).fit(data, y, groups=groups)
    broken = np.where((groups == 2)[:, None], np.nan, data)
    for scoring in ("neg_mean_squared_error", strict):
        bounds = (-4.0, 0.0)
        whole = shares_of(model, data, y, groups, scoring, bounds)
        failing = shares_of(model, broken, y, groups, scoring, bounds)
        assert failing[2] == 0 < whole[2]
        np.testing.assert_allclose(np.delete(failing, 2), np.delete(whole, 2), rtol=1e-12)
    assert whole[-1] == 0  # whose scorer raised
    assert not shares_of(model, data * np.nan, y, groups, strict, bounds).any()


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"holdout": (X[:9], Y[:9])}, "the rows of holdout"),
        ({"epsilon": np.inf}, "one client's held-out rows"),
        ({"epsilon": np.inf, "score_range": None}, "one client's held-out rows"),
    ],
)
def test_no_score_at_all_is_an_error(options, rows):
    def undefined(estimator, X, y):
        return math.nan

    search = select(scoring=undefined, expected_trials=2, **options)
    with pytest.raises(ValueError, match=rf"^scoring=.*undefined.*NaN in all trials.*{rows}"):
        seeded(search)
    with pytest.raises(NotFittedError):
        search.predict(X)


@pytest.mark.parametrize("scoring", ["roc_auc", strict])
def test_only_the_noisy_score_depends_on_private_rows(scoring):
    """Labels of one class, or a scorer whose error shows values: for some clients, or for all."""
    rounds = PPSGDClassifier(n_rounds=3, learning_rate=0.1, clip_norm=1.0)
    groups = GROUPS[:120]
    for labels in (np.tile([0, 1], 60), groups % 2):
        search = select(rounds, {"alpha": [1.0]}, scoring=scoring, score_range=(0.0, 1.0))
        search.set_params(expected_trials=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = fitted(search, X[:120], labels, groups)
        assert math.isfinite(model.best_score_)


@pytest.mark.parametrize(
    "container", [list, lambda y: np.array(y, dtype=object)], ids=["list", "object"]
)
@pytest.mark.parametrize("scoring", ["accuracy", "f1", "neg_log_loss", "neg_mean_squared_error"])
def test_a_label_of_one_client_leaves_the_others_scores_alone(scoring, container):
    groups = np.repeat(np.arange(6), 4)
    y = [0, 1, 1, 1] * 6
    model = BernoulliMean() if "squared" not in scoring else GaussianMean()
    model.fit(np.zeros((24, 1)), y, groups=groups)
    changed = [*y[:-1], "unheard of"]

    def scores(y):
        rows = RoutedRows(np.zeros((24, 1)), y, {"groups": groups})
        return HeldOutScore(rows, groups, scoring, None, None)._of_clients(model)

    before, after = scores(y), scores(container(changed))
    np.testing.assert_array_equal(after[:-1], before[:-1])
    assert np.isfinite(before).all()
    assert not after[-1] >= before[-1]


def test_public_rows_are_scored_by_the_population_model():
    """A client's own model is not covered by its promise, so its public rows get no use of it."""
    model = fitted(select(epsilon=1e6, holdout=(X, Y, GROUPS), params={"clip_norm": [50.0]}))
    released = model.release()
    expected = -np.mean((Y - released.predict(X)) ** 2)
    assert model.best_score_ == pytest.approx(expected, rel=1e-12)
    own = -np.mean((Y - model.predict(X, groups=GROUPS)) ** 2)
    assert own > model.best_score_ + 0.1


@pytest.mark.slow
def test_the_best_trial_wins():
    """Without noise to speak of, the right shrinkage is found."""
    params = {"noise_variance": [1e-3, 1.0, 1e3]}
    for options in ({"epsilon": math.inf}, {"epsilon": 1e5, "score_range": (-30.0, 0.0)}):
        search = select(GaussianMean(clip_norm=9.0), params, expected_trials=20, **options)
        model = seeded(search.set_params(distribution="poisson"))
        assert model.best_params_ == {"noise_variance": 1.0}


# The report, the ledger, the interface.


def test_report():
    model = fitted(select(random_state=None))
    report = model.privacy_
    assert (report.epsilon, report.delta, report.relation) == (2.0, DELTA, "replace_one")
    assert (report.unit, report.n_clients) == ("client", N_CLIENTS)
    assert report is model.best_estimator_.privacy_
    assert privacy_of(model) is report
    assert privacy_of(make_pipeline(FunctionTransformer(), model)).epsilon == 2.0
    assert {"population_mean_", "best_params_", "best_score_"} <= set(report.released)
    assert any("number" in text for text in report.not_released)
    assert "means_" in report.not_released
    assert any("score_range" in text for text in report.assumptions)
    assert not report.noise_reproducible
    assert dict(report.epsilon_under)["zero_out"] < 2.0
    assert report.warnings == ()
    assert report.from_dict(report.to_dict()) == report
    cost = search_cost(model)
    assert (cost.epsilon, cost.n_fits, cost.scores_protected) == (2.0, 1, True)
    assert not hasattr(select(BaggingRegressor(MEAN), {}), "release")


def test_the_server_of_a_selection_is_trusted_whoever_adds_the_noise():
    """It sees the messages of all trials, and the exact scores, which no epsilon covers."""
    local = GaussianMean(noise_variance=1.0, trust="local")
    report = fitted(select(local, {"clip_norm": [1.0, 4.0]})).privacy_
    assert report.trust == "central"
    assert "anyone who sees what is released" in report.adversary
    assert any("trusted with their messages and scores" in text for text in report.assumptions)


def test_trials_without_a_renyi_bound_are_refused_by_name():
    noisy = GaussianMean(noise_variance=1.0, trust="local", mechanism="discrete_gaussian")
    with pytest.raises(ValueError, match=r"Renyi.*epsilon=2\.0.*'discrete_gaussian'"):
        fitted(select(noisy, {"clip_norm": [1.0, 4.0]}, epsilon=2.0))


@every_distribution
def test_trials_are_drawn_from_the_distribution_that_is_accounted(distribution, monkeypatch):
    asked = []
    monkeypatch.setattr(_trials, "draw_n_trials", lambda *given: asked.append(given[:2]) or 1)
    seeded(select(expected_trials=3, distribution=distribution))
    assert asked == [(3, distribution)]


@pytest.mark.slow
def test_nothing_of_the_other_trials_is_kept():
    model = seeded(select(expected_trials=8, distribution="poisson"))
    assert len(model.trial_params_) > 1
    kept = {name for name in vars(model) if name not in model.get_params(deep=False)}
    best = {"best_estimator_", "best_params_", "best_score_"}
    assert kept == {*best, "trial_params_", "privacy_", "_last_fit"}  # the last: their names


@pytest.mark.slow
def test_a_seed_repeats_and_is_warned_of():
    search = select(random_state=3)
    with pytest.warns(PrivacyWarning, match="random_state") as found:
        first, second = (fitted(clone(search)) for _ in range(2))
    assert len(found) == 2  # one for each fit, however many trials it has
    assert first.privacy_.noise_reproducible
    assert first.best_score_ == second.best_score_
    assert first.best_estimator_.population_mean_ == second.best_estimator_.population_mean_
    with pytest.warns(PrivacyWarning):
        other = fitted(search.set_params(random_state=4))
    assert other.best_score_ != first.best_score_
    unseeded = [fitted(search.set_params(random_state=None)).best_score_ for _ in range(2)]
    assert unseeded[0] != unseeded[1]  # on a grid: the same by chance 3e-7 of times


class Recorded(GaussianMean):
    """Keeps what every fit releases; passes for one of the package's own."""

    __module__ = GaussianMean.__module__
    seen: list[float] = []

    def fit(self, X, y=None, *, groups=None, sample_weight=None):
        super().fit(X, y, groups=groups)
        self.seen.append(self.population_mean_)
        return self


RECORDED = Recorded(noise_variance=1.0, clip_norm=1.0, random_state=0)


@pytest.mark.parametrize("seed", [None, 5])
def test_every_trial_has_noise_of_its_own(seed):
    """Even if the estimator has a seed; and one of the trials is what is released."""
    Recorded.seen.clear()
    how = {"expected_trials": 15, "distribution": "poisson"}
    model = seeded(select(RECORDED, {"unseen": ["population"]}, **how), seed=seed)
    assert len(set(Recorded.seen)) == len(Recorded.seen) > 2
    assert model.best_estimator_.population_mean_ in Recorded.seen


@pytest.mark.slow
def test_fit_runs_as_many_trials_as_are_drawn():
    """Poisson numbers, which the test of numbers of trials holds to their distribution."""
    counts = []
    search = select(RECORDED, {"unseen": ["population"]}, expected_trials=2, holdout=(X[:9], Y[:9]))
    for seed in range(20):
        Recorded.seen.clear()
        with contextlib.suppress(RuntimeError):  # no trial
            seeded(
                search.set_params(distribution="poisson"), X[:60], Y[:60], GROUPS[:60], seed=seed
            )
        counts.append(len(Recorded.seen))
    assert min(counts) == 0  # which other distributions do not have
    values = 0.7 ** np.array(counts)
    error = values.std() / math.sqrt(len(counts))
    assert abs(values.mean() - generating("poisson", 2.0)(0.7)) < 4.5 * error


def test_ledger_has_one_entry(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl", budget=(3.0, 1e-4))
    search = select(ledger=ledger, expected_trials=20)
    fitted(search)
    assert len(ledger.entries) == 1
    assert ledger.total() == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(BudgetExceeded):
        fitted(clone(search))
    with pytest.raises(ValueError, match=r"ledger.*PrivateSelectCV"):
        fitted(select(clone(MEAN).set_params(ledger=ledger)))
    assert len(ledger.entries) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["direct", "column inside", "column around", "pipeline"])
def test_interface(how):
    pipeline, step = make_pipeline(FunctionTransformer(), MEAN), "gaussianmean__clip_norm"
    search, data, groups = {
        "direct": (select(), FRAME[["x"]], {"groups": GROUPS}),
        "column inside": (
            select(ClientColumn(MEAN, "site"), {"estimator__clip_norm": [1.0, 3.0]}),
            FRAME,
            {},
        ),
        "column around": (ClientColumn(select(pipeline, {step: [1.0, 3.0]}), "site"), FRAME, {}),
        "pipeline": (select(pipeline, {step: [1.0, 3.0]}), FRAME[["x"]], {"groups": GROUPS}),
    }[how]
    model = search.fit(data, Y, **groups)
    np.testing.assert_array_equal(model.clients_, np.arange(N_CLIENTS))
    np.testing.assert_array_equal(known_clients(model), np.arange(N_CLIENTS))
    inner = model.estimator_ if how == "column around" else model
    assert privacy_of(model).epsilon == privacy_of(inner.best_estimator_).epsilon == 2.0
    assert list(model.feature_names_in_) == list(data.columns)
    predicted = model.predict(data, **groups)
    own = inner.best_estimator_
    while not hasattr(own, "means_"):
        own = own.estimator_ if hasattr(own, "estimator_") else own.steps[-1][1]
    np.testing.assert_array_equal(predicted, own.means_[GROUPS])
    assert model.score(data, Y, **groups) > 0
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict(data, **groups), predicted)


@pytest.mark.parametrize("options", [{}, {"holdout": (FRAME, Y, GROUPS)}])
def test_groups_and_a_client_column_must_agree(options):
    """As for a ClientColumn: which of the two are the clients is for the user to say."""
    search = select(client_column="site", **options)
    assert fitted(search, FRAME).clients_.tolist() == list(range(N_CLIENTS))
    with pytest.raises(ValueError, match=r"groups= differs from column 'site' of X"):
        fitted(search, FRAME, groups=GROUPS // 2)


def test_groups_are_routed_and_searches_warn():
    search = GridSearchCV(
        select(holdout=(X, Y)),
        {"score_share": [0.1, 0.2]},
        cv=ClientKFold(2, random_state=0),
        scoring=ClientScorer("neg_mean_squared_error"),
    )
    with (
        sklearn.config_context(enable_metadata_routing=True),
        pytest.warns(PrivacyWarning, match="A search chose the parameters"),
    ):
        search.fit(X, Y, groups=GROUPS)
    assert search_cost(search).n_fits == 5
    assert 9.99 < search_cost(search, delta=1e-4).epsilon <= 10.0


def test_classifiers_and_proportions():
    labels = (GENERATOR.random(len(GROUPS)) < 0.7).astype(int)
    model = PrivateSelectCV(BernoulliMean(), {"mechanism": ["auto"]}, epsilon=3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # delta against the number of clients
        model.fit(X, labels, groups=GROUPS)
    assert model.classes_.tolist() == [0, 1]
    assert model.predict_proba(X, groups=GROUPS).shape == (len(X), 2)
    assert 0.4 < model.best_score_ < 1.0  # accuracy, whose range is known
    assert model.privacy_.epsilon == 3.0
    event = PureEvent(model.trial_params_["epsilon"], 0.0, "replace_one")
    score = GaussianEvent(None, gdp_mu(0.2 * 3.0, DELTA))
    spent = selection_epsilon([event, score], expected_trials=10, delta=DELTA)
    assert spent == pytest.approx(3.0, rel=1e-3)


def test_a_private_regression():
    line = PersonalizedLinearRegression(noise_variance=1.0, feature_bound=3.0, target_bound=3.0)
    params = {"prior": [GaussianPrior(covariance=size) for size in (0.1, 1.0)]}
    model = fitted(select(line, params, epsilon=20.0))
    assert model.privacy_.epsilon == 20.0
    assert model.best_params_["prior"].covariance in (0.1, 1.0)
    assert model.best_estimator_.epsilon < 20


class Foreign(GaussianMean):
    """Of another package, whose word the report does not take."""


def test_an_estimator_of_another_package_counts_as_unprotected():
    model = fitted(select(Foreign(noise_variance=1.0)))
    assert model.privacy_.epsilon == math.inf
    assert "Foreign is not part of pfl_sklearn" in model.privacy_.warnings[0]


@pytest.mark.slow
def test_rounds_of_ppsgd():
    """Sampled rounds under add/remove, whose noise multiplier is what is calibrated."""
    rounds = PPSGDRegressor(
        n_rounds=20, client_fraction=0.1, clip_norm=1.0, learning_rate=0.1, batch_size=2
    )
    how = {"expected_trials": 4, "delta": 1e-4}
    params = {"alpha": [0.0, 1.0, 10.0], "learning_rate": [0.01, 0.1]}
    model = fitted(select(rounds, params, epsilon=2.0, **how))
    event = SampledGaussian(model.trial_params_["noise_multiplier"], 20, rate=0.1)
    score = GaussianEvent(gdp_mu(0.2 * 2.0, 1e-4), None)
    spent = selection_epsilon([event, score], relation="zero_out", **how)
    assert 0.999 * 2.0 < spent <= 2.0
    assert (model.privacy_.epsilon, model.privacy_.relation) == (2.0, "zero_out")
    assert model.best_params_.keys() == params.keys()
    with pytest.raises(ValueError, match=r"param_distributions.*(client_fraction|relation|unit)="):
        fitted(select(rounds, {"client_fraction": [0.1, 0.2]}))
    with pytest.raises(ValueError, match=r"checkpoint.*None.*'rounds\.npz'"):
        fitted(select(clone(rounds).set_params(checkpoint="rounds.npz"), params))


def test_infinite_epsilon_is_a_random_search():
    model = fitted(select(epsilon=math.inf, score_range=None))
    assert model.privacy_.epsilon == math.inf
    assert model.trial_params_ == {}
    assert "the selection has epsilon=inf" in model.privacy_.warnings[0]
    with pytest.raises(ValueError, match=r"release.*GaussianMean.*epsilon"):
        model.release()
    ridge = PrivateSelectCV(Ridge(), {"alpha": [0.1, 1.0]}).fit(X, Y)
    assert ridge.privacy_.epsilon == math.inf
    assert ridge.best_params_["alpha"] in (0.1, 1.0)


def test_nothing_released_costs_nothing():
    model = fitted(select(KNOWN, {"method": ["reml", "ml"]}, holdout=(X, Y)))
    assert model.privacy_.epsilon == 0


def test_what_fits_several_times_is_refused(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    column = ClientColumn(clone(MEAN).set_params(clip_norm=1.0), 0)
    table = np.column_stack([GROUPS, X])
    for estimator in (
        GridSearchCV(column, {"estimator__clip_norm": [1.0, 2.0]}, cv=2),
        BaggingRegressor(column, n_estimators=5),
    ):
        params = {"estimator__estimator__noise_variance": [1.0]}
        search = select(estimator, params, client_column=0, ledger=ledger)
        name = type(estimator).__name__
        with pytest.raises(ValueError, match=rf"{name}.*epsilon and delta.*epsilon=2\.0"):
            fitted(search, table, groups=None)
    inside = GridSearchCV(column.estimator, {"clip_norm": [1.0, 2.0]}, cv=2)
    bagged = BaggingRegressor(column.estimator, n_estimators=5)
    for estimator, name in ((inside, "fits"), (bagged, "BaggingRegressor")):
        nested = select(ClientColumn(column, 0), {"estimator": [column, estimator]}, ledger=ledger)
        with pytest.raises(ValueError, match=rf"{name}.*epsilon.*\binf\b.*\b2\.0\b"):
            fitted(nested, table, groups=None)
    assert ledger.entries == []


def test_callbacks_are_refused(tmp_path):
    """They would carry the scores of all trials out, in the model that is released."""
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    rounds = PPSGDRegressor(n_rounds=3, learning_rate=0.1, clip_norm=1.0)
    watched = clone(rounds).set_callbacks(ScoringMonitor(scoring="r2"))
    for estimator, params in (
        (watched, {"alpha": [1.0]}),
        (make_pipeline(FunctionTransformer(), watched), {}),
        (make_pipeline(FunctionTransformer(), rounds), {"ppsgdregressor": [rounds, watched]}),
    ):
        with pytest.raises(ValueError, match=r"callbacks.*epsilon=2\.0\b"):
            fitted(select(estimator, params, ledger=ledger))
    assert ledger.entries == []


def test_rounds_cannot_go_on_after_a_selection():
    rounds = PPSGDRegressor(n_rounds=3, learning_rate=0.1, clip_norm=1.0, warm_start=True)
    for estimator, name in (
        (rounds, "alpha"),
        (make_pipeline(FunctionTransformer(), rounds), "ppsgdregressor__alpha"),
    ):
        best = fitted(select(estimator, {name: [1.0]})).best_estimator_
        released = best if estimator is rounds else best.steps[-1][1]
        assert not hasattr(released, "_progress")
        assert released.privacy_.epsilon == 2.0


BOUNDED = GaussianMean(noise_variance=1.0, clip_norm=1.0)
LARGE_GRID = {"clip_norm": [*np.linspace(1, 2, 40)], "noise_variance": [*np.ones(40), -1.0]}
LEARNT = {"functiontransformer": [FunctionTransformer(), StandardScaler()]}
PPSGD = PPSGDRegressor(n_rounds=3, learning_rate=0.1, clip_norm=1.0)
LABELS, NO_CHANCES = (X, Y > 0), "predict_proba.*GaussianMean"


@pytest.mark.parametrize(
    ("estimator", "params", "options", "error"),
    [
        (PPSGD, {"learning_rate": [0.1, "auto"]}, {}, r"learning_rate='auto'.*'theory'"),
        (
            PPSGD,
            {"clip_norm": [1.0, None], "clip_quantile": [None, 0.5]},
            {},
            r"clip_quantile=0\.5 without clip_norm",
        ),
        (PPSGD, {"batch_size": [1, 0]}, {}, "The 'batch_size' parameter"),
        (PPSGD, {"clip_norm": [1.0, -1.0]}, {}, "The 'clip_norm' parameter"),
        (BOUNDED, {"noise_variance": [1.0, -1.0]}, {}, "The 'noise_variance' parameter"),
        (MEAN, LARGE_GRID, {}, "The 'noise_variance' parameter"),  # which is looked at in part
        (
            make_pipeline(FunctionTransformer(), BOUNDED),
            LEARNT,
            {},
            r"'functiontransformer' \(StandardScaler\).*\binf\b.*\b2\.0\b",
        ),
        (MEAN, CLIPS, {"scoring": "neg_log_loss"}, rf"scoring='neg_log_loss'.*{NO_CHANCES}"),
        (
            MEAN,
            CLIPS,
            {"scoring": "roc_auc", "holdout": LABELS},
            rf"scoring='roc_auc'.*{NO_CHANCES}",
        ),
    ],
)
def test_candidates_that_cannot_be_run_cost_nothing(estimator, params, options, error, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    for _ in range(3):  # whichever are drawn
        with pytest.raises(ValueError, match=error):
            fitted(select(estimator, params, ledger=ledger, **options))
    assert ledger.entries == []


def test_warnings_are_those_of_the_best_trial():
    with pytest.warns(SingleClientWarning) as found:
        fitted(select(epsilon=math.inf, expected_trials=30, distribution="poisson"), groups=None)
    assert len(found) == 1


@pytest.mark.slow
def test_no_trial_at_all():
    search = select(expected_trials=1, distribution="poisson", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        for seed in range(20):
            model = clone(search).set_params(random_state=seed)
            try:
                fitted(model)
            except RuntimeError as error:
                assert "trials" in str(error)
                assert "spent" in str(error)
                with pytest.raises(NotFittedError):
                    model.predict(X, groups=GROUPS)
                return
    raise AssertionError("20 Poisson numbers of mean 1 were all positive")


BAD = [
    ({"expected_trials": 0.5}, "The 'expected_trials' parameter"),
    ({"distribution": "fixed"}, "The 'distribution' parameter"),
    ({"epsilon": 0.0}, "The 'epsilon' parameter"),
    ({"score_share": 1.0}, "The 'score_share' parameter"),
    ({"delta": 0.0}, r"delta.*epsilon.*\b0\b"),
    ({"holdout": [X, Y]}, "The 'holdout' parameter"),
    ({"holdout": (X,)}, r"holdout.*\(X, y, groups\)"),
    ({"holdout": (X, Y[:-1])}, "inconsistent numbers of samples"),
    ({"scoring": "nonsense"}, "scoring"),
    ({"score_range": (1.0, 0.0)}, r"score_range.*\(1\.0, 0\.0\)"),
    ({"score_range": (0.0, math.inf)}, r"score_range.*\(0\.0, inf\)"),
    ({"score_range": None}, r"score_range.*scoring='neg_mean_squared_error'.*holdout="),
    ({"param_distributions": {"epsilon": [1.0]}}, r"param_distributions.*'epsilon'"),
    ({"param_distributions": {"delta": [1.0]}}, r"param_distributions.*'delta'"),
    ({"param_distributions": {"random_state": [1]}}, r"param_distributions.*'random_state'"),
    ({"param_distributions": {"clipping": [1.0]}}, r"param_.*'clipping'.*GaussianMean"),
    ({"param_distributions": {"prior__bogus": [1]}}, "'bogus'"),
    ({"param_distributions": {"method__of": [1]}}, "method='reml'"),
    ({"param_distributions": {"clip_norm": []}}, r"param_distributions\['clip_norm'\].*\[\]"),
    ({"param_distributions": {"clip_norm": 3.0}}, r"param_distributions\['clip_norm'\].*3\.0"),
    ({"param_distributions": [3]}, r"param_distributions.*dict.*\[3\]"),
    ({"epsilon": 0.005, "holdout": (X, Y)}, r"epsilon=0\.005.*expected_trials=10\b.*\b0\.01025\b"),
    ({"estimator": Ridge(), "param_distributions": {}}, r"Ridge.*epsilon and delta.*epsilon=2\.0"),
    (
        {"estimator": make_pipeline(StandardScaler(), MEAN), "param_distributions": {}},
        r"'standardscaler' \(StandardScaler\).*epsilon=2\.0",
    ),
    ({"param_distributions": {"mechanism": ["quantizer"]}}, "mechanism='quantizer'.*epsilon=2.0"),
]


@pytest.mark.parametrize(("params", "error"), BAD)
def test_bad_parameters(params, error, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    model = select(ledger=ledger).set_params(**params)
    with pytest.raises(ValueError, match=error):
        fitted(model)
    assert not [name for name in vars(model) if name.endswith("_")]
    assert ledger.entries == []


@pytest.mark.parametrize("epsilon", [2.0, math.inf])
def test_parameters_of_a_prior_given_by_name(epsilon):
    """Also where the name itself is drawn."""
    estimator = GaussianMean(noise_variance=1.0, clip_norm=3.0)
    grid = {"prior": ["gaussian"], "prior__covariance": [0.5]}
    for params in (grid, {"prior__covariance": [0.5]}):
        model = seeded(select(estimator, params, epsilon=epsilon))
        assert model.best_params_ == {name: values[0] for name, values in params.items()}
        np.testing.assert_array_equal(model.best_estimator_.prior_.covariance, [[0.5]])


def test_units_and_relations_may_not_vary():
    line = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0), noise_variance=1.0, feature_bound=3.0, target_bound=3.0
    )
    for params in ({"unit": ["client", "row"]}, {"relation": ["replace_one", "add_remove"]}):
        with pytest.raises(ValueError, match=r"param_distributions.*(relation|unit)="):
            fitted(select(line, params))
    for unit in ("row", "client"):
        one_more = clone(line).set_params(unit=unit, relation="add_remove")
        with pytest.raises(ValueError, match=r"relation='add_remove'.*holdout="):
            fitted(select(one_more, {"method": ["reml"]}))


def test_bad_rows_leave_nothing_fitted():
    model = select()
    for data, y, groups, error in (
        (X[:5], Y[:5], np.arange(5), r"two rows.*\b5 clients.*holdout="),
        (X, Y, GROUPS[:-1], r"groups.*\b599 ids.*\b600 rows"),
        (X, np.where(np.arange(len(Y)) == 3, np.nan, Y), GROUPS, "NaN"),
        (X, None, GROUPS, "requires y"),
    ):
        with pytest.raises(ValueError, match=error):
            fitted(model, data, y, groups)
        assert not [name for name in vars(model) if name.endswith("_")]


def test_a_trial_that_raises_leaves_nothing():
    model = select(params={"noise_variance": [1.0], "center": [[1.0, 2.0]]})
    with pytest.raises(ValueError, match=r"clip_norm.*center"):
        fitted(model)
    assert not [name for name in vars(model) if name.endswith("_")]


class Diverging(GaussianMean):
    """Diverges at a large bound."""

    __module__ = GaussianMean.__module__

    def fit(self, X, y=None, *, groups=None, sample_weight=None):
        if self.clip_norm > 10:
            raise FloatingPointError(f"The rounds diverged at {self.clip_norm}.")
        return super().fit(X, y, groups=groups)


def test_trials_that_diverge_lose():
    estimator = Diverging(noise_variance=1.0)
    for seed in range(5):
        model = seeded(select(estimator, {"clip_norm": [1.0, 100.0, 1e3]}), seed=seed)
        assert model.best_params_ == {"clip_norm": 1.0}
    model = select(estimator, {"clip_norm": [100.0]})
    with pytest.raises(FloatingPointError, match="diverged"):
        fitted(model)
    assert not [name for name in vars(model) if name.endswith("_")]


def test_if_all_trials_diverge_the_error_is_the_first_ones():
    estimator, rows = Diverging(), SimpleNamespace(X=X, y=Y, fit_params={"groups": GROUPS})
    plan = SimpleNamespace(params={}, seed_name=None)
    candidates = [{"clip_norm": bound} for bound in (20.0, 30.0, 40.0)]
    rng = np.random.default_rng(0)
    with pytest.raises(FloatingPointError, match=r"diverged at 20\.0"):
        best_trial(select(estimator), plan, candidates, rows, None, rng, False)


def test_one_release_is_no_more_than_its_trial():
    """With one trial and a public hold-out the noise is the Renyi one of a single release."""
    model = fitted(select(expected_trials=1, holdout=(X, Y), epsilon=1.0))
    mu = gdp_mu(model.trial_params_["epsilon"], DELTA)
    assert gdp_delta(mu, 1.0) <= DELTA


@pytest.mark.filterwarnings("ignore::pfl_sklearn.SingleClientWarning")
@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@parametrize_with_checks(
    [
        PrivateSelectCV(
            PersonalizedLinearRegression(random="intercept"),
            {"method": ["reml", "ml"]},
            expected_trials=2,
            random_state=0,
        )
    ]
)
def test_sklearn_checks(estimator, check):
    check(estimator)
