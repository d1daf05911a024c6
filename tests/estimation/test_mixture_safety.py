"""Mixture releases: no client is much worse off than alone, and nothing exact is released."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from pfl_sklearn import GaussianMean
from pfl_sklearn.priors import DiscretePrior, GaussianMixturePrior
from pfl_sklearn.privacy import GaussianMechanism, PrivateClustering

pytestmark = [
    pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:.*epsilon.*clip_norm"),
]


def make_table(theta, sampling, seed):
    """Rows (4 m, d) and groups of clients with four rows each."""
    groups = np.repeat(np.arange(len(theta)), 4)
    noise = np.random.default_rng(seed + 1000).normal(size=(len(groups), theta.shape[1]))
    return theta[groups] + math.sqrt(4 * sampling) * noise, groups


def fit(y, groups, prior, noise=0.2, **params):
    model = GaussianMean(prior, noise_variance=noise, **{"random_state": 0, **params})
    return model.fit(np.zeros((len(y), 1)), y, groups=groups)


def error_ratio_to_local(model, theta):
    return np.sum((model.means_ - theta) ** 2) / np.sum((model.local_means_ - theta) ** 2)


def is_local(model):
    return np.all(model.means_ == model.local_means_, axis=1)


def groups_of_three(m, share, far, seed):
    points = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, far]])
    rng = np.random.default_rng(seed)
    return points[rng.choice(3, m, p=[0.5 - share / 2, 0.5 - share / 2, share])]


@pytest.mark.parametrize("prior", [DiscretePrior(2), GaussianMixturePrior(2)], ids=repr)
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize(
    ("share", "far", "clip_norm"), [(0.04, 20.0, 2.0), (0.05, 3.0, 4.0), (0.1, 5.0, 6.0)]
)
def test_a_group_without_a_component(prior, epsilon, share, far, clip_norm):
    """Few clients lie far from both components, outside the ball or inside."""
    theta = groups_of_three(1000, share, far, 0)
    y, groups = make_table(theta, 0.05, 0)
    model = fit(y, groups, prior, epsilon=epsilon, clip_norm=clip_norm)
    assert error_ratio_to_local(model, theta) < 1.1
    outside = np.linalg.norm(model.local_means_, axis=1) > clip_norm
    assert is_local(model)[outside].all()
    np.testing.assert_array_equal(model.shrinkage_[outside], 0.0)
    np.testing.assert_allclose(model.stds_[outside], math.sqrt(0.05))


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"epsilon": 20.0, "trust": "local", "clip_norm": 5.0},
        {"epsilon": 8.0, "trust": "local", "clip_norm": 5.0},
        {"mechanism": "quantizer", "n_bits": 8, "clip_norm": 6.0},
        {"epsilon": 4.0, "clip_norm": 6.0},
    ],
)
@pytest.mark.parametrize("spread", [0.2, 0.7])
def test_points_for_groups_that_spread(params, spread):
    """Two wide blobs are no two points."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        centres = np.array([[-3.0, 0.0], [3.0, 0.0]])
        theta = centres[rng.choice(2, 3000)] + spread * rng.normal(size=(3000, 2))
        y, groups = make_table(theta, 0.05, seed)
        model = fit(y, groups, DiscretePrior(2), **{"random_state": seed, **params})
        assert error_ratio_to_local(model, theta) < 1.1


def test_the_guard_costs_a_client_in_a_thousand():
    """Of a model that holds: about .001 of the clients keep their own mean, and little is lost."""
    points = np.array([[-1.0, 0.0], [1.0, 0.0]])
    theta = points[np.random.default_rng(0).choice(2, 10_000)]
    y, groups = make_table(theta, 0.05, 0)
    model = fit(y, groups, DiscretePrior(2), epsilon=20.0, clip_norm=6.0)
    assert 0 < is_local(model).sum() < 25
    plain = fit(y, groups, DiscretePrior(2))
    assert error_ratio_to_local(model, theta) < error_ratio_to_local(plain, theta) + 0.02


def test_a_ball_that_cuts_the_groups():
    """Cut means draw the components inwards; who was cut does not follow them."""
    theta = np.array([[-2.5, 0.0], [2.5, 0.0]])[np.random.default_rng(0).choice(2, 2000)]
    y, groups = make_table(theta, 0.05, 0)
    model = fit(y, groups, DiscretePrior(2), epsilon=20.0, trust="local", clip_norm=2.0)
    assert error_ratio_to_local(model, theta) < 1.1
    outside = np.linalg.norm(model.local_means_, axis=1) > 2
    assert outside.mean() > 0.8
    assert is_local(model)[outside].all()


def test_far_clients_count_in_the_check_as_if_they_were_at_the_limit(monkeypatch):
    gains, gain = [], PrivateClustering.gain

    def spy(self, values, importance):
        gains.append(values)
        return gain(self, values, importance)

    monkeypatch.setattr(PrivateClustering, "gain", spy)
    theta = groups_of_three(1000, 0.05, 3.0, 0)
    y, groups = make_table(theta, 0.05, 0)
    fit(y, groups, DiscretePrior(2), epsilon=8.0, clip_norm=4.0)
    limit = stats.chi2(2).ppf(0.999)
    np.testing.assert_allclose(gains[0][theta[:, 1] > 0], 2 - limit / 2)
    assert np.mean(gains[0][theta[:, 1] == 0]) > 0.5


# Nothing exact ------------------------------------------------------------------------------------
def values_of(obj):
    """Fitted attributes and parameters as plain arrays, those of priors inside."""
    found = {}
    for name, value in sorted(vars(obj).items()):
        if hasattr(value, "get_params"):
            found |= {f"{name}.{part}": inner for part, inner in values_of(value).items()}
        elif not name.startswith("_") and name not in ("privacy_", "random_state"):
            found[name] = value
    return found


@pytest.mark.slow_but_first
@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize(
    ("prior", "replayed"),
    [
        (DiscretePrior(3), "recorded"),
        (GaussianMixturePrior(2, n_init=2), "recorded"),
        (DiscretePrior(3), "of no use"),
    ],
    ids=str,
)
def test_a_release_holds_what_was_noised_and_nothing_else(trust, prior, replayed, monkeypatch):
    """Two tables, the same noisy messages: bitwise the same release.

    Messages of a first fit, or ones of no use: clusters then stay where they start.
    """
    tables = [
        make_table(groups_of_three(200, share, 1.5, seed), 0.05, seed)
        for seed, share in ((0, 0.3), (1, 0.6))
    ]
    assert not np.array_equal(tables[0][0], tables[1][0])
    recorded, privatize = [], GaussianMechanism.privatize

    def record(self, messages, rng):
        made = privatize(self, messages, rng)
        if replayed == "of no use":
            made = np.random.default_rng(len(recorded)).uniform(0.0, 1.0, size=made.shape)
        recorded.append(made)
        return made

    params = {"epsilon": 8.0, "clip_norm": 2.0, "trust": trust}
    monkeypatch.setattr(GaussianMechanism, "privatize", record)
    first = values_of(fit(*tables[0], prior, **params).release())
    remaining = iter(list(recorded))

    def replay(self, messages, rng):
        privatize(self, messages, rng)  # so that what is drawn next is the same
        return next(remaining)

    monkeypatch.setattr(GaussianMechanism, "privatize", replay)
    second = values_of(fit(*tables[1], prior, **params).release())
    assert next(remaining, None) is None
    names = {"population_mean_", "population_mean_std_", "noise_variance_", "icc_"}
    assert names | {"prior_.weights"} <= set(first)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.parametrize("trust", ["central", pytest.param("local", marks=pytest.mark.slow)])
def test_stated_errors_of_the_population_mean_off_the_centre(trust):
    """Squared errors over the stated variances, over many fits; counts are noisy as well."""
    points = np.array([[3.8, 3.0], [2.2, 4.6]])
    squares = []
    for seed in range(20):  # a mean of 40 squares: a standard error of .22
        theta = points[np.random.default_rng(seed).choice(2, 1000)]
        y, groups = make_table(theta, 0.1, seed)
        params = {"epsilon": 1.0 if trust == "central" else 8.0, "clip_norm": 7.0}
        prior = DiscretePrior(2, n_init=2)
        model = fit(y, groups, prior, 0.4, trust=trust, random_state=seed, **params)
        z = (model.population_mean_ - points.mean(axis=0)) / model.population_mean_std_
        squares.append(np.mean(z**2))
    assert 0.7 < np.mean(squares) < 1.3


# Few clients, known mixtures ----------------------------------------------------------------------
@pytest.mark.parametrize(
    "params",
    [
        {"epsilon": 1e4, "trust": "central"},
        {"epsilon": 1e4, "trust": "local"},
        {"epsilon": 0.5, "trust": "local"},
        {"mechanism": "quantizer", "n_bits": 4},
    ],
)
@pytest.mark.parametrize(
    "prior", [DiscretePrior(2), GaussianMixturePrior(3), GaussianMixturePrior(2, covariances=0.1)]
)
def test_one_client_keeps_its_mean(prior, params):
    y = np.arange(12.0).reshape(6, 2) / 10
    model = fit(y, np.zeros(6), prior, 1.0, clip_norm=5.0, **params)
    np.testing.assert_array_equal(model.means_, model.local_means_)
    np.testing.assert_array_equal(model.shrinkage_, 0.0)
    np.testing.assert_allclose(model.stds_, math.sqrt(1 / 6))
    assert np.isfinite(model.population_mean_).all()
    assert not np.array_equal(model.population_mean_, model.local_means_[0])


@pytest.mark.parametrize("size", [1e200, 1e308, 1.7e308])
@pytest.mark.parametrize(
    "prior",
    [
        DiscretePrior(2, points=[[0.0, 0.0], [1.0, 1.0]], weights=[0.5, 0.5]),
        GaussianMixturePrior(
            2, means=[[0.0, 0.0], [1.0, 1.0]], covariances=1.0, weights=[0.5, 0.5]
        ),
    ],
)
def test_a_known_mixture_takes_values_of_any_size(prior, size):
    """A client that overflows keeps its own mean, whatever that is; nobody else notices."""
    y, groups = make_table(np.zeros((20, 2)), 0.1, 0)
    plain = fit(y, groups, prior, epsilon=1.0, clip_norm=1.0)
    y[groups == 0] = size
    y[groups == 1, 1] = [size, -size, size, -size]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = fit(y, groups, prior, epsilon=1.0, clip_norm=1.0)
    np.testing.assert_array_equal(model.means_[2:], plain.means_[2:])
    np.testing.assert_array_equal(model.means_[0], model.local_means_[0])
    assert not np.isnan(model.stds_).any()
