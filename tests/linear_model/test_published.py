"""Fits of public tables against published REML values (lme4) and an independent profiled REML."""

import numpy as np
import pandas as pd
import pytest

from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.priors import GaussianPrior

# file, group, target, features, random, covariance_type; fixed effects, their standard errors,
# variance components (matrix or number), noise variance, -2 log REML.
PUBLISHED = {
    "sleepstudy 1": (
        ("sleepstudy", "subject", "reaction", [], "intercept", "spherical"),
        ([298.50789], [9.04994], 1278.3377, 1958.8652, 1904.3265),
    ),
    "sleepstudy days": (
        ("sleepstudy", "subject", "reaction", ["days"], "intercept", "spherical"),
        ([251.40510, 10.46729], [9.74672, 0.80422], 1378.1787, 960.4566, 1786.4651),
    ),
    "sleepstudy (days|subject)": (
        ("sleepstudy", "subject", "reaction", ["days"], "all", "full"),
        (
            *([251.40510, 10.46729], [6.82455, 1.54579], [[612.089, 9.605], [9.605, 35.072]]),
            *(654.9412, 1743.628),
        ),
    ),
    "radon 1": (
        ("radon_mn", "county_fips", "log_radon", [], "intercept", "spherical"),
        ([1.31258], [0.04891], 0.095814, 0.636621, 2259.4423),
    ),
    "radon floor": (
        ("radon_mn", "county_fips", "log_radon", ["floor"], "intercept", "spherical"),
        ([1.46160, -0.69299], [0.05158, 0.07043], 0.107730, 0.570915, 2171.3053),
    ),
    "radon floor + uranium": (
        ("radon_mn", "county_fips", "log_radon", ["floor", "log_uranium"], "intercept", "diag"),
        ([1.46576, -0.66824, 0.72027], [0.03794, 0.06880, 0.09176], 0.024462, 0.575230, 2134.1862),
    ),
    "radon (floor|county)": (
        ("radon_mn", "county_fips", "log_radon", ["floor"], "all", "full"),
        (
            *([1.46277, -0.68109], None, [[0.12158, -0.04042], [-0.04042, 0.11811]]),
            *(0.556742, 2168.3246),
        ),
    ),
    "hsb82": (
        ("hsb82", "school", "mAch", [], "intercept", "spherical"),
        ([12.63697], [0.24439], 8.61402, 39.14832, 47116.7935),
    ),
    "chem97": (
        ("chem97", "school", "score", ["gcsecnt"], "intercept", "spherical"),
        ([5.62767, 2.47228], [0.02807, 0.01689], 1.17976, 5.15437, 141698.6288),
    ),
    "insteval": (
        ("insteval", "student", "y", [], "intercept", "spherical"),
        ([3.20922], [0.00787], 0.100648, 1.675915, 248799.4770),
    ),
}


def fitted(data_home, file, group, target, features, random, covariance_type, **params):
    table = pd.read_csv(data_home / f"{file}.csv.gz")
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance_type=covariance_type, centered=False),
        random=random,
        uncertainty="plug_in",
        **params,
    )
    X = table[features] if features else pd.DataFrame({"none": np.zeros(len(table))})
    return model.fit(X, table[target], groups=table[group]), X, table


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fits(name, data_home):
    setting, (fixed, errors, between, noise, criterion) = PUBLISHED[name]
    model, _, _ = fitted(data_home, *setting)
    n_fixed = len(setting[3])
    got = np.append(model.population_intercept_, model.population_coef_[:n_fixed])
    np.testing.assert_allclose(got, fixed, rtol=1e-4)
    if errors is not None:
        got = np.append(model.population_intercept_std_, model.population_coef_std_[:n_fixed])
        np.testing.assert_allclose(got, errors, rtol=2e-4, atol=5e-6)
    np.testing.assert_allclose(np.squeeze(model.prior_.covariance), between, rtol=5e-4)
    assert model.noise_variance_ == pytest.approx(noise, rel=1e-5)
    assert -2 * model.log_likelihood_ == pytest.approx(criterion, abs=2e-3)


def test_published_predictions_of_subjects(data_home):
    setting, _ = PUBLISHED["sleepstudy days"]
    model, _, _ = fitted(data_home, *setting)
    deviations = model.intercept_ - model.population_intercept_
    np.testing.assert_allclose(deviations[:3], [40.78, -77.85, -63.11], atol=0.006)
    np.testing.assert_allclose(model.coef_, np.tile(model.population_coef_, (18, 1)))
    setting, _ = PUBLISHED["sleepstudy (days|subject)"]
    model, _, _ = fitted(data_home, *setting)
    deviations = np.column_stack(
        [model.intercept_ - model.population_intercept_, model.coef_ - model.population_coef_]
    )
    expected = [[2.2586, 9.199], [-40.3986, -8.6197], [-38.9602, -5.4489]]
    np.testing.assert_allclose(deviations[:3], expected, atol=1e-3)
