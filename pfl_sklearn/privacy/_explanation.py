"""A privacy report in words: eleven questions that a person in the table may ask, answered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pfl_sklearn.privacy._report import PrivacyReport

_MOST_NATS = 700.0  # whose exponential is finite
_CERTAIN = 1e-6  # rest of the time that is not worth a digit
_PRESENCE = {
    "replace_one": "No. What the data of {unit} say is hidden, not that they are there",
    "zero_out": "No. What {unit} contributes is hidden, not that it is in the table",
    "add_remove": "Yes. Whether {unit} is in the table at all is hidden",
}
_SIDE_CHANNELS = (
    "No. Not covered are: error messages about tables that are not valid, running times, memory "
    "and network traffic; parameters chosen after a look at the data; and what the data say about "
    "people in general, which applies to those in the table as to all others."
)
_FOR_GOOD = (
    "Yes. Every further fit to the same data is a release of its own, also one that continues "
    "this model; epsilons and deltas add up at most, and a PrivacyLedger keeps count. Nothing "
    "renews what was spent, and computing something from what was released costs nothing. The "
    "promise does not expire, whatever else is known or published later."
)


# Questions of the public, and the headings for experts, which are those of NIST SP 800-226.
_QUESTIONS = (
    ("Is a single person protected?", "Unit of privacy"),
    ("Is it hidden that I am in the table?", "Neighbouring tables"),
    ("Is my exact value in it if I am the only one of my client?", "Release"),
    ("Can somebody who knows everybody else's data find out mine?", "Privacy parameters"),
    ("Can the promise fail?", "Delta"),
    ("Must somebody be trusted with exact data?", "Trust and threat model"),
    ("May the estimates of all clients be published?", "Access to estimates"),
    ("Does another release of the same data cost more?", "Composition and renewal"),
    ("Does the promise rest on assumptions?", "Assumptions"),
    ("Are errors, running times and the choice of settings covered?", "Side channels"),
    ("Does it cost accuracy?", "Utility"),
)


class Answer(NamedTuple):
    """A question of the public, the heading for experts, and what each of them reads."""

    question: str
    heading: str
    plain: str
    technical: str  # what experts read besides


def answers(report: PrivacyReport) -> list[Answer]:
    """The questions, answered from the fields of a PrivacyReport alone."""
    texts = _no_promise(report) if math.isinf(report.epsilon) else _promise(report)
    return [Answer(*question, *text) for question, text in zip(_QUESTIONS, texts, strict=True)]


def _promise(report: PrivacyReport) -> list[tuple[str, str]]:
    one = f"one {report.unit}"
    presence = _PRESENCE[report.relation].format(unit=one)
    return [
        (_person(report), ""),
        (presence + _public_facts(report), f"Unit: {report.unit}; relation: {report.relation}."),
        (
            _exact_value(report),
            _listed("Covered", report.released) + _listed("Not covered", report.not_released),
        ),
        (_odds(report), _parameters(report)),
        (_failure(report), ""),
        (_trust(report), _listed("Adversary", (report.adversary,))),
        (_tables(report), ""),
        (_FOR_GOOD, ""),
        (f"Yes, and on the software being right:{_listed('', report.assumptions, '; ')}", ""),
        (_SIDE_CHANNELS, ""),
        (_accuracy(report), _mechanism(report)),
    ]


def _no_promise(report: PrivacyReport) -> list[tuple[str, str]]:
    nothing = "There is no promise: epsilon is infinite."
    return [
        (f"No, nobody is.{_listed('Reason', report.warnings)}", ""),
        ("No.", ""),
        (
            "It may be. Treat the model as if the exact data had been printed.",
            _listed("Not covered", report.not_released),
        ),
        ("Yes. Nothing stands in the way.", "epsilon = inf."),
        (nothing, ""),
        ("Yes, everybody who sees the model.", ""),
        ("No, unless the exact data may be.", ""),
        ("No. Nothing is protected now.", ""),
        (nothing, ""),
        ("No.", ""),
        ("No. Nothing was hidden.", _mechanism(report)),
    ]


def _person(report: PrivacyReport) -> str:
    epsilon, k = report.epsilon, report.rows_per_person
    if epsilon == 0:
        return (
            "Yes. Nothing that depends on the data is released (epsilon = 0), apart from each "
            "client's own estimate, which is for that client alone."
        )
    # Group privacy; a pure promise has no delta that could grow.
    more = " and a delta k exp((k - 1) epsilon) times as large" if report.delta else ""
    if report.unit == "client":
        return (
            "Yes, as part of a client (a hospital, a school, a phone): the promise is for all rows "
            f"of a client together. A person with rows at k clients has k times its epsilon{more}."
        )
    many = f"{report.unit}s"
    if k is None:
        text = (
            f"Only a person with a single {report.unit}: with k {many}, a person has k times the "
            f"epsilon{more}, and nobody has said how large k may be."
        )
    else:
        text = (
            f"Yes: a person has at most {k} {report.unit if k == 1 else many}, which the promise "
            f"covers with epsilon = {k * epsilon:.4g}."
        )
    if report.epsilon_whole_client is not None:
        text += (
            f" A client that has all of its rows replaced has epsilon = "
            f"{report.epsilon_whole_client:.4g}."
        )
    return text


def _public_facts(report: PrivacyReport) -> str:
    if report.relation == "add_remove":
        if report.unit == "event":
            return ". The clients and their exposures are public."
        if report.n_clients is not None:
            return ", and so is how many rows each client has. The list of clients is public."
        return ", and so are the numbers of clients and rows."
    more = ", and which client a row belongs to" if report.unit == "row" else ""
    return f". The clients, their number and their numbers of rows are public{more}."


def _exact_value(report: PrivacyReport) -> str:
    if _shows_clients(report):
        if report.noise_reproducible:
            return "Yes, for those who know the seed of the noise, which they can remove."
        return (
            "No. Noise was added to the figure of every client before anything else was computed, "
            "also where a client has a single row, and no exact figure is kept."
        )
    hidden = "has noise" if report.epsilon else "comes from no data"
    return (
        f"No. What is released {hidden}. But the estimate of a single client, which is for that "
        "client alone, may be made from its exact rows, and with one row it may show that row: it "
        "is not part of the release."
    )


def _shows_clients(report: PrivacyReport) -> bool:
    """Whether every client's estimate is part of what the promise covers."""
    return report.unit != "client" and "means_" in report.released


def _odds(report: PrivacyReport) -> str:
    if report.epsilon == 0:
        return "No. What is released does not depend on the data."
    epsilon, delta = _of_replacement(report)
    k = report.rows_per_person or 1
    whose = f"one {report.unit}" if k == 1 else f"all {report.unit}s of a person"
    # Group privacy, for all rows of a person.
    epsilon, delta = k * epsilon, delta * k * math.exp(min((k - 1) * epsilon, _MOST_NATS))
    rest = (math.exp(-epsilon) - min(delta, 1.0) * math.exp(-epsilon)) / (1 + math.exp(-epsilon))
    if epsilon <= 1:
        start = "Hardly"
    else:
        start = "Not for certain" if rest > 0.01 else "Yes, almost for certain"
    guess = f"which of two possible values of the data of {whose} is the true one"
    if report.unit == "event":
        guess = "whether a single event happened" if k == 1 else f"whether {whose} happened"
    text = (
        f"{start}. Somebody who is to guess {guess}, and would be right half of the time, is right "
        f"{_percentage(rest)} of the time after seeing the release."
    )
    if report.noise_reproducible:
        text = f"Yes, those who know the seed of the noise can. For all others: {text}"
    if report.unit != "client" and report.rows_per_person is None:
        text += f" For a person with several {report.unit}s it is more."
    return text


def _of_replacement(report: PrivacyReport) -> tuple[float, float]:
    """Epsilon and delta under which the data of one unit are replaced by others."""
    if report.relation == "replace_one" or report.unit == "event":
        return report.epsilon, report.delta
    under = dict(report.epsilon_under)
    if "replace_one" in under:
        return under["replace_one"], report.delta
    # Taken out, and others put in.
    return 2 * report.epsilon, report.delta * (1 + math.exp(min(report.epsilon, _MOST_NATS)))


def _percentage(rest: float) -> str:
    """At most what share of the time, given the rest; rounded up, so that it is a bound."""
    if rest < _CERTAIN:
        return "practically all"
    # As many digits as tell it from 100 %, and one more.
    scale = 10 ** max(1, math.ceil(-math.log10(rest)) - 1)
    return f"at most {math.ceil(100 * scale * (1 - rest)) / scale:.{round(math.log10(scale))}f} %"


def _parameters(report: PrivacyReport) -> str:
    parts = [f"epsilon = {report.epsilon:.4g}, delta = {report.delta:.4g} ({report.relation})"]
    parts += [f"epsilon = {value:.4g} under {name}" for name, value in report.epsilon_under]
    if report.epsilon_outsiders is not None:
        parts.append(f"{report.epsilon_outsiders:.4g} against outsiders, who are no clients")
    if report.epsilon_per_recipient is not None:
        parts.append(f"{report.epsilon_per_recipient:.4g} against a single recipient of messages")
    return f"{'; '.join(parts)}; accountant: {report.accountant}."


def _failure(report: PrivacyReport) -> str:
    weaknesses = [f"{text.rstrip('.')}." for text in report.warnings]
    if report.delta:
        one_in = f", one in {math.floor(1 / report.delta):,}," if report.delta <= 0.1 else ""
        weaknesses.insert(
            0,
            f"The promise holds up to a probability of {report.delta:.3g}{one_in} for which there "
            "is none (delta).",
        )
    if weaknesses:
        return " ".join(["Yes.", *weaknesses])
    return "No. The odds above hold for everything that may be released (delta = 0)."


def _trust(report: PrivacyReport) -> str:
    if report.epsilon == 0:
        return "No. Clients send nothing that depends on their data."
    if report.trust == "local":
        return "No. Every client adds noise itself, before anything leaves it."
    return (
        "Yes, the server: it sees exact messages (or rows), and adds the noise. It must keep them "
        "safe, and the promise does not cover what it does with them."
    )


def _tables(report: PrivacyReport) -> str:
    if _shows_clients(report):
        if report.noise_reproducible:
            return "No. The noise had a seed: who knows it can remove the noise."
        return "Yes. All of them are covered: what summary() prints, release(), and the model."
    names = ", ".join(report.released) or "nothing"
    return (
        f"No. Only what release() returns is covered ({names}). Estimates of single clients come "
        "from their own exact rows: for_client() is for that client, and summary(), plots and a "
        "pickle of the whole model are for nobody else than who may see the rows."
    )


def _accuracy(report: PrivacyReport) -> str:
    if report.epsilon == 0:
        return "No. No noise was added."
    if report.noise_std is None:
        return "Yes. What is released is random on purpose."
    if report.rounds > 1:
        text = f"Yes. Noise is added in each of {report.rounds} rounds."
    else:
        ratio = report.noise_std / report.sensitivity if report.sensitivity else math.inf
        text = (
            f"Yes. The noise has a standard deviation of {report.noise_std:.4g}, {ratio:.3g} times "
            f"the most that one {report.unit} can change."
        )
    if "shrinkage_" in (*report.released, *report.not_released):
        text += (
            " Small groups lose most, and shrinkage towards the population moves them most: they "
            "appear more alike than they are."
        )
    return text


def _mechanism(report: PrivacyReport) -> str:
    sampling = f"; sampling: {report.sampling}" if report.sampling_rate != 1 else ""
    rounds = f"; {report.rounds} rounds" if report.rounds > 1 else ""
    return f"Mechanism: {report.mechanism}{rounds}{sampling}."


def _listed(label: str, texts: tuple[str, ...], separator: str = ", ") -> str:
    """A sentence of several texts after a label; nothing without any."""
    given = [text.rstrip(".") for text in texts if text]
    start = f" {label}: " if label else " "
    return f"{start}{separator.join(given)}." if given else ""
