"""Private linear regression: what is released, what the report says, and what is refused."""

import json
import math
import re

import numpy as np
import pytest

from pfl_sklearn import privacy_of
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior, LaplacePrior
from pfl_sklearn.privacy import (
    GaussianMechanism,
    PrivacyReport,
    PrivacyWarning,
    RegressionMoments,
    calibrate_noise,
    epsilon_spent,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:The released noise variance"),
]
CLIENT = {"feature_bound": 3.0, "target_bound": 6.0}
AT_ZERO = GaussianPrior(mean=0.0, covariance=1.0)
NAMES = ("population_coef_", "population_intercept_", "population_covariance_", "noise_variance_")


def many_clients(seed, m):
    """Clients with 1 to 15 rows; intercept and three slopes vary."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(m), rng.integers(1, 16, m))
    theta = np.array([0.5, 1.0, -1.0, 0.5]) + 0.5 * rng.normal(size=(m, 4))
    X = rng.normal(size=(len(groups), 3))
    y = theta[groups, 0] + np.sum(X * theta[groups, 1:], axis=1) + rng.normal(size=len(groups))
    return X, y, groups


def fit(X, y, groups, **params):
    return PersonalizedLinearRegression(**{"epsilon": 1.0, "random_state": 0, **params}).fit(
        X, y, groups=groups
    )


def clients(model):
    return np.column_stack([model.intercept_, model.coef_])


@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
@pytest.mark.parametrize("unit", ["client", "row"])
def test_facts_of_the_report(unit, relation):
    X, y, groups = many_clients(0, 200)
    if unit == "row" and relation == "add_remove":
        groups = np.zeros(len(X), dtype=int)
    prior = GaussianPrior(covariance=0.25)
    params = {"unit": unit, "relation": relation, "prior": prior, "random_state": None, **CLIENT}
    report = fit(X, y, groups, **params).privacy_
    assert (report.epsilon, report.delta, report.unit, report.relation) == (1, 1e-5, unit, relation)
    assert (report.trust, report.rounds, report.warnings) == ("central", 1, ())
    moments = RegressionMoments(
        3, 3.0, 6.0, relation=relation, sizes=unit == "client" and relation == "add_remove"
    )
    assert report.sensitivity == moments.sensitivity
    assert report.noise_std == pytest.approx(calibrate_noise(1.0, 1e-5, moments.sensitivity))
    ((other, epsilon),) = report.epsilon_under
    assert other == ("zero_out" if relation == "replace_one" else "replace_one")
    both = {"replace_one": moments.replace_one_sensitivity}
    moved = both.get(other, moments.add_remove_sensitivity)
    spent = epsilon_spent(report.noise_std, moved, delta=1e-5, relation=other)
    assert epsilon == pytest.approx(spent)
    assert (epsilon < 1) == (relation == "replace_one")
    assert f"moments of the {unit}s" in report.mechanism
    assert "anyone who sees what is released" in report.adversary
    text = " ".join(report.assumptions)
    assert "feature_bound = 3, target_bound = 6" in text
    assert ("number of clients and of rows" in text) == (relation == "replace_one")
    expected = {("client", "replace_one"): 200, ("row", "replace_one"): 200}
    assert report.n_clients == expected.get((unit, relation), None if unit == "client" else 1)
    assert "population_coef_" in report.released
    assert {"coef_", "intercept_", "coef_std_", "clients_"} <= set(report.not_released)
    assert PrivacyReport.from_dict(json.loads(report.to_json())) == report


def test_the_released_model_has_no_client():
    X, y, groups = many_clients(0, 200)
    model = fit(X, y, groups, prior=GaussianPrior(covariance=0.25), **CLIENT)
    public = model.release()
    assert privacy_of(public).epsilon == 1.0
    assert not hasattr(public, "_posterior")
    mean, std = public.predict(X[:3], return_std=True)
    np.testing.assert_allclose(mean, X[:3] @ model.population_coef_ + model.population_intercept_)
    rows = np.column_stack([np.ones(3), X[:3]])
    spread = model.population_covariance_ + 0.25 * np.eye(4)
    np.testing.assert_allclose(std**2, np.einsum("np,pq,nq->n", rows, spread, rows))


def release_the_same(monkeypatch):
    """Every fit has the noisy sum of the first one."""
    message = {}

    def same(self, messages, rng):
        return message.setdefault("first", messages + rng.normal(0, self.noise_std, messages.shape))

    monkeypatch.setattr(GaussianMechanism, "privatize", same)


@pytest.mark.parametrize("unit", ["client", "row"])
@pytest.mark.parametrize("intercept", [True, False])
def test_add_remove_releases_nothing_that_depends_on_exact_numbers(unit, intercept, monkeypatch):
    """Whatever the table, the same noisy sum gives the same public attributes."""
    release_the_same(monkeypatch)
    found, prior = [], GaussianPrior(covariance=0.25)
    params = {"prior": prior, "unit": unit, "relation": "add_remove", "epsilon": 50.0}
    for m in (100, 37, 1):
        X, y, groups = many_clients(m, m)
        groups = groups if unit == "client" else np.zeros(len(X), dtype=int)
        model = fit(X, y, groups, fit_intercept=intercept, **params, **CLIENT)
        report = model.privacy_.to_dict()
        found.append([report, *(getattr(model, name) for name in NAMES)])
        assert math.isnan(model.log_likelihood_)
    for other in found[1:]:
        assert found[0][0] == other[0]
        for first, second in zip(found[0][1:], other[1:], strict=True):
            np.testing.assert_array_equal(first, second)


def test_add_remove_tells_no_client_that_it_is_alone(monkeypatch):
    """Its estimate follows from the release and its own rows; a missing covariance is refused."""
    release_the_same(monkeypatch)
    X, y, groups = many_clients(0, 100)
    params = {"relation": "add_remove", "epsilon": 50.0, **CLIENT}
    prior = GaussianPrior(covariance=0.25)
    together = fit(X, y, groups, prior=prior, **params)
    own = groups == groups[0]
    alone = fit(X[own], y[own], groups[own], prior=prior, **params)
    np.testing.assert_allclose(clients(alone)[0], clients(together)[0], rtol=1e-9)
    np.testing.assert_array_equal(alone.shrinkage_[0], together.shrinkage_[0])
    for unknown in (GaussianPrior(), GaussianPrior(covariance=math.inf)):
        for rows in (own, groups <= groups[own][0] + 1, groups == groups):
            with pytest.raises(ValueError, match=r"relation='add_remove'.*covariance"):
                fit(X[rows], y[rows], groups[rows], prior=unknown, **params)


def test_the_noise_is_the_reported_one(monkeypatch):
    drawn, privatize = [], GaussianMechanism.privatize

    def spy(self, messages, rng):
        drawn.append(privatize(self, messages, rng) - messages)
        return messages + drawn[-1]

    monkeypatch.setattr(GaussianMechanism, "privatize", spy)
    rng = np.random.default_rng(0)
    for unit, relation in (("row", "add_remove"), ("client", "replace_one")):
        X, y = rng.normal(size=(100, 80)), rng.normal(size=100)
        params = {"unit": unit, "relation": relation, "prior": GaussianPrior(covariance=1.0)}
        model = fit(X, y, np.zeros(100), noise_variance=1.0, **params, **CLIENT)
        assert drawn[-1].size > 3000
        assert np.std(drawn[-1]) == pytest.approx(model.privacy_.noise_std, rel=0.05)


def test_rows_and_names_of_clients_do_not_matter():
    X, y, groups = many_clients(0, 100)
    params = {"prior": GaussianPrior(covariance=0.25), "epsilon": 20.0, **CLIENT}
    model = fit(X, y, groups, **params)
    renamed = fit(X, y, np.array([f"c{g:03d}" for g in groups]), **params)
    parallel = fit(X, y, groups, n_jobs=2, **params)
    for other in (renamed, parallel):
        np.testing.assert_array_equal(clients(other), clients(model))
        np.testing.assert_array_equal(other.population_coef_, model.population_coef_)
    order = np.random.default_rng(0).permutation(len(X))
    shuffled = fit(X[order], y[order], groups[order], **params)
    np.testing.assert_allclose(clients(shuffled), clients(model), rtol=1e-4, atol=1e-5)


def test_method_and_solver_have_no_effect():
    X, y, groups = many_clients(0, 100)
    params = {"prior": GaussianPrior(covariance=0.25), **CLIENT}
    model = fit(X, y, groups, **params)
    for change in ({"method": "ml"}, {"solver": "quasi_newton"}, {"solver": "gd"}):
        np.testing.assert_array_equal(
            clients(fit(X, y, groups, **params, **change)), clients(model)
        )


@pytest.mark.filterwarnings("error::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    ("params", "warning"),
    [
        ({"delta": 0.02}, "delta.*clients"),
        ({"delta": 0.02, "unit": "row"}, "delta.*rows"),
        ({"delta": 0.02, "relation": "add_remove"}, "delta.*clients"),
        ({"random_state": 0}, "random_state=None"),
    ],
)
def test_weaknesses_are_warned_of(params, warning):
    X, y, groups = many_clients(0, 100)
    prior = GaussianPrior(covariance=0.25)
    params = {"prior": prior, "noise_variance": 1.0, "random_state": None, **CLIENT, **params}
    with pytest.warns(PrivacyWarning) as caught:
        fit(X, y, groups, **params)
    assert len(caught) == 1
    assert re.search(warning, str(caught[0].message))


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"feature_bound": None}, r"feature_bound.*epsilon"),
        ({"target_bound": None}, r"target_bound.*epsilon"),
        ({"delta": 0}, r"delta.*\b0\b"),
        ({"prior": LaplacePrior(scale=1.0)}, r"prior=LaplacePrior\(scale=1\.0\).*epsilon"),
        ({"prior": GaussianPrior()}, r"epsilon.*GaussianPrior.*covariance"),
        ({"prior": GaussianPrior(covariance=math.inf)}, r"epsilon.*GaussianPrior.*covariance"),
        (
            {"unit": "row", "relation": "add_remove"},
            r"unit='row'.*relation='add_remove'.*relation='replace_one'",
        ),
        ({"prior": AT_ZERO}, r"prior.*mean.*epsilon.*random='all'"),
        (
            {"prior": AT_ZERO, "noise_variance": 1.0, "random": "intercept"},
            r"prior.*mean.*epsilon.*random='all'",
        ),
        ({"relation": "zero_out"}, "relation"),
    ],
)
def test_refusals_leave_the_estimator_unfitted(params, error):
    X, y, groups = many_clients(0, 20)
    model = PersonalizedLinearRegression(
        **{"prior": GaussianPrior(covariance=0.25), "epsilon": 1.0, **CLIENT, **params}
    )
    with pytest.raises(ValueError, match=error):
        model.fit(X, y, groups=groups)
    assert not hasattr(model, "privacy_")
