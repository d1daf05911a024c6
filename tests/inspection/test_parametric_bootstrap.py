"""Bootstrap distributions against errors of the fit, workers, failing fits, and refusals."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import parametric_bootstrap
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.slow import slow
from tests.helpers.three_responses import ALONE, KINDS, draw


def population(model):
    return {"intercept": model.population_intercept_, "slope": model.population_coef_[0]}


@pytest.mark.parametrize("kind", slow(KINDS))
def test_spread_is_that_of_the_errors(kind):
    x, y, codes, _ = draw(kind, np.random.default_rng(0), 40, 5)
    model = KINDS[kind](**ALONE, uncertainty="plug_in").fit(x, y, groups=codes)
    fits = parametric_bootstrap(model, population, x, groups=codes, n=120, random_state=0)
    assert fits.attrs["estimate"] == pytest.approx(population(model))
    stds = [model.population_intercept_std_, model.population_coef_std_[0]]
    assert_allclose(fits.std(), stds, rtol=0.2)
    assert np.abs((fits.mean() - pd.Series(population(model))) / fits.std()).max() < 0.3


def test_draws_are_those_of_refits():
    """Of responses that `simulate` draws with the same seed."""
    x, y, codes, _ = draw("linear", np.random.default_rng(0), 10, 4)
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    fits = parametric_bootstrap(model, population, x, groups=codes, n=3, random_state=7)
    drawn = model.simulate(x, groups=codes, n=3, clients="new", random_state=7)
    again = [PersonalizedLinearRegression(**ALONE).fit(x, each, groups=codes) for each in drawn]
    assert_allclose(fits, pd.DataFrame(map(population, again)))
    assert fits.attrs["estimate"] == pytest.approx(population(model))


@pytest.mark.slow
def test_the_same_for_any_number_of_workers():
    x, y, codes, _ = draw("counts", np.random.default_rng(0), 10, 4)
    exposure = np.linspace(0.5, 2, len(y))
    model = PersonalizedPoissonRegression(**ALONE).fit(x, y, groups=codes, exposure=exposure)
    options = {"groups": codes, "exposure": exposure, "n": 5, "random_state": 1}
    one, two = (
        parametric_bootstrap(model, lambda fit: fit.population_intercept_, x, n_jobs=k, **options)
        for k in (None, 2)
    )
    pd.testing.assert_frame_equal(one, two)
    assert one.columns.tolist() == ["statistic"]


def test_behind_steps_and_searches():
    x, y, codes, _ = draw("linear", np.random.default_rng(0), 10, 4)
    frame = pd.DataFrame({"x": x[:, 0], "site": codes})
    steps = make_pipeline(StandardScaler(), PersonalizedLinearRegression(**ALONE))
    model = ClientColumn(steps, "site").fit(frame, y)
    fits = parametric_bootstrap(
        model, lambda fit: fit.predict(frame[:3]), frame, n=4, random_state=0
    )
    assert fits.shape == (4, 3)
    search = GridSearchCV(
        ClientColumn(PersonalizedLinearRegression(**ALONE), "site"),
        {"estimator__method": ["ml", "reml"]},
        cv=2,
    ).fit(frame, y)
    fits = parametric_bootstrap(
        search, lambda fit: fit.estimator_.method == "ml", frame, n=3, random_state=0
    )
    assert (fits["statistic"] == (search.best_params_["estimator__method"] == "ml")).all()


def test_fits_that_fail_are_missing():
    x, codes = np.zeros((12, 1)), np.repeat([0, 1, 2], 4)
    y = np.array([1, 1, *[0] * 10])
    model = PersonalizedLogisticRegression(random="intercept").fit(x, y, groups=codes)
    with pytest.warns(UserWarning, match=r"\d+ of 40 fits to simulated rows failed; the first"):
        fits = parametric_bootstrap(
            model, lambda fit: fit.population_intercept_, x, groups=codes, n=40, random_state=0
        )
    assert fits["statistic"].isna().any()
    assert fits["statistic"].notna().any()


def test_rows_without_weight_are_absent():
    x, y, codes, _ = draw("linear", np.random.default_rng(0), 10, 4)
    weights = np.where(np.arange(40) % 4, 1.0, 0.0)
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes, sample_weight=weights)
    options = {"n": 3, "random_state": 0}
    some = parametric_bootstrap(
        model, population, x, groups=codes, sample_weight=weights, **options
    )
    used = weights > 0
    rest = parametric_bootstrap(model, population, x[used], groups=codes[used], **options)
    assert_allclose(some, rest)


def test_statistics_and_models_that_do_not_fit():
    x, y, codes, _ = draw("linear", np.random.default_rng(0), 10, 4)
    model = PersonalizedLinearRegression(**ALONE).fit(x, y, groups=codes)
    with pytest.raises(TypeError, match="statistic must return numbers; got 'no number'"):
        parametric_bootstrap(model, lambda fit: "no number", x, groups=codes, n=2)
    with pytest.raises(TypeError, match=r"expected a fitted PersonalizedLinear.*got Ridge"):
        parametric_bootstrap(Ridge().fit(x, y), population, x)
    outer = TransformedTargetRegressor(
        PersonalizedLinearRegression(**ALONE),
        func=np.cbrt,
        inverse_func=np.square,
        check_inverse=False,
    )
    outer.fit(x, y, groups=codes)
    with pytest.raises(TypeError, match="simulated responses are those of the transformed target"):
        parametric_bootstrap(outer, population, x, groups=codes)
    frame = pd.DataFrame({"x": x[:, 0], "site": codes})
    named = PersonalizedLinearRegression(**ALONE).fit(frame[["x"]], y, groups=codes)
    frozen = ClientColumn(FrozenEstimator(named), "site")
    with pytest.raises(TypeError, match="cannot fit a FrozenEstimator again"):
        parametric_bootstrap(frozen.fit(frame, y), population, frame)
    private = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5),
        noise_variance=1.0,
        epsilon=4.0,
        feature_bound=4.0,
        target_bound=6.0,
        **ALONE,
    )
    private.fit(x, y, groups=codes)
    with pytest.raises(ValueError, match="parametric_bootstrap is for fits without privacy"):
        parametric_bootstrap(private, population, x, groups=codes)
