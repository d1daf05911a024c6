"""Label priors of private nets that are estimated from one noisy sum over the clients."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import pld_privacy_accountant
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.base import clone

from pfl_sklearn._rounds.privacy import epsilon_by_round
from pfl_sklearn.neural_network import MLP, AdaPeDClassifier, FedAvgClassifier, LocalNetClassifier
from pfl_sklearn.priors import DirichletPrior, SparseDirichletPrior
from pfl_sklearn.privacy import FrequencyMoments, PrivacyLedger
from tests.helpers.interruption import interrupt
from tests.helpers.nets import recipe

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

DELTA, N_ROUNDS, N_CLIENTS = 1e-5, 4, 300
SHORT = {"n_rounds": N_ROUNDS, "local_steps": 1, "random_state": 0}
LABELS = {"label_prior": DirichletPrior(), "clip_norm": 0.3, **SHORT}
MEAN = np.array([0.5, 0.3, 0.2])


def rows(seed=0, concentration=2.0):
    """Three to nine rows of each client, whose labels come from a Dirichlet prior."""
    rng = np.random.default_rng(seed)
    sizes = np.resize([3, 9, 5], N_CLIENTS)
    theta = rng.dirichlet(concentration * MEAN, N_CLIENTS)
    groups = np.repeat(np.arange(N_CLIENTS), sizes)
    y = np.array([rng.choice(3, p=theta[client]) for client in groups])
    return rng.normal(size=(len(y), 2)), y, groups


X, Y, GROUPS = rows()
COUNTS = np.zeros((N_CLIENTS, 3))
np.add.at(COUNTS, (GROUPS, Y), 1)
SIZES = COUNTS.sum(axis=1)


def model_of(cls=FedAvgClassifier, estimator=None, **params):
    return cls(estimator or recipe(MLP, module__hidden=()), **{**LABELS, **params})


def fit(cls=FedAvgClassifier, **params):
    return model_of(cls, **params).fit(X, Y, groups=GROUPS)


def profile_epsilon(mu):
    """Epsilon of Gaussian DP at DELTA, from the closed form of its profile."""

    def excess(epsilon):
        low = epsilon / mu - mu / 2
        return norm.sf(low) - np.exp(epsilon + norm.logsf(low + mu)) - DELTA

    return brentq(excess, 0, 100)


def stds(model):
    """Noise on the sum of frequencies, and the noise multiplier of the rounds."""
    return model._label_sums["noise_std"], model.noise_multiplier_


# What it costs ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("epsilon", "share", "sampling"),
    [(1.0, None, "poisson"), (8.0, 0.02, "fixed"), (1.0, 0.7, "fixed"), (2.0, 1e-300, "poisson")],
)
def test_epsilon_is_that_of_the_sum_and_the_rounds(epsilon, share, sampling):
    """By hand, under both relations: every sensitivity of the sum is sqrt(2)."""
    model = fit(epsilon=epsilon, label_prior_share=share, sampling=sampling)
    std, z = stds(model)
    report, native = model.privacy_, "zero_out" if sampling == "poisson" else "replace_one"
    assert (report.relation, report.trust) == (native, "central")
    figures = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    for relation, moved in (("zero_out", 1.0), ("replace_one", 2.0)):
        mu = math.hypot(math.sqrt(2) / std, moved * math.sqrt(N_ROUNDS) / z)
        assert figures[relation] == pytest.approx(profile_epsilon(mu), rel=1e-6)
        if relation == native:
            taken = (math.sqrt(2) / std / mu) ** 2
            assert taken == pytest.approx(0.05 if share is None else share, rel=1e-6)
    assert figures[native] == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_epsilon_of_sampled_rounds_is_that_of_dp_accounting(relation):
    model = fit(epsilon=2.0, client_fraction=0.3)
    std, z = stds(model)
    relations = privacy_accountant.NeighboringRelation
    replaced = relation == "replace_one"
    accountant = pld_privacy_accountant.PLDAccountant(
        relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE,
        value_discretization_interval=1e-3,
    )
    # The accountant doubles the sensitivity under replacement, which the sum's does not.
    of_sum = dp_event.GaussianDpEvent(std / math.sqrt(2) * (2 if replaced else 1))
    round_ = dp_event.PoissonSampledDpEvent(0.3, dp_event.GaussianDpEvent(z))
    accountant.compose(of_sum).compose(round_, N_ROUNDS)
    report = model.privacy_
    figures = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    assert figures[relation] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    assert 1.99 < report.epsilon <= 2.0
    assert math.sqrt(2) / std == pytest.approx(math.sqrt(0.05) * solve_mu(2.0), rel=1e-6)


def solve_mu(epsilon):
    return brentq(lambda mu: profile_epsilon(mu) - epsilon, 1e-2, 10, xtol=1e-12)


@pytest.mark.parametrize("share", [None, 0.4])
def test_a_noise_multiplier_is_that_of_the_rounds(share):
    model = fit(noise_multiplier=3.0, label_prior_share=share)
    std, z = stds(model)
    assert z == 3.0
    taken, rest = 2 / std**2, N_ROUNDS / z**2
    assert taken / (taken + rest) == pytest.approx(0.05 if share is None else share)
    assert model.privacy_.epsilon == pytest.approx(profile_epsilon(math.sqrt(taken + rest)))


@pytest.mark.parametrize("noise", [{"epsilon": 2.0}, {"noise_multiplier": 1.5}])
def test_a_method_that_sends_nothing_else_spends_all_of_it(noise):
    model = fit(LocalNetClassifier, **noise)
    mu = 1 / noise["noise_multiplier"] if "noise_multiplier" in noise else solve_mu(2.0)
    report = model.privacy_
    assert report.noise_std == pytest.approx(math.sqrt(2) / mu)
    assert report.sensitivity == pytest.approx(math.sqrt(2))
    assert report.epsilon == pytest.approx(profile_epsilon(mu))
    assert report.epsilon_under == (("replace_one", report.epsilon),)
    assert report.rounds == 0


@pytest.mark.parametrize("cls", [FedAvgClassifier, LocalNetClassifier])
def test_the_report_and_the_ledger_name_it(cls, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl", relation="zero_out")
    model = fit(cls, epsilon=2.0, ledger=ledger)
    (entry,) = ledger.entries
    assert entry["events"][0] == {
        "kind": "gaussian",
        "mu_add_remove": None,
        "mu_replace_one": pytest.approx(math.sqrt(2) / model._label_sums["noise_std"]),
        "n_releases": 1,
        "mu_zero_out": pytest.approx(math.sqrt(2) / model._label_sums["noise_std"]),
    }
    assert ledger.total() == pytest.approx(2.0, rel=1e-6) == model.privacy_.epsilon
    assert "label frequencies and their squared length" in model.privacy_.mechanism
    assert "label_prior_" in model.privacy_.released
    released = model.release()
    np.testing.assert_array_equal(released.label_prior_.mean, model.label_prior_.mean)
    assert not any(hasattr(released, name) for name in ("_label_sums", "_label_counts"))


def test_epsilon_by_round_begins_with_the_sum():
    model = fit(epsilon=2.0)
    std, z = stds(model)
    found = epsilon_by_round(model._progress.spent, DELTA, "zero_out", [1, N_ROUNDS])
    assert found[0] == pytest.approx(profile_epsilon(math.hypot(math.sqrt(2) / std, 1 / z)))
    assert found[1] == pytest.approx(2.0)


# Once per training --------------------------------------------------------------------------------
@pytest.mark.parametrize("more", ["warm_start", "partial_fit"])
def test_further_rounds_keep_it(more, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl", relation="zero_out")
    model = fit(noise_multiplier=3.0, ledger=ledger, warm_start=True)
    prior, (std, _) = model.label_prior_, stds(model)
    if more == "warm_start":
        model.set_params(n_rounds=2 * N_ROUNDS).fit(X, Y, groups=GROUPS)
    else:
        some = GROUPS < 20
        model.partial_fit(X[some], 2 - Y[some], groups=GROUPS[some])
    np.testing.assert_array_equal(model.label_prior_.mean, prior.mean)
    assert model.label_prior_.concentration == prior.concentration
    mu = math.hypot(math.sqrt(2) / std, math.sqrt(2 * N_ROUNDS) / 3.0)
    assert model.privacy_.epsilon == pytest.approx(profile_epsilon(mu))
    kinds = [[event["kind"] for event in entry["events"]] for entry in ledger.entries]
    assert kinds == [["gaussian", "sampled_gaussian"], ["sampled_gaussian"]]
    assert ledger.total() == pytest.approx(model.privacy_.epsilon)


def test_another_prior_is_fitted_to_the_same_sum():
    model = fit(noise_multiplier=3.0, warm_start=True)
    spent, sums = model.privacy_.epsilon, model._label_sums
    for prior in (None, DirichletPrior(MEAN), DirichletPrior(concentration=3.0)):
        model.set_params(label_prior=prior).fit(X, Y, groups=GROUPS)
        assert model.privacy_.epsilon == spent
    assert model.label_prior_.concentration == 3.0
    expected = DirichletPrior().fit_sums(**sums)
    np.testing.assert_array_equal(model.label_prior_.mean, expected.mean)


def test_a_fit_that_begins_to_use_it_pays_then():
    model = fit(epsilon=2.0, label_prior=None, warm_start=True)
    z = model.noise_multiplier_
    model.set_params(label_prior=DirichletPrior()).fit(X, Y, groups=GROUPS)
    std, after = stds(model)
    assert after == z
    mu = math.hypot(math.sqrt(2) / std, math.sqrt(N_ROUNDS) / z)
    assert model.privacy_.epsilon == pytest.approx(profile_epsilon(mu))
    assert math.sqrt(2) / std == pytest.approx(math.sqrt(0.05) * solve_mu(2.0))
    found = epsilon_by_round(model._progress.spent, DELTA, "zero_out", [1, N_ROUNDS])
    assert found[0] < 2 < found[1] == model.privacy_.epsilon


def test_a_resumed_fit_has_the_same_sum(tmp_path):
    """Without a seed, too: the noise comes from the entropy in the checkpoint."""
    ledger, path = PrivacyLedger(tmp_path / "ledger.jsonl"), tmp_path / "run.npz"
    model = model_of(noise_multiplier=3.0, ledger=ledger, random_state=None)
    model.set_params(checkpoint=path, checkpoint_every=1)
    drawn, release = [], FrequencyMoments.release
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FrequencyMoments, "release", lambda *given: drawn.append(release(*given)) or drawn[-1]
        )
        interrupt(model, (X, Y, GROUPS), 2)
        clone(model).fit(X, Y, groups=GROUPS)
    np.testing.assert_array_equal(drawn[0]["frequencies"], drawn[1]["frequencies"])
    assert len(ledger.entries) == 1


def test_sums_of_one_seed_have_noise_of_their_own_in_later_rounds():
    """As the ledger takes it, which tells seeds apart by the round that a call starts at."""
    first = fit(noise_multiplier=3.0)
    later = fit(noise_multiplier=3.0, label_prior=None, warm_start=True)
    later.set_params(label_prior=DirichletPrior(), n_rounds=N_ROUNDS).fit(X, Y, groups=GROUPS)
    assert stds(first) == stds(later)
    assert (first._label_sums["frequencies"] != later._label_sums["frequencies"]).all()


# What it is worth ---------------------------------------------------------------------------------
def test_the_prior_is_that_of_the_sum():
    model = fit(epsilon=4.0, label_prior_share=0.5)
    sums = model._label_sums
    np.testing.assert_array_equal(sums["n_rows"], SIZES)
    expected = DirichletPrior().fit_sums(**sums)
    np.testing.assert_array_equal(model.label_prior_.mean, expected.mean)
    assert model.label_prior_.concentration == expected.concentration
    offsets = expected.log_frequencies(COUNTS) - np.log(expected.mean)
    np.testing.assert_allclose(model._offsets, offsets)


@pytest.mark.parametrize("cls", [FedAvgClassifier, LocalNetClassifier])
def test_with_little_noise_it_is_the_prior_of_the_exact_sums(cls):
    """Within 5 standard deviations, those of the concentration by the delta method.

    1 / (1 + alpha) is (H - |pi|^2) / (1 - |pi|^2), and noise moves H = (A - c) / (1 - c) by that of
    A over 1 - c, and |pi|^2 by twice pi times that of the mean.
    """
    model = fit(cls, epsilon=200.0)
    exact = FrequencyMoments().messages(COUNTS).sum(axis=0)
    expected = DirichletPrior().fit_sums(exact[:-1], exact[-1], SIZES)
    std, mean = model._label_sums["noise_std"] / N_CLIENTS, expected.mean
    np.testing.assert_allclose(model.label_prior_.mean, mean, rtol=0, atol=5 * std)
    found, true = (1 / (1 + prior.concentration) for prior in (model.label_prior_, expected))
    moved = math.hypot(1 / np.mean(1 - 1 / SIZES), 2 * np.linalg.norm(mean))
    assert abs(found - true) < 5 * std * moved / (1 - mean @ mean) < 0.1 * true


# What is refused, and what is said ----------------------------------------------------------------


KNOWN = DirichletPrior(MEAN, 2.0)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"label_prior": SparseDirichletPrior()}, r"noise does not cover.*DirichletPrior\(\)"),
        ({"label_prior": SparseDirichletPrior(MEAN)}, r"noise does not cover.*DirichletPrior\(\)"),
        *(
            (
                {"label_prior": prior, "label_prior_share": 0.2},
                r"got label_prior_share=0\.2 with label_prior=",
            )
            for prior in (None, "client", KNOWN)
        ),
        ({"label_prior_share": 0.0}, "'label_prior_share' parameter"),
        ({"label_prior_share": math.nan}, "'label_prior_share' parameter"),
    ],
    ids=str,
)
def test_what_is_refused(params, match):
    with pytest.raises(ValueError, match=match):
        fit(epsilon=1.0, **params)


def test_a_server_that_is_not_trusted_gets_no_frequencies():
    per_step = {"noise": "per_step", "noise_multiplier": 10.0}
    assert fit(AdaPeDClassifier, label_prior=KNOWN, **per_step).privacy_.trust == "local"
    with pytest.raises(ValueError, match=r"label_prior=DirichletPrior\(\).*noise='per_round'"):
        fit(AdaPeDClassifier, **per_step)


def test_without_noise_a_share_has_no_effect():
    """So that a search over epsilon may include inf."""
    free = fit(label_prior_share=0.2).label_prior_
    expected = DirichletPrior().fit_counts(COUNTS)
    np.testing.assert_array_equal(free.mean, expected.mean)


@pytest.mark.parametrize(
    ("prior", "given"),
    [
        (None, False),
        ("client", False),
        (DirichletPrior(), False),
        (DirichletPrior(MEAN), True),
        (DirichletPrior(MEAN, 2.0), True),
        (SparseDirichletPrior(MEAN, 2.0, MEAN, 1.0), True),
    ],
    ids=str,
)
def test_the_report_says_what_a_given_prior_must_not_come_from(prior, given):
    assumptions = " ".join(fit(label_prior=prior, epsilon=1.0).privacy_.assumptions)
    assert ("label_prior gives is the user's: it was not computed" in assumptions) == given
