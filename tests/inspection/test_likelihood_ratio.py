"""Likelihood ratio tests: statistic, null distributions, and models that do not compare."""

import copy

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn import config_context
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.inspection import likelihood_ratio_test
from pfl_sklearn.inspection._null_distribution import (
    _eigenvalues,
    _semidefinite_weights,
    null_of_full_covariance,
    null_of_independent_variances,
    null_of_low_rank,
)
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior
from tests.helpers.slow import slow

NONE, FULL = GaussianPrior(covariance=0.0), GaussianPrior(covariance_type="full")
SPHERICAL = GaussianPrior(covariance_type="spherical")
LOW_RANK = GaussianPrior(covariance_type="low_rank")
PLAIN = GaussianPrior(centered=False)
AT_ZERO, KNOWN, ML = GaussianPrior(mean=0.0), GaussianPrior(covariance=0.4), {"method": "ml"}
ONE, TWO = {"random": "intercept"}, {"random": ["intercept", "a"]}
THREE = {"random": ["intercept", "a", "b"]}


def draw(m=25, n=6, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(m), n)
    X = pd.DataFrame(rng.normal([1.0, 0.5, -2.0], size=(m * n, 3)), columns=["a", "b", "c"])
    theta = rng.normal(size=(m, 3)) * [0.7, 0.5, 0.3]
    y = theta[codes, 0] + X["a"] * (1 + theta[codes, 1]) + X["b"] * theta[codes, 2]
    return X, (y + rng.normal(size=m * n)).to_numpy(), codes


FITTED = {}  # models of the drawn table, which tests must not change


def fit_once(model, columns, n_classes=None):
    key = repr(model), *columns, n_classes
    if key not in FITTED:
        X, y, codes = draw()
        if n_classes is not None:
            y = np.digitize(y, np.quantile(y, np.arange(1, n_classes) / n_classes))
        FITTED[key] = model.fit(X[list(columns)], y, groups=codes)
    return FITTED[key]


def linear(prior="gaussian", columns=("a", "b", "c"), rows=None, **params):
    model = PersonalizedLinearRegression(prior, uncertainty="plug_in", **params)
    if rows is None:
        return fit_once(model, columns)
    X, y, codes = rows
    return model.fit(X[list(columns)], y, groups=codes)


def logistic(prior="gaussian", columns=("a", "b", "c"), n_classes=2, **params):
    return fit_once(PersonalizedLogisticRegression(prior, **params), columns, n_classes)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("smaller", "larger", "expected"),
    [
        ((NONE, {}), ("gaussian", ONE), ((0, 1), (0.5, 0.5))),
        ((NONE, {}), (SPHERICAL, {"random": ["a", "b"]}), ((0, 1), (0.5, 0.5))),
        ((NONE, {}), ("gaussian", TWO), ((0, 1, 2), (0.25, 0.5, 0.25))),
        (("gaussian", ONE), (FULL, TWO), ((1, 2), (0.5, 0.5))),
        (("gaussian", ONE), ("gaussian", THREE), ((0, 1, 2), (0.25, 0.5, 0.25))),
        ((PLAIN, {"random": "a"}), (PLAIN, TWO), ((0, 1), (0.5, 0.5))),
        (("gaussian", TWO), (FULL, TWO), ((1,), (1.0,))),
        ((SPHERICAL, TWO), ("gaussian", THREE), ((1, 2), (0.5, 0.5))),
        (("gaussian", TWO), (FULL, THREE), ((1 + 2, 1 + 2 + 1), (0.5, 0.5))),
        ((LOW_RANK, {}), (FULL, {}), ((5,), (1.0,))),
        ((KNOWN, {"random": "a"}), ("gaussian", {"random": "a"}), ((1,), (1.0,))),
        (("gaussian", {"noise_variance": 1.0}), ("gaussian", {}), ((1,), (1.0,))),
        ((AT_ZERO, {"random": "a"} | ML), ("gaussian", TWO | ML), None),
    ],
)
def test_the_null_distribution_is_that_of_the_extension(smaller, larger, expected):
    models = [linear(prior, **params) for prior, params in (smaller, larger)]
    if expected is None:  # the shapes have different column centres
        with pytest.raises(
            ValueError, match=r"different column centres.*centered.*covariance_type='full'"
        ):
            likelihood_ratio_test(*models)
        return
    test = likelihood_ratio_test(*models)
    assert test[2:4] == expected
    first, second = (model.log_likelihood_ for model in models)
    assert test.log_likelihoods == (first, second)
    assert test.statistic == pytest.approx(2 * (second - first))
    tail = sum(
        weight * (stats.chi2.sf(test.statistic, k) if k else 0.0)
        for k, weight in zip(*expected, strict=True)
    )
    assert test.p_value == pytest.approx(tail)
    assert test.n_parameters == tuple(round(m.aic_ / 2 + m.log_likelihood_) for m in models)


def test_population_coefficients_by_full_likelihood():
    """As the F test of least squares says of models without differences between clients."""
    smaller = linear(NONE, ["a"], method="ml")
    larger = linear(NONE, method="ml")
    test = likelihood_ratio_test(smaller, larger)
    assert test[2:4] == ((2,), (1.0,))
    X, y, _ = draw()
    squares = [np.sum((y - LinearRegression().fit(x, y).predict(x)) ** 2) for x in (X[["a"]], X)]
    assert test.statistic == pytest.approx(len(y) * np.log(squares[0] / squares[1]))
    assert test.p_value == pytest.approx(stats.chi2.sf(test.statistic, 2))


def test_a_known_mean_is_a_hypothesis():
    smaller = linear(GaussianPrior(mean=0.0), random="intercept", method="ml")
    larger = linear(random="intercept", method="ml")
    assert likelihood_ratio_test(smaller, larger)[2:4] == ((1,), (1.0,))
    with pytest.raises(ValueError, match=r"more parameters than larger \(6 and 5\)"):
        likelihood_ratio_test(larger, smaller)


def test_classes():
    smaller, larger = logistic(NONE), logistic(random="intercept")
    assert likelihood_ratio_test(smaller, larger)[2:4] == ((0, 1), (0.5, 0.5))
    several = [logistic(NONE, names, n_classes=3) for names in (["a"], ["a", "b", "c"])]
    assert likelihood_ratio_test(*several)[2:4] == ((4,), (1.0,))


def test_a_statistic_of_zero():
    rng = np.random.default_rng(3)
    codes = np.repeat(np.arange(20), 5)
    y = rng.normal(size=100)
    y -= (pd.Series(y).groupby(codes).transform("mean")).to_numpy()  # no variance between clients
    rows = pd.DataFrame({"a": rng.normal(size=100)}), y, codes
    test = likelihood_ratio_test(
        linear(NONE, "a", rows), linear("gaussian", "a", rows, random="intercept")
    )
    assert (test.statistic, test.p_value) == (0.0, 1.0)


def test_rows_may_be_in_another_order():
    X, y, codes = draw()
    at = np.random.default_rng(0).permutation(len(y))
    shuffled = X.iloc[at], y[at], codes[at]
    test = likelihood_ratio_test(linear(NONE), linear(rows=shuffled))
    assert test.p_value == pytest.approx(likelihood_ratio_test(linear(NONE), linear()).p_value)


def test_models_inside_pipelines_and_searches():
    X, y, codes = draw()

    def scaled(prior):
        model = PersonalizedLinearRegression(prior, random="intercept")
        return make_pipeline(StandardScaler(), model)

    with config_context(enable_metadata_routing=True):
        smaller = scaled(NONE).fit(X, y, groups=codes)
        search = GridSearchCV(
            scaled("gaussian"),
            {"personalizedlinearregression__tol": [1e-7]},
            cv=ClientKFold(2, random_state=0),
            scoring=ClientScorer("neg_mean_squared_error"),
        ).fit(X, y, groups=codes)
    test = likelihood_ratio_test(smaller, search)
    expected = likelihood_ratio_test(linear(NONE), linear(random="intercept"))
    assert test.statistic == pytest.approx(expected.statistic, rel=1e-6)
    assert test[2:4] == ((0, 1), (0.5, 0.5))
    with pytest.raises(ValueError, match=r"columns 'a', 'b', 'c' of smaller and larger have the s"):
        likelihood_ratio_test(linear(NONE), search)


def test_the_repr_has_few_digits():
    text = repr(likelihood_ratio_test(linear(NONE), linear(random="intercept")))
    assert text.startswith("LikelihoodRatioTest(statistic=")
    assert "degrees_of_freedom=(0, 1), weights=(0.5, 0.5)" in text
    assert "n_parameters=(5, 6)" in text
    assert len(text) < 200


@pytest.mark.slow_but_first
@pytest.mark.parametrize("r", [2, 3, 4])
def test_weights_of_a_full_covariance(r):
    """Drawn matrices, projected by clipping their eigenvalues."""
    rng = np.random.default_rng(7)
    drawn = rng.normal(size=(100_000, r, r))
    values = np.linalg.eigvalsh((drawn + drawn.transpose(0, 2, 1)) / 2)
    squares = np.sum(np.maximum(values, 0) ** 2, axis=1)
    found = null_of_full_covariance(r)
    assert sum(found.weights) == pytest.approx(1.0)
    for value in (0.5, 2.0, 6.0, 12.0):
        share = np.mean(squares >= value)
        assert found.tail(value) == pytest.approx(share, abs=5 * np.sqrt(share / len(squares)))


@pytest.mark.slow
def test_simulated_weights_are_those_of_the_closed_form():
    simulated = _semidefinite_weights(_eigenvalues(2))
    np.testing.assert_allclose(simulated, null_of_full_covariance(2).weights, atol=0.01)
    assert null_of_full_covariance(1) == null_of_independent_variances(1)
    wide = null_of_full_covariance(20)  # where few matrices are drawn
    assert len(wide.weights) == 211
    assert sum(wide.weights) == pytest.approx(1.0)


@pytest.mark.parametrize("at_zero", [False, *slow([True])])
@pytest.mark.slow
def test_low_rank_directions(at_zero):
    """Drawn matrices, and the closest ones of the shape by search over the ridge."""
    rng = np.random.default_rng(7)
    drawn = rng.normal(size=(4000, 3, 3))
    values = np.linalg.eigvalsh((drawn + drawn.transpose(0, 2, 1)) / 2)
    ridges = np.linspace(0 if at_zero else -5, 5, 801)[:, None, None]
    fitted = np.concatenate(
        [np.broadcast_to(ridges, (801, 4000, 2)), np.maximum(values[:, 2:], ridges)], axis=2
    )
    left = np.min(np.sum((values - fitted) ** 2, axis=2), axis=0)
    total = values if at_zero else values - values.mean(axis=1, keepdims=True)
    squares = np.sum(total**2, axis=1) - left + rng.chisquare(2, size=4000)
    reference = null_of_low_rank(3, 1, 2, at_zero=at_zero)
    for value in (2.0, 6.0, 12.0):
        share = np.mean(squares >= value)
        assert reference.tail(value) == pytest.approx(share, abs=5 * np.sqrt(share / 4000))
    assert reference.tail(0.0) == 1.0


def test_low_rank_models():
    test = likelihood_ratio_test(linear(SPHERICAL), linear(LOW_RANK))
    assert test.degrees_of_freedom is None
    assert test.weights is None
    assert 0 < test.p_value < 1
    assert likelihood_ratio_test(linear(NONE), linear(LOW_RANK)).p_value < 1e-4


def refuse(smaller, larger, match):
    with pytest.raises(ValueError, match=match):
        likelihood_ratio_test(smaller, larger)


@pytest.mark.slow
def test_models_that_are_not_nested_are_refused():
    refuse(linear(NONE, "ab", method="ml"), linear("gaussian", "ac", method="ml"),
           r"smaller has the columns 'b', which larger lacks")  # fmt: skip
    refuse(linear(random="a"), linear(random=["intercept", "b"]),
           r"smaller has a full covariance of 'a', which is not a special case of larger's, a diag "
           r"covariance of 'intercept', 'b'")  # fmt: skip
    refuse(linear(FULL, random=["intercept", "a"]), linear(), r"a full cov.*a diag covariance of")
    refuse(linear(random=["a", "b"]), linear(LOW_RANK), r"a diag cov.*a low_rank.*of rank 1")
    refuse(linear(SPHERICAL, random="intercept"), linear(LOW_RANK), r"not a special case of larger")
    refuse(linear(PLAIN), linear(random="all", prior=FULL.set_params(), noise_variance=1.0),
           r"larger has noise_variance=1.0, and smaller estimates it")  # fmt: skip
    refuse(linear(noise_variance=2.0), linear(FULL, noise_variance=1.0), r"and smaller has 2.0")
    refuse(linear(GaussianPrior(covariance=0.5)), linear(), r"a given covariance of.*a diag cov")
    refuse(linear(GaussianPrior(covariance=0.5), noise_variance=1.0),
           linear(GaussianPrior(covariance=0.4)), r"not a special case of larger's")  # fmt: skip
    refuse(linear(random=["intercept", "a"]), linear(PLAIN), r"different column centres")
    refuse(linear(), linear(), r"smaller and larger are the same model")
    refuse(linear(), linear(NONE), r"more parameters than larger \(9 and 5\); give the smaller")


def test_a_known_covariance_of_both_is_no_difference():
    given = GaussianPrior(covariance=[0.5, 0.2])
    test = likelihood_ratio_test(
        linear(given, "ab", random=["intercept", "a"], method="ml"),
        linear(given, random=["intercept", "a"], method="ml"),
    )
    assert test[2:4] == ((1,), (1.0,))


def test_known_means_that_differ_are_refused():
    first, second = (GaussianPrior(mean=mean) for mean in (0.0, 1.0))
    refuse(
        linear(first, "ab", random="a", method="ml"),
        linear(second, random="a", method="ml"),
        r"larger has known means of 'a', but smaller estimates them or has other values",
    )


def test_other_rows_are_refused():
    X, y, codes = draw()
    larger, match = linear(), r"fitted to different rows: "
    refuse(linear(NONE, rows=(X[1:], y[1:], codes[1:])), larger, match + "149 and 150 rows")
    refuse(
        linear(NONE, rows=(X, y, codes + 1)), larger, match + r"different clients \(25 and 25, or"
    )
    moved = np.where(np.arange(150) == 0, 1, codes)
    refuse(linear(NONE, rows=(X, y, moved)), larger, match + "different numbers of rows per client")
    refuse(linear(NONE, rows=(X, y + 1, codes)), larger, match + "different responses")
    refuse(
        linear(NONE, rows=(X, y[::-1], codes)), larger, r"columns 'a', 'b', 'c' of sma.*different r"
    )
    X2 = X.assign(b=X["b"] ** 2)
    refuse(linear(NONE, rows=(X2, y, codes)), larger, r"the columns 'b' of smaller and larger")
    weights = np.random.default_rng(0).uniform(0.5, 2, size=150)
    weighted = PersonalizedLinearRegression(NONE).fit(X, y, groups=codes, sample_weight=weights)
    refuse(weighted, larger, match + r"weights that sum to \S+ and 150")
    weights /= weights.mean()
    weighted = PersonalizedLinearRegression(NONE).fit(X, y, groups=codes, sample_weight=weights)
    refuse(weighted, larger, match + "different responses or weights")
    three = logistic(NONE, n_classes=3)
    refuse(three, logistic(random="intercept"), match + r"classes \[0, 1, 2\] and \[0, 1\]")


def test_likelihoods_that_do_not_compare_are_refused():
    refuse(linear(NONE, "ab"), linear(),
           r"with the same population coefficients, and 'c' are in one.*method='ml'")  # fmt: skip
    refuse(linear(NONE), linear(method="ml"), r"smaller has method='reml' and larger method='ml'")
    auto, slopes = logistic(random="intercept"), logistic(random=["intercept", "a"])
    refuse(auto, slopes, r"by quadrature with 15 points.*by laplace.*quadrature='laplace'")
    laplace = logistic(random="intercept", quadrature="laplace")
    assert likelihood_ratio_test(laplace, slopes).weights == (0.5, 0.5)
    penalized = logistic(random="intercept", population_penalty=1.0)
    refuse(logistic(NONE), penalized, r"larger has population_penalty=1.0, so its likelihood")


def test_models_without_likelihood_are_refused():
    model = linear(random="intercept")
    refuse(LinearRegression().fit([[1.0], [2.0]], [1.0, 2.0]), model, r"got LinearRegression")
    refuse(logistic(NONE), model, r"smaller is a PersonalizedLogisticRegression and larger a Pers")
    refuse(linear(GaussianMixturePrior(2)), model, r"smaller must have a GaussianPrior.*Mixture")
    refuse(linear(NONE), linear(GaussianPrior(covariance=np.inf)), r"log_likelihood_ of larger is")
    refuse(linear(NONE), model.for_client(3), r"larger must be a fit of all clients without priv")
    X, y, codes = draw()
    private = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5), noise_variance=1.0, epsilon=5.0, feature_bound=6.0,
        target_bound=10.0,
    ).fit(X, y, groups=codes)  # fmt: skip
    for each in (private, private.release()):
        refuse(each, model, r"smaller must be a fit of all clients without privacy; got a Pers")
    for unfitted in (PersonalizedLinearRegression(), make_pipeline(PersonalizedLinearRegression())):
        with pytest.raises(NotFittedError):
            likelihood_ratio_test(unfitted, model)
    twins = X[["a", "b"]].set_axis(["a", "intercept"], axis=1)
    refuse(PersonalizedLinearRegression(NONE).fit(twins, y, groups=codes), model,
           r"smaller has columns of the same name: 'intercept', 'a', 'intercept'")  # fmt: skip


def test_a_search_that_has_not_converged_is_told():
    larger = copy.copy(linear(random="intercept"))
    larger.log_likelihood_ -= 100
    with pytest.warns(ConvergenceWarning, match=r"less than the -\S+ of smaller.*set to 0"):
        test = likelihood_ratio_test(linear(NONE), larger)
    assert (test.statistic, test.p_value) == (0.0, 1.0)
