"""What the estimators write to a privacy ledger, and that they do so before they read data."""

import math

import numpy as np
import pytest
from sklearn.base import clone

from pfl_sklearn import (
    BernoulliMean,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PoissonMean,
    PrivacyWarning,
)
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.linear_model._base import BasePersonalizedRegression
from pfl_sklearn.priors import (
    BetaPrior,
    DiscretePrior,
    GammaPrior,
    GaussianMixturePrior,
    GaussianPrior,
)
from pfl_sklearn.privacy import BudgetExceeded, PrivacyLedger, RegressionMoments
from tests.helpers.ledgers import numbers

CLIENTS = make_gaussian_clients(60, 6, random_state=0)


COMMON = {"epsilon": 1.5, "delta": 1e-4}
MEANS = {**COMMON, "clip_norm": 4.0}
LINES = {**COMMON, "feature_bound": 2.0, "target_bound": 8.0}
PRIVATE = [
    GaussianMean(**MEANS),
    GaussianMean(**MEANS, noise_variance=1.0),
    GaussianMean(GaussianPrior(mean=0.0), **MEANS, noise_variance=1.0),
    GaussianMean(GaussianPrior(covariance=1.0), **MEANS),
    GaussianMean(**MEANS, noise_variance=1.0, trust="local"),
    GaussianMean("discrete", **MEANS, noise_variance=1.0),
    GaussianMean("gaussian_mixture", **MEANS, noise_variance=1.0, trust="local"),
    BernoulliMean(epsilon=1.5),
    BernoulliMean(epsilon=1.5, mechanism="two_bit", delta=0.01),
    BernoulliMean(epsilon=1.5, mechanism="one_bit", method="printed"),
    BernoulliMean(**COMMON, trust="central"),
    PoissonMean(epsilon=1.5, cap=40),
    PoissonMean(**COMMON, cap=40, trust="central"),
    *(
        PersonalizedLinearRegression(
            GaussianPrior(covariance=4.0), **LINES, unit=unit, relation=relation, **more
        )
        for unit, relation, more in (
            ("client", "replace_one", {}),
            ("client", "replace_one", {"fit_intercept": False, "noise_variance": 1.0}),
            ("row", "replace_one", {"random": "intercept"}),
            ("client", "add_remove", {}),
            ("client", "add_remove", {"fit_intercept": False, "noise_variance": 1.0}),
        )
    ),
    PersonalizedLinearRegression(random="intercept", **LINES),
    PersonalizedLogisticRegression(
        epsilon=1.5, delta=0.01, feature_bound=4.0, max_rows_per_client=10
    ),
    PersonalizedPoissonRegression(
        epsilon=1.5, delta=0.01, feature_bound=4.0, max_rows_per_client=10, rate_range=(0.1, 10.0)
    ),
]
OPEN = [
    GaussianMean(),
    GaussianMean(mechanism="quantizer", n_bits=8, clip_norm=4.0, noise_variance=1.0),
    GaussianMean(GaussianPrior(mean=0.0, covariance=1.0), noise_variance=1.0),
    BernoulliMean(),
    PoissonMean(),
    PersonalizedLinearRegression(GaussianPrior(covariance=1.0)),
]
KNOWN = [
    GaussianMean(GaussianPrior(mean=0.0, covariance=1.0), **MEANS, noise_variance=1.0),
    GaussianMean(
        GaussianMixturePrior(2, means=[[0.0], [1.0]], covariances=1.0, weights=[0.5, 0.5]),
        **MEANS,
        noise_variance=1.0,
    ),
    GaussianMean(
        DiscretePrior(2, points=[[0.0], [1.0]], weights=[0.5, 0.5]), **MEANS, noise_variance=1.0
    ),
    BernoulliMean(BetaPrior(2.0, 2.0), epsilon=1.5),
    PoissonMean(GammaPrior(2.0, 1.0), epsilon=1.5),
    PersonalizedLinearRegression(
        GaussianPrior(mean=0.0, covariance=1.0), noise_variance=1.0, **LINES
    ),
]


class Untouchable:
    """Data that must not be looked at."""

    def _touched(self, *args):
        raise RuntimeError("touched")

    __getattr__ = __len__ = __iter__ = __array__ = __getitem__ = _touched


class OnlyShape(Untouchable):
    """A table of which the numbers of rows and columns and their names may be seen, no value."""

    shape, columns = CLIENTS.data.shape, range(CLIENTS.data.shape[1])


def untouchable(model):
    """Data of a fit; regressions check public numbers first: those of columns and of ids."""
    if isinstance(model, BasePersonalizedRegression):
        return OnlyShape(), Untouchable(), CLIENTS.groups
    return Untouchable(), Untouchable(), Untouchable()


def table_for(estimator):
    X, y = CLIENTS.data, CLIENTS.target
    if isinstance(estimator, BernoulliMean | PersonalizedLogisticRegression):
        y = (y > np.median(y)).astype(int)
    if isinstance(estimator, PoissonMean | PersonalizedPoissonRegression):
        y = np.rint(np.exp(y / 2))
    return X, y


def fit(estimator, ledger):
    X, y = table_for(estimator)
    return clone(estimator).set_params(ledger=ledger).fit(X, y, groups=CLIENTS.groups)


@pytest.mark.filterwarnings(
    "ignore:.*(noise_variance|clip_norm)", "ignore::pfl_sklearn.PrivacyWarning"
)
@pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
def test_the_entry_of_a_fit_is_what_its_report_promises(estimator, path):
    report = fit(estimator, None).privacy_
    under = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    if "add_remove" in under:
        under["zero_out"] = under["add_remove"]
    for relation in ("replace_one", "zero_out", "add_remove"):
        ledger = PrivacyLedger(
            path.with_name(relation),
            delta=report.delta or 1e-7,
            relation=relation,
            unit=report.unit,
        )
        fit(estimator, ledger)
        (entry,) = ledger.entries
        assert entry["what"] == type(estimator).__name__
        total = ledger.total()
        if relation == report.relation:
            assert total == pytest.approx(report.epsilon, rel=1e-9)
            continue
        counted = "zero_out" if relation == "add_remove" else relation
        if counted not in under:
            assert total == math.inf
        else:
            # Never less; more only where the number of features or trials would have to be known.
            assert under[counted] * (1 - 1e-9) <= total <= under[counted] * 1.5


@pytest.mark.parametrize("estimator", OPEN, ids=repr)
def test_a_fit_without_privacy_spends_without_bound(estimator, path):
    ledger = PrivacyLedger(path)
    fit(estimator, ledger)
    with pytest.warns(
        PrivacyWarning, match=rf"entry 1 \({type(estimator).__name__}\).*delta = 1e-05"
    ):
        assert ledger.total() == math.inf
    limited = PrivacyLedger(path.with_name("limited"), budget=1e9)
    with pytest.raises(BudgetExceeded, match=r"epsilon = inf\b.*\b1e\+09\b"):
        fit(estimator, limited)


@pytest.mark.filterwarnings("ignore:.*(noise_variance|clip_norm)")
@pytest.mark.parametrize("estimator", KNOWN, ids=repr)
def test_a_fit_with_a_known_population_costs_nothing(estimator, path):
    ledger = PrivacyLedger(path, budget=(1e-3, 1e-9))
    assert fit(estimator, ledger).privacy_.epsilon == 0
    assert [entry["events"] for entry in ledger.entries] == [[]]


@pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
def test_a_refused_fit_looks_at_no_data(estimator, path):
    unit = getattr(estimator, "unit", "client")
    ledger = PrivacyLedger(path, budget=(1.0, 1e-4), unit=unit)
    model = clone(estimator).set_params(ledger=ledger)
    with pytest.raises(BudgetExceeded, match=type(estimator).__name__):
        X, y, groups = untouchable(model)
        model.fit(X, y, groups=groups)
    assert ledger.entries == []
    if hasattr(model, "fit_counts"):
        with pytest.raises(BudgetExceeded, match=type(estimator).__name__):
            model.fit_counts(Untouchable(), Untouchable())
    assert not hasattr(model, "privacy_")


@pytest.mark.parametrize("estimator", PRIVATE, ids=repr)
def test_a_fit_that_fails_on_its_data_stays_recorded(estimator, path):
    ledger = PrivacyLedger(path, unit=getattr(estimator, "unit", "client"))
    model = clone(estimator).set_params(ledger=ledger)
    with pytest.raises(RuntimeError, match="touched"):
        X, y, groups = untouchable(model)
        model.fit(X, y, groups=groups)
    assert numbers(ledger) == [1]


@pytest.mark.parametrize(
    "estimator",
    [
        GaussianMean(epsilon=1.0),
        GaussianMean(**{**MEANS, "delta": 0.0}),
        BernoulliMean(epsilon=1.0, trust="central"),
        PoissonMean(epsilon=1.0),
        PoissonMean(epsilon=1.0, cap=40, trust="central"),
        PersonalizedLinearRegression(epsilon=1.0),
    ],
    ids=repr,
)
def test_parameters_that_make_no_fit_cost_nothing(estimator, path):
    ledger = PrivacyLedger(path)
    with pytest.raises(ValueError, match=r"clip_norm|delta|feature_bound|cap"):
        fit(estimator, ledger)
    assert ledger.entries == []


def test_what_is_no_ledger_is_refused():
    with pytest.raises(ValueError, match="The 'ledger' parameter of GaussianMean must be"):
        fit(GaussianMean(), "ledger.jsonl")


def test_counts_are_recorded_too(path):
    ledger = PrivacyLedger(path)
    model = BernoulliMean(epsilon=1.5, ledger=ledger)
    model.fit_counts(np.arange(50) % 11, np.full(50, 10))
    assert ledger.total() == 1.5


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("sizes", [True, False])
def test_one_feature_has_the_largest_ratio_of_sensitivities(relation, intercept, square, sizes):
    """The ledger takes it, because it does not know the number of features."""
    sizes &= relation == "add_remove"
    ratios = []
    for d in [*range(1, 40), 100, 1000, 10_000]:
        moments = RegressionMoments(d, 1.0, 1.0, intercept, relation, square=square, sizes=sizes)
        ratios.append(moments.replace_one_sensitivity / moments.add_remove_sensitivity)
    if relation == "replace_one":
        np.testing.assert_allclose(ratios, math.sqrt(2), rtol=1e-12)
    assert max(ratios[1:]) <= ratios[0] * (1 + 1e-12)
