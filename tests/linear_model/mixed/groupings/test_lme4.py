"""Answers of lme4 1.1-31 (R) to models with several groupings.

Its tables lie in the folder ``oracles/groupings`` beside that of the public tables.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior, GroupingPrior
from tests.helpers.oracles import read_oracle

ORACLES = read_oracle("lme4_groupings")
PLAIN = GaussianPrior(centered=False)  # (1|g), or with slopes (1|g) + (0+x|g)


class Formula(NamedTuple):
    """The model in our words; groupings are the columns of X that group rows."""

    target: str
    client: str
    groupings: dict
    features: tuple = ()
    random: tuple = ("intercept",)
    prior: GaussianPrior = PLAIN
    weights: str | None = None


SIMULATED = Formula("y", "g", {"h": GroupingPrior()}, ("x",))
RADON = Formula("log_radon", "county", {"st": GroupingPrior()}, ("floor", "u"))
SLOPES = ("intercept", "floor")
FORMULAS = {
    "insteval": Formula("y", "s", {"d": GroupingPrior(), "dept": GroupingPrior()}, ("service",)),
    "penicillin": Formula("diameter", "plate", {"sample": GroupingPrior()}),
    "pastes": Formula("strength", "sample", {"batch": GroupingPrior()}),
    "radon nested": RADON,
    "radon nested slopes": RADON._replace(
        random=SLOPES, groupings={"st": GroupingPrior(SLOPES, centered=False)}
    ),
    "simulated slopes": SIMULATED._replace(
        random=("intercept", "x"),
        prior=GaussianPrior(covariance_type="full"),
        groupings={"h": GroupingPrior(), "k": GroupingPrior()},
    ),
    "simulated ml": SIMULATED,
    "simulated weights": SIMULATED._replace(weights="e"),
}


@pytest.fixture(scope="module", params=FORMULAS)
def case(request, data_home):
    """The oracle, the formula, its table and the fitted model."""
    oracle, formula = ORACLES[request.param], FORMULAS[request.param]
    file = data_home.parent / "oracles" / "groupings" / f"{oracle['table']}.csv.gz"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    ids = dict.fromkeys([formula.client, *formula.groupings], str)
    rows = pd.read_csv(file, dtype=ids)
    model = PersonalizedLinearRegression(
        formula.prior,
        random=list(formula.random),
        groupings=formula.groupings,
        method="reml" if oracle["reml"] else "ml",
        uncertainty="plug_in",
        unseen="population",
    )
    weights = None if formula.weights is None else rows[formula.weights]
    X, y, clients = columns(formula, rows), rows[formula.target], rows[formula.client]
    return oracle, formula, rows, model.fit(X, y, groups=clients, sample_weight=weights)


def columns(formula, rows):
    return rows[[*formula.features, *formula.groupings]]


def test_likelihood_and_population(case):
    oracle, _, _, model = case
    assert model.log_likelihood_ == pytest.approx(oracle["loglik"], abs=1e-5)
    found = [model.population_intercept_, *model.population_coef_]
    assert_allclose(found, list(oracle["fixef"].values()), rtol=1e-4)
    errors = [model.population_intercept_std_, *model.population_coef_std_]
    assert_allclose(errors, list(oracle["se"].values()), rtol=1e-4)


def test_variances(case):
    oracle, formula, _, model = case
    covariances = {formula.client: model.prior_.covariance}
    covariances |= {name: prior.covariance for name, prior in model.groupings_.items()}
    names = {"(Intercept)": "intercept"}
    for group, first, second, expected in oracle["varcorr"]:
        if group == "Residual":
            assert model.noise_variance_ == pytest.approx(expected, rel=1e-3)
            continue
        group = group.removesuffix(".1")  # the second of lme4's terms of a group
        terms = formula.random if group == formula.client else model.groupings_[group].random
        terms = [terms] if isinstance(terms, str) else list(terms)
        a = terms.index(names.get(first, first))
        b = a if second is None else terms.index(second)
        assert covariances[group][a, b] == pytest.approx(expected, rel=1e-3)


def test_fitted_values(case):
    oracle, formula, rows, model = case
    some = rows[: len(oracle["fitted"])]
    fitted = model.predict(columns(formula, some), groups=some[formula.client])
    assert_allclose(fitted, oracle["fitted"], atol=1e-4)


def test_effects(case):
    """An effect is what knowing the client or the level adds to a prediction."""
    oracle, formula, _, model = case
    for group, effects in oracle["effects"].items():
        n = len(effects["ids"])
        new = pd.DataFrame(0.0, index=range(n), columns=list(formula.features))
        new = new.assign(**dict.fromkeys([formula.client, *formula.groupings], "new"))
        known = new.assign(**{group: effects["ids"]})
        before = np.zeros(n)
        for term, expected in effects["values"].items():
            # At features of zero the effect is that of the intercept; one more adds a slope.
            at = {} if term == "(Intercept)" else {term: 1.0}
            found = np.subtract(
                *(
                    model.predict(columns(formula, each), groups=each[formula.client])
                    for each in (known.assign(**at), new.assign(**at))
                )
            )
            assert_allclose(found - before, expected, atol=1e-4)
            before = found


# Conditional standard deviations (`ranef(condVar=TRUE)`) belong to
# ``effects(errors="conditional")``: compare its column "sd" with the oracle's "sds" to 1e-4 there.
