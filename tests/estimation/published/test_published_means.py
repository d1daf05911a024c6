"""Means of all clients that may be published: what the fit gives, hands out and refuses."""

import copy
import pickle
import warnings

import duckdb
import numpy as np
import pandas as pd
import polars
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone

from pfl_sklearn import BernoulliMean, GaussianMean, PoissonMean, PrivacyWarning
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.datasets import load_radon
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import BudgetExceeded, DiscreteLaplaceMechanism, PrivacyLedger, privacy_of
from pfl_sklearn.statistics import ClientStatistics

PUBLISH = {
    "unit": "row",
    "publish": "clients",
    "bounds": (-4.0, 4.0),
    "unseen": "population",
}
RNG = np.random.default_rng(0)
GROUPS = np.repeat([f"county {k:02d}" for k in range(40)], np.arange(40) % 10 + 3)
CODES = np.unique(GROUPS, return_inverse=True)[1]
THETA = RNG.normal(0.5, 0.7, 40)
Y = THETA[CODES] + RNG.normal(size=len(GROUPS))
X = np.zeros((len(Y), 1))


def fit(y=Y, groups=GROUPS, **params):
    """A fit that publishes; that a seed is no protection is tested by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "random_state was given", PrivacyWarning)
        return GaussianMean(**{**PUBLISH, "epsilon": 4.0, **params}).fit(
            np.zeros((len(y), 1)), y, groups=groups
        )


@pytest.fixture(scope="module")
def fitted():
    return fit()


def means_of(y, groups):
    return pd.Series(np.asarray(y)).groupby(np.asarray(groups)).mean().to_numpy()


# Estimates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["population", "table"])
def test_estimates_are_nearer_than_noised_means(target):
    model = fit(target=target, epsilon=1.0, random_state=0)
    truth = THETA if target == "population" else means_of(Y, GROUPS)
    noised, shrunken = (np.mean((est - truth) ** 2) for est in (model.local_means_, model.means_))
    assert shrunken < 0.5 * noised
    lower, upper = model.credible_interval()
    assert np.mean((lower <= truth) & (truth <= upper)) > 0.8
    assert (model.stds_ > 0).all()
    assert ((model.shrinkage_ > 0) & (model.shrinkage_ < 1)).all()
    assert abs(model.population_mean_ - 0.5) < 5 * model.population_mean_std_
    assert model.predict([[0.0]], groups=["elsewhere"]) == model.population_mean_


def test_without_much_noise_they_are_those_of_exact_means():
    published = fit(epsilon=1e4, random_state=0, grid=8 / 2**19)
    exact = GaussianMean().fit(X, np.clip(Y, -4, 4), groups=GROUPS)
    assert_allclose(published.local_means_, exact.local_means_, atol=1e-3)
    assert_allclose(published.means_, exact.means_, atol=0.05)
    assert_allclose(published.stds_, exact.stds_, rtol=0.05)
    assert published.noise_variance_ == pytest.approx(exact.noise_variance_, rel=0.03)
    of_table = fit(epsilon=1e4, random_state=0, target="table", grid=8 / 2**19)
    assert_allclose(of_table.means_, exact.local_means_, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["population", "table"])
@pytest.mark.parametrize(("m", "n"), [(8, 50), (50, 5)])
def test_intervals_cover(m, n, target):
    hits = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        theta, groups = rng.normal(0, 0.6, m), np.repeat(np.arange(m), n)
        y = theta[groups] + rng.normal(size=m * n)
        model = fit(y, groups, epsilon=1.0, target=target, random_state=seed)
        truth = theta if target == "population" else means_of(np.clip(y, -4, 4), groups)
        lower, upper = model.credible_interval()
        hits.append(np.mean((lower <= truth) & (truth <= upper)))
    assert 0.92 < np.mean(hits) < 0.985


def test_radon():
    homes = load_radon().frame
    y, county = homes["log_radon"], homes["county_fips"]
    model = fit(y, county, epsilon=1.0, bounds=(-2.5, 4.5), target="table", random_state=0)
    exact = y.clip(-2.5, 4.5).groupby(county).mean().to_numpy()
    noised, shrunken = (
        np.sqrt(np.mean((v - exact) ** 2)) for v in (model.local_means_, model.means_)
    )
    assert shrunken < 0.35 * noised


def test_known_parameters():
    model = fit(prior=GaussianPrior(0.5, 0.5), noise_variance=1.0)
    assert (model.population_mean_, model.population_mean_std_) == (0.5, 0.0)
    assert model.prior_.covariance == pytest.approx(0.5)
    assert model.noise_variance_ == pytest.approx(1.0)
    assert "squares" not in model.privacy_.mechanism
    assert model.icc_ == pytest.approx(1 / 3)


def test_clients_of_one_row():
    groups = np.arange(30)
    y = np.random.default_rng(0).normal(size=30)
    model = fit(y, groups, target="table")
    assert np.isnan(model.noise_variance_)
    assert np.isnan(model.icc_)
    assert np.isfinite(model.means_).all()
    with pytest.raises(ValueError, match=r"every client has one row.*target='table'"):
        fit(y, groups)
    assert np.isfinite(fit(y, groups, noise_variance=1.0).means_).all()
    alone = fit(y[:6], np.zeros(6, dtype=int))
    assert np.isfinite([alone.means_[0], alone.stds_[0]]).all()


@pytest.mark.parametrize("odd", [None, pd.NA, pd.NaT, "n/a", 10**400, 1j, [1.0], np.nan])
def test_odd_values_are_no_errors(odd, monkeypatch):
    monkeypatch.setattr(
        DiscreteLaplaceMechanism, "privatize", lambda self, values, rng=None: values
    )
    y = Y.astype(object)
    y[0] = odd
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(y).local_means_
    assert_allclose(found, means_of([0.0, *Y[1:]], GROUPS), atol=1e-4)


def test_values_that_are_no_numbers_count_as_the_middle(monkeypatch):
    monkeypatch.setattr(
        DiscreteLaplaceMechanism, "privatize", lambda self, values, rng=None: values
    )
    y = Y.copy()
    y[:6] = [np.nan, np.inf, -np.inf, 1e308, -1e308, 9.0]
    expected = y.copy()
    expected[:6] = [0.0, 0.0, 0.0, 4.0, -4.0, 4.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit(y).local_means_
    assert_allclose(found, means_of(np.clip(expected, -4, 4), GROUPS), atol=0.01)


# What is handed out -------------------------------------------------------------------------------


def test_everything_is_covered(fitted):
    report = fitted.privacy_
    assert (report.unit, report.relation, report.epsilon, report.delta) == (
        *("row", "replace_one"),
        *(4.0, 0.0),
    )
    assert report.not_released == ()
    assert {"means_", "local_means_", "noise_std_", "shrinkage_"} <= set(report.released)
    assert "a row, not a person" in str(report)
    assert privacy_of(fitted).epsilon == 4.0
    with_persons = fit(rows_per_person=3).privacy_
    assert "epsilon = 12 for a person, who has at most 3 rows" in str(with_persons)
    assert type(report).from_dict(with_persons.to_dict()) == with_persons


def test_the_table_shows_the_noise(fitted):
    table = fitted.summary()
    assert list(table.columns[:4]) == ["n_samples", "local_mean", "noise_std", "mean"]
    expected = np.sqrt(2) * 8 / (0.9 * 4 * fitted.n_samples_per_client_)
    assert_allclose(table["noise_std"], expected, rtol=1e-4)


def test_quality_says_what_an_estimate_rests_on():
    # Noise of 11.3 over the rows, and of .04 over them, beside known spreads of clients and rows.
    sizes = np.array([1, 5, 11, 12, 3000])
    groups, rng = np.repeat(np.arange(5), sizes), np.random.default_rng(0)
    known = {"prior": GaussianPrior(0.0, 1.0), "noise_variance": 0.01}
    quality = fit(rng.normal(size=len(groups)), groups, epsilon=1.0, **known).summary()["quality"]
    assert quality.tolist() == ["mostly noise"] * 3 + [quality[3], "own rows"]
    known = {"prior": GaussianPrior(0.0, 0.09), "noise_variance": 4.0}
    quality = fit(rng.normal(size=len(groups)), groups, epsilon=300.0, **known).summary()["quality"]
    assert quality.tolist() == ["mostly population"] * 4 + ["own rows"]


@pytest.mark.parametrize("hand_out", ["pickle", "copy", "release", "for_client"])
def test_copies_hold_the_whole_table(fitted, hand_out):
    again = {
        "pickle": lambda: pickle.loads(pickle.dumps(fitted)),
        "copy": lambda: copy.deepcopy(fitted),
        "release": fitted.release,
        "for_client": lambda: fitted.for_client("county 03"),
    }[hand_out]()
    assert_array_equal(again.predict(X, groups=GROUPS), fitted.predict(X, groups=GROUPS))
    pd.testing.assert_frame_equal(again.summary(), fitted.summary())


@pytest.mark.parametrize("name", ["means_", "local_means_", "stds_", "noise_std_", "shrinkage_"])
def test_a_table_that_was_changed_is_not_released(fitted, name):
    changed = copy.deepcopy(fitted)
    getattr(changed, name)[3] += 0.01  # such as an exact value instead of a noised one
    for hand_out in (changed.release, lambda: changed.for_client("county 03")):
        with pytest.raises(ValueError, match="is not the report of its fitted values"):
            hand_out()
    assert "does not cover" in changed.summary().attrs["privacy"]
    assert fitted.release().release().privacy_ == fitted.privacy_


def test_a_table_with_other_ids_is_not_released(fitted):
    changed = copy.deepcopy(fitted)
    changed.clients_[:2] = changed.clients_[1::-1].copy()
    with pytest.raises(ValueError, match="is not the report of its fitted values"):
        changed.release()
    assert fitted.benchmark(100.0).attrs == fitted.summary().attrs


def test_models_of_unknown_clients(fitted):
    with pytest.raises(ValueError, match="not one of the 40 clients"):
        fitted.for_client("elsewhere")


def test_a_seed_is_no_release():
    model = GaussianMean(**PUBLISH, epsilon=4.0, random_state=0)
    with pytest.warns(PrivacyWarning, match="random_state was given"):
        model.fit(X, Y, groups=GROUPS)
    again = fit(random_state=0)
    assert_array_equal(model.means_, again.means_)
    with pytest.raises(ValueError, match=r"release\(\) of a fit with random_state"):
        model.release()
    assert not np.array_equal(fit().local_means_, fit().local_means_)


def test_every_fit_is_a_release(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", budget=(9.0, 0.5), unit="row")
    for _ in range(2):
        fit(ledger=ledger)
    with pytest.raises(BudgetExceeded):
        fit(ledger=ledger)
    other = PrivacyLedger(tmp_path / "other", budget=(9.0, 0.5))
    with pytest.raises(ValueError, match="unit"):
        fit(ledger=other)


def test_with_the_client_in_a_column(fitted):
    rows = pd.DataFrame({"county": GROUPS, "x": 0.0})
    model = ClientColumn(GaussianMean(**PUBLISH, epsilon=4.0), column="county").fit(rows, Y)
    assert model.predict(rows).shape == Y.shape
    assert privacy_of(model).epsilon == 4.0


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epsilon": np.inf}, "needs a finite epsilon"),
        ({"unit": "client"}, r"publish='clients' needs unit='row'"),
        ({"publish": None}, r"unit='row' needs publish='clients'"),
        ({"publish": None, "unit": "client"}, "bounds has no effect without publish"),
        (
            {"publish": None, "unit": "client", "bounds": None, "target": "table"},
            "target has no effect without publish",
        ),
        ({"bounds": None}, "bounds must be given"),
        ({"bounds": (1.0, -1.0)}, "bounds must be two finite numbers"),
        ({"grid": 9.0}, "grid=9.0 must divide"),
        ({"clip_norm": 1.0}, "clip_norm has no effect"),
        ({"participants": ["county 01", "county 02"]}, "participants has no effect"),
        ({"prior": "discrete"}, "needs a Gaussian prior"),
        ({"prior": GaussianPrior(covariance_type="diag")}, "needs a Gaussian prior"),
    ],
)
def test_parameters_that_do_not_go_together(params, message, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", unit="row")
    with pytest.raises(ValueError, match=message):
        fit(**params, ledger=ledger)
    assert ledger.entries == []


def test_input_that_does_not_fit():
    model = GaussianMean(**PUBLISH, epsilon=1.0)
    with pytest.raises(ValueError, match="sample_weight is not supported"):
        clone(model).fit(X, Y, groups=GROUPS, sample_weight=np.ones(len(Y)))
    with pytest.raises(ValueError, match="one output"):
        clone(model).fit(X, np.column_stack([Y, Y]), groups=GROUPS)
    with pytest.raises(ValueError, match=r"partial_fit.*epsilon"):
        clone(model).partial_fit(X, Y, groups=GROUPS)
    for other in (model, *COUNTS.values()):
        with pytest.raises(ValueError, match="is not private") as refused:
            clone(other).partial_fit(X, [-3.25] * len(Y), groups=GROUPS)
        assert "3.25" not in str(refused.value)


# Statistics ---------------------------------------------------------------------------------------

COUNTS = {
    "proportions": BernoulliMean(unit="row", publish="clients", epsilon=1.0),
    "rates": PoissonMean(unit="event", publish="clients", epsilon=1.0),
}


def no_noise(monkeypatch):
    monkeypatch.setattr(
        DiscreteLaplaceMechanism, "privatize", lambda self, values, rng=None: values
    )


@pytest.mark.parametrize("kind", ["rows", "polars", "duckdb"])
def test_statistics_of_cut_rows_are_those_rows(kind, monkeypatch):
    no_noise(monkeypatch)
    cut = np.clip(Y, -4, 4)
    if kind == "rows":
        statistics = ClientStatistics.from_rows(None, cut, groups=GROUPS, target_bound=4.0)
    else:
        frame = pd.DataFrame({"y": cut, "county": GROUPS})
        frame = polars.from_pandas(frame).lazy() if kind == "polars" else duckdb.from_df(frame)
        statistics = ClientStatistics.from_frame(
            frame, groups="county", target="y", target_bound=4.0
        )
    model, of_rows = GaussianMean(**PUBLISH, epsilon=4.0).fit_statistics(statistics), fit()
    assert_array_equal(model.clients_, of_rows.clients_)
    assert_allclose(model.local_means_, of_rows.local_means_, atol=1e-4)
    assert_allclose(model.means_, of_rows.means_, atol=1e-3)
    assert model.noise_variance_ == pytest.approx(of_rows.noise_variance_, rel=0.01)
    assert "rows were cut to bounds before" in " ".join(model.privacy_.assumptions)
    assert model.release().privacy_ == model.privacy_


def test_statistics_of_counts_are_those_counts(monkeypatch):
    no_noise(monkeypatch)
    labels = (Y > 0.5).astype(float)
    statistics = ClientStatistics.from_rows(None, labels, groups=GROUPS)
    for model in COUNTS.values():
        found = clone(model).fit_statistics(statistics)
        of_rows = clone(model).fit(X, labels.astype(int), groups=GROUPS)
        assert_array_equal(found.local_means_, of_rows.local_means_)
        assert_allclose(found.means_, of_rows.means_)
        assert found.privacy_ == of_rows.privacy_


@pytest.mark.parametrize(
    ("changes", "bounds", "message"),
    [
        ({}, (-9.0, 9.0), "need a target_bound"),
        ({"target_bound": 9.0}, (-1.0, 1.0), r"cut to bounds=\(-1, 1\).*got rows beyond them"),
        ({"sample_weight": np.full(len(Y), 2.0)}, (-9.0, 9.0), "weighted rows"),
        ({"y": np.column_stack([Y, Y])}, (-9.0, 9.0), "needs one target; got statistics of 2"),
        ({"y": np.where(Y > 1, np.nan, Y), "missing": "drop"}, (-9.0, 9.0), "left out rows"),
        ({"y": Y + 1e9, "target_bound": 1e9}, (1e9 - 9, 1e9 + 9), "too inexact for bounds"),
    ],
)
def test_statistics_that_do_not_fit(changes, bounds, message, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger", unit="row")
    model = GaussianMean(**{**PUBLISH, "bounds": bounds}, epsilon=1.0, ledger=ledger)
    statistics = ClientStatistics.from_rows(None, **{"y": Y, "groups": GROUPS, **changes})
    with pytest.raises(ValueError, match=message):
        model.fit_statistics(statistics)
    assert ledger.entries == []


def test_statistics_of_counts_that_do_not_fit():
    labels = np.where(Y > 1, np.nan, Y > 0)
    statistics = ClientStatistics.from_rows(None, labels, groups=GROUPS, missing="drop")
    for model in COUNTS.values():
        with pytest.raises(ValueError, match="left out rows with missing values"):
            clone(model).fit_statistics(statistics)
    odd = ClientStatistics.from_rows(None, Y, groups=GROUPS)
    for model in COUNTS.values():
        with pytest.raises(ValueError, match="whole numbers"):
            clone(model).fit_statistics(odd)
    large = ClientStatistics.from_rows(None, np.full(200, 1e9), groups=np.zeros(200, dtype=int))
    with pytest.raises(ValueError, match="sums of at most 1e"):
        clone(COUNTS["rates"]).fit_statistics(large)


# A public list of clients -------------------------------------------------------------------------

LIST = [*np.unique(GROUPS), "county without rows"]


@pytest.mark.slow
def test_with_a_list_of_clients(monkeypatch):
    model = fit(clients=LIST, epsilon=2.0, random_state=0)
    assert_array_equal(model.clients_, LIST)
    assert np.isfinite([model.means_, model.stds_, model.local_means_, model.noise_std_]).all()
    lower, upper = model.credible_interval()
    assert np.mean((lower[:-1] <= THETA) & (upper[:-1] >= THETA)) > 0.8
    assert np.mean((model.means_[:-1] - THETA) ** 2) < 0.5
    report = model.privacy_
    assert (report.relation, report.epsilon, report.unit) == ("add_remove", 2.0, "row")
    assert "the list of clients is public" in report.assumptions
    assert "so is how many rows each client has" in " ".join(report.explain().split())
    assert fit(clients=LIST).release().summary().shape[0] == 41


def test_a_client_without_rows_is_the_population():
    known = {"prior": GaussianPrior(0.5, 0.49), "noise_variance": 1.0, "epsilon": 100.0}
    model = fit(clients=LIST, **known)
    assert model.means_[-1] == pytest.approx(0.5, abs=0.02)
    assert model.stds_[-1] == pytest.approx(0.7, rel=0.02)
    exact = GaussianMean(known["prior"], noise_variance=1.0).fit(X, Y, groups=GROUPS)
    assert_allclose(model.means_[:-1], exact.means_, atol=0.15)
    assert_allclose(model.stds_[:-1], exact.stds_, rtol=0.15)


def test_rows_of_other_clients_are_absent():
    some = LIST[:4]
    part = fit(clients=some[::-1], epsilon=1e4)
    assert_array_equal(part.clients_, some)
    assert_allclose(part.local_means_, means_of(np.clip(Y, -4, 4), GROUPS)[:4], atol=0.01)
    assert_allclose(part.n_samples_per_client_, [3, 4, 5, 6], atol=0.01)


@pytest.mark.slow
def test_tables_without_rows():
    for epsilon in (1e4, 4.0):
        with pytest.warns(UserWarning, match="noised numbers of rows add up to"):
            empty = fit(Y[:0], GROUPS[:0], clients=LIST[:4], epsilon=epsilon)
        assert np.isfinite([empty.means_, empty.stds_, *empty.credible_interval()]).all()
        assert (empty.n_samples_per_client_ > 0).all()
        if epsilon > 1e3:
            assert (np.abs(empty.local_means_) < 0.1).all()


@pytest.mark.slow
def test_a_client_that_is_much_larger_keeps_its_size():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(101), [300] + [5] * 100)
    y = np.where(groups == 0, 3.0, 0.0) + rng.normal(size=len(groups))
    sizes = [
        fit(y, groups, clients=range(101), epsilon=0.5, random_state=seed).n_samples_per_client_[0]
        for seed in range(4)
    ]
    assert abs(np.mean(sizes) - 300) < 15  # the noise has a standard deviation of 9


@pytest.mark.slow
def test_a_list_in_ledgers_and_plans(tmp_path):
    ledger = PrivacyLedger(
        tmp_path / "ledger", budget=(5.0, 0.5), unit="row", relation="add_remove"
    )
    with pytest.raises(ValueError, match="clients needs groups"):
        fit(clients=LIST, groups=None, ledger=ledger)
    fit(clients=LIST, ledger=ledger)
    assert ledger.remaining() == pytest.approx(1.0)
    other = PrivacyLedger(tmp_path / "other", budget=(5.0, 0.5), unit="row")
    with pytest.raises(BudgetExceeded):  # a replaced row is one less and one more
        fit(clients=LIST, ledger=other)
    plan = GaussianMean(**PUBLISH, epsilon=4.0, clients=LIST).expected_error(
        GaussianPrior(0.5, 0.5), 10, 5, noise_variance=1.0, n_simulations=2
    )
    assert np.isfinite(plan).all(axis=None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clients": []}, "name one client or more.*got none"),
        ({"clients": ["a", "a"]}, "each once; got 'a' twice"),
        ({"clients": {"a": 1}}, "clients must be a list, an array or a column of ids"),
        ({"clients": [1, 2]}, "clients have number ids"),
        ({"clients": LIST, "target": "table"}, "clients goes with target='population'"),
        ({"clients": LIST, "groups": None}, "clients needs groups"),
        (
            {"clients": LIST, "publish": None, "unit": "client", "bounds": None},
            "clients has no effect without publish",
        ),
    ],
)
def test_lists_that_do_not_fit(params, message):
    with pytest.raises(ValueError, match=message):
        fit(**params)
    statistics = ClientStatistics.from_rows(None, np.clip(Y, -4, 4), groups=GROUPS)
    with pytest.raises(ValueError, match="fit_statistics does not take clients"):
        GaussianMean(**PUBLISH, epsilon=1.0, clients=LIST).fit_statistics(statistics)
