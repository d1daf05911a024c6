"""Fits with the same seed have the same noise, which a privacy ledger counts as none."""

import copy
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from pfl_sklearn import GaussianMean, PPSGDRegressor, PrivacyWarning
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.privacy import BudgetExceeded, PrivacyLedger, PureEvent, SampledGaussian
from pfl_sklearn.privacy._ledger import charge_events
from pfl_sklearn.privacy._spending import UNPROTECTED
from tests.helpers.ledgers import DELTA, GAUSSIAN

CLIENTS = make_gaussian_clients(60, 6, random_state=0)
REASON = r"random_state.*entry 1\b.*random_state=None"
seeded = pytest.mark.filterwarnings("ignore:random_state was given")


def spend(ledger, *seeds, events=(GAUSSIAN,)):
    for seed in seeds:
        ledger.spend(events, what="Somebody", seed=seed)
    return ledger


def model(ledger=None, random_state=0, clip_norm=4.0):
    return GaussianMean(
        epsilon=1.0,
        delta=DELTA,
        clip_norm=clip_norm,
        noise_variance=1.0,
        ledger=ledger,
        random_state=random_state,
    )


def fit(*args, **params):
    return model(*args, **params).fit(CLIENTS.data, CLIENTS.target, groups=CLIENTS.groups)


@seeded
def test_the_noise_of_two_fits_with_one_seed_cancels():
    """What the ledger is to refuse: twice one estimate less the other is not noisy at all."""
    errors = []
    for seed in range(8):
        one = fit(random_state=seed, clip_norm=100.0).population_mean_
        two = fit(random_state=seed, clip_norm=200.0).population_mean_
        errors.append((2 * one - two, one))
    exact, noisy = np.std(errors, axis=0)
    assert exact < 1e-4 < 0.1 < noisy


@seeded
def test_a_second_fit_with_the_same_seed_is_refused_by_a_budget(path):
    ledger = PrivacyLedger(path, budget=(50.0, DELTA))
    fit(ledger)
    before = path.read_bytes()
    for clip_norm in (4.0, 8.0):
        with pytest.raises(BudgetExceeded, match=rf"GaussianMean.*epsilon = inf\b.*{REASON}"):
            fit(ledger, clip_norm=clip_norm)
    assert path.read_bytes() == before
    fit(ledger, random_state=1)
    fit(ledger, random_state=None)
    fit(ledger, random_state=None)
    assert len(ledger.entries) == 4


@seeded
def test_a_second_fit_with_the_same_seed_is_recorded_as_infinite(path):
    ledger = PrivacyLedger(path)
    fit(ledger)
    fit(ledger, random_state=None)
    assert math.isfinite(ledger.total())
    fit(ledger)
    match = rf"entry 3 \(GaussianMean\).*{REASON}"
    with pytest.warns(PrivacyWarning, match=match):
        assert PrivacyLedger(path).total() == math.inf
    assert re.search(REASON, str(ledger))
    assert np.isfinite(ledger.to_frame()["epsilon"]).tolist() == [True, True, False]
    assert [len(entry["events"]) for entry in ledger.entries] == [1, 1, 2]


def test_what_counts_as_the_same_seed(path):
    """Also numpy's integers and a generator in the same state; not one that went on."""
    for number, same in enumerate(
        [
            (3, np.int32(3)),
            (np.random.RandomState(3), np.random.RandomState(3)),
            (_after_normals(1), _after_normals(2)),
        ]
    ):
        ledger = PrivacyLedger(path.with_name(f"same {number}"), budget=(50.0, DELTA))
        with pytest.raises(BudgetExceeded, match=REASON):
            spend(ledger, *same)
        assert len(ledger.entries) == 1
    ledger = PrivacyLedger(path, budget=(50.0, DELTA))
    moved = np.random.RandomState(3)
    spend(ledger, None, None, 3, 4, moved)
    moved.randint(2)
    spend(ledger, moved)
    assert len(ledger.entries) == 6


def _after_normals(n_drawn):
    """Normal numbers are made in pairs: the second one takes nothing from the generator."""
    state = np.random.RandomState(3)
    for _ in range(n_drawn):
        state.normal()
    return state


def test_a_generator_is_left_as_it_was(path):
    state = np.random.RandomState(3)
    spend(PrivacyLedger(path), state)
    assert state.randint(1000) == np.random.RandomState(3).randint(1000)


@pytest.mark.parametrize("events", [(), UNPROTECTED, (PureEvent(math.inf, 0.0, "add_remove"),)])
def test_fits_without_noise_have_none_that_cancels(path, events):
    ledger = PrivacyLedger(path)
    spend(ledger, 0, 0, events=events)
    spend(ledger, 0)
    assert [entry.get("seed") is None for entry in ledger.entries] == [True, True, False]
    assert [len(entry["events"]) for entry in ledger.entries] == [len(events), len(events), 1]


def test_rounds_that_go_on_have_other_noise(path):
    ledger = PrivacyLedger(path, budget=(50.0, DELTA))
    rounds = SimpleNamespace(ledger=ledger, random_state=0)
    charge_events(rounds, (GAUSSIAN,))
    charge_events(rounds, (GAUSSIAN,), first_round=7)
    charge_events(rounds, (GAUSSIAN,), first_round=9)
    assert len({entry["seed"] for entry in ledger.entries}) == 3
    for first_round in (0, 7, 9):
        with pytest.raises(BudgetExceeded, match=r"random_state.*entry \d.*random_state=None"):
            charge_events(rounds, (GAUSSIAN,), first_round=first_round)


def rounds(number):
    return (SampledGaussian(5.0, number),)


@pytest.mark.parametrize(
    ("spans", "repeats"),
    [
        ([(0, 6), (1, 5)], [2]),  # a warm start from round 1 on
        ([(1, 5), (0, 6)], [2]),
        ([(0, 6), (5, 1)], [2]),
        ([(2, 2), (0, 6)], [2]),
        ([(0, 6), (6, 4)], []),
        ([(6, 4), (0, 6)], []),
        ([(0, 3), (6, 3), (3, 3), (8, 3)], [4]),
        ([(0, 1), (0, 6)], [2]),
    ],
    ids=str,
)
def test_rounds_that_two_fits_have_in_common_have_the_same_noise(path, spans, repeats):
    """Whichever was first: of their sums in these rounds, the difference has no noise."""
    ledger = PrivacyLedger(path, relation="zero_out")
    for first_round, number in spans:
        ledger.spend(rounds(number), what="Rounds", seed=0, first_round=first_round)
        ledger.spend(rounds(number), what="Rounds", seed=1 + first_round + 100 * number)
        ledger.spend(rounds(number), what="Rounds", first_round=first_round)
    seeds = [entry for entry in ledger.entries if entry["entry"] % 3 == 1]
    found = [number for number, entry in enumerate(seeds, 1) if "seed_of" in entry]
    assert found == repeats
    assert np.isinf(ledger.to_frame()["epsilon"]).sum() == len(repeats)


@seeded
def test_a_warm_start_into_rounds_that_another_fit_ran_with_its_seed(path):
    X, groups = np.eye(6), np.arange(6) // 2
    ledger = PrivacyLedger(path, budget=(50.0, DELTA), relation="zero_out")
    params = {"noise_multiplier": 5.0, "clip_norm": 1.0, "learning_rate": 0.1, "ledger": ledger}
    one = PPSGDRegressor(random_state=0, n_rounds=6, **params)
    one.fit(X, X[:, 0], groups=groups)
    other = PPSGDRegressor(n_rounds=1, warm_start=True, **params).fit(X, X[:, 0], groups=groups)
    other.set_params(random_state=0, n_rounds=6)
    with pytest.raises(BudgetExceeded, match=rf"PPSGDRegressor.*epsilon = inf\b.*{REASON}"):
        other.fit(X, X[:, 0], groups=groups)
    assert other.set_params(random_state=1).fit(X, X[:, 0], groups=groups).n_rounds_ == 6
    assert ledger.total() < 50.0


@seeded
def test_two_copies_of_a_seeded_fit_do_not_both_go_on(path):
    """Each adds the noise of the next rounds: of different clip norms, the difference has none."""
    X, groups = np.eye(6), np.arange(6) // 2
    ledger = PrivacyLedger(path, budget=(50.0, DELTA), relation="zero_out")
    model = PPSGDRegressor(
        ledger=ledger, random_state=0, noise_multiplier=5.0, clip_norm=1.0, learning_rate=0.1
    ).fit(X, X[:, 0], groups=groups)
    other = copy.deepcopy(model).set_params(clip_norm=2.0)
    model.partial_fit(X, X[:, 0], groups=groups)
    model.partial_fit(X, X[:, 0], groups=groups)
    with pytest.raises(BudgetExceeded, match=r"random_state.*entry \d.*random_state=None"):
        other.partial_fit(X, X[:, 0], groups=groups)


def test_the_tag_of_a_seed_is_another_one_in_another_ledger(path):
    ledgers = [spend(PrivacyLedger(path.with_name(name)), 0, 1) for name in ("one", "two")]
    tags = [entry["seed"] for ledger in ledgers for entry in ledger.entries]
    assert len(set(tags)) == 4
    assert {len(tag) for tag in tags} == {16}


def test_what_is_no_seed_is_refused(path):
    ledger = PrivacyLedger(path)
    with pytest.raises(ValueError, match="'seed' cannot be used to seed"):
        spend(ledger, "seed")
    assert ledger.entries == []
