"""Reports in words: eleven questions, answered as the parameters of the fit say."""

import dataclasses
import math

import numpy as np
import pytest

from pfl_sklearn import GaussianMean
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._explanation import answers
from tests.helpers.registry import (
    KNOWN,
    PUBLISHED,
    RELEASING,
    UNREPEATABLE,
    every_one_of,
    first_of_each_class,
    plain_fit,
)

pytestmark = pytest.mark.filterwarnings("ignore:no round of .* lowered the loss of held-out rows")
PERSON, PRESENT, EXACT, FOUND, FAILS, TRUSTED, PRINTED, AGAIN, RESTS, SIDES, ACCURACY = range(11)


def promise(epsilon=1.0, delta=0.0, **fields):
    return PrivacyReport(epsilon, delta, "a mechanism", noise_std=2.0, sensitivity=1.0, **fields)


def first_words(report):
    return [answer.plain.split(" ")[0].rstrip(".,:") for answer in answers(report)]


@every_one_of([*first_of_each_class(RELEASING), *UNREPEATABLE, *KNOWN, *PUBLISHED])
def test_answers_are_those_of_the_parameters(estimator):
    report = plain_fit(estimator).privacy_
    words = first_words(report)
    texts = [answer.plain for answer in answers(report)]
    if getattr(estimator, "mechanism", None) == "quantizer":  # without noise
        assert words[PERSON] == "No"
        assert texts[EXACT].startswith("It may be.")
        return
    published = getattr(estimator, "publish", None) == "clients"
    asks_rows = report.unit != "client"
    assert words[PERSON] == ("Only" if asks_rows else "Yes")
    assert words[EXACT] == "No"
    assert ("may be made from its exact rows" in texts[EXACT]) == (not published)
    assert words[PRINTED] == ("Yes" if published else "No")
    presence = getattr(estimator, "unit", "") == "event" or report.relation == "add_remove"
    assert words[PRESENT] == ("Yes" if presence else "No")
    nothing_sent = estimator in KNOWN
    # Only a server that is trusted can add noise for rows of a client, except in streams.
    local = report.trust == "local" and not published
    assert words[TRUSTED] == ("No" if nothing_sent or local else "Yes")
    seeded = estimator.random_state is not None and estimator not in (*KNOWN, *UNREPEATABLE)
    assert words[FOUND] == "No" if nothing_sent else words[FOUND] in ("Hardly", "Not", "Yes")
    assert words[ACCURACY] == ("No" if nothing_sent else "Yes")
    seeded = estimator.random_state is not None and estimator not in (*KNOWN, *UNREPEATABLE)
    assert words[FAILS] == ("Yes" if report.delta or seeded else "No")
    assert ("knows the seed" in texts[FAILS]) == seeded
    assert words[AGAIN] == words[RESTS] == "Yes"
    assert words[SIDES] == "No"


@pytest.mark.parametrize(
    ("epsilon", "delta", "percent"),
    [
        *(
            (1.0, 0.0, "at most 73.2 %"),
            (0.1, 0.0, "at most 52.5 %"),
            (8.0, 0.0, "at most 99.967 %"),
        ),
        *((1.0, 0.1, "at most 75.8 %"), (1000.0, 0.0, "practically all")),
    ],
)
def test_epsilon_as_the_chance_of_a_right_guess(epsilon, delta, percent):
    # Of randomized response with these odds, and where it is given away with probability delta.
    assert percent in answers(promise(epsilon, delta))[FOUND].plain


def test_a_guess_is_no_better_than_said():
    rng, noise = np.random.default_rng(0), 1 / math.log(3)
    truth = rng.integers(2, size=200_000)
    seen = truth + rng.laplace(scale=noise, size=len(truth))
    right = np.mean((seen > 0.5) == truth)
    # Laplace noise that doubles and halves: at most 3 / 4, and randomized response attains it.
    assert right < 0.75
    assert "75.0 %" in answers(promise(math.log(3)))[FOUND].plain


def test_persons():
    rows = {"unit": "row", "relation": "replace_one"}
    assert "nobody has said how large k" in answers(promise(**rows))[PERSON].plain
    one = answers(promise(**rows, rows_per_person=1))[PERSON].plain
    assert "at most 1 row, which the promise covers with epsilon = 1." in one
    many = answers(promise(**rows, rows_per_person=3))[PERSON].plain
    assert "at most 3 rows, which the promise covers with epsilon = 3." in many
    whole = answers(promise(**rows, epsilon_whole_client=9.0))[PERSON].plain
    assert whole.endswith("epsilon = 9.")
    # The guess is about all rows of the one who asks.
    assert "at most 73.2 % of the time" in answers(promise(**rows))[FOUND].plain
    assert "several rows it is more" in answers(promise(**rows))[FOUND].plain
    three = answers(promise(**rows, rows_per_person=3))[FOUND].plain
    assert "all rows of a person" in three
    assert "at most 95.3 %" in three
    # Deltas of groups grow faster than their number.
    ten = answers(promise(0.1, 1e-3, **rows, rows_per_person=10))[FOUND].plain
    chance = (math.e + 10 * math.exp(0.9) * 1e-3) / (math.e + 1)
    assert f"at most {math.ceil(1000 * chance) / 10} %" in ten
    assert "a delta k exp((k - 1) epsilon) times as large" in answers(promise(1, 0.1))[PERSON].plain


def test_a_guess_is_about_data_that_are_replaced():
    zeroed = promise(relation="zero_out", epsilon_under=(("replace_one", 2.0),))
    assert "at most 88.1 %" in answers(zeroed)[FOUND].plain
    assert "at most 88.1 %" in answers(promise(relation="add_remove"))[FOUND].plain
    events = answers(promise(unit="event", relation="add_remove"))[FOUND].plain
    assert "whether a single event happened" in events
    assert "at most 73.2 %" in events


def test_tables_with_a_seed_are_not_published():
    fields = {"unit": "row", "released": ("means_",)}
    assert answers(promise(**fields))[PRINTED].plain.startswith("Yes")
    seeded = promise(**fields, noise_reproducible=True)
    assert answers(seeded)[EXACT].plain.startswith("Yes, for those who know the seed")
    assert answers(seeded)[FOUND].plain.startswith("Yes, those who know the seed")
    assert answers(seeded)[PRINTED].plain.startswith("No. The noise had a seed")


def test_audiences():
    report = promise(
        *(2.0, 1e-6),
        epsilon_under=(("replace_one", 5.0),),
        relation="zero_out",
        epsilon_outsiders=1.5,
        epsilon_per_recipient=1.25,
        adversary="anyone",
        rounds=7,
        sampling="Poisson",
        sampling_rate=0.5,
        released=("model_",),
        not_released=("means_",),
    )
    public, technical = report.explain(), report.explain("technical")
    assert public.startswith("Is a single person protected?\n  Yes, as part of a client")
    assert max(map(len, public.splitlines())) <= 100
    assert "one in 1,000,000" in public
    expected = (
        "Unit: client; relation: zero_out.",
        "Covered: model_. Not covered: means_.",
        "epsilon = 2, delta = 1e-06 (zero_out); epsilon = 5 under replace_one; 1.5 against",
        "1.25 against a single recipient",
        "Adversary: anyone.",
        "Mechanism: a mechanism; 7 rounds; sampling: Poisson.",
    )
    joined = " ".join(technical.split())
    for text in expected:
        assert text in joined
        assert text not in " ".join(public.split())
    markdown = report.to_markdown()
    assert markdown.startswith("### Unit of privacy\n\nYes, as part of")
    assert markdown.count("\n### ") == 10
    assert "### Does it cost accuracy?" in report.to_markdown("public")
    with pytest.raises(ValueError, match="audience must be one of"):
        report.explain("press")


def test_without_a_promise():
    report = GaussianMean().fit(np.zeros((4, 1)), [1.0, 2, 3, 4], groups=[0, 0, 1, 1]).privacy_
    assert "No, nobody is. Reason: epsilon=inf was asked for." in report.explain()
    lost = dataclasses.replace(promise(), epsilon=math.inf, warnings=("a step learns.",))
    assert "Reason: a step learns." in lost.explain()
    assert "epsilon = inf." in lost.explain("technical")
