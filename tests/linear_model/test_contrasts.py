"""Tests of population coefficients, against dense formulas, lmerTest and pbkrtest."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.linear_model._contrasts import JOINT
from pfl_sklearn.priors import GaussianPrior, GroupingPrior, LaplacePrior
from tests.helpers.dense_mixed_model import Problem, draw_problem, rows_covariance, solve
from tests.helpers.oracles import read_oracle
from tests.helpers.slow import slow

ORACLE = read_oracle("lmer_tests")
TIGHT = {"tol": 1e-10, "max_iter": 1000}
SHAPES = {
    "intercept": {"random": "intercept"},
    "diag": {"prior": GaussianPrior(covariance_type="diag", centered=False)},
    "centred diag": {"prior": GaussianPrior(covariance_type="diag")},
    "full": {"prior": GaussianPrior(covariance_type="full")},
    "spherical": {"prior": GaussianPrior(covariance_type="spherical", centered=False)},
    "one slope": {"random": [0], "fit_intercept": True},
}


def draw(shape, weighted=False):
    """A problem whose estimates are inside, and its fitted model."""
    rng = np.random.default_rng(3)
    random = {"intercept": [0], "one slope": [1]}.get(shape, [0, 1])
    problem = draw_problem(
        rng, sizes=rng.integers(4, 12, 14), n_features=2, random=random, weighted=weighted
    )
    params = {"random": ["intercept", 0], **SHAPES[shape], **TIGHT}
    return problem, PersonalizedLinearRegression(**params)


def fit(problem, model):
    weights = None if (problem.weights == 1).all() else problem.weights
    return model.fit(problem.X[:, 1:], problem.y, groups=problem.codes, sample_weight=weights)


def steps_of(shape, model):
    """Directions of the covariance between clients (a, q, q), in the columns of the data."""
    q = len(model.random_)
    if shape in ("intercept", "one slope"):
        return [np.eye(1)]
    if shape == "spherical":
        return [np.eye(2)]
    back = np.eye(q)
    if shape == "centred diag":
        back[0, 1] = -model._centre[1]
    if shape == "full":
        return [np.diag([1.0, 0.0]), np.diag([0.0, 1.0]), np.array([[0.0, 1.0], [1.0, 0.0]])]
    return [np.outer(back[:, j], back[:, j]) for j in range(q)]


def dense_satterthwaite(problem, model, steps, x, restricted=True):
    """Degrees of freedom of x' beta, by finite differences of the dense likelihood."""
    S, noise = model._design.random_block(model._between), model.noise_variance_
    size = np.array([*(np.abs(S).max() for _ in steps), noise]) * 1e-3

    def at(parameters):
        moved = S + sum(c * step for c, step in zip(parameters[:-1], steps, strict=True))
        return solve(problem, moved, noise + parameters[-1], restricted)

    units = np.diag(size)

    def hessian(a, b):
        signs = ((1, 1), (1, -1), (-1, 1), (-1, -1))
        values = [s * t * at(s * units[a] + t * units[b]).criterion for s, t in signs]
        return sum(values) / (4 * size[a] * size[b]) / 2

    n = len(size)
    information = np.array([[hessian(a, b) for b in range(n)] for a in range(n)])
    variance = [
        x @ (at(units[a]).population_covariance - at(-units[a]).population_covariance) @ x
        for a in range(n)
    ]
    gradient = np.array(variance) / (2 * size)
    centre = x @ at(np.zeros(n)).population_covariance @ x
    return 2 * centre**2 / (gradient @ np.linalg.solve(information, gradient))


@pytest.mark.parametrize(
    "shape", ["intercept", "centred diag", *slow(["diag", "full", "spherical", "one slope"])]
)
def test_satterthwaite_by_finite_differences(shape):
    problem, model = draw(shape)
    model, L = fit(problem, model), np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, -1, 2]])
    dfs = model.contrast(L)["df"][:4]
    expected = [dense_satterthwaite(problem, model, steps_of(shape, model), x) for x in L]
    assert_allclose(dfs, expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("method", "weighted"), [("ml", True), *slow([("ml", False), ("reml", True)])]
)
def test_satterthwaite_of_other_fits(method, weighted):
    problem, model = draw("full", weighted)
    model = fit(problem, model.set_params(method=method))
    x, steps = np.array([1.0, -1.0, 2.0]), steps_of("full", model)
    expected = dense_satterthwaite(problem, model, steps, x, method == "reml")
    assert model.contrast(x)["df"].iloc[0] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("known", ["noise", "covariance"])
def test_known_variances_do_not_count(known):
    problem, model = draw("intercept")
    fitted = fit(problem, model)
    between, noise = fitted.prior_.covariance, fitted.noise_variance_
    model = clone(model)
    if known == "noise":
        model.set_params(noise_variance=noise)
    else:
        model.set_params(prior=GaussianPrior(covariance=between))
    fewer, x = fit(problem, model).contrast({"intercept": 1}), np.array([1.0, 0, 0])
    assert fewer["df"].iloc[0] > fitted.contrast(x)["df"].iloc[0]
    both = {"prior": GaussianPrior(covariance=between), "noise_variance": noise}
    nothing = fit(problem, PersonalizedLinearRegression(random="intercept", **both))
    assert nothing.contrast(x)["df"].iloc[0] == np.inf


def dense_kenward_roger(problem, model, steps, L):
    """Adjusted covariance of L beta and its F test, by products of matrices of all rows."""
    S, noise = model._design.random_block(model._between), model.noise_variance_
    inverse, X = np.linalg.inv(rows_covariance(problem, S, noise)), problem.X
    moves = [
        *(rows_covariance(problem, step, 0.0) for step in steps),
        np.diag(1 / problem.weights),
    ]
    C = np.linalg.inv(X.T @ inverse @ X)
    P = [-X.T @ inverse @ move @ inverse @ X for move in moves]
    Q = [[X.T @ inverse @ a @ inverse @ b @ inverse @ X for b in moves] for a in moves]
    n = len(moves)
    information = np.empty((n, n))
    for a in range(n):
        for b in range(n):
            value = np.trace(inverse @ moves[a] @ inverse @ moves[b])
            value += -2 * np.trace(C @ Q[a][b]) + np.trace(C @ P[a] @ C @ P[b])
            information[a, b] = value / 2
    W = np.linalg.inv(information)
    middle = sum(W[a, b] * (Q[a][b] - P[a] @ C @ P[b]) for a in range(n) for b in range(n))
    return C + 2 * C @ middle @ C, C, W, P


def test_kenward_roger_by_dense_matrices():
    for shape in ("intercept", "diag", "full"):
        problem, model = draw(shape)
        model, L = fit(problem, model), np.array([[1.0, 0, 0], [0, 1, 0], [1, -1, 2]])
        table = model.contrast(L, df="kenward_roger")
        adjusted, C, W, P = dense_kenward_roger(problem, model, steps_of(shape, model), L)
        assert_allclose(table["std_error"][:3] ** 2, np.diag(L @ adjusted @ L.T), rtol=1e-4)
        # Of one combination they are Satterthwaite's, by expected information.
        slopes = np.array([[-x @ C @ p @ C @ x for p in P] for x in L])
        expected = 2 * np.diag(L @ C @ L.T) ** 2 / np.einsum("ka,ab,kb->k", slopes, W, slopes)
        assert_allclose(table["df"][:3], expected, rtol=1e-4)
        # A linear map of the combinations changes no joint test, and repeated ones count once.
        joint, mixed = (
            table.loc[JOINT],
            model.contrast(
                np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) @ L, df="kenward_roger"
            ),
        )
        assert_allclose(mixed.loc[JOINT].dropna(), joint.dropna(), rtol=1e-6)
        assert mixed.attrs["numerator_df"] == 3


def test_balanced_clients_have_the_degrees_of_freedom_of_their_means():
    """The test of a feature of clients is an exact t test of their means."""
    rng = np.random.default_rng(0)
    group, m, n = np.repeat([0.0, 1.0], 4), 8, 6
    codes = np.repeat(np.arange(m), n)
    y = rng.normal(size=m)[codes] + rng.normal(size=m * n)
    model = PersonalizedLinearRegression(random="intercept", **TIGHT)
    model = model.fit(group[codes, None], y, groups=codes)
    means = np.bincount(codes, y) / n
    expected = stats.ttest_ind(means[4:], means[:4])
    for df in ("satterthwaite", "kenward_roger"):
        row = model.contrast({"x0": 1}, df=df).iloc[0]
        assert_allclose(row[["df", "statistic"]].astype(float), [6, expected.statistic], rtol=1e-5)
        assert row["p_value"] == pytest.approx(expected.pvalue, rel=1e-5)


LMER = {
    "sleepstudy": {"prior": GaussianPrior(covariance_type="full")},
    "sleepstudy diag": {"prior": GaussianPrior(covariance_type="diag", centered=False)},
    "hsb12": {"random": "intercept"},
    "hsb12 slopes": {
        "prior": GaussianPrior(covariance_type="diag", centered=False),
        "random": ["intercept", "ses"],
    },
}


@pytest.mark.parametrize("name", LMER)
def test_lmertest_and_pbkrtest(name, data_home):
    expected, model = ORACLE[name], PersonalizedLinearRegression(**LMER[name], **TIGHT)
    if name.startswith("sleepstudy"):
        table = pd.read_csv(data_home / "sleepstudy.csv.gz")
        model.fit(table[["days"]], table["reaction"], groups=table["subject"])
    else:
        table = hsb12(data_home)
        model.fit(table[["ses", "catholic"]], table["mathach"], groups=table["school"])
    every = np.eye(len(expected["df"]))
    found = model.contrast(every)[: len(every)]
    for column, key in (("estimate", "coef"), ("std_error", "se"), ("df", "df")):
        assert_allclose(found[column], list(expected[key].values()), rtol=1e-4, err_msg=column)
    found = model.contrast(every, df="kenward_roger")[: len(every)]
    for column in ("se", "df"):
        name_of = {"se": "std_error", "df": "df"}[column]
        assert_allclose(found[name_of], list(expected["kr"][column].values()), rtol=1e-4)
    contrast = model.contrast(expected["contrast"]["L"]).iloc[0]
    assert contrast["df"] == pytest.approx(expected["contrast"]["df"], rel=1e-4)
    assert contrast["p_value"] == pytest.approx(expected["contrast"]["p"], rel=1e-3)
    joint, oracle = model.contrast(expected["joint"]["L"]), expected["joint"]
    assert joint.attrs["numerator_df"] == oracle["numdf"]
    row = joint.loc[JOINT]
    assert_allclose([row["statistic"], row["df"]], [oracle["F"], oracle["dendf"]], rtol=1e-4)


ROBUST = read_oracle("club_sandwich")


def hsb12(data_home):
    path = data_home.parent / "oracles" / "inference" / "hsb12.csv.gz"
    if not path.exists():
        pytest.skip("the folder of the public tables has no oracles beside it")
    return pd.read_csv(path)


@pytest.mark.parametrize("errors", ["CR0", "robust"])
@pytest.mark.parametrize("name", ["sleepstudy", "sleepstudy slopes", "hsb12"])
def test_club_sandwich(name, errors, data_home):
    if name == "hsb12":
        table = hsb12(data_home)
        rows = {"X": table[["ses", "catholic"]], "y": table["mathach"], "groups": table["school"]}
    else:
        table = pd.read_csv(data_home / "sleepstudy.csv.gz")
        rows = {"X": table[["days"]], "y": table["reaction"], "groups": table["subject"]}
    params = {"prior": GaussianPrior(covariance_type="full")} if "slopes" in name else {}
    params = params or {"random": "intercept"}
    model = PersonalizedLinearRegression(**params, **TIGHT).fit(**rows)
    expected = ROBUST[f"{name} {'CR0' if errors == 'CR0' else 'CR2'}"]
    found = model.contrast(np.eye(len(expected["df"])), errors=errors, **rows)[:-1]
    assert_allclose(found["std_error"], list(expected["se"].values()), rtol=1e-6)
    assert_allclose(found["df"], list(expected["df"].values()), rtol=1e-6)
    assert_allclose(found["p_value"], list(expected["p"].values()), rtol=1e-4)


def test_robust_errors_by_dense_matrices():
    """With short and long clients, one of which has a feature alone."""
    rng = np.random.default_rng(0)
    problem = draw_problem(rng, sizes=[1, 2, 3, 9, 12, 4, 5], n_features=2, random=[0])
    problem.X[problem.codes != 3, 2] = 0.0
    model = fit(problem, PersonalizedLinearRegression(random="intercept", **TIGHT))
    X, codes = problem.X, problem.codes
    V = rows_covariance(problem, model._design.random_block(model._between), model.noise_variance_)
    inverse = np.linalg.inv(V)
    M = np.linalg.inv(X.T @ inverse @ X)
    residual = problem.y - X @ (M @ X.T @ inverse @ problem.y)
    hat = np.eye(len(X)) - X @ M @ X.T @ inverse
    meat, x = np.zeros((3, 3)), np.array([0.5, 1.0, 0.0])
    directions = []
    for client in range(7):
        at = np.flatnonzero(codes == client)
        values, vectors = np.linalg.eigh(V[np.ix_(at, at)])
        D = vectors * np.sqrt(values) @ vectors.T
        values, vectors = np.linalg.eigh(D @ (hat @ V @ hat.T)[np.ix_(at, at)] @ D)
        kept = values > 1e-10 * values.max()
        root = vectors[:, kept] / np.sqrt(values[kept]) @ vectors[:, kept].T
        u = inverse[np.ix_(at, at)] @ D @ root @ D
        score = X[at].T @ u @ residual[at]
        meat += np.outer(score, score)
        directions.append(hat[at].T @ u.T @ X[at] @ M @ x)
    G = np.array([[a @ V @ b for b in directions] for a in directions])
    rows = {"X": X[:, 1:], "y": problem.y, "groups": codes}
    found = model.contrast(x, errors="robust", **rows).iloc[0]
    assert found["std_error"] == pytest.approx(np.sqrt(x @ M @ meat @ M @ x), rel=1e-6)
    assert found["df"] == pytest.approx(np.trace(G) ** 2 / np.sum(G**2), rel=1e-6)
    # What one client alone decides has no error that residuals tell.
    assert np.isnan(model.contrast([0.0, 0.0, 1.0], errors="robust", **rows)["std_error"].iloc[0])
    both = model.contrast(np.eye(3), errors="robust", **rows)
    assert np.isfinite(both["std_error"].iloc[:2]).all()
    assert np.isnan(both.loc["joint F", "p_value"])


@pytest.mark.slow
def test_robust_intervals_cover_where_rows_differ_in_their_variance():
    """Three times the noise in half of 20 clients; 200 tables have a standard error of 1.5 %."""
    hits, codes = [], np.repeat(np.arange(20), 8)
    group = (codes % 2).astype(float)[:, None]
    for seed in range(200):
        rng = np.random.default_rng(seed)
        y = 0.3 * rng.normal(size=20)[codes] + rng.standard_t(3, 160) * (1 + 2 * group[:, 0])
        model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
        rows = {"X": group, "y": y, "groups": codes}
        row = model.fit(**rows).contrast({"x0": 1}, errors="robust", **rows).iloc[0]
        hits.append(row["lower"] <= 0 <= row["upper"])
    assert 0.9 < np.mean(hits) < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("m", "ratio"), [(6, 3.0), (20, 1.0)])
def test_sizes_of_tests(m, ratio):
    """Of a feature of clients without effect; 200 tables have a standard error of 1.5 %."""
    p_values, group = [], (np.arange(m) % 2).astype(float)
    codes = np.repeat(np.arange(m), 8)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        y = ratio * rng.normal(size=m)[codes] + rng.normal(size=len(codes))
        model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
        model.fit(group[codes, None], y, groups=codes)
        p_values.append(model.contrast({"x0": 1})["p_value"].iloc[0])
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.085


# Tables -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(120, 2)), columns=["dose", "age"])
    frame["site"] = np.repeat([f"s{k}" for k in range(12)], 10)
    y = frame["dose"] + rng.normal(size=12)[np.repeat(np.arange(12), 10)] + rng.normal(size=120)
    return frame, y


@pytest.fixture(scope="module")
def fitted(table):
    frame, y = table
    model = PersonalizedLinearRegression(random="intercept")
    return model.fit(frame[["dose", "age"]], y, groups=frame["site"])


def test_ways_to_name_combinations(fitted):
    one = fitted.contrast({"dose": 1, "age": -2})
    assert one.index.tolist() == ["dose - 2 age"]
    assert one["estimate"].iloc[0] == pytest.approx(fitted.population_coef_ @ [1, -2])
    both = {"first": {"dose": 1}, "second": {"age": 1, "intercept": 0.5}}
    several = fitted.contrast(both)
    assert several.index.tolist() == ["first", "second", JOINT]
    frame = pd.DataFrame(both).T.fillna(0.0)
    array = np.array([[0, 1, 0], [0.5, 0, 1]])
    pd.testing.assert_frame_equal(fitted.contrast(frame), several)
    assert_allclose(fitted.contrast(array), several)
    assert fitted.contrast(array).index.tolist() == ["dose", "0.5 intercept + age", JOINT]
    renamed = fitted.contrast({"a": 1}, feature_names=["a", "b"])
    assert renamed["estimate"].iloc[0] == fitted.population_coef_[0]


def test_frames_and_series_are_read_by_name(fitted):
    expected = fitted.contrast({"age": 1, "dose": 2})
    series = pd.Series({"age": 1.0, "dose": 2, "intercept": 0})
    pd.testing.assert_frame_equal(fitted.contrast(series), expected)
    frame = pl.DataFrame({"age": [1.0], "dose": [2.0]})
    assert_allclose(fitted.contrast(frame), expected)
    twice = pd.DataFrame({"dose": [1, 0], "age": [0, 1]}, index=["same", "same"])
    assert len(fitted.contrast(twice)) == 3


@pytest.mark.parametrize("df", ["satterthwaite", "kenward_roger", "averaged"])
def test_units_and_repetitions_change_no_joint_test(table, fitted, df):
    frame, y = table
    both = np.eye(3)[1:]
    expected = fitted.contrast(both, df=df)
    assert expected.attrs["numerator_df"] == 2
    other = frame[["dose", "age"]] * [1e6, 1.0] + [2e9, 2020.0]
    model = clone(fitted).fit(other, y, groups=frame["site"]).contrast(both, df=df)
    assert model.attrs["numerator_df"] == 2
    assert model.loc[JOINT, "statistic"] == pytest.approx(
        expected.loc[JOINT, "statistic"], rel=1e-3
    )
    more = fitted.contrast(np.vstack([both, both.sum(axis=0), 3 * both[0]]), df=df)
    assert more.attrs["numerator_df"] == 2
    assert more.loc[JOINT, "statistic"] == pytest.approx(expected.loc[JOINT, "statistic"])
    again = fitted.contrast(np.vstack([both[::-1], both[0] - both[1]]), df=df)
    assert_allclose(again.loc[JOINT].dropna(), more.loc[JOINT].dropna(), rtol=1e-6)


def test_an_exact_fit_has_the_degrees_of_freedom_of_its_clients():
    rng = np.random.default_rng(0)
    codes, x = np.repeat(np.arange(12), 6), rng.normal(size=(72, 1))
    with pytest.warns(UserWarning):
        model = PersonalizedLinearRegression(random="intercept").fit(
            x, 2 + 3 * x[:, 0] + codes, groups=codes
        )
    dfs = model.contrast(np.eye(2))["df"]
    assert dfs.iloc[0] == pytest.approx(11, rel=0.01)
    assert (dfs > 0).all()


def test_one_client_has_the_tests_of_least_squares(table):
    frame, y = table
    with pytest.warns(UserWarning):
        model = PersonalizedLinearRegression().fit(frame[["dose", "age"]], y)
    row, expected = model.contrast({"dose": 1}).iloc[0], stats.linregress(frame["dose"], y)
    assert row["df"] == 117
    design = np.column_stack([np.ones(120), frame[["dose", "age"]]])
    residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    variance = residual @ residual / 117 * np.linalg.inv(design.T @ design)[1, 1]
    assert row["std_error"] == pytest.approx(np.sqrt(variance))
    assert row["p_value"] == pytest.approx(expected.pvalue, abs=0.05)


def test_a_table_is_consistent(fitted):
    row = fitted.contrast({"dose": 1}, level=0.9).iloc[0]
    assert row["statistic"] == row["estimate"] / row["std_error"]
    assert row["p_value"] == pytest.approx(2 * stats.t.sf(abs(row["statistic"]), row["df"]))
    bounds = stats.t.interval(0.9, row["df"], row["estimate"], row["std_error"])
    assert_allclose(row[["lower", "upper"]].astype(float), bounds)
    averaged = fitted.contrast({"dose": 1}, df="averaged").iloc[0]
    assert averaged["std_error"] == pytest.approx(fitted.population_coef_std_[0])
    assert averaged["df"] == np.inf
    normal = fitted.contrast({"dose": 1}, df="normal").iloc[0]
    assert normal["std_error"] == pytest.approx(row["std_error"])


def test_a_summary_with_tests(fitted):
    summary, each = fitted.summary(tests=True), fitted.contrast(np.eye(3))[:3]
    columns = ["std_error", "statistic", "df", "p_value"]
    assert_allclose(summary.loc["fixed"][columns], each[columns])
    assert summary.loc["between", "df"].isna().all()
    assert "df" not in fitted.summary()


def test_in_a_pipeline(table, fitted):
    frame, y = table
    steps = make_pipeline(StandardScaler(), PersonalizedLinearRegression(random="intercept"))
    model = ClientColumn(steps, column="site").fit(frame, y)
    found = model.contrast({"dose": 1}).iloc[0]
    assert found["df"] == pytest.approx(fitted.contrast({"dose": 1})["df"].iloc[0], rel=1e-4)
    assert "p_value" in model.summary(tests=True)
    rows = {"X": frame[["dose", "age"]], "y": y, "groups": frame["site"]}
    expected = fitted.contrast({"dose": 1}, errors="robust", **rows).iloc[0]
    found = model.contrast({"dose": 1}, X=frame, y=y, errors="robust").iloc[0]
    per_unit = found["std_error"] / frame["dose"].std(ddof=0)
    assert per_unit == pytest.approx(expected["std_error"], rel=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        PersonalizedLogisticRegression(random="intercept"),
        PersonalizedPoissonRegression(random="intercept"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_classes_and_counts_have_normal_tests(model, table):
    frame, y = table
    model = model.fit(frame[["dose"]], (y > 0).astype(int), groups=frame["site"])
    row = model.contrast({"dose": 1}).iloc[0]
    assert row["df"] == np.inf
    assert row["std_error"] == pytest.approx(np.ravel(model.population_coef_std_)[0])
    assert row["p_value"] == pytest.approx(2 * stats.norm.sf(abs(row["statistic"])))
    with pytest.raises(ValueError, match=r"df='satterthwaite' is for linear models"):
        model.contrast({"dose": 1}, df="satterthwaite")


def test_three_classes(table):
    frame, y = table
    labels = pd.cut(y, [-np.inf, -0.5, 0.5, np.inf], labels=["low", "middle", "high"]).astype(str)
    model = PersonalizedLogisticRegression(random="intercept")
    model = model.fit(frame[["dose"]], labels, groups=frame["site"])
    row = model.contrast({"high: dose": 1, "low: dose": -1}).iloc[0]
    difference = model.population_coef_[0, 0] - model.population_coef_[1, 0]
    assert row["estimate"] == pytest.approx(difference)
    assert np.isfinite(row["p_value"])


def test_more_clients_than_the_errors_average_over():
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(1200), 3)
    X = rng.normal(size=(3600, 1))
    y = X[:, 0] + rng.normal(size=1200)[codes] + rng.normal(size=3600)
    model = PersonalizedLinearRegression().fit(X, y, groups=codes)
    row = model.contrast({"x0": 1}).iloc[0]
    assert 200 < row["df"] < 3600


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"weight": 1}, "'weight' is no coefficient; expected names among .*'dose'"),
        ({"dose": 0}, "weights must be finite, and not all 0"),
        ({"dose": np.nan}, "weights must be finite, and not all 0"),
        ({}, "weights must be finite, and not all 0"),
        ([1, 2], "or numbers with 3 columns"),
        ("dose", "weights must be a dict of names and numbers"),
        ([{"dose": 1}], "weights must be a dict of names and numbers"),
        ({"dose": "one"}, "the weight of 'dose' must be a number; got 'one'"),
        ({"both": {"dose": 1}, "age": 1}, "'both' is no coefficient"),
        ({JOINT: {"dose": 1}, "other": {"age": 1}}, "is the label of the joint test"),
        (np.zeros((0, 3)), "weights must be finite, and not all 0"),
    ],
)
def test_weights_that_do_not_fit(fitted, weights, message):
    with pytest.raises(ValueError, match=message):
        fitted.contrast(weights)


def test_what_rows_do_not_determine(table):
    frame, y = table
    frame = frame.assign(twice=2 * frame["dose"])
    with pytest.warns(UserWarning, match="'twice'"):
        model = PersonalizedLinearRegression(random="intercept").fit(
            frame[["dose", "age", "twice"]], y, groups=frame["site"]
        )
    with pytest.raises(ValueError, match="do not determine 'dose', because in all of them"):
        model.contrast({"dose": 1})
    assert np.isfinite(model.contrast({"dose": 1, "twice": 2})["df"]).all()
    summary = model.summary(tests=True).loc["fixed"]
    assert summary["df"].isna().tolist() == [False, True, False, True]


def test_models_that_have_no_degrees_of_freedom(table):
    frame, y = table
    X, groups = frame[["dose"]], frame["site"]
    model = PersonalizedLinearRegression(random="intercept")
    released = model.fit(X, y, groups=groups).for_client("s1")
    for other, reason in (
        (released, "needs the fit of all clients"),
        (
            PersonalizedLinearRegression(
                random="intercept", epsilon=4.0, feature_bound=3.0, target_bound=9.0, delta=1e-5
            )
            .set_params(prior=GaussianPrior(covariance=1.0), noise_variance=1.0)
            .fit(X, y, groups=groups),
            "by likelihood",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            other.contrast({"dose": 1}, df="kenward_roger")
        assert other.contrast({"dose": 1})["df"].iloc[0] == np.inf
    modes = PersonalizedLinearRegression(LaplacePrior()).fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="contrast needs errors of the population"):
        modes.contrast({"dose": 1})
    with pytest.raises(ValueError, match="df must be one of"):
        model.contrast({"dose": 1}, df="exact")
    with pytest.raises(ValueError, match="needs method='reml'"):
        model.set_params(method="ml").fit(X, y, groups=groups).contrast(
            {"dose": 1}, df="kenward_roger"
        )


def test_robust_errors_that_are_not_there(table, fitted):
    frame, y = table
    rows = {"X": frame[["dose", "age"]], "y": y, "groups": frame["site"]}
    for params, message in (
        ({"errors": "sandwich"}, "errors must be one of model, robust, CR0"),
        ({"errors": "robust"}, "needs X, y and groups, the rows of fit"),
        (rows, "are for robust errors; got errors='model'"),
        ({"errors": "robust", "df": "normal", **rows}, "degrees of freedom of its own"),
        (
            {"errors": "robust", **{name: values[1:] for name, values in rows.items()}},
            "needs the X, y, groups and sample_weight of fit, which had 120 rows of 12 clients",
        ),
        (
            {"errors": "robust", **rows, "y": y[::-1]},
            "needs the X, y, groups and sample_weight of fit",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fitted.contrast({"dose": 1}, **params)
    classes = PersonalizedLogisticRegression(random="intercept")
    classes.fit(rows["X"], (y > 0).astype(int), groups=frame["site"])
    with pytest.raises(ValueError, match=r"errors='CR0' is for linear models"):
        classes.contrast({"dose": 1}, errors="CR0", **rows)


@pytest.mark.parametrize("errors", ["CR0", "robust"])
def test_robust_errors_of_weighted_rows(table, errors):
    """CR0 by dense matrices; rows of weight 0 are absent, and weights that are left out noticed."""
    frame, y = table
    weights = np.random.default_rng(1).uniform(0.2, 4, 120)
    weights[::9] = 0.0
    rows = {"X": frame[["dose", "age"]], "y": y, "groups": frame["site"]}
    model = PersonalizedLinearRegression(random="intercept", **TIGHT)
    model = model.fit(**rows, sample_weight=weights)
    found = model.contrast(np.eye(3), errors=errors, sample_weight=weights, **rows)[:-1][
        "std_error"
    ]
    with pytest.raises(ValueError, match="needs the X, y, groups and sample_weight of fit"):
        model.contrast(np.eye(3), errors=errors, **rows)
    used = weights > 0
    codes = frame["site"].str[1:].astype(int).to_numpy()[used]
    X = np.column_stack([np.ones(used.sum()), rows["X"][used]])
    problem = Problem(X, y[used], codes, np.array([0]), weights[used])
    fit_ = solve(problem, model._design.random_block(model._between), model.noise_variance_, True)
    scores = np.array(
        [X[codes == k].T @ (fit_.inverse @ fit_.residuals)[codes == k] for k in range(12)]
    )
    covariance = fit_.population_covariance @ scores.T @ scores @ fit_.population_covariance
    expected = np.sqrt(np.diag(covariance))
    if errors == "CR0":
        assert_allclose(found, expected, rtol=1e-5)
    else:
        assert (found > expected).all()


def test_joint_test_with_robust_errors(table, fitted):
    """Of one combination it is its t test, and it does not depend on the basis."""
    frame, y = table
    rows = {"X": frame[["dose", "age"]], "y": y, "groups": frame["site"], "errors": "robust"}
    one = fitted.contrast({"a": {"dose": 1}, "b": {"dose": -2}}, **rows)
    assert_allclose(one.loc["joint F", "statistic"], one.loc["a", "statistic"] ** 2)
    assert_allclose(one.loc["joint F", ["df", "p_value"]], one.loc["a", ["df", "p_value"]])
    both = fitted.contrast({"a": {"dose": 1}, "b": {"age": 1}}, **rows)
    turned = fitted.contrast({"a": {"dose": 3, "age": 1}, "b": {"age": -1}}, **rows)
    assert_allclose(both.iloc[-1].dropna(), turned.iloc[-1].dropna(), rtol=1e-9)
    assert both.attrs["numerator_df"] == 2


@pytest.mark.slow
def test_sizes_of_joint_tests_with_robust_errors():
    """Noise of clients that differs; 300 tables have a standard error of 1.3 %."""
    p_values, codes = [], np.repeat(np.arange(12), 8)
    for seed in range(300):
        rng = np.random.default_rng(seed)
        X = np.column_stack([rng.normal(size=96), rng.normal(size=12)[codes]])
        y = (
            rng.normal(size=12)[codes]
            + rng.normal(size=96) * np.exp(rng.normal(size=12) / 2)[codes]
        )
        model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
        rows = {"X": X, "y": y, "groups": codes}
        found = model.fit(**rows).contrast(np.eye(3)[1:], errors="robust", **rows)
        p_values.append(found.loc["joint F", "p_value"])
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.085


def test_more_combinations_than_clusters_tell():
    rng = np.random.default_rng(1)
    codes, x = np.repeat(np.arange(4), 12), rng.normal(size=(48, 6))
    rows = {"X": x, "y": rng.normal(size=4)[codes] + rng.normal(size=48), "groups": codes}
    model = PersonalizedLinearRegression(random="intercept").fit(**rows)
    for errors in ("CR0", "robust"):
        found = model.contrast(np.eye(7), errors=errors, **rows)
        assert np.isfinite(found["std_error"].iloc[:7]).all()
        assert np.isnan(found.loc["joint F", "p_value"])


def test_robust_errors_far_from_zero():
    """Years and their squares have the errors of centred ones."""
    rng = np.random.default_rng(0)
    codes, year = np.repeat(np.arange(8), 8), rng.integers(0, 10, 64).astype(float)
    y = 1 + year + rng.normal(size=8)[codes] + rng.normal(size=64)
    found = []
    for shift in (0, 2015):
        rows = {"X": np.column_stack([year + shift, (year + shift) ** 2]), "y": y, "groups": codes}
        model = PersonalizedLinearRegression(random="intercept", **TIGHT).fit(**rows)
        found.append(model.contrast({"x1": 1}, errors="robust", **rows).iloc[0])
    assert_allclose(found[0], found[1], rtol=1e-4)


# Groupings ----------------------------------------------------------------------------------------


def nested(rng, n_states=8, n_counties=5, n_rows=4):
    """Balanced: counties in states, with features of states, of counties and of rows."""
    county = np.repeat(np.arange(n_states * n_counties), n_rows)
    state = county // n_counties
    frame = pd.DataFrame({"by_state": state % 2, "by_row": np.arange(len(county)) % 2}, dtype=float)
    y = rng.normal(size=n_states)[state] + rng.normal(size=county.max() + 1)[county]
    y += rng.normal(size=len(county))
    return frame.assign(state=state), y, county


@pytest.mark.parametrize("method", ["reml", "ml"])
def test_balanced_groupings_have_the_degrees_of_freedom_of_an_analysis_of_variance(method):
    X, y, county = nested(np.random.default_rng(0))
    model = PersonalizedLinearRegression(random="intercept", groupings=["state"], method=method)
    model.fit(X, y, groups=county)
    found = model.contrast({"by_state": {"by_state": 1}, "by_row": {"by_row": 1}})
    expected = [6, 119] if method == "reml" else [8, 120]  # of maximum likelihood: no columns count
    assert_allclose(found["df"].iloc[:2], expected, rtol=1e-3)
    assert_allclose(model.summary(tests=True).loc["fixed"]["df"].iloc[1:], expected, rtol=1e-3)
    # One grouping of the means of states has the same test.
    alone = PersonalizedLinearRegression(random="intercept", method=method)
    means = pd.DataFrame({"y": y, "state": X["state"], "by_state": X["by_state"], "county": county})
    means = means.groupby("county").mean()
    alone.fit(means[["by_state"]], means["y"], groups=means["state"].astype(int))
    row = alone.contrast({"by_state": 1}).iloc[0]
    if method == "reml":
        assert_allclose(found.iloc[0], row, rtol=1e-3)


def test_crossed_groupings_have_degrees_of_freedom():
    """A feature of items has those of items, one of users those of users."""
    rng = np.random.default_rng(1)
    user, item = np.repeat(np.arange(40), 12), np.tile(np.arange(12), 40)
    frame = pd.DataFrame({"of_user": user % 2, "of_item": item % 2}, dtype=float).assign(item=item)
    y = rng.normal(size=40)[user] + rng.normal(size=12)[item] + rng.normal(size=480)
    model = PersonalizedLinearRegression(random="intercept", groupings=["item"])
    found = model.fit(frame, y, groups=user).contrast(np.eye(3)[1:])
    assert_allclose(found["df"].iloc[:2], [38, 10], rtol=1e-3)


def test_a_variance_of_zero_counts_as_known():
    X, _, county = nested(np.random.default_rng(0))
    rng = np.random.default_rng(5)
    y = rng.normal(size=40)[county] + rng.normal(size=160)
    y -= pd.Series(y).groupby(X["state"]).transform("mean")  # states are all alike
    model = PersonalizedLinearRegression(random="intercept", groupings=["state"])
    found = model.fit(X, y, groups=county).contrast({"by_state": 1})
    assert model.groupings_["state"].covariance[0, 0] == 0
    alone = PersonalizedLinearRegression(random="intercept").fit(X[["by_state"]], y, groups=county)
    assert_allclose(found["df"], alone.contrast({"by_state": 1})["df"], rtol=1e-2)


def test_singular_covariances_have_degrees_of_freedom():
    """Of rank 1, as many as clients tell; a second grouping without a variance changes nothing."""
    rng = np.random.default_rng(0)
    user, item = np.repeat(np.arange(20), 6), np.tile(np.arange(6), 20)
    x = rng.normal(size=120)
    y = 1 + rng.normal(size=20)[user] + (0.3 * rng.normal(size=6))[item] + rng.normal(size=120)
    y += 0.5 * x + (0.2 * rng.normal(size=20))[user] * x
    frame = pd.DataFrame({"x": x, "item": item})
    full = {"prior": GaussianPrior(covariance_type="full")}
    both = PersonalizedLinearRegression(**full, groupings=["item"]).fit(frame, y, groups=user)
    alone = PersonalizedLinearRegression(**full).fit(frame[["x"]], y, groups=user)
    assert np.linalg.eigvalsh(alone.prior_.covariance)[0] < 1e-6
    assert both.groupings_["item"].covariance[0, 0] == 0
    one, two = (model.contrast(np.eye(2)) for model in (alone, both))
    assert_allclose(one["df"], two["df"], rtol=1e-3)
    assert 15 < one["df"].iloc[0] < 20
    other = {"item": GroupingPrior(random=["intercept", "x"], covariance_type="full")}
    model = PersonalizedLinearRegression(random="intercept", groupings=other)
    assert np.isfinite(model.fit(frame, y, groups=user).contrast({"x": 1})["df"]).all()


def test_clusters_of_nested_groupings_are_the_outermost_levels():
    X, y, county = nested(np.random.default_rng(0), n_rows=3)
    rows = {"X": X, "y": y, "groups": county}
    model = PersonalizedLinearRegression(random="intercept", groupings=["state"], **TIGHT)
    model.fit(**rows)
    found = model.contrast({"by_state": 1}, errors="CR0", **rows).iloc[0]
    D = np.column_stack([np.ones(len(y)), X[["by_state", "by_row"]]])
    V = model._between[0, 0] * (county[:, None] == county) + model.noise_variance_ * np.eye(len(y))
    state = X["state"].to_numpy()
    V += model.groupings_["state"].covariance[0, 0] * (state[:, None] == state)
    inverse = np.linalg.inv(V)
    M = np.linalg.inv(D.T @ inverse @ D)
    residuals = inverse @ (y - D @ M @ D.T @ inverse @ y)
    scores = np.array([D[state == k].T @ residuals[state == k] for k in range(8)])
    assert_allclose(found["std_error"], np.sqrt((M @ scores.T @ scores @ M)[1, 1]), rtol=1e-5)
    # The balanced table has the degrees of freedom of a t test of states.
    assert_allclose(model.contrast({"by_state": 1}, errors="robust", **rows)["df"], 6, rtol=1e-3)


def test_tests_that_groupings_do_not_have(table):
    frame, y = table
    frame = frame.assign(nurse=np.arange(120) % 7)
    rows = {"X": frame[["dose", "nurse"]], "y": y, "groups": frame["site"]}
    model = PersonalizedLinearRegression(random="intercept", groupings=["nurse"]).fit(**rows)
    with pytest.raises(ValueError, match="df='kenward_roger' is for a single grouping"):
        model.contrast({"dose": 1}, df="kenward_roger")
    with pytest.raises(ValueError, match="levels of 'client' are in several levels of 'nurse'"):
        model.contrast({"dose": 1}, errors="robust", **rows)
    X, y, county = nested(np.random.default_rng(0))
    X["state"] = X["state"].where(X.index > 0)
    model = PersonalizedLinearRegression(random="intercept", groupings=["state"])
    model.fit(X, y, groups=county)
    with pytest.raises(ValueError, match="needs a level of 'state' in every row"):
        model.contrast({"by_row": 1}, errors="robust", X=X, y=y, groups=county)
    given = {"state": GroupingPrior(covariance=[[1.0]])}
    known = PersonalizedLinearRegression(random="intercept", groupings=given)
    known.fit(X, y, groups=county)
    with pytest.raises(ValueError, match="needs estimated variances of clients and groupings"):
        known.contrast({"by_row": 1}, df="satterthwaite")
    assert known.contrast({"by_row": 1})["df"].iloc[0] == np.inf
