"""Tables, generators and loaders."""

from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kstest, truncnorm

from pfl_sklearn import BernoulliMean, GaussianMean
from pfl_sklearn.datasets import (
    expand_counts,
    load_baseball,
    load_county_elections,
    load_heart_disease,
    load_parkinsons,
    load_radon,
    make_bernoulli_clients,
    make_gaussian_clients,
)
from pfl_sklearn.linear_model import PersonalizedLinearRegression


def squared_error(estimate, truth):
    return np.sum((estimate - truth) ** 2)


def test_baseball_table():
    baseball = load_baseball()
    assert baseball.frame.shape == (18, 4)
    names = ["at_bats", "hits", "remaining_at_bats", "remaining_hits"]
    assert baseball.frame.columns.tolist() == names
    assert (baseball.trials == 45).all()
    assert baseball.successes.sum() == 215
    assert baseball.groups[[0, -1]].tolist() == ["Roberto Clemente", "Max Alvis"]
    assert len(set(baseball.groups)) == 18
    # Printed in Efron and Morris (1975), Table 1.
    printed = [0.346, 0.298, 0.276, 0.222, 0.273, 0.270, 0.263, 0.210, 0.269]
    printed += [0.230, 0.264, 0.256, 0.303, 0.264, 0.226, 0.286, 0.316, 0.200]
    # Kessinger's and Campaneris's season totals (168 hits each) give .265 and .285, not as printed.
    off = np.abs(baseball.season_average.to_numpy() - printed)
    assert baseball.groups[off > 6e-4].tolist() == ["Don Kessinger", "Bert Campaneris"]
    assert off.max() < 2e-3
    np.testing.assert_array_equal(
        baseball.season_average,
        baseball.frame["remaining_hits"] / baseball.frame["remaining_at_bats"],
    )


def test_baseball_shrinkage_is_the_classic():
    baseball = load_baseball()
    average, truth = baseball.successes / baseball.trials, baseball.season_average.to_numpy()
    assert squared_error(average, truth) == pytest.approx(0.0755, abs=5e-4)
    known = average.mean() * (1 - average.mean()) / 45
    spread = average - average.mean()
    james_stein = average.mean() + (1 - 15 * known / np.sum(spread**2)) * spread
    assert squared_error(james_stein, truth) == pytest.approx(0.0214, abs=5e-4)
    gaussian = GaussianMean(noise_variance=known).fit(
        np.zeros((18, 1)), average, groups=baseball.groups
    )
    beta = BernoulliMean().fit_counts(baseball.successes, baseball.trials, groups=baseball.groups)
    position = np.argsort(baseball.groups)
    for model in (gaussian, beta):
        assert squared_error(model.means_, truth[position]) < 0.0755 / 3


def test_loaders_hand_out_copies():
    frame = load_baseball().frame
    frame.loc["Max Alvis", "hits"] = 45
    assert load_baseball().frame.loc["Max Alvis", "hits"] == 7


def test_gaussian_moments():
    clients = make_gaussian_clients(
        20_000, 5, mean=3.0, between_std=0.5, noise_std=2.0, random_state=0
    )
    assert clients.data.shape == (100_000, 1)
    assert clients.target.shape == (100_000,)
    assert clients.client_means.shape == (20_000,)
    # Four standard errors.
    assert clients.client_means.mean() == pytest.approx(3.0, abs=4 * 0.5 / np.sqrt(20_000))
    assert clients.client_means.std() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(40_000))
    noise = clients.target - clients.client_means[clients.groups]
    assert noise.mean() == pytest.approx(0, abs=4 * 2 / np.sqrt(100_000))
    assert noise.std() == pytest.approx(2.0, abs=4 * 2 / np.sqrt(200_000))


def test_gaussian_shapes_and_unequal_sizes():
    clients = make_gaussian_clients(3, [1, 4, 2], n_outputs=2, mean=[10.0, -10.0], random_state=0)
    assert clients.groups.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert clients.target.shape == (7, 2)
    assert clients.client_means.shape == (3, 2)
    assert (clients.target[:, 0] > 0).all()
    assert (clients.target[:, 1] < 0).all()
    assert make_gaussian_clients(3, n_outputs=1).target.shape == (30, 1)
    still = make_gaussian_clients(4, 2, mean=7.0, between_std=0.0, noise_std=0.0)
    assert (still.target == 7).all()


@pytest.mark.parametrize("make", [make_gaussian_clients, make_bernoulli_clients])
def test_generators_repeat_with_a_seed(make):
    def drawn(seed):
        made = make(20, 5, random_state=seed)
        return made["target" if "target" in made else "successes"].tolist()

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert drawn(np.random.RandomState(0)) == drawn(0)


@pytest.mark.parametrize("make", [make_gaussian_clients, make_bernoulli_clients])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 2], r"n_(rows|trials).*\b3\b.*array"),
        (2.5, r"n_(rows|trials).*\b3\b.*array"),
        (0, r"n_(rows|trials).*\b1\b.*\b0\b"),
        ([3, -1, 2], r"n_(rows|trials).*\b1\b.*-1"),
    ],
)
def test_generators_refuse_bad_sizes(make, rows, message):
    with pytest.raises(ValueError, match=message):
        make(3, rows)


def test_generators_refuse_bad_parameters():
    with pytest.raises(ValueError, match=r"prior.*beta.*normal.*'gamma'"):
        make_bernoulli_clients(prior="gamma")
    for outputs in (None, 2):
        with pytest.raises(ValueError, match="broadcast"):
            make_gaussian_clients(3, mean=[0.0, 1.0, 2.0], n_outputs=outputs)


POPULATIONS = {
    "beta": ("beta", (4, 4)),
    "normal": (truncnorm(-0.5 / 0.15, 0.5 / 0.15, loc=0.5, scale=0.15).cdf, ()),
    "uniform": ("uniform", ()),
}


@pytest.mark.parametrize("prior", POPULATIONS)
def test_bernoulli_populations(prior):
    clients = make_bernoulli_clients(5000, prior=prior, random_state=0)
    cdf, arguments = POPULATIONS[prior]
    assert kstest(clients.probabilities, cdf, arguments).pvalue > 1e-3
    assert (clients.trials == 14).all()


def test_three_spikes_and_counts():
    clients = make_bernoulli_clients(30_000, 14, prior="3-spike", random_state=0)
    spikes, counts = np.unique(clients.probabilities, return_counts=True)
    assert spikes.tolist() == [0.25, 0.5, 0.75]
    np.testing.assert_allclose(counts, 10_000, atol=4 * np.sqrt(30_000 * 2 / 9))
    for spike in spikes:
        successes = clients.successes[clients.probabilities == spike]
        variance = 14 * spike * (1 - spike)
        assert successes.mean() == pytest.approx(14 * spike, abs=4 * np.sqrt(variance / 9000))
        assert successes.var() == pytest.approx(variance, rel=0.06)


def test_bernoulli_unequal_trials():
    clients = make_bernoulli_clients(3, [1, 50, 2], random_state=0)
    assert clients.trials.tolist() == [1, 50, 2]
    assert clients.groups.tolist() == [0, 1, 2]
    assert (clients.successes <= clients.trials).all()


def test_expanded_counts_fit_like_the_counts():
    clients = make_bernoulli_clients(40, np.arange(1, 41), random_state=0)
    names = np.array([f"c{k:02d}" for k in range(40)])
    y, groups = expand_counts(clients.successes, clients.trials, names)
    assert len(y) == clients.trials.sum()
    np.testing.assert_array_equal(pd.Series(y).groupby(groups).sum().to_numpy(), clients.successes)
    rows = BernoulliMean().fit(np.zeros((len(y), 1)), y, groups=groups)
    table = BernoulliMean().fit_counts(clients.successes, clients.trials, groups=names)
    np.testing.assert_allclose(rows.means_, table.means_, rtol=1e-12)
    assert expand_counts([0, 2], [1, 2])[1].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("successes", "trials", "groups", "message"),
    [
        ([3], [2], None, r"successes.*trials"),
        ([-1], [2], None, r"successes.*trials"),
        ([1, 2], [2], None, "inconsistent numbers of samples"),
        ([1, 2], [2, 3], ["a"], "inconsistent numbers of samples"),
    ],
)
def test_expand_counts_refuses(successes, trials, groups, message):
    with pytest.raises(ValueError, match=message):
        expand_counts(successes, trials, groups)


def test_elections():
    elections = load_county_elections()
    assert elections.frame.shape == (18_666, 7)
    assert len(np.unique(elections.groups)) == 3111
    wins = pd.Series(elections.target).groupby(elections.groups).sum()
    assert wins.value_counts().sort_index().tolist() == [349, 61, 167, 85, 147, 237, 2065]
    by_year = elections.frame.groupby("year")["rep_won"].mean()
    np.testing.assert_allclose(by_year, [0.7837, 0.8120, 0.7191, 0.7766, 0.8428, 0.8274], atol=5e-5)
    assert elections.frame["fips"].str.fullmatch(r"\d{5}").all()
    assert "Alaska" not in set(elections.frame["state"].str.title())
    model = BernoulliMean().fit(elections.data, elections.target, groups=elections.groups)
    assert len(model.clients_) == 3111
    assert model.predict(elections.data[:1], groups=["01001"]).tolist() == [1]


def test_radon():
    """Minnesota is the table of Gelman and Hill (2007)."""
    radon = load_radon("MN")
    assert radon.data.shape == (919, 2)
    assert len(np.unique(radon.groups)) == 85
    assert pd.Series(radon.groups).value_counts().iloc[[0, -1]].tolist() == [116, 1]
    model = PersonalizedLinearRegression(random="intercept")
    model.fit(radon.data, radon.target, groups=radon.groups)
    # lme4: log_radon ~ floor + log_uranium + (1 | county)
    assert model.population_intercept_ == pytest.approx(1.4658, abs=1e-3)
    np.testing.assert_allclose(model.population_coef_, [-0.6682, 0.7202], atol=1e-3)
    every = load_radon()
    assert every.data.shape == (12_124, 2)
    assert len(np.unique(every.groups)) == 463
    assert np.isfinite(every.data).all(axis=None)
    assert set(every.data["floor"]) == {0, 1}
    with pytest.raises(ValueError, match=r"state must be one of AZ, .*got 'NY'"):
        load_radon("NY")


def test_heart_disease():
    heart = load_heart_disease()
    sizes = pd.Series(heart.groups).value_counts()
    assert sizes.to_dict() == {"cleveland": 303, "hungarian": 261, "va": 130, "switzerland": 46}
    assert heart.data.notna().all(axis=None)
    every = load_heart_disease(complete=False)
    assert every.data.shape == (920, 10)
    ill = pd.Series(every.target).groupby(every.groups).sum()
    assert ill.to_dict() == {"cleveland": 139, "hungarian": 106, "switzerland": 115, "va": 149}
    assert (every.target == (every.frame["num"] > 0)).all()


def test_parkinsons():
    table = load_parkinsons()
    assert table.data.shape == (5875, 19)
    assert len(np.unique(table.groups)) == 42
    assert table.data.columns[:3].tolist() == ["age", "sex", "test_time"]
    assert np.isfinite(table.data).all(axis=None)
    assert (table.target.min(), table.target.max()) == pytest.approx((7.0, 54.992))


def test_licences_are_beside_the_tables():
    folder = files("pfl_sklearn.datasets") / "data"
    text = (folder / "LICENSES.md").read_text()
    tables = [file.name for file in folder.iterdir() if file.name.endswith(".csv.gz")]
    assert len(tables) == 5
    assert all(f"`{name}`" in text for name in tables)
