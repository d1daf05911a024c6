"""PPSGD on sparse rows: as on dense ones, and noise that is drawn when somebody is to see it."""

import itertools
import math
import pickle

import numpy as np
import pytest
from scipy.sparse import coo_array, csc_array, csr_array, csr_matrix, random_array
from sklearn.base import clone

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn.linear_model._ppsgd._sparse import LateNoise
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum
from tests.helpers.callbacks import StopAfter
from tests.helpers.frozen import assert_frozen, freeze
from tests.helpers.ppsgd import SEED, SIZES

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

NOISE = {"noise_multiplier": 1.5, "clip_norm": 0.7, "learning_rate": 0.05}
MUCH = {**NOISE, "noise_multiplier": 15.0}  # whose epsilon in sampled rounds is computed fast


def table(d=12, sizes=SIZES, seed=0, density=0.15):
    """Rows with few entries, some with none; a feature that nobody has."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    X = rng.normal(size=(len(groups), d)) * (rng.random((len(groups), d)) < density)
    X[:, 4] = 0
    X[groups == 1] = 0
    return X, X @ rng.normal(size=d) + rng.normal(size=len(groups)), groups


CONFIGURATIONS = [
    {},
    {"client_fraction": 0.4, "batch_size": 3},
    {"client_fraction": 0.4, "sampling": "fixed", "weighting": "clients", "average": True},
    {"alpha": 0, "average": True},
    {"alpha": math.inf, "batch_size": None, "fit_intercept": False},
    {"clip_norm": 0.3, "fit_intercept": False, "batch_size": 2},
    {"clip_norm": 0.3, "clip_quantile": 0.6, "client_fraction": 0.5},
]


def assert_close(sparse, dense):
    for name in ("coef_", "intercept_", "population_coef_", "population_intercept_"):
        first, second = getattr(sparse, name), getattr(dense, name)
        np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(sparse.local_intercept_, dense.local_intercept_, rtol=1e-12)
    local = sparse.local_coef_.toarray().reshape(dense.local_coef_.shape)
    np.testing.assert_allclose(local, dense.local_coef_, rtol=1e-12, atol=1e-13)
    for name in dense.history_.keys() - {"bytes_sent"}:
        np.testing.assert_allclose(sparse.history_[name], dense.history_[name], rtol=1e-12)


@pytest.mark.parametrize("params", CONFIGURATIONS, ids=str)
def test_the_same_as_dense_without_noise(params):
    X, y, groups = table()
    model = PPSGDRegressor(
        **{"alpha": 0.3, "learning_rate": 0.05, "n_rounds": 15, "random_state": SEED, **params}
    )
    dense = clone(model).fit(X, y, groups=groups)
    sparse = clone(model).fit(csr_array(X), y, groups=groups)
    assert np.abs(dense.coef_).max() > 0.05
    assert_close(sparse, dense)
    for shown in (X, csr_array(X), csc_array(X)):
        known, unseen = groups, np.where(groups == 2, 77, groups)
        for ids in (known, unseen):
            np.testing.assert_allclose(
                sparse.predict(shown, groups=ids), dense.predict(X, groups=ids), rtol=1e-11
            )
    own = sparse.for_client(6)
    rows = groups == 6
    np.testing.assert_allclose(own.predict(X[rows]), dense.predict(X[rows], groups=groups[rows]))
    np.testing.assert_allclose(own.coef_, dense.coef_[[6]], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("loss", ["log_loss", "squared_error"])
def test_classifiers_are_the_same_as_dense(n_classes, loss):
    X, y, groups = table()
    labels = np.digitize(y, [0.0, 0.8][: n_classes - 1])
    model = PPSGDClassifier(
        alpha=0.3, loss=loss, learning_rate=0.1, n_rounds=15, random_state=SEED, batch_size=4
    )
    dense = clone(model).fit(X, labels, groups=groups)
    sparse = clone(model).fit(csr_matrix(X), labels, groups=groups)
    assert_close(sparse, dense)
    assert sparse.local_coef_.shape == (8 * (1 if n_classes == 2 else 3), 12)
    np.testing.assert_allclose(
        sparse.decision_function(csr_matrix(X), groups=groups),
        dense.decision_function(X, groups=groups),
        rtol=1e-11,
    )


@pytest.mark.slow
def test_workers_change_no_bit():
    X, y, groups = table(sizes=SIZES * 3)
    model = PPSGDRegressor(
        client_fraction=0.7, n_rounds=6, random_state=SEED, clip_quantile=0.5, **MUCH
    )
    alone = clone(model).fit(csr_array(X), y, groups=groups)
    both = clone(model).set_params(n_jobs=2).fit(csr_array(X), y, groups=groups)
    np.testing.assert_array_equal(both.population_coef_, alone.population_coef_)
    np.testing.assert_array_equal(both.coef_, alone.coef_)
    np.testing.assert_equal(both.history_, alone.history_)


def test_containers_and_orders_of_entries():
    """Formats, entries out of order, given twice, or stored zeros."""
    X, y, groups = table()
    model = PPSGDRegressor(learning_rate=0.05, n_rounds=5, random_state=SEED)
    expected = clone(model).fit(X, y, groups=groups)
    plain = csr_array(X)
    turned = csr_array(X)
    for start, end in zip(turned.indptr[:-1], turned.indptr[1:], strict=True):
        turned.indices[start:end] = turned.indices[start:end][::-1].copy()
        turned.data[start:end] = turned.data[start:end][::-1].copy()
    turned.has_sorted_indices = False
    twice = csr_array(
        (
            np.repeat(plain.data, 2) * np.tile([0.25, 0.75], plain.nnz),
            np.repeat(plain.indices, 2),
            plain.indptr * 2,
        ),
        shape=X.shape,
    )
    zeros = csr_array((X.ravel(), np.tile(np.arange(12), len(X)), np.arange(len(X) + 1) * 12))
    for other in (csc_array(X), coo_array(X), csr_matrix(X), turned, twice, zeros):
        got = clone(model).fit(other, y, groups=groups)
        np.testing.assert_allclose(got.coef_, expected.coef_, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(
            got.predict(other, groups=groups), expected.predict(X, groups=groups), rtol=1e-11
        )


def test_local_models_are_on_the_features_of_a_client_only():
    X, y, groups = table()
    model = PPSGDRegressor(alpha=0.3, learning_rate=0.05, random_state=0, n_rounds=30)
    model.fit(csr_array(X), y, groups=groups)
    used = np.array([np.abs(X[groups == i]).sum(axis=0) > 0 for i in range(8)])
    local = model.local_coef_
    np.testing.assert_array_equal(local.toarray() != 0, used)
    assert local.nnz == used.sum()
    assert len(model._local.values) == used.sum() + 8  # and the intercepts
    assert not local[[1]].nnz
    no_intercept = clone(model).set_params(fit_intercept=False).fit(csr_array(X), y, groups=groups)
    assert len(no_intercept._local.values) == used.sum()
    assert not no_intercept.for_client(1).local_coef_.nnz
    np.testing.assert_allclose(
        no_intercept.predict(X[groups == 1], groups=groups[groups == 1]), 0, atol=1e-15
    )


def test_a_feature_that_nobody_has_gets_noise_alone():
    X, y, groups = table()
    without = PPSGDRegressor(learning_rate=0.05, n_rounds=20).fit(csr_array(X), y, groups=groups)
    assert without.population_coef_[4] == 0
    model = PPSGDRegressor(**NOISE)
    values = [model.fit(csr_array(X), y, groups=groups).population_coef_[4] for _ in range(3)]
    assert len(set(values)) == 3  # on a grid: two of them are the same by chance 2e-7 of times


@pytest.mark.parametrize("alpha", [0.3, math.inf])
def test_no_rows_with_entries_at_all(alpha):
    X, y, groups = np.zeros((6, 3)), np.arange(6.0), [1, 1, 2, 2, 3, 3]
    for params in ({}, {"fit_intercept": False}, NOISE, {**NOISE, "fit_intercept": False}):
        model = PPSGDRegressor(alpha=alpha, n_rounds=3, random_state=0).set_params(**params)
        model.fit(csr_array(X), y, groups=groups)
        assert (model.population_coef_ != 0).all() == ("clip_norm" in params)
        assert model.local_coef_.shape == (3, 3)
        assert np.isfinite(model.predict(csr_array(X), groups=groups)).all()


def test_empty_rounds():
    X, y, groups = table()
    model = PPSGDRegressor(client_fraction=0.05, n_rounds=40, random_state=0, **MUCH)
    for params in ({}, {"noise_multiplier": None}, {"average": True}, {"clip_quantile": 0.5}):
        fitted = clone(model).set_params(**params).fit(csr_array(X), y, groups=groups)
        taken = fitted.history_["n_clients"]
        assert (taken == 0).any()
        assert taken.any()
        assert np.isfinite(fitted.coef_).all()


def test_very_many_clients_and_features():
    """Pairs that are beyond 32 bits."""
    n_clients, d, used = 3000, 1_500_000, 40
    assert n_clients * d > 2**31
    small = random_array((2 * n_clients, used), density=0.1, rng=np.random.default_rng(0))
    small = csr_array(small)
    columns = np.linspace(0, d - 1, used).astype(np.int32)
    wide = csr_array((small.data, columns[small.indices], small.indptr), shape=(2 * n_clients, d))
    assert wide.indices.dtype == np.int32
    groups = np.repeat(np.arange(n_clients), 2)
    y = np.asarray(small.sum(axis=1)).ravel() + 0.1 * groups % 7
    model = PPSGDRegressor(
        alpha=1.0, learning_rate=0.1, n_rounds=4, client_fraction=0.1, random_state=0
    )
    expected = clone(model).fit(small, y, groups=groups)
    got = model.fit(wide, y, groups=groups)
    np.testing.assert_array_equal(got.population_coef_[columns], expected.population_coef_)
    assert np.count_nonzero(got.population_coef_) == np.count_nonzero(expected.population_coef_)
    np.testing.assert_array_equal(
        got.predict(wide, groups=groups), expected.predict(small, groups=groups)
    )
    found = got.local_coef_
    np.testing.assert_array_equal(found.data, expected.local_coef_.data)
    assert found.shape == (n_clients, d)
    assert len(pickle.dumps(got._local)) < 1_000_000


def test_partial_fits_bring_clients_features_and_formats():
    X, y, groups = table(d=12, sizes=[6] * 8)
    model = PPSGDRegressor(
        alpha=0.3, learning_rate=0.05, random_state=SEED, average=True, batch_size=4
    )
    dense, sparse = clone(model), clone(model)
    for members in ([0, 3, 5], [3, 5], [1, 3, 7], range(8)):
        rows = np.isin(groups, members)
        dense.partial_fit(X[rows], y[rows], groups=groups[rows])
        sparse.partial_fit(csr_array(X[rows]), y[rows], groups=groups[rows])
        assert_close(sparse, dense)
    sparse.partial_fit(X, y, groups=groups)  # dense rows after sparse ones, and the reverse
    dense.partial_fit(csr_array(X), y, groups=groups)
    assert_close(sparse, dense)
    before = freeze(sparse)
    with pytest.raises(ValueError, match="features"):
        sparse.partial_fit(csr_array(X[:, :5]), y, groups=groups)
    with pytest.raises(ValueError, match="NaN"):
        sparse.partial_fit(csr_array(X), np.where(y > 1, np.nan, y), groups=groups)
    assert_frozen(sparse, before)


def test_callbacks_see_all_the_noise():
    """What a callback is shown after a round has the noise of that round on every feature."""
    X, y, groups = table()
    shown = []

    class Look(StopAfter):
        def on_fit_task_end(self, estimator, context, *, fitted_estimator):
            if context.task_name == "round":
                shown.append(fitted_estimator.population_coef_.copy())

    model = PPSGDRegressor(n_rounds=6, random_state=SEED, **NOISE)
    model.set_callbacks(Look(0)).fit(csr_array(X), y, groups=groups)
    assert len(shown) == 6
    for before, after in itertools.pairwise(shown):
        assert (before != after).all()


# The noise. Rows are so small that what w moves by is noise alone.
STEP, BOUND = 0.05, 0.7


def views(n_fits, lazy=True, forget=None):
    """Noise that clients were shown, by (fit, feature): rounds and values."""
    n, d = 6, 3
    X = csr_array(1e-200 * (np.arange(d) == np.arange(n)[:, None] % d))
    found, settled = {}, LateNoise._draw_pending

    def spy(self, server, features, t, rng):
        server = settled(self, server, features, t, rng)
        for j in range(d) if features is None else features.tolist():
            found.setdefault((fit, j), []).append((t, float(server["coef"][j, 0])))
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateNoise, "_draw_pending", spy)
        if forget:
            patch.setattr(SparseClippedSum, "due_noise", forget)
        for fit in range(n_fits):
            PPSGDRegressor(
                alpha=math.inf,
                client_fraction=0.25,
                n_rounds=12,
                weighting="clients",
                fit_intercept=False,
                warm_start=not lazy,
                random_state=fit,
                clip_norm=BOUND,
                noise_multiplier=1.5,
                learning_rate=STEP,
            ).fit(X, np.ones(n), groups=np.arange(n))
    return found


def increments(found):
    """Gaps (rounds), standardized increments, and those of the view before (NaN for the first)."""
    scale = STEP * 1.5 * BOUND / (0.25 * 6)
    gaps, values, previous = [], [], []
    for seen in found.values():
        last, earlier = (0, 0.0), np.nan
        for t, value in seen:
            if t == last[0]:
                assert value == last[1]  # nothing is new within a round
                continue
            step = (value - last[1]) / (scale * math.sqrt(t - last[0]))
            gaps.append(t - last[0])
            values.append(step)
            previous.append(earlier)
            last, earlier = (t, value), step
        assert last[0] == 12
    return np.array(gaps), np.array(values), np.array(previous)


def conviction(found):
    """Largest z score of variances by gap, means, and correlations between views and features."""
    gaps, values, previous = increments(found)
    scores = [abs(values.mean()) * math.sqrt(len(values))]
    for gap in range(1, 5):
        some = values[gaps == gap]
        assert len(some) > 50
        scores.append(abs(np.mean(some**2) - 1) * math.sqrt(len(some) / 2))
    both = ~np.isnan(previous)
    scores.append(abs(np.mean((values * previous)[both])) * math.sqrt(both.sum()))
    last = np.array([[seen[-1][1] for (f, j), seen in found.items() if j == k] for k in range(3)])
    correlations = np.corrcoef(last)[np.triu_indices(3, 1)]
    scores += list(np.abs(correlations) * math.sqrt(last.shape[1]))
    return max(scores)


def forgets_the_rounds(self, settled, variance, rows, c, rng):
    """Mutant: the noise of one round, however many are due."""
    due = np.where(settled[rows] < variance, self.dense.sum_noise_multiplier * BOUND, 0.0)
    settled[rows] = variance
    return rng.standard_normal((len(rows), c)) * due[:, None]


def settles_anew(self, settled, variance, rows, c, rng):
    """Mutant: what was settled before is drawn again."""
    due = np.where(settled[rows] < variance, math.sqrt(variance), 0.0)
    settled[rows] = variance
    return rng.standard_normal((len(rows), c)) * due[:, None]


def shares_noise(self, settled, variance, rows, c, rng):
    """Mutant: features that are settled together get the same draw."""
    due = np.sqrt(np.maximum(variance - settled[rows], 0.0))
    settled[rows] = variance
    return rng.standard_normal((1, c)) * due[:, None]


@pytest.mark.slow
def test_late_noise_has_the_distribution_of_noise_in_every_round():
    """Increments between views are independent, with the variance of the rounds between."""
    assert conviction(views(150)) < 4.2


@pytest.mark.slow
def test_noise_in_every_round_passes_the_same_test():
    found = views(60, lazy=False)
    gaps, values, previous = increments(found)
    assert set(gaps) == {1}
    assert abs(np.mean(values**2) - 1) * math.sqrt(len(values) / 2) < 4.2
    assert abs(np.nanmean(values * previous)) * math.sqrt(len(values)) < 4.2


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [forgets_the_rounds, settles_anew, shares_noise])
def test_wrong_late_noise_is_convicted(mutant):
    assert conviction(views(150, forget=mutant)) > 6


def test_the_last_noise_is_not_that_of_the_next_round():
    """A late draw after the last round, and a fit that goes on with noise in every round."""
    X = csr_array((6, 4000))
    model = PPSGDRegressor(
        alpha=math.inf, n_rounds=3, random_state=0, fit_intercept=False, **NOISE
    ).fit(X, np.ones(6), groups=np.arange(6))
    first = model.population_coef_.copy()
    model.set_params(warm_start=True, n_rounds=4).fit(X, np.ones(6), groups=np.arange(6))
    added = model.population_coef_ - first
    assert added.std() == pytest.approx(first.std() / math.sqrt(3), rel=0.06)
    assert abs(np.corrcoef(first, added)[0, 1]) < 5 / math.sqrt(4000)


def test_a_fit_holds_the_local_models_once():
    X, y, groups = table()
    model = PPSGDRegressor(n_rounds=3, learning_rate=0.1).fit(csr_array(X), y, groups=groups)
    assert np.shares_memory(model._local.values, model._progress.state.clients["local"])
