"""What searches over private models cost, against accounts composed by hand."""

import json
import math
import re
import warnings

import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.callback import ScoringMonitor
from sklearn.ensemble import BaggingRegressor
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import Ridge
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    HalvingGridSearchCV,
    LeaveOneOut,
    RandomizedSearchCV,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    PrivacyWarning,
)
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import (
    GaussianEvent,
    PrivacyLedger,
    SampledGaussian,
    gdp_epsilon,
    gdp_mu,
    search_cost,
)
from tests.helpers.private_searches import (
    DELTA,
    FOLDS,
    GROUPS,
    MEAN,
    SCORER,
    TABLE,
    X,
    Y,
    by_hand,
    column,
    fitted,
    grid,
    searched,
)


class Rounds(RegressorMixin, BaseEstimator):
    """Predicts 0, and spends what rounds on a twentieth of the clients spend."""

    def __init__(self, alpha=1.0, noise_multiplier=1.0, delta=DELTA):
        self.alpha = alpha
        self.noise_multiplier = noise_multiplier
        self.delta = delta

    _privacy_relation = "zero_out"

    def _privacy_events(self):
        if self.noise_multiplier == 0:
            return None
        return (SampledGaussian(self.noise_multiplier, 200, rate=0.05),)

    def fit(self, X, y):
        self.fitted_ = True
        return self

    def predict(self, X):
        return np.zeros(len(X))


@pytest.mark.slow
def test_the_example_of_nine_candidates_and_five_folds():
    """46 runs with noise multiplier 1, composed by dp-accounting: PLD, and RDP above it."""
    search = fitted(
        GridSearchCV(Rounds(), {"alpha": list(range(9))}, cv=5, scoring="r2"), groups=None
    )
    cost = search_cost(search)
    run = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(1.0)), 200
    )
    loose, tight = rdp.RdpAccountant(), pld.PLDAccountant(value_discretization_interval=1e-3)
    loose.compose(run, 46)
    tight.compose(run, 46)
    assert loose.get_epsilon(DELTA) == pytest.approx(49.56, abs=0.01)
    assert cost.epsilon == pytest.approx(tight.get_epsilon(DELTA), rel=2e-3)
    assert cost.epsilon == pytest.approx(44.54, abs=0.05)
    assert cost.fits[0].epsilon == pytest.approx(4.766, abs=2e-3)
    assert (cost.n_fits, len(cost.fits), cost.relation) == (46, 10, "zero_out")
    assert not cost.scores_protected


@pytest.mark.parametrize(("refit", "n_fits"), [(True, 7), (False, 6)])
def test_gaussian_fits_compose_exactly(refit, n_fits):
    cost = search_cost(fitted(grid(refit=refit)))
    assert cost.epsilon == pytest.approx(by_hand(n_fits), rel=1e-9)
    assert cost.n_fits == n_fits == sum(fit.n_fits for fit in cost.fits)
    assert [fit.epsilon for fit in cost.fits] == pytest.approx([1.0] * len(cost.fits))
    assert (cost.delta, cost.unit, cost.relation) == (DELTA, "client", "replace_one")


def test_candidates_that_spend_differently():
    cost = search_cost(fitted(grid(params={"epsilon": [0.5, 2.0]})))
    best = float(cost.fits[-1].params.split("=")[1])
    squares = 2 * gdp_mu(0.5, DELTA) ** 2 + 2 * gdp_mu(2.0, DELTA) ** 2 + gdp_mu(best, DELTA) ** 2
    assert cost.epsilon == pytest.approx(gdp_epsilon(math.sqrt(squares), DELTA), rel=1e-9)


def test_pure_fits_add_up():
    labels = (Y > 0).astype(int)
    search = GridSearchCV(
        ClientColumn(BernoulliMean(epsilon=0.5, mechanism="two_bit"), 0),
        {"estimator__unseen": ["population", "error"]},
        cv=ClientKFold(3, client_column=0),
        scoring="accuracy",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = search_cost(search.fit(TABLE, labels))
    assert (cost.delta, cost.n_fits) == (0.0, 7)
    assert cost.epsilon == pytest.approx(3.5)


def test_searches_in_searches_multiply(tmp_path):
    """The ledger counts 2 outer splits and a refit, each of 3 x 2 fits and a refit."""
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    inner = GridSearchCV(column(ledger=ledger), {"estimator__clip_norm": [1.0, 2.0, 3.0]}, **FOLDS)
    search = GridSearchCV(inner, {"estimator__estimator__epsilon": [1.0]}, **FOLDS)
    cost = search_cost(fitted(search, data=TABLE, groups=None))
    assert cost.n_fits == len(ledger.entries) == 3 * 7
    assert cost.epsilon == pytest.approx(ledger.total(), rel=1e-9)
    assert cost.epsilon == pytest.approx(by_hand(21), rel=1e-9)
    assert [(fit.n_fits, fit.fits_within) for fit in cost.fits] == [(2, 7), (1, 7)]
    assert cost.fits[0].epsilon == pytest.approx(by_hand(7), rel=1e-9)
    assert "epsilon = 2.953 for 7 fits" in str(cost)


@pytest.mark.parametrize("inner", [False, True])
def test_only_the_candidates_need_bounds(inner):
    """The estimator that is searched over could not be fitted as it is, yet it states a delta."""
    model, bounds = column(clip_norm=None), {"estimator__clip_norm": [1.0]}
    search = GridSearchCV(model, bounds, **FOLDS)
    if inner:
        search = GridSearchCV(search, {"estimator__estimator__epsilon": [1.0]}, **FOLDS)
    cost = search_cost(fitted(search, data=TABLE, groups=None))
    assert cost.delta == DELTA
    assert cost.epsilon == pytest.approx(by_hand(cost.n_fits), rel=1e-9)


class OtherMean(GaussianMean):
    """Another class, whose fit spends the same."""


KNOWN = GaussianPrior(mean=0.0, covariance=1.0)


@pytest.mark.parametrize(
    ("estimator", "candidates", "n_paid"),
    [
        # Those that learn nothing from others cost nothing, and the refit may be of any.
        (MEAN, {"estimator__prior": [KNOWN, MEAN.prior]}, 2 * 3),
        (clone(MEAN).set_params(prior=KNOWN), {"estimator__random_state": [0, None]}, 0),
        (MEAN, {"estimator": [MEAN, OtherMean(**MEAN.get_params(deep=False))]}, 2 * 5),
    ],
    ids=["released in part", "seeds without a release", "classes that spend the same"],
)
def test_inner_searches(estimator, candidates, n_paid):
    """Two candidates on two splits and a refit, of which some are paid for."""
    inner = GridSearchCV(column(estimator), candidates, **FOLDS)
    search = GridSearchCV(inner, {"estimator__estimator__clip_norm": [1.0]}, refit=False, **FOLDS)
    cost = search_cost(fitted(search, data=TABLE, groups=None))
    assert cost.n_fits == 2 * 5
    assert cost.epsilon == (pytest.approx(by_hand(n_paid), rel=1e-9) if n_paid else 0)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ({"cv": LeaveOneOut()}, "how often the inner GridSearchCV fits depends on the data"),
        ({"param_grid": {"estimator__epsilon": [1.0, 2.0]}}, "inner GridSearchCV spend differ"),
        ({"param_grid": {"estimator__epsilon": [1.0, math.inf]}}, "nothing protects the clients"),
    ],
)
def test_inner_searches_that_are_not_known_beforehand(inner, reason):
    options = {"param_grid": {}, **FOLDS, "scoring": "neg_mean_squared_error", **inner}
    few = TABLE[:12]
    search = GridSearchCV(GridSearchCV(column(), **options), {}, **FOLDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = search_cost(search.fit(few, Y[:12]))
    assert cost.epsilon == math.inf
    assert reason in cost.fits[0].reason


def test_what_fits_an_unknown_number_of_times():
    """Nobody states what is around a private estimator, here two fits, or one for each target."""
    several = np.column_stack([Y, Y])
    for around, y in (
        (BaggingRegressor(column(), n_estimators=2), Y),
        (MultiOutputRegressor(column()), several),
        (RandomizedSearchCV(column(), {"estimator__clip_norm": [1.0]}, n_iter=1, **FOLDS), Y),
    ):
        name = type(around).__name__
        search = GridSearchCV(around, {}, cv=2, scoring="neg_mean_squared_error")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cost = search_cost(search.fit(TABLE, y))
        assert cost.epsilon == math.inf
        assert f"{name} gives no privacy guarantee" in " ".join(cost.notes)


def test_what_fits_a_search_is_looked_at_too():
    class Twice(BaseEstimator):
        def __init__(self, estimator):
            self.estimator = estimator

        def fit(self, X, y):
            self.estimator_ = self.estimator.fit(X, y)
            return self

    search = GridSearchCV(column(), {}, **FOLDS)
    cost = search_cost(fitted(Twice(search), data=TABLE, groups=None))
    assert cost.epsilon == math.inf
    assert "Twice around the search gives no privacy guarantee" in cost.notes
    frozen = search_cost(FrozenEstimator(fitted(search, data=TABLE, groups=None)))
    assert frozen.epsilon == pytest.approx(by_hand(3), rel=1e-9)


@pytest.mark.parametrize("seed", [0, np.random.RandomState(0)])
def test_fits_that_share_their_noise_protect_nobody(seed):
    """Two fits that differ in what is added to all means: the noise cancels in the difference."""
    seeded = MEAN.__sklearn_clone__().set_params(random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        fits = [
            clone(seeded).set_params(center=shift).fit(X, Y + shift, groups=GROUPS)
            for shift in (0.0, 1.0)
        ]
    assert fits[1].population_mean_ - fits[0].population_mean_ == pytest.approx(1.0, abs=1e-9)
    cost = search_cost(fitted(grid(seeded)))
    assert cost.epsilon == math.inf
    assert "random_state gives all of its fits the same noise" in cost.fits[0].reason
    assert "use random_state=None" in str(cost)
    inner = GridSearchCV(column(seeded), {}, **FOLDS)
    nested = search_cost(fitted(GridSearchCV(inner, {}, **FOLDS), data=TABLE, groups=None))
    assert "the same noise" in nested.fits[0].reason
    free = seeded.__sklearn_clone__().set_params(prior=KNOWN)
    assert search_cost(fitted(grid(free))).epsilon == 0


def test_the_deltas_of_selections_add_up():
    select = PrivateSelectCV(
        MEAN, {"clip_norm": [1.0]}, epsilon=2.0, expected_trials=2, holdout=(X, Y)
    )
    search = fitted(grid(select, {}, cv=ClientKFold(2, random_state=0)))
    cost = search_cost(search)
    assert (cost.n_fits, cost.epsilon) == (3, math.inf)
    assert cost.notes[0].startswith("the deltas of the fits add up to 3e-05")
    assert "give a larger delta=" in cost.notes[0]
    assert 5.99 < search_cost(search, delta=3.1e-5).epsilon <= 6.0


@pytest.mark.parametrize("wrapped", ["inside", "around", "pipeline", "both"])
def test_searches_in_and_around_wrappers(wrapped):
    pipeline = make_pipeline(FunctionTransformer(), MEAN)
    params = {"gaussianmean__clip_norm": [1.0, 2.0, 3.0]}
    inner = {f"estimator__{name}": values for name, values in params.items()}
    folds = FOLDS["cv"]
    search, data, groups = {
        "inside": (grid(ClientColumn(pipeline, 0), inner, cv=folds), TABLE, None),
        "around": (ClientColumn(grid(pipeline, params), 0), TABLE, None),
        "pipeline": (grid(pipeline, params), X, GROUPS),
        "both": (make_pipeline(FunctionTransformer(), grid(pipeline, params)), X, GROUPS),
    }[wrapped]
    cost = search_cost(fitted(search, data=data, groups=groups))
    assert cost.n_fits == 7
    assert cost.epsilon == pytest.approx(by_hand(7), rel=1e-9)


def test_randomized_and_halving_searches():
    random = RandomizedSearchCV(
        MEAN, {"clip_norm": [1.0, 2.0, 3.0, 4.0]}, n_iter=2, cv=ClientKFold(2), scoring=SCORER
    )
    assert search_cost(fitted(random)).n_fits == 5
    halving = HalvingGridSearchCV(
        ClientColumn(MEAN, 0),
        {"estimator__clip_norm": [1.0, 2.0, 3.0, 4.0]},
        cv=2,
        scoring="neg_mean_squared_error",
        min_resources=60,
        factor=2,
    )
    cost = search_cost(fitted(halving, data=TABLE, groups=None))
    assert cost.n_fits == 2 * (4 + 2) + 1
    assert cost.epsilon == pytest.approx(by_hand(13), rel=1e-9)


def test_a_candidate_without_privacy_is_named():
    cost = search_cost(fitted(grid(params={"epsilon": [1.0, math.inf]})))
    assert cost.epsilon == math.inf
    named = [fit.params for fit in cost.fits if math.isinf(fit.epsilon)]
    assert "epsilon=inf" in named
    assert any("epsilon=inf: nothing protects" in note for note in cost.notes)
    assert "NONE: epsilon = inf" in str(cost)
    values = json.loads(cost.to_json())
    assert values["epsilon"] == "inf"
    assert values["fits"][0]["events"][0]["kind"] == "gaussian"


@pytest.mark.parametrize(
    ("estimator", "params", "reason"),
    [
        (make_pipeline(StandardScaler(), MEAN), {}, r"step 'standardscaler' \(StandardScaler\)"),
        (make_pipeline(FunctionTransformer(), Ridge()), {}, "Ridge gives no privacy guarantee"),
    ],
)
def test_what_learns_without_noise_is_named(estimator, params, reason):
    groups = None if isinstance(estimator.steps[-1][1], Ridge) else GROUPS
    scorer, cv = ("r2", 3) if groups is None else (SCORER, ClientKFold(3))
    cost = search_cost(fitted(grid(estimator, params, cv=cv, scoring=scorer), groups=groups))
    assert cost.epsilon == math.inf
    assert cost.fits[0].params == "as it is"
    assert re.search(reason, cost.fits[0].reason)
    assert re.search(reason, " ".join(cost.notes))


def test_what_learns_around_a_search_is_named():
    search = make_pipeline(StandardScaler(), grid())
    cost = search_cost(fitted(search))
    assert cost.epsilon == math.inf
    assert "step 'standardscaler' (StandardScaler)" in cost.notes[0]


def test_what_is_said_of_scores():
    cost = search_cost(searched())
    assert "not protected at all" in cost.scores
    public = search_cost(searched(), public_holdout=True)
    assert public.scores_protected
    assert public.epsilon == cost.epsilon
    assert "public" in public.scores
    noised = search_cost(searched(), score_events=[GaussianEvent(0.05, 0.1)])
    assert noised.scores_protected
    mu = math.sqrt(7 * gdp_mu(1.0, DELTA) ** 2 + 6 * 0.1**2)
    assert noised.epsilon == pytest.approx(gdp_epsilon(mu, DELTA), rel=1e-9)
    trained = search_cost(fitted(grid(return_train_score=True)), public_holdout=True)
    assert not trained.scores_protected
    assert "return_train_score=True" in trained.scores


def test_folds_of_whole_clients_are_an_upper_bound():
    whole = grid(ClientColumn(MEAN, 0), {"estimator__clip_norm": [1.0]}, cv=GroupKFold(3))
    scores = {"scoring": ClientScorer("r2", client_column=0)}
    cost = search_cost(fitted(whole.set_params(**scores), data=TABLE))
    assert any("leaves whole clients out" in note for note in cost.notes)
    assert not any("leaves whole" in note for note in search_cost(searched()).notes)


def test_a_score_monitor_is_named():
    search = grid(make_pipeline(FunctionTransformer(), MEAN), {})
    search.set_callbacks(ScoringMonitor(scoring=SCORER))
    assert any("ScoringMonitor" in note for note in search_cost(fitted(search)).notes)


def test_units_that_do_not_add_up_are_refused():
    line = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0), epsilon=1.0, feature_bound=3.0, target_bound=3.0
    )
    search = fitted(grid(line, {"unit": ["client", "row"]}))
    with pytest.raises(ValueError, match=r"unit='client'.*unit='row'"):
        search_cost(search)


def test_text():
    cost = search_cost(searched())
    for part in ("epsilon = 2.953", "7 fits", "replace_one", "not protected", "clip_norm=2.0"):
        assert part in str(cost)
    assert repr(cost) == str(cost)


def test_without_a_search():
    with pytest.raises(ValueError, match=r"GaussianMean.*GridSearchCV"):
        search_cost(GaussianMean().fit(X, Y, groups=GROUPS))


@pytest.mark.parametrize("delta", [-0.1, 1.0])
def test_delta_out_of_range(delta):
    with pytest.raises(ValueError, match=r"delta.*\[0, 1\).*(-0\.1|\b1\.0)\b"):
        search_cost(searched(), delta=delta)
