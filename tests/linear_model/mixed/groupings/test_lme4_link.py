"""Answers of lme4 1.1-31 (R, glmer with nAGQ=1) to classes and counts with several groupings.

Its tables lie in the folder ``oracles/groupings`` beside that of the public tables. Its search
ends up to 2.5e-3 nats below the maximum, and for verbagg .07 standard errors away.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from pfl_sklearn import PersonalizedLogisticRegression, PersonalizedPoissonRegression
from pfl_sklearn.linear_model._mixed._families import Binomial, Poisson
from pfl_sklearn.linear_model._mixed._groupings._link_equations import LinkModel
from pfl_sklearn.linear_model._mixed._groupings._products import Grouping, grouped_design
from tests.helpers.dense_link import DenseLinkModel
from tests.helpers.oracles import read_oracle

ORACLES = read_oracle("lme4_groupings")


class Formula(NamedTuple):
    """The model in our words."""

    estimator: Any
    family: Any
    target: str
    client: str
    groupings: tuple
    features: tuple
    tol: float = 2e-3  # relative, of the population's coefficients
    close: float = 2e-3  # of effects and fitted values
    exposure: str | None = None


CLASSES = PersonalizedLogisticRegression, Binomial()
COUNTS = PersonalizedPoissonRegression, Poisson()
KINDS = ("Anger", "male", "scold", "shout", "self", "do")
FORMULAS = {
    "simulated binary": Formula(*CLASSES, "z", "g", ("h",), ("x",), 1e-5),
    "simulated counts": Formula(*COUNTS, "cnt", "g", ("h",), ("x",), exposure="e"),
    "verbagg crossed": Formula(*CLASSES, "resp01", "id", ("item",), KINDS, 0.05, 0.03),
    # As many levels of INDEX as rows: the overdispersion of single counts.
    "grouseticks": Formula(*COUNTS, "TICKS", "LOCATION", ("INDEX", "BROOD"), ("y96", "y97", "h")),
}


def table_of(name, data_home):
    file = data_home.parent / "oracles" / "groupings" / f"{ORACLES[name]['table']}.csv.gz"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    formula = FORMULAS[name]
    return pd.read_csv(file, dtype=dict.fromkeys([formula.client, *formula.groupings], str))


@pytest.fixture(scope="module", params=FORMULAS)
def case(request, data_home):
    """The oracle, the formula, its table and the fitted model."""
    formula, rows = FORMULAS[request.param], table_of(request.param, data_home)
    model = formula.estimator(
        random="intercept",
        groupings=list(formula.groupings),
        uncertainty="plug_in",
        unseen="population",
    )
    model.fit(
        rows[[*formula.features, *formula.groupings]],
        rows[formula.target],
        groups=rows[formula.client],
        **known(formula, rows),
    )
    return ORACLES[request.param], formula, rows, model


def known(formula, rows):
    return {} if formula.exposure is None else {"exposure": rows[formula.exposure]}


def test_estimates(case):
    oracle, formula, _, model = case
    assert -1e-4 < model.log_likelihood_ - oracle["loglik"] < 3e-3
    found = [model.population_intercept_, *model.population_coef_]
    assert_allclose(found, list(oracle["fixef"].values()), rtol=formula.tol)
    errors = [model.population_intercept_std_, *model.population_coef_std_]
    assert_allclose(errors, list(oracle["se"].values()), rtol=2e-3)
    covariances = {name: prior.covariance for name, prior in model.groupings_.items()}
    covariances[formula.client] = model.prior_.covariance
    for group, _, _, expected in oracle["varcorr"]:
        assert covariances[group][0, 0] == pytest.approx(expected, rel=3e-3)


def test_effects_and_fitted_values(case):
    oracle, formula, rows, model = case
    table = model.effects()
    for group, effects in oracle["effects"].items():
        name = "client" if group == formula.client else group
        found = table[table["grouping"] == name].set_index("level")["estimate"]
        expected = effects["values"]["(Intercept)"]
        assert_allclose(found[effects["ids"]], expected, atol=formula.close)
    some = rows[: len(oracle["fitted"])]
    X, options = some[[*formula.features, *formula.groupings]], {"groups": some[formula.client]}
    options |= known(formula, some) | {"integrate": False}
    if formula.estimator is PersonalizedPoissonRegression:
        fitted = model.predict(X, **options)
    else:
        fitted = model.predict_proba(X, **options)[:, 1]
    assert_allclose(fitted, oracle["fitted"], rtol=formula.close)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tol"), [("simulated counts", 1e-3), ("verbagg crossed", 1e-6)])
def test_the_likelihood_is_theirs_at_their_estimates(name, tol, data_home):
    # That of the counts is theirs at modes which their steps have not quite reached.
    oracle, formula, rows = ORACLES[name], FORMULAS[name], table_of(name, data_home)
    one = np.ones((len(rows), 1))
    groupings = []
    for column in (formula.client, *formula.groupings):
        codes, levels = pd.factorize(rows[column])
        groupings.append(Grouping(codes, one, len(levels)))
    X = np.column_stack([one, rows[list(formula.features)]]).astype(float)
    y, p = rows[formula.target].to_numpy(float), X.shape[1]
    offset = np.zeros(len(rows))
    if formula.exposure is not None:
        offset = np.log(rows[formula.exposure].to_numpy())
    none = np.zeros((p, p)), [np.zeros((1, 1))] * len(groupings)
    design, family = grouped_design(groupings, X), formula.family
    dense = DenseLinkModel.of(LinkModel(design, groupings, family, y, one[:, 0], offset, *none))
    variances = {group: np.array([[value]]) for group, _, _, value in oracle["varcorr"]}
    covariances = [variances[column] for column in (formula.client, *formula.groupings)]
    criterion = dense.criterion(np.array(list(oracle["fixef"].values())), covariances)
    value = family.constants(y).sum() - criterion / 2
    assert value == pytest.approx(oracle["loglik"], abs=tol)
