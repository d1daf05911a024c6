"""Private means on a real table: what they cost, and that they help."""

import numpy as np
import pandas as pd
import pytest

from pfl_sklearn import GaussianMean
from pfl_sklearn.model_selection import ClientShuffleSplit

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:The released noise variance"),  # by chance, at epsilon .5
]


@pytest.fixture(scope="module")
def scores(data_home):
    """Mathematics scores of 7,185 pupils of 160 schools: y and school."""
    table = pd.read_csv(data_home / "hsb82.csv.gz")
    return table["mAch"].to_numpy(), table["school"].to_numpy()


def fit(y, school, **params):
    return GaussianMean(**params).fit(y[:, None], y, groups=school)


def private(y, school, epsilon, seed):
    return fit(y, school, epsilon=epsilon, clip_norm=8.0, center=12.5, random_state=seed)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 10.0])
def test_private_fits_of_the_schools_shrink(scores, epsilon):
    """With the noise of n_i times the row variance, 0, 0 and 4 of 10 fits did."""
    models = [private(*scores, epsilon, seed) for seed in range(10)]
    assert sum(model.shrinkage_.max() > 0 for model in models) >= 9
    within = fit(*scores).noise_variance_
    found = np.array([model.noise_variance_ for model in models])
    noise = models[0].privacy_.noise_std * 64 / 160  # of the mean row variance
    assert np.sqrt(np.mean((found - within) ** 2)) < 2 * noise + 1


def test_private_means_predict_better_than_local_ones(scores):
    """Nine pupils of each school to fit on, the others to predict.

    Gains over the school's own mean in mean squared error: 1.35 (epsilon .5), 1.38 (1), 1.54 (10)
    and 1.54 (no privacy); with the noise of n_i times the row variance, .04, .16 and 1.53.
    """
    y, school = scores
    gains = {0.5: [], 1.0: [], 10.0: [], np.inf: []}
    splits = ClientShuffleSplit(10, test_size=0.8, random_state=0).split(y[:, None], y, school)
    for seed, (train, test) in enumerate(splits):
        for epsilon, found in gains.items():
            model = private(y[train], school[train], epsilon, seed)
            own = model.local_means_[np.searchsorted(model.clients_, school[test])]
            got = model.predict(y[test, None], groups=school[test])
            found.append(np.mean((own - y[test]) ** 2 - (got - y[test]) ** 2))
    best = np.mean(gains[np.inf])
    assert best > 1.3
    assert np.mean(gains[0.5]) > 0.75 * best
    assert np.mean(gains[1.0]) > 0.75 * best
    assert np.mean(gains[10.0]) > 0.95 * best
