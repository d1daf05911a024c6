"""DP-AdaPeD: what noise on sums and noise in steps do, what they cost, and what is refused."""

import math
from itertools import islice

import numpy as np
import pytest
import skorch
import torch
from scipy.optimize import brentq
from scipy.stats import binom

from pfl_sklearn._rounds.loop import Sampling, round_generators
from pfl_sklearn.neural_network import AdaPeDClassifier
from pfl_sklearn.privacy import PrivacyLedger, gdp_delta, gdp_epsilon
from pfl_sklearn.privacy._mechanisms import _clipped_sum
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps
from tests.helpers.fitted_rounds import initial_net, state_of

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

STEPS, RATE, PSI_RATE = 3, 0.2, 0.05


def net(hidden=(), **params):
    from pfl_sklearn.neural_network import MLP

    return skorch.NeuralNetClassifier(
        MLP, module__hidden=hidden, criterion=torch.nn.CrossEntropyLoss, lr=RATE, batch_size=4
    ).set_params(**params)


def adaped(recipe=None, **params):
    shared = {"n_rounds": 2, "local_steps": STEPS, "clip_norm": 0.3, "delta": 1e-3}
    more = {"random_state": 0, "psi_learning_rate": PSI_RATE, "global_loss": 0.0}
    return AdaPeDClassifier(recipe or net(), **{**shared, **more, **params})


def per_step(recipe=None, **params):
    return adaped(recipe, noise="per_step", **{"noise_multiplier": 1.5, **params})


def table(n_clients=5, seed=0):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_clients), 8)
    X = rng.normal(size=(len(groups), 2))
    return X, (X[:, 0] + rng.normal(size=len(groups)) > groups - 2).astype(int), groups


@pytest.fixture
def sent(monkeypatch):
    """Messages (k, p + 1) of every round that go to a release of either kind."""
    found = []
    for kind in (NoisySteps, ClippedSum):
        original = kind.release

        def release(self, messages, *rest, original=original):
            found.append(np.array(messages, dtype=float))
            return original(self, messages, *rest)

        monkeypatch.setattr(kind, "release", release)
    return found


# The printed algorithm ----------------------------------------------------------------------------
class Reference:
    """Listing 2 for one client and a linear net, in double precision: loops, and torch's slopes."""

    def __init__(self, start, psi, clip_norms, noise_std, seed):
        self.personal, self.shared = (torch.tensor(start, dtype=torch.float64) for _ in range(2))
        self.psi, self.clip_norms, self.noise_std = psi, clip_norms, noise_std
        self.rng = np.random.default_rng((int(seed), 1))

    def run(self, batches):
        for X, y in batches:
            X, y = torch.tensor(X, dtype=torch.float64), torch.tensor(y)
            theta, mu = self.personal.requires_grad_(), self.shared.requires_grad_()
            loss = torch.nn.functional.cross_entropy(logits(theta, X), y)
            (slope,) = torch.autograd.grad(loss + kl(mu.detach(), theta, X) / 2 / self.psi, theta)
            self.personal = (theta - RATE * slope).detach()
            (h,) = torch.autograd.grad(kl(mu, self.personal, X) / 2 / self.psi, mu)
            self.shared = mu.detach() - RATE * torch.tensor(self.noisy(h.numpy(), 0))
            gap = float(kl(self.shared, self.personal, X))
            k = 1 / (2 * self.psi) - gap / (2 * self.psi**2)
            self.psi = max(self.psi - PSI_RATE * float(self.noisy(np.array([k]), 1)[0]), 0.5)

    def noisy(self, slope, part):
        clipped = slope / max(np.linalg.norm(slope) / self.clip_norms[part], 1)
        return clipped + self.noise_std[part] * self.rng.standard_normal(slope.shape)


def logits(parameters, X):
    return X @ parameters[:4].reshape(2, 2).T + parameters[4:]


def kl(first, second, X):
    one, other = (torch.log_softmax(logits(each, X), dim=1) for each in (first, second))
    return (one.exp() * (one - other)).sum(dim=1).mean()


def members_of_rounds(n_rounds, seed, rate, n_clients=5):
    """Clients that take part in each round."""
    drawn = (Sampling(rate).draw(rng, n_clients) for rng in round_generators((seed, 1)))
    return [members.tolist() for members in islice(drawn, n_rounds)]


@pytest.mark.parametrize("stacked", [True, False])
def test_a_round_is_that_of_the_paper(stacked, sent, monkeypatch):
    """Clients' messages after one round, with the noise that their seeds give."""
    batches, original = [], AdaPeDClassifier._method

    def spy(self, setup):
        method = original(self, setup)

        def update(server, t, batch, clients):
            batches.append(batch)
            return method.client_update(server, t, batch, clients)

        return method._replace(client_update=update)

    monkeypatch.setattr(AdaPeDClassifier, "_method", spy)
    lone = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    given = {"criterion": torch.nn.CrossEntropyLoss, "lr": RATE, "batch_size": 4}
    recipe = net() if stacked else skorch.NeuralNetClassifier(lone, **given)
    model = per_step(recipe, n_rounds=1, psi_clip_norm=0.01, psi_init=0.503, psi_min=0.5)
    X, y, groups = table()
    model.fit(X, y, groups=groups)
    engine = model._engines.client
    assert engine.stacked == stacked
    found = []
    for batch in batches:
        for rows, labels, seed in zip(batch.X, batch.y, batch.seeds, strict=True):
            clip_norms, noise_std = (0.3, 0.01), (0.45, 0.015)
            client = Reference(engine.start(), 0.503, clip_norms, noise_std, seed)
            client.run(zip(rows, labels, strict=True))
            change = client.shared.numpy() - engine.start()
            found.append([*change, client.psi - 0.503])
    np.testing.assert_allclose(sent[0], found, rtol=1e-4, atol=2e-6)
    assert np.isclose(np.array(found)[:, -1], 0.5 - 0.503).any()  # some are at the floor
    moved = model._population - engine.start()
    np.testing.assert_allclose(moved, np.mean(sent[0], axis=0)[:-1], rtol=1e-6)


# What a client may move ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "decay"), [(1.0, 0.0), (30.0, 0.5), (30.0, 9.9), (1e20, 0.0), (1e38, 9.9)]
)
def test_other_rows_move_a_message_by_the_bounds_of_all_steps(size, decay, sent):
    """With the noise of all steps as it was: what the certificate rests on."""
    X, y, groups = table()
    model = per_step(
        net(optimizer__weight_decay=decay),
        n_rounds=1,
        psi_clip_norm=0.02,
        psi_init=0.6,
        global_loss=1.0,
    )
    for sign in (1, -1):
        X[groups == 2], y[groups == 2] = sign * size, np.arange(8) % 2 if sign > 0 else 1
        model.fit(X, y, groups=groups)
    change = sent[1] - sent[0]
    assert not np.delete(change, 2, axis=0).any()
    assert size > 30 or change[2, :-1].any()  # where the net overflows, gradients count as 0
    assert np.linalg.norm(change[2, :-1]) <= 2 * STEPS * 0.3 * RATE * (1 + 1e-5)
    assert abs(change[2, -1]) <= 2 * STEPS * 0.02 * PSI_RATE * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "noise"), [(30.0, "per_round"), (1.0, "per_step")])
def test_missed_rounds_widen_no_bound(size, noise, sent):
    """The first message of a client that trained its own net in two rounds without it."""
    X, y, groups = table()
    rounds = (members_of_rounds(3, seed, 0.5) for seed in range(100))
    pattern = [False, False, True]
    seed, who = next(
        (seed, members)
        for seed, members in enumerate(rounds)
        if [2 in some for some in members] == pattern
    )
    given = {"n_rounds": 3, "client_fraction": 0.5, "noise_multiplier": 12.0, "random_state": seed}
    given |= {"train_unsampled": True, "noise": noise, "psi_clip_norm": 0.02, "psi_init": 0.6}
    given["psi_min"] = 0.5
    found = []
    for sign in (1, -1):
        X[groups == 2], y[groups == 2] = sign * size, np.arange(8) % 2 if sign > 0 else 1
        found.append(state_of(adaped(**given).fit(X, y, groups=groups)))
    change, at = sent[5] - sent[2], who[2].index(2)
    assert not np.delete(change, at, axis=0).any()
    assert change[at, :-1].any()
    first, second = found
    assert (first.clients["personal"][2] != second.clients["personal"][2]).any()
    if noise == "per_step":
        assert np.linalg.norm(change[at, :-1]) <= 2 * STEPS * 0.3 * RATE * (1 + 1e-5)
        assert abs(change[at, -1]) <= 2 * STEPS * 0.02 * PSI_RATE * (1 + 1e-5)
    else:
        both = first.server["global"] - second.server["global"]
        psi = (first.server["psi"] - second.server["psi"]) / 0.02 * 0.3
        assert 0 < np.linalg.norm([*both, psi]) <= 2 * 0.3 / 2.5 * (1 + 1e-5)


@pytest.mark.parametrize("psi_clip_norm", [1e-3, 1.0])
def test_noise_on_sums_treats_both_parts_of_a_message_alike(psi_clip_norm, sent, monkeypatch):
    """Clipped together in units of their bounds, without a count of clients; every draw is 1."""
    monkeypatch.setattr(_clipped_sum, "gaussian_on_grid", lambda exact, std, rng: exact + std)
    X, y, groups = table()
    X[groups == 2] *= 30
    model = adaped(n_rounds=1, noise_multiplier=2.0, psi_clip_norm=psi_clip_norm, psi_init=1.0)
    model.fit(X, y, groups=groups)
    scales = np.array([1.0] * 6 + [psi_clip_norm / 0.3])
    assert state_of(model).server.keys() == {"global", "psi"}
    lengths = np.linalg.norm(sent[0], axis=1)  # in units of clip_norm
    assert (lengths > 0.3).any()
    kept = np.minimum(1, 0.3 / lengths) @ sent[0]
    moved = [*(model._population - initial_net(model)), model.history_["psi"][0] - 1.0]
    np.testing.assert_allclose(moved, (kept + 2.0 * 0.3) * scales / 5, rtol=1e-5, atol=1e-8)


# What it costs ------------------------------------------------------------------------------------
def test_epsilon_is_that_of_the_last_steps():
    X, y, groups = table()
    model = per_step(n_rounds=4).fit(X, y, groups=groups)
    report, mu = model.privacy_, math.sqrt(4) * 2 * STEPS * math.sqrt(2) / 1.5
    assert report.epsilon == pytest.approx(gdp_epsilon(mu, 1e-3))
    assert (report.relation, report.trust) == ("replace_one", "local")
    assert dict(report.epsilon_under) == {"zero_out": pytest.approx(gdp_epsilon(mu / 2, 1e-3))}
    assert (report.noise_std, report.epsilon_outsiders) == (pytest.approx(0.45), None)
    assert model.noise_multiplier_ == pytest.approx(1.5)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_who_takes_part_is_no_secret(sampling):
    """Absent clients add no noise, so sampling lowers delta alone: a mixture over rounds."""
    X, y, groups = table()
    model = per_step(n_rounds=6, client_fraction=0.4, sampling=sampling, noise_multiplier=9.0)
    found = model.fit(X, y, groups=groups).privacy_.epsilon
    rounds, mu = np.arange(7), 2 * STEPS * math.sqrt(2) / 9.0

    def excess(epsilon):
        deltas = [gdp_delta(mu * math.sqrt(k), epsilon) if k else 0.0 for k in rounds]
        return binom.pmf(rounds, 6, 0.4) @ deltas - 1e-3

    assert found == pytest.approx(brentq(excess, 0.1, 50), rel=1e-3)


@pytest.mark.parametrize(("rate", "epsilon"), [(1.0, 2.0), (0.4, 0.5)])
def test_epsilon_gives_the_noise(rate, epsilon, tmp_path):
    X, y, groups = table()
    ledger = PrivacyLedger(tmp_path / "ledger", delta=1e-3)
    model = per_step(noise_multiplier=None, epsilon=epsilon, client_fraction=rate, ledger=ledger)
    report = model.set_params(warm_start=True).fit(X, y, groups=groups).privacy_
    assert report.epsilon == pytest.approx(epsilon, rel=5e-3)
    assert report.epsilon <= epsilon
    assert ledger.total() == pytest.approx(report.epsilon, rel=1e-3)
    z = model.noise_multiplier_
    model.set_params(n_rounds=4).fit(X, y, groups=groups)  # goes on with the noise that it had
    assert model.noise_multiplier_ == pytest.approx(z)
    assert model.privacy_.epsilon > epsilon


def test_a_client_that_takes_no_part_adds_no_noise():
    """Whoever takes part can be seen, so that sampling hides nobody."""
    X, y, _ = table()
    model = per_step(n_rounds=6, client_fraction=0.5, psi_init=20.0, noise_multiplier=30.0)
    model.fit(X, y, groups=np.zeros(len(y), dtype=int))
    history = model.history_
    moved = np.diff(history["psi"], prepend=20.0) != 0
    assert set(moved) == {True, False}
    np.testing.assert_array_equal(moved, history["n_clients"] == 1)


# What is refused ----------------------------------------------------------------------------------
class Counting(torch.nn.Module):
    """A buffer that training moves, and no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, X):
        self.seen = self.seen + 1
        return self.linear(X)


@pytest.mark.parametrize(
    ("recipe", "params", "error"),
    [
        ({"optimizer__momentum": 0.9}, {}, r"momentum=0\.9.*noise='per_round'"),
        ({"optimizer__weight_decay": 11.0}, {}, r"lr times weight_decay of the net is 2\.2"),
        ({"module": Counting}, {}, r"training moves seen .*without noise"),
        ({}, {"clip_quantile": 0.5}, r"clip_quantile=0\.5 with noise='per_step'"),
        ({}, {"clip_norm": None}, r"clip_norm=None with noise"),
        ({}, {"noise": "sometimes"}, r"'noise' parameter"),
        ({}, {"psi_clip_norm": 1e-101}, r"\[1e-100, 1e100\]; got 1e-101"),
    ],
    ids=str,
)
def test_what_is_refused(recipe, params, error):
    X, y, groups = table()
    given = net()
    if "module" in recipe:
        given = skorch.NeuralNetClassifier(Counting, criterion=torch.nn.CrossEntropyLoss)
    elif recipe:
        given.set_params(**recipe)
    model = per_step(given).set_params(**params)
    with pytest.raises(ValueError, match=error):
        model.fit(X, y, groups=groups)
    assert not hasattr(model, "privacy_")


def test_without_noise_gradients_are_clipped_or_nothing_is_done():
    X, y, groups = table()
    plain = adaped(clip_norm=None).fit(X, y, groups=groups)
    same = adaped(clip_norm=None, noise="per_step").fit(X, y, groups=groups)
    np.testing.assert_array_equal(same._population, plain._population)
    clipped = adaped(noise="per_step", clip_norm=1e-6).fit(X, y, groups=groups)
    moved = np.linalg.norm(clipped._population - initial_net(clipped))
    assert 0 < moved <= 2 * STEPS * 1e-6 * RATE * 1.01
    assert clipped.privacy_.epsilon == math.inf
