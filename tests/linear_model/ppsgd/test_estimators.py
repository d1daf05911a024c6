"""PPSGD without noise: against plain loops, limits of alpha, losses, warm starts, callbacks."""

import math

import numpy as np
import pytest
import sklearn
from hypothesis import given, settings, strategies as st
from scipy.sparse import csr_array, csr_matrix
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.callback import ScoringMonitor
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn._rounds.loop import round_generators
from pfl_sklearn._rounds.step_sizes import step_sizes
from pfl_sklearn.linear_model._ppsgd._steps import batch_curvatures, largest_eigenvalue
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.theory import ppsgd_learning_rate, smoothness_alpha
from tests.helpers.callbacks import scores_of
from tests.helpers.frozen import assert_frozen, freeze
from tests.helpers.ppsgd import SEED, SIZES, table
from tests.helpers.public_tasks import movielens


def squared_residuals(predictor, target):
    return predictor - target


def logistic_residuals(predictor, label):
    return expit(predictor) - label


def softmax_residuals(predictor, label):
    return softmax(predictor) - np.eye(len(predictor))[label]


def reference(model, X, y, groups, residuals=squared_residuals):
    """Algorithms 1, 2 and 3 of the paper, client by client and row by row, in its own symbols.

    Returns the iterates of w (T + 1, d, c) and theta (T + 1, N, d, c).
    """
    if model.fit_intercept:
        X = np.column_stack([X, np.ones(len(X))])
    N = int(groups.max()) + 1
    rows = [np.flatnonzero(groups == i) for i in range(N)]
    if model.shuffle:
        keys = np.random.default_rng((model.random_state, 0)).random(len(X))
        parts = np.split(keys, np.cumsum([len(own) for own in rows])[:-1])
        rows = [own[np.argsort(part)] for own, part in zip(rows, parts, strict=True)]
    m = [min(len(own), model.batch_size or len(own)) for own in rows]
    q, M = model.client_fraction, sum(m)
    if model.sampling == "fixed":
        q = math.floor(q * N) / N
    alpha, Q = model.alpha, q * N
    eta = model.learning_rate * (Q if alpha * Q <= 1 else 1 / alpha)
    c = 1 if y.ndim == 1 and residuals is not softmax_residuals else None
    c = c or (y.shape[1] if y.ndim == 2 else int(y.max()) + 1)
    targets = y.reshape(len(y), -1) if residuals is squared_residuals else y
    w, theta, used = np.zeros((X.shape[1], c)), np.zeros((N, X.shape[1], c)), [0] * N
    w_path, theta_path = [w.copy()], [theta.copy()]
    for t in range(model.n_rounds):
        rng = np.random.Generator(np.random.PCG64((model.random_state, 1)).jumped(t))
        taking = range(N)
        if model.sampling == "fixed":
            taking = np.sort(rng.choice(N, round(Q), replace=False, shuffle=False))
        elif q < 1:
            taking = np.sort(rng.choice(N, rng.binomial(N, q), replace=False, shuffle=False))
        total = np.zeros_like(w)
        for i in taking:
            gradient = np.zeros_like(w)
            for j in range(m[i]):
                row = rows[i][(used[i] + j) % len(rows[i])]
                gradient += np.outer(X[row], residuals(X[row] @ (w + theta[i]), targets[row]))
            used[i] += m[i]
            if model.weighting == "clients":
                gradient /= m[i]
            norm = np.linalg.norm(gradient)
            if not math.isinf(alpha):
                theta[i] -= eta / (q * (M if model.weighting == "samples" else N)) * gradient
            clip = 1.0 if model.clip_norm is None else min(1.0, model.clip_norm / norm)
            total += clip * gradient
        weight = q * (M if model.weighting == "samples" else N)
        step = model.learning_rate if math.isinf(alpha) else alpha * eta
        w = w - step * total / weight
        w_path.append(w.copy())
        theta_path.append(theta.copy())
    return np.array(w_path), np.array(theta_path)


REFERENCED = [
    {"batch_size": 1},  # Algorithm 1
    {"batch_size": 5},  # Algorithm 2 with everybody
    {"batch_size": 5, "client_fraction": 0.4},
    {"batch_size": 5, "client_fraction": 0.4, "weighting": "clients"},  # Algorithm 3
    {"batch_size": None, "weighting": "clients"},
    {"batch_size": None, "client_fraction": 0.4, "sampling": "fixed"},
    {"batch_size": 3, "fit_intercept": False, "shuffle": False, "clip_norm": 0.5},
    {"batch_size": 3, "clip_norm": 0.3, "weighting": "clients", "client_fraction": 0.6},
]


@pytest.mark.parametrize(
    ("alpha", "params"),
    [*((0.02, params) for params in REFERENCED), *((a, REFERENCED[-1]) for a in (0, 40, math.inf))],
    ids=str,
)
def test_plain_loops_agree(alpha, params):
    X, y, groups = table()
    model = PPSGDRegressor(
        alpha=alpha, learning_rate=0.03, n_rounds=12, random_state=SEED, **params
    ).fit(X, y, groups=groups)
    w, theta = reference(model, X, y, groups)
    assert np.abs(w[-1]).max() + np.abs(theta[-1]).max() > 0.01
    np.testing.assert_allclose(model._population, w[-1], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(model._local, theta[-1], rtol=1e-12, atol=1e-14)
    averages = clone(model).set_params(average=True).fit(X, y, groups=groups)
    np.testing.assert_allclose(averages._population, w[:-1].mean(axis=0), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(averages._local, theta[:-1].mean(axis=0), rtol=1e-10, atol=1e-13)


def test_plain_loops_agree_for_several_outputs_and_classes():
    X, y, groups = table(n_outputs=3)
    shared = {"learning_rate": 0.05, "n_rounds": 12, "random_state": SEED, "batch_size": 4}
    model = PPSGDRegressor(alpha=0.2, **shared).fit(X, y, groups=groups)
    w, theta = reference(model, X, y, groups)
    np.testing.assert_allclose(model._population, w[-1], rtol=1e-12)
    np.testing.assert_allclose(model._local, theta[-1], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(model.population_coef_, w[-1][:-1].T, rtol=1e-12)
    np.testing.assert_allclose(model.coef_[2], (w[-1] + theta[-1][2])[:-1].T, rtol=1e-12)
    np.testing.assert_allclose(model.intercept_[2], (w[-1] + theta[-1][2])[-1], rtol=1e-12)
    assert model.predict(X, groups=groups).shape == y.shape
    labels = y.argmax(axis=1)
    softmax_model = PPSGDClassifier(alpha=0.2, **shared).fit(X, labels, groups=groups)
    w, theta = reference(softmax_model, X, labels, groups, softmax_residuals)
    np.testing.assert_allclose(softmax_model._population, w[-1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(softmax_model._local, theta[-1], rtol=1e-11, atol=1e-14)
    binary = PPSGDClassifier(alpha=0.2, **shared).fit(X, labels > 0, groups=groups)
    w, theta = reference(binary, X, (labels > 0).astype(int), groups, logistic_residuals)
    np.testing.assert_allclose(binary._population, w[-1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(binary._local, theta[-1], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("n_expected", [0.3, 10.0])
def test_steps_go_from_local_only_to_global_only(n_expected):
    assert step_sizes(0, 0.5, n_expected) == (0, 0.5)
    assert step_sizes(math.inf, 0.5, n_expected) == (0.5, 0)
    assert step_sizes(1 / n_expected, 0.5, n_expected) == pytest.approx((0.5, 0.5))
    np.testing.assert_allclose(step_sizes(1e-14, 0.5, n_expected), (0, 0.5), atol=1e-10)
    np.testing.assert_allclose(step_sizes(1e300, 0.5, n_expected), (0.5, 0), atol=1e-200)
    for alpha in (1e-3, 0.09, 0.11, 1.0, 5.0, 1e6):
        steps = step_sizes(alpha, 0.5, n_expected)
        assert max(steps) == 0.5
        assert steps.population / steps.local == pytest.approx(alpha * n_expected)
    assert step_sizes(1e308, 0.5, 1e6) == (0.5, 0)


def test_alpha_0_is_every_client_alone():
    """A client's model does not change a bit with the others' rows, and nothing is released."""
    X, y, groups = table()
    model = PPSGDRegressor(alpha=0, learning_rate=0.1, shuffle=False, n_rounds=100)
    first = clone(model).fit(X, y, groups=groups)
    assert not first.population_coef_.any()
    y[groups == 4] *= 100
    second = clone(model).fit(X, y, groups=groups)
    others = first.clients_ != 4
    np.testing.assert_array_equal(second.coef_[others], first.coef_[others])
    assert (second.coef_[4] != first.coef_[4]).all()


@pytest.mark.parametrize("weighting", ["samples", "clients"])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_the_step_of_theory(weighting, sampling):
    X, y, groups = table()
    sizes = np.minimum(SIZES, 10)
    for alpha in (0, 0.01, 0.3, 5.0, math.inf):
        for q in (1.0, 0.5):
            model = PPSGDRegressor(
                alpha=alpha,
                learning_rate="theory",
                smoothness=30.0,
                client_fraction=q,
                weighting=weighting,
                sampling=sampling,
                n_rounds=5,
            )
            steepest = smoothness_alpha(
                30.0, alpha, 8, batch_sizes=sizes, client_fraction=q, weighting=weighting
            )
            larger = 1 if math.isinf(alpha) else max(alpha, 1 / (8 * q))
            got = clone(model).fit(X, y, groups=groups).learning_rate_
            assert got == pytest.approx(larger / (4 * steepest))
            model.set_params(solution_norm=0.1, gradient_std=90.0)
            eta = ppsgd_learning_rate(steepest, 0.1, 90.0, 5)
            assert eta < 1 / (4 * steepest)
            got = clone(model).fit(X, y, groups=groups).learning_rate_
            assert got == pytest.approx(larger * eta)
    needs = {"smoothness": "needs smoothness", "solution_norm": r"=None.*gradient_std=90\.0"}
    for without, message in needs.items():
        with pytest.raises(ValueError, match=message):
            clone(model).set_params(**{without: None}).fit(X, y, groups=groups)


@pytest.mark.parametrize("convert", [np.asarray, csr_array])
def test_curvatures_of_batches(convert):
    """Against all batches that follow one another: bounds, exact where rows are parallel."""
    rng = np.random.default_rng(0)
    sizes, batches = np.array([1, 7, 64, 5]), np.array([1, 3, 10, 5])
    X, offsets = rng.normal(size=(sizes.sum(), 3)), np.cumsum([0, *sizes])
    found = batch_curvatures(convert(X), offsets, batches)
    for i, b in enumerate(batches):
        starts = [*range(offsets[i], offsets[i + 1] - b, b), offsets[i + 1] - b]
        norms = [np.mean(np.sum(X[start : start + b] ** 2, axis=1)) for start in starts]
        assert found[i] == pytest.approx(max(norms))
    parallel = np.abs(X[:, :1]) * [[1.0, 2.0, 2.0]]
    found = batch_curvatures(convert(parallel), offsets, sizes)
    for i in range(4):
        rows = parallel[offsets[i] : offsets[i + 1]]
        assert found[i] == pytest.approx(np.linalg.eigvalsh(rows.T @ rows / len(rows))[-1])


@pytest.mark.parametrize("convert", [np.asarray, csr_array])
def test_the_largest_eigenvalue(convert):
    rng = np.random.default_rng(0)
    X, weights = rng.normal(size=(50, 4)) * [3.0, 1.0, 1.0, 0.5], rng.random(50)
    expected = np.linalg.eigvalsh(X.T @ (weights[:, None] * X))[-1]
    assert largest_eigenvalue(convert(X), weights) == pytest.approx(expected, rel=0.02)
    assert largest_eigenvalue(convert(0 * X), weights) == 0


@pytest.mark.parametrize(
    ("convert", "weighting"), [(np.asarray, "samples"), (csr_matrix, "clients")]
)
def test_the_automatic_step_by_hand(convert, weighting):
    """Rows of curvature 1 once they are scaled; clients of 20, 1, 1 and 6 rows in a round."""
    sizes = [40, 1, 1, 6]
    X, groups = np.full((48, 1), 2.0), np.repeat(np.arange(4), sizes)
    model = PPSGDRegressor(weighting=weighting, fit_intercept=False, n_rounds=1, batch_size=20)
    shares = np.array([20, 1, 1, 6]) / 7 if weighting == "samples" else np.ones(4)
    typical = np.sum(shares**2) / 4
    for alpha, q, population, local in (
        (1.0, 1.0, 1.0, 0.25),
        (0, 0.5, 0.0, 1.0),
        (0.1, 1.0, 0.4, 1.0),
        (math.inf, 0.5, 1.0, 0.0),
        ("auto", 0.5, 1.0, 1 / 30),
    ):
        model.set_params(alpha=alpha, client_fraction=q)
        model.fit(convert(X), np.ones(48), groups=groups)
        rate = 1 / (population * (1 + typical / (4 * q)) + local * typical)
        assert model.learning_rate_ == pytest.approx(rate)
        steps = model._progress.state.clients["step"].ravel()
        np.testing.assert_allclose(steps, np.minimum(rate * local, 0.5 / shares))


def test_one_steep_client_does_not_slow_the_others():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 10)
    X = rng.normal(size=(300, 2))
    model = PPSGDRegressor(alpha=0, n_rounds=5, random_state=0, clip_norm=1e9)
    calm = clone(model).fit(X, X[:, 0], groups=groups)
    X[groups == 7] *= 3
    steep = clone(model).fit(X, X[:, 0], groups=groups)
    steps = steep._progress.state.clients["step"]
    assert steps[7] < 0.5 * np.delete(steps, 7).min()
    assert steep.learning_rate_ > 0.2 * calm.learning_rate_


def test_features_whose_squares_overflow():
    X, y, groups = table()
    model = PPSGDRegressor()
    for rows in (1e200 * X, csr_array(1e200 * X)):
        with pytest.raises(ValueError, match=r"\bX\b.*too large to be squared.*1e150"):
            model.fit(rows, y, groups=groups)
    assert not hasattr(model, "coef_")


@pytest.mark.parametrize("given", [{}, {"learning_rate": 0.01}])
def test_targets_whose_squares_overflow(given):
    X, y, groups = table()
    with pytest.raises(ValueError, match=r"\by\b.*too large to be squared.*1e150"):
        PPSGDRegressor(**given).fit(X, 1e200 * y, groups=groups)


@pytest.mark.parametrize(
    ("kind", "unit", "size"), [(np.asarray, 1e-310, 1.0), (csr_array, 1e-250, 1e100)]
)
def test_features_too_small_for_their_coefficients(kind, unit, size):
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(40, 2)), np.repeat(range(5), 8)
    y = X.sum(axis=1)
    model = PPSGDRegressor(n_rounds=5, random_state=0)
    with pytest.raises(ValueError, match=r"\bX\b.*e-\d+.*target.*e.\d+.*rescale"):
        model.fit(kind(X * [1, unit]), size * y, groups=groups)
    fitted = model.fit(kind(X * [1, 1e-300]), y, groups=groups)
    assert np.isfinite(fitted.predict(kind(X * [1, 1e-300]), groups=groups)).all()
    assert np.isfinite(fitted.population_coef_).all()


def test_targets_whose_squares_vanish():
    X, y, groups = table()
    with pytest.raises(ValueError, match=r"\by\b.*too small to be squared.*1e-140"):
        PPSGDRegressor().fit(X, 1e-170 * y, groups=groups)
    plain, tiny = (PPSGDRegressor(random_state=0).fit(c * X, y, groups=groups) for c in (1, 1e-170))
    np.testing.assert_allclose(1e-170 * tiny.population_coef_, plain.population_coef_, rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e3, 1e6]),
    alpha=st.sampled_from([0, 0.05, 1.0, 30.0, math.inf]),
    q=st.sampled_from([1.0, 0.3, 0.02]),
    batch_size=st.sampled_from([1, 5, None]),
    weighting=st.sampled_from(["samples", "clients"]),
    skewed=st.booleans(),
)
def test_the_automatic_step_never_diverges(
    seed, sizes, scale, alpha, q, batch_size, weighting, skewed
):
    """The error of the rows stays below a few times that of predicting 0."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    X = scale * rng.normal(size=(len(groups), 3))
    if skewed:
        X *= rng.gamma(0.5, size=(len(groups), 1))
    y = X @ rng.normal(size=3) / scale + rng.normal(size=len(groups))
    model = PPSGDRegressor(
        alpha=alpha,
        client_fraction=q,
        batch_size=batch_size,
        weighting=weighting,
        fit_intercept=False,
        n_rounds=200,
        random_state=seed,
    ).fit(X, y, groups=groups)
    assert np.mean((model.predict(X, groups=groups) - y) ** 2) < 8 * np.mean(y**2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("c", [1, 2, 4])
def test_gradients_of_losses(name, c):
    """Residuals against central differences, and the curvature that is claimed."""
    rng = np.random.default_rng(0)
    loss, step = LOSSES[name], 1e-5
    predictors = 3 * rng.normal(size=(3, 5, c))
    y = rng.normal(size=(3, 5, c))
    if name != "squared_error":
        y = rng.integers(0, max(c, 2), size=(3, 5))
    residuals, _ = loss.function(predictors.copy(), y)
    for k in range(c):
        moved = np.zeros(c)
        moved[k] = step
        ahead, behind = (loss.function(predictors + s * moved, y) for s in (1, -1))
        slope = (ahead[1] - behind[1]) / (2 * step)
        np.testing.assert_allclose(residuals[..., k], slope, rtol=1e-6, atol=1e-8)
        second = (ahead[0] - behind[0])[..., k] / (2 * step)
        assert second.max() <= loss.curvature + 1e-8


def test_log_loss_of_extreme_predictors():
    for c in (1, 3):
        predictors = np.array([[[-800.0] * c, [800.0] * c, [0.0] * c]])
        predictors[0, 0, 0] = 800.0 if c > 1 else -800.0
        residuals, losses = LOSSES["log_loss"].function(predictors, np.array([[1, 1, 0]]))
        assert np.isfinite(residuals).all()
        assert losses[0] == pytest.approx(
            [800, 0, math.log(2)] if c == 1 else [1600, math.log(3), math.log(3)]
        )


def test_one_versus_all_has_the_targets_of_the_paper():
    residuals, losses = LOSSES["one_versus_all"].function(np.zeros((1, 2, 4)), np.array([[1, 3]]))
    np.testing.assert_allclose(-residuals[0, 0], [-0.25, 0.75, -0.25, -0.25])
    np.testing.assert_allclose(losses, 0.5 * (0.75**2 + 3 * 0.25**2))


@pytest.mark.parametrize("loss", ["log_loss", "squared_error"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_labels_and_shapes(loss, n_classes):
    """Labels of any type; some clients see one of them only."""
    X, y = load_iris(return_X_y=True)
    X, y = X[: 50 * n_classes] - X.mean(axis=0), y[: 50 * n_classes]
    groups = y * 2 + np.arange(len(y)) % 2
    groups[::10] = 99
    names = np.array(["setosa", "versicolor", "virginica"])
    model = PPSGDClassifier(alpha=0.1, loss=loss, n_rounds=100, random_state=0)
    numbers = clone(model).fit(X, y, groups=groups)
    strings = clone(model).fit(X, names[y], groups=groups)
    np.testing.assert_array_equal(
        strings.predict(X, groups=groups), names[numbers.predict(X, groups=groups)]
    )
    assert numbers.score(X, y, groups=groups) > 0.9
    decision = numbers.decision_function(X, groups=groups)
    assert decision.shape == ((len(y),) if n_classes == 2 else (len(y), 3))
    c = () if n_classes == 2 else (3,)
    assert numbers.population_coef_.shape == (*c, 4)
    assert numbers.coef_.shape == (len(numbers.clients_), *c, 4)
    assert np.shape(numbers.population_intercept_) == c
    chosen = (decision > 0).astype(int) if n_classes == 2 else decision.argmax(axis=1)
    np.testing.assert_array_equal(numbers.predict(X, groups=groups), numbers.classes_[chosen])
    if loss == "squared_error":
        assert not hasattr(numbers, "predict_proba")
        assert not hasattr(numbers, "predict_log_proba")
        return
    proba = numbers.predict_proba(X, groups=groups)
    np.testing.assert_allclose(proba.sum(axis=1), 1, rtol=1e-12)
    expected = softmax(decision, axis=1) if n_classes == 3 else expit(decision)
    np.testing.assert_allclose(proba if n_classes == 3 else proba[:, 1], expected, rtol=1e-12)
    log_proba = numbers.predict_log_proba(X, groups=groups)
    np.testing.assert_allclose(np.exp(log_proba), proba, rtol=1e-12)


def test_coefficients_predict():
    X, y, groups = table()
    model = PPSGDRegressor(alpha=0.1, random_state=0).fit(X, y, groups=groups)
    expected = np.sum(X * model.coef_[groups], axis=1) + model.intercept_[groups]
    np.testing.assert_allclose(model.predict(X, groups=groups), expected, rtol=1e-12)
    np.testing.assert_allclose(model.coef_, model.population_coef_ + model.local_coef_, rtol=1e-15)
    new = model.predict(X, groups=np.where(groups == 3, 1000, groups))
    known = groups != 3
    # To the bit only where the rows keep their places: some kernels sum the last ones differently.
    np.testing.assert_array_equal(new[known], model.predict(X, groups=groups)[known])
    population = X[~known] @ model.population_coef_ + model.population_intercept_
    np.testing.assert_allclose(new[~known], population, rtol=1e-12)


def test_one_class_only():
    X, y, groups = table()
    model = PPSGDClassifier()
    with pytest.raises(ValueError, match=r"two classes.*one class"):
        model.fit(X, np.ones(len(y)), groups=groups)
    with pytest.raises(ValueError, match=r"two classes.*one class"):
        model.partial_fit(X, np.ones(len(y)), classes=[1], groups=groups)
    assert not [name for name in vars(model) if name.endswith("_")]


def test_partial_fit_with_classes():
    X, y, groups = table()
    labels = np.where(y > 0, "b", "a")
    model = PPSGDClassifier(random_state=0)
    model.partial_fit(X, labels, classes=["c", "a", "b"], groups=groups)
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.predict_proba(X, groups=groups).shape == (len(y), 3)
    model.partial_fit(X, np.full(len(y), "c"), groups=groups)
    before = freeze(model)
    with pytest.raises(ValueError, match=r"'d'.*\b3 classes"):
        model.partial_fit(X, np.full(len(y), "d"), groups=groups)
    with pytest.raises(ValueError, match=r"classes=\['a', 'b'\].*\['a', 'b', 'c'\]"):
        model.partial_fit(X, labels, classes=["a", "b"], groups=groups)
    assert_frozen(model, before)


def test_warm_start_refuses_what_it_cannot_continue():
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=20, warm_start=True, random_state=0).fit(X, y, groups=groups)
    before = freeze(model)
    model.n_rounds = 10
    with pytest.raises(ValueError, match=r"n_rounds=10\b.*\b20 rounds"):
        model.fit(X, y, groups=groups)
    model.n_rounds = 20
    assert_frozen(model, before)
    model.n_rounds = 30
    before = freeze(model)
    kept = groups != 3
    with pytest.raises(ValueError, match="warm_start=True"):
        model.fit(X[kept], y[kept], groups=groups[kept])
    with pytest.raises(ValueError, match="features"):
        model.fit(X[:, :2], y, groups=groups)
    with pytest.raises(ValueError, match=r"\by\b.*\b2 outputs.*\b1\b"):
        model.fit(X, np.column_stack([y, y]), groups=groups)
    assert_frozen(model, before)


@pytest.mark.parametrize(("name", "value"), [("fit_intercept", False), ("average", True)])
def test_parameters_that_a_warm_start_cannot_change(name, value):
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=5, warm_start=True).fit(X, y, groups=groups)
    model.set_params(n_rounds=10, **{name: value})
    before = freeze(model)
    for call in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=f"{name}={value}.*warm_start=False"):
            call(X, y, groups=groups)
    assert_frozen(model, before)


def test_partial_fit_is_a_pass():
    """Every row is used once; clients come and stay as they were."""
    X, y, groups = table()
    model = PPSGDRegressor(alpha=0, batch_size=5, random_state=0, learning_rate=0.05)
    first = groups < 5
    model.partial_fit(X[first], y[first], groups=groups[first])
    assert model.n_rounds_ == 3  # 12 rows, 5 at a time
    assert model.clients_.tolist() == [0, 1, 2, 3, 4]
    kept, used = model.local_coef_.copy(), model._progress.state.schedule["used"]
    assert (used >= np.array(SIZES)[:5]).all()
    second = np.isin(groups, [1, 6, 7])
    model.partial_fit(X[second], y[second], groups=groups[second])
    assert model.clients_.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert model.n_rounds_ == 8
    np.testing.assert_array_equal(model.local_coef_[[0, 2, 3, 4]], kept[[0, 2, 3, 4]])
    assert (model.local_coef_[1] != kept[1]).all()
    assert model.local_coef_[[5, 6]].all()
    assert model.n_samples_per_client_.tolist() == [1, 14, 4, 1, 12, 25, 2]
    before = freeze(model)
    with pytest.raises(ValueError, match="features"):
        model.partial_fit(X[:, :2], y, groups=groups)
    with pytest.raises(ValueError, match=r"groups.*string.*'0'"):
        model.partial_fit(X, y, groups=groups.astype(str))
    assert_frozen(model, before)


def test_partial_fits_are_rounds_of_one_fit():
    """With the same rows in their order a second pass goes on where the first ended."""
    X, y, groups = table([6] * 5)
    model = PPSGDRegressor(
        batch_size=3, shuffle=False, learning_rate=0.05, random_state=SEED, average=True
    )
    whole = clone(model).set_params(n_rounds=6).fit(X, y, groups=groups)
    for _ in range(3):
        model.partial_fit(X, y, groups=groups)
    np.testing.assert_array_equal(model.coef_, whole.coef_)
    np.testing.assert_equal(model.history_, whole.history_)


@pytest.mark.parametrize(
    ("call", "average"), [("fit", True), ("warm", False), ("partial_fit", True)]
)
def test_a_failed_fit_leaves_everything_as_it_was(call, average):
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=30, random_state=0, average=average, warm_start=call == "warm"
    ).fit(X, y, groups=groups)
    model.set_params(n_rounds=400, learning_rate=1e3)
    fit = model.partial_fit if call == "partial_fit" else model.fit
    before = freeze(model)
    huge = 1e200 * X if call == "partial_fit" else X
    with pytest.raises(ValueError, match=r"learning_rate=1000\b"):
        fit(huge, y, groups=groups)
    assert_frozen(model, before)


def test_scores_of_every_round():
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=8, batch_size=3, random_state=SEED, average=True)
    monitor, scorer = ScoringMonitor(scoring={"r2": ClientScorer("r2")}), ClientScorer("r2")
    watched = clone(model).set_callbacks(monitor).fit(X, y, groups=groups)
    plain = clone(model).fit(X, y, groups=groups)
    np.testing.assert_array_equal(watched.coef_, plain.coef_)
    np.testing.assert_equal(watched.history_, plain.history_)
    fits = [clone(model).set_params(n_rounds=t).fit(X, y, groups=groups) for t in range(1, 9)]
    expected = [scorer(fit, X, y, groups=groups) for fit in fits]
    np.testing.assert_allclose(scores_of(monitor)["r2"], expected, rtol=1e-12)


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def test_a_little_of_both_beats_local_and_global_models(data_home, routing):
    """Mean squared errors of two folds, for alpha 0, 0.01 and infinity."""
    X, y, groups, *_ = movielens(data_home)
    search = GridSearchCV(
        make_pipeline(FunctionTransformer(), PPSGDRegressor(random_state=0)),
        {"ppsgdregressor__alpha": [0, 0.01, math.inf]},
        cv=ClientKFold(2, random_state=0),
        scoring=ClientScorer("neg_mean_squared_error"),
        refit=False,
    ).fit(X.drop(columns="year").to_numpy(), y - 3.5, groups=groups)
    errors = -search.cv_results_["mean_test_score"]
    np.testing.assert_allclose(errors, (0.8756, 0.8689, 1.0705), atol=1e-4)


@pytest.mark.parametrize("convert", [np.asarray, csr_array])
def test_dropped_clients_skip_rounds(convert):
    """The sum is that of the clients that stay, over the expected number of sampled ones."""
    X, y, groups = table()
    params = {"n_rounds": 1, "alpha": np.inf, "learning_rate": 0.1, "batch_size": None}
    params |= {"weighting": "clients", "fit_intercept": False, "random_state": SEED}
    model = PPSGDRegressor(drop_fraction=0.4, **params).fit(convert(X), y, groups=groups)
    rng = next(round_generators((SEED, 1)))
    stay = np.flatnonzero(rng.random(len(SIZES)) >= 0.4)
    assert 0 < len(stay) < len(SIZES)
    assert model.history_["n_clients"] == [len(stay)]
    means = [X[groups == i].T @ y[groups == i] / SIZES[i] for i in stay]
    expected = 0.1 * np.sum(means, axis=0) / len(SIZES)
    np.testing.assert_allclose(model.population_coef_, expected, rtol=1e-12)
