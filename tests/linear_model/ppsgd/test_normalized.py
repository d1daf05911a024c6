"""PPSGD with noise and no clip norm: messages of length one, and steps from public numbers."""

import math

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import expit
from sklearn.base import clone
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import PPSGDClassifier, PPSGDRegressor
from pfl_sklearn.linear_model._ppsgd._steps import LARGEST_NOISE, TOTAL_MOVE
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.privacy import ClippedSum, calibrate_rounds, gdp_epsilon
from tests.helpers.audits import effect_size
from tests.helpers.ppsgd import table
from tests.helpers.public_tasks import landmine, verbagg

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

FAR = 6  # standard deviations: noise without a seed fails a test in fewer than 1 of 1e8 runs
GLOBAL = {"alpha": math.inf, "fit_intercept": False}


@pytest.mark.parametrize(
    ("weighting", "sparse", "q"),
    [("samples", False, 1.0), ("clients", True, 1.0), ("samples", True, 0.5)],
)
def test_the_noise_on_w(weighting, sparse, q):
    """Rows of zeros send zero: w is T steps on noise of z / Q, in each of 3000 features."""
    sizes, T, d = np.array([2, 5, 30, 7, 1, 3]), 9, 3000
    X = np.zeros((sizes.sum(), d))
    model = PPSGDRegressor(
        learning_rate=0.05,
        noise_multiplier=15.0,
        client_fraction=q,
        weighting=weighting,
        n_rounds=T,
        **GLOBAL,
    ).fit(csr_array(X) if sparse else X, np.ones(len(X)), groups=np.repeat(np.arange(6), sizes))
    expected = math.sqrt(T) * 0.05 * 15.0 / (6 * q)
    assert model.population_coef_.std() == pytest.approx(expected, rel=FAR / math.sqrt(2 * d))
    assert abs(model.population_coef_.mean()) < FAR * expected / math.sqrt(d)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weighting", ["samples", "clients"])
def test_the_learning_rate_is_how_far_w_moves(weighting, sparse):
    """Clients who agree, whatever the size of their gradients, move it as far as it may."""
    sizes = np.array([2, 5, 30, 7])
    groups = np.repeat(np.arange(4), sizes)
    X = np.repeat([[1e-5], [1.0], [300.0], [1e9]], sizes, axis=0)
    model = PPSGDRegressor(
        learning_rate=0.02, noise_multiplier=1e-9, n_rounds=5, weighting=weighting, **GLOBAL
    )
    model.fit(csr_array(X) if sparse else X, np.full(len(X), 1e12), groups=groups)
    np.testing.assert_allclose(model.population_coef_, 5 * 0.02, rtol=1e-6)


@pytest.mark.parametrize(("weighting", "value"), [("samples", 1e-120), ("clients", 1e60)])
def test_a_client_moves_the_first_sum_by_one(weighting, value, monkeypatch):
    """Whatever its rows are: a message of no length has lost its size and not its direction."""
    seen, release = [], ClippedSum.release

    def spy(self, messages, *args):
        seen.append(release(ClippedSum(1.0, normalize=self.normalize), messages, *args).total)
        return release(self, messages, *args)

    monkeypatch.setattr(ClippedSum, "release", spy)
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=1, noise_multiplier=1.0, random_state=0, shuffle=False, weighting=weighting
    )
    clone(model).set_params(alpha=math.inf).fit(X, y, groups=groups)
    own = np.full((2, 3), value)
    more = np.vstack([X, own]), np.r_[y, value, value]
    clone(model).set_params(alpha=math.inf).fit(*more, groups=np.r_[groups, 99, 99])
    assert np.linalg.norm(seen[1] - seen[0]) == pytest.approx(1.0, abs=1e-12)


def test_what_the_report_says():
    X, y, groups = table()
    report = PPSGDRegressor(epsilon=2.0, delta=1e-3).fit(X, y, groups=groups).privacy_
    z = report.noise_std
    assert (report.sensitivity, report.relation, report.rounds) == (1.0, "zero_out", 100)
    assert report.epsilon == pytest.approx(gdp_epsilon(10 / z, 1e-3))
    assert dict(report.epsilon_under)["replace_one"] == pytest.approx(gdp_epsilon(20 / z, 1e-3))
    assert "sum of normalized messages" in report.mechanism


@pytest.mark.parametrize("sparse", [False, True])
def test_steps_follow_from_public_numbers(sparse):
    X, y, groups = table()
    model, rates = PPSGDRegressor(epsilon=1.0, n_rounds=40), []
    for rows, target in ((X, y), (1e6 * X, -y)):
        rows = csr_array(rows) if sparse else rows
        rates.append(clone(model).fit(rows, target, groups=groups).learning_rate_)
    z = model.fit(X, y, groups=groups).noise_multiplier_
    noise_of_all = rates[0] * z * math.sqrt(40) / 8
    assert rates[0] == rates[1] == model.learning_rate_ < TOTAL_MOVE / 40
    assert noise_of_all == pytest.approx(LARGEST_NOISE)
    hardly = PPSGDRegressor(noise_multiplier=1e-3, n_rounds=40).fit(X, y, groups=groups)
    assert hardly.learning_rate_ == TOTAL_MOVE / 40


@pytest.mark.parametrize(
    ("loss", "sparse", "n_rounds", "q", "step"),
    [
        ("log_loss", False, 1, 1.0, 0.5),
        ("squared_error", True, 40, 1.0, 0.05),
        ("log_loss", True, 80, 0.5, 0.05),
    ],
)
def test_local_steps_add_up_to_what_a_client_may_learn(loss, sparse, n_rounds, q, step):
    """And none is longer than the inverse curvature of the batch, here of rows of length sqrt 2."""
    X, y = np.array([[1.0, -1.0], [-1.0, 1.0]]), np.array([1, 0])
    model = PPSGDClassifier(
        loss=loss,
        noise_multiplier=1e-9,
        n_rounds=n_rounds,
        client_fraction=q,
        learning_rate=1e-12,
        fit_intercept=False,
        random_state=0,
    ).fit(csr_array(X) if sparse else X, y, groups=[0, 0])
    curvature, own = 0.5 if loss == "log_loss" else 1.0, 0.0
    for _ in range(int(model.history_["n_clients"].sum())):
        slope = expit(-2 * own) if loss == "log_loss" else 0.5 - 2 * own
        own += step / curvature * slope
    np.testing.assert_allclose(model.coef_[0], [own, -own], rtol=1e-8)


@pytest.mark.parametrize(("weighting", "sparse"), [("samples", True), ("clients", False)])
def test_long_rows_make_no_local_model_diverge(weighting, sparse):
    """Nor one bit of another client's, whose steps follow from its own rows."""
    X, y, groups = table()
    rows, own = X.copy(), groups == 4
    rows[own] *= 1e3
    model = PPSGDRegressor(
        noise_multiplier=1e-9, learning_rate=1e-12, weighting=weighting, random_state=0
    )
    plain, steep = (
        clone(model).fit(csr_array(one) if sparse else one, y, groups=groups) for one in (X, rows)
    )
    error = np.mean((steep.predict(rows, groups=groups) - y)[own] ** 2)
    assert error < np.mean(y[own] ** 2)
    np.testing.assert_allclose(
        np.delete(steep.coef_, 4, axis=0), np.delete(plain.coef_, 4, axis=0), atol=1e-9
    )


@pytest.mark.parametrize(
    ("ratio", "w", "own"), [(15.0, 0.5, 1.0), (30.0, 1.0, 1.0), (60.0, 1.0, 0.5)]
)
def test_alpha_shortens_the_steps_of_one_model(ratio, w, own):
    X, y, groups = table()
    model, fits = PPSGDRegressor(noise_multiplier=1e-9, n_rounds=1, learning_rate=1e-3), []
    model.set_params(fit_intercept=False, random_state=0)
    for alpha in ("auto", ratio / 8):  # rows so short that they bound no local step
        fits.append(clone(model).set_params(alpha=alpha).fit(0.1 * X, y, groups=groups))
    default, model = fits
    np.testing.assert_allclose(
        model.population_coef_, w * default.population_coef_, rtol=1e-6, atol=1e-10
    )
    np.testing.assert_allclose(model.local_coef_, own * default.local_coef_, rtol=1e-12)


def test_rounds_go_on_with_or_without_a_clip_norm_but_not_from_those_that_read_scales():
    X, y, groups = table()
    model = PPSGDRegressor(noise_multiplier=1.5, n_rounds=5).fit(X, y, groups=groups)
    rate = model.learning_rate_
    model.partial_fit(X, y, groups=groups)
    assert model.learning_rate_ == rate
    model.set_params(warm_start=True, n_rounds=10).fit(X, y, groups=groups)  # nothing is left to do
    assert model.learning_rate_ == rate
    model.set_params(warm_start=False, clip_norm=1.0, learning_rate=0.1)
    assert math.isfinite(model.partial_fit(X, y, groups=groups).privacy_.epsilon)
    plain = PPSGDRegressor(n_rounds=5).fit(X, y, groups=groups)
    with pytest.raises(ValueError, match=r"learning_rate='auto'.*fit anew"):
        plain.set_params(noise_multiplier=1.5).partial_fit(X, y, groups=groups)


def test_a_released_model_is_personalized_with_the_steps_of_the_fit():
    X, y, groups = table()
    model = PPSGDRegressor(epsilon=4.0, delta=1e-3, random_state=0).fit(X, y, groups=groups)
    released = model.release()
    own = released.personalize(X, y, groups=groups)
    assert own.learning_rate_ == model.learning_rate_
    error = np.mean((own.predict(X, groups=groups) - y) ** 2)
    assert error < 0.5 * np.mean((model.release().predict(X) - y) ** 2)


def simulated(m=200, n=20):
    """Training and new rows of clients of a logistic model whose coefficients vary."""
    rng = np.random.default_rng(0)
    coef = np.array([0.8, -0.5, 0.3]) + 0.3 * rng.normal(size=(m, 3))
    level = -0.5 + rng.normal(size=m)
    groups = np.repeat(np.arange(m), n)
    X = rng.normal(size=(2, m * n, 3))
    p = expit(np.einsum("rnd,nd->rn", X, coef[groups]) + level[groups])
    return X, (rng.random(p.shape) < p).astype(int), groups


def test_defaults_come_close_to_the_fit_without_noise():
    """Which stops at the lowest loss of held-out rows; a pooled model is far behind."""
    X, y, groups = simulated()

    def loss_of(model):
        model.fit(X[0], y[0], groups=groups)
        return log_loss(y[1], model.predict_proba(X[1], groups=groups)[:, 1])

    private = loss_of(PPSGDClassifier(epsilon=2.0, random_state=0))
    plain = loss_of(PPSGDClassifier(random_state=0))
    pooled = loss_of(PPSGDClassifier(alpha=math.inf, random_state=0))
    assert private < plain + 0.01 < pooled - 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "epsilon", "most"), [(verbagg, 1.0, 0.5075), (landmine, 2.0, 0.25)]
)
def test_defaults_on_public_tables(task, epsilon, most, data_home):
    """Epsilon under replace one. At most .02 above a tuned clip norm, learning rate and rounds.

    One row in sixteen of landmine is a mine: where w moves half as far, the loss is .284.
    """
    X, y, groups = task(data_home)[:3]
    X, losses = StandardScaler().fit_transform(X), []
    z = calibrate_rounds(epsilon, 1e-5, n_rounds=100, rate=1.0, relation="replace_one")
    for train, test in ClientKFold(5, random_state=0).split(X, groups=groups):
        model = PPSGDClassifier(noise_multiplier=z, random_state=0)
        model.fit(X[train], y[train], groups=groups[train])
        losses.append(log_loss(y[test], model.predict_proba(X[test], groups=groups[test])[:, 1]))
    assert np.mean(losses) < most


@pytest.mark.slow
def test_an_audit_finds_the_stated_mu():
    """With and without a client whose message has length one: mu = sqrt(rounds) / z = 2."""

    def score(canary, seed):
        X = np.zeros((7, 1))
        X[-1] = canary
        model = PPSGDRegressor(
            n_rounds=4, learning_rate=1.0, noise_multiplier=1.0, random_state=seed, **GLOBAL
        ).fit(X, np.full(7, 1e9), groups=np.arange(7))
        return model.population_coef_[0] * 7

    seeds = np.random.SeedSequence(0).generate_state(120).tolist()
    scores = [[score(canary, seed) for seed in seeds[canary::2]] for canary in (1, 0)]
    mu, error = effect_size(*scores)
    assert abs(mu - 2.0) < 4 * error
