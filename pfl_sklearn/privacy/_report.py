"""The privacy statement of a fitted estimator."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

from pfl_sklearn import __version__
from pfl_sklearn._compat import fit_tasks
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy._accounting._events import as_json, check_value, from_json
from pfl_sklearn.privacy._explanation import answers

__all__ = ["PrivacyReport", "PrivacyWarning"]

_SCHEMA_VERSION = 1
_RELATION_NAMES = {
    ("client", "replace_one"): "one client's whole data replaced by any other",
    ("client", "add_remove"): "one client added or removed",
    ("client", "zero_out"): "one client's contribution replaced by nothing",
    ("row", "replace_one"): "one row replaced by any other",
    ("row", "add_remove"): "one row added or removed",
    ("row", "zero_out"): "one row's contribution replaced by nothing",
    ("event", "add_remove"): "one event added or removed",
}
# What no epsilon covers, by the task of a search that a fit is.
CHOSEN = (
    "A search chose the parameters of this fit by scores without noise: epsilon covers this fit "
    "alone, not the choice, and not the fits before it. pfl_sklearn.privacy.search_cost(search) "
    "reports what all of them cost together, and pfl_sklearn.model_selection.PrivateSelectCV "
    "chooses within an epsilon that you state."
)
SCORED = (
    "A search scored this fit without noise: epsilon covers the fit, not the scores or a choice "
    "made by them."
)
# Phrases that mark these two warnings, in stored reports too: the sentences of all versions have
# them.
_CHOSEN_PHRASE, _SCORED_PHRASE = "chose the parameters of this fit", "scored this fit without noise"
_SEARCH_TASKS = {"refit-with-best-params": CHOSEN, "candidate-split-evaluation": SCORED}

# What reports of fits that were not to be private give as their reason.
_NOT_ASKED = re.compile(
    r"epsilon=inf was asked for\."
    r"|\w+ (has no private fit|fits base estimators and folds without noise)\."
)

_OUTSIDERS = "against those alone who are no client and see nothing of one but what is released"
_WHOLE = "if all rows of a client are replaced: one row is what the promise protects"

VALID_TABLES = (
    "tables are valid: fit refuses NaN, infinity, wrong types and labels that it cannot take, and "
    "a refusal reveals that some client holds one; a finite number is never refused: beyond a "
    "bound it counts as the bound"
)


class PrivacyWarning(UserWarning):
    """The requested privacy has a weakness that its user should know about."""


@dataclass(frozen=True)
class PrivacyReport:
    """Privacy statement of a fitted estimator: the promise, and everything that it does not cover.

    It prints as a table of the fields that matter, or as one line if no privacy was asked for.

    Parameters
    ----------
    epsilon, delta : float
        The promise; `delta` goes with `epsilon`. Epsilon is infinite if nothing protects the
        clients; `warnings` then gives the reason.
    mechanism : str
        How the release is randomized.
    unit : {"client", "row", "event"}
        What is protected: all rows of a client together, a single row, or a single event that is
        counted.
    relation : {"replace_one", "zero_out", "add_remove"}
        Which tables are neighbours, so that (`epsilon`, `delta`) limits how well they can be
        distinguished.
    trust : {"central", "local"} or None
        Who adds the noise: a trusted server ("central") or every client ("local").
    adversary : str
        Who is assumed to see what.
    noise_std, sensitivity : float or None
        Standard deviation of the noise and L2 sensitivity under `relation`, in the same units.
    n_clients : int or None
        Number of clients in the fit.
    sampling, sampling_rate, rounds : str, float, int
        How clients are sampled in a round, the share of the clients in a round, and the number of
        rounds.
    accountant : str
        How `epsilon` was computed.
    epsilon_under : tuple of (relation, epsilon)
        Epsilon at the same `delta` under other relations, where it is defined.
    epsilon_outsiders : float or None
        Epsilon at the same `delta` and `relation` against outsiders alone, who see the releases and
        nothing of a client; None if it equals `epsilon`.
    epsilon_per_recipient : float or None
        Likewise against a single recipient of messages, where clients send messages to one another;
        `epsilon` holds against all of them together.
    epsilon_whole_client : float or None
        Epsilon at the same `delta` if all rows of a client are replaced, if `unit` is "row" and it
        is known.
    rows_per_person : int or None
        Number of rows (or events) that a person has at most, if `unit` is not "client" and that is
        known. A person has so many times `epsilon`.
    released, not_released : tuple of str
        What the promise covers, and what it does not cover.
    assumptions, warnings : tuple of str
        What the promise rests on (without a promise: notes on the fit), and its weaknesses.
    noise_reproducible : bool
        True if all rounds, or some of them, had a seed; `warnings` then name these. Anyone who
        knows the seed can remove the noise.
    schema_version, package_version : int, str
        Versions of the fields of this report, and of pfl_sklearn that wrote it.

    Examples
    --------
    >>> from pfl_sklearn.privacy import PrivacyReport
    >>> report = PrivacyReport.unprotected("epsilon=inf was asked for.")
    >>> report.epsilon, PrivacyReport.from_dict(report.to_dict()) == report
    (inf, True)
    """

    epsilon: float
    delta: float
    mechanism: str
    unit: str = "client"
    relation: str = "replace_one"
    trust: str | None = None
    adversary: str = ""
    noise_std: float | None = None
    sensitivity: float | None = None
    n_clients: int | None = None
    sampling: str = "none: every client takes part"
    sampling_rate: float = 1.0
    rounds: int = 1
    accountant: str = "none"
    epsilon_under: tuple[tuple[str, float], ...] = ()
    epsilon_outsiders: float | None = None
    epsilon_per_recipient: float | None = None
    epsilon_whole_client: float | None = None
    rows_per_person: int | None = None
    released: tuple[str, ...] = ()
    not_released: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    noise_reproducible: bool = False
    schema_version: int = field(default=_SCHEMA_VERSION)
    package_version: str = field(default=__version__)

    @classmethod
    def unprotected(cls, reason: str, **facts: Any) -> Self:
        """Report of a fit that protects nobody, with an infinite epsilon by default.

        Parameters
        ----------
        reason : str
            Why nothing protects the clients; it becomes the only warning.
        **facts : dict
            Other fields of the report, by name.
        """
        nothing = {"epsilon": math.inf, "delta": 0.0, "mechanism": "none"}
        return cls(**{**nothing, **facts, "warnings": (reason,)})

    @classmethod
    def of_known_population(
        cls, released: tuple[str, ...], not_released: tuple[str, ...], n_clients: int | None
    ) -> Self:
        """Report of a fit whose population model comes from the user: epsilon is 0.

        Parameters
        ----------
        released, not_released : tuple of str
            Attributes of the fit that the promise covers, and those that it does not cover.
        n_clients : int or None
            Number of clients in the fit; None if it is not public.
        """
        return cls(
            0.0,
            0.0,
            "nothing is released: the population is known",
            adversary="anyone",
            assumptions=(
                "the number of clients and of rows of each client are public",
                VALID_TABLES,
                "the given prior and variances come from the user, not from the data",
            ),
            released=released,
            not_released=not_released,
            n_clients=n_clients,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json.dumps(..., allow_nan=False)`` accepts; infinity is "inf"."""
        values = {**dataclasses.asdict(self), "epsilon_under": dict(self.epsilon_under)}
        plain: dict[str, Any] = as_json(values)
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Report from the values of :meth:`to_dict`; ValueError for another version of the schema.

        Parameters
        ----------
        values : dict
            As :meth:`to_dict` returned them, or read from JSON.
        """
        version = values.get("schema_version")
        check_value("schema_version", version, version == _SCHEMA_VERSION, str(_SCHEMA_VERSION))
        plain = from_json(values)
        return cls(**{**plain, "epsilon_under": tuple(plain["epsilon_under"].items())})

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=2)

    def explain(self, audience: str = "public") -> str:
        """The report in words: who is protected, from whom, how well, and what is not covered.

        Parameters
        ----------
        audience : {"public", "technical"}, default="public"
            For whom: "public" answers eleven questions of a person whose data are in the table;
            "technical" gives the answers under the headings of NIST SP 800-226, with the
            parameters, the mechanism, the adversary and all warnings.

        Returns
        -------
        str
            Paragraphs of at most 100 characters a line.

        Raises
        ------
        ValueError
            If `audience` is anything else.

        References
        ----------
        Near, Darais, Lefkovitz and Howarth (2025). Guidelines for Evaluating Differential Privacy
        Guarantees. NIST SP 800-226.
        """
        paragraphs = (
            f"{title}\n{textwrap.fill(text, 96, initial_indent='  ', subsequent_indent='  ')}"
            for title, text in self._explanation(audience)
        )
        return "\n\n".join(paragraphs)

    def to_markdown(self, audience: str = "technical") -> str:
        """The text of :meth:`explain` in Markdown, for the page on which figures are published.

        Parameters
        ----------
        audience : {"public", "technical"}, default="technical"
            As in :meth:`explain`.
        """
        parts = (f"### {title}\n\n{text}" for title, text in self._explanation(audience))
        return "\n\n".join(parts) + "\n"

    def _explanation(self, audience: str) -> Iterator[tuple[str, str]]:
        """Titles and texts for an audience."""
        audiences = ("public", "technical")
        check_value("audience", audience, audience in audiences, f"one of {audiences}")
        for answer in answers(self):
            if audience == "public":
                yield answer.question, answer.plain
            else:
                yield answer.heading, f"{answer.plain} {answer.technical.strip()}".rstrip()

    def __str__(self) -> str:
        # Most fits are not private: a list of everything that is not covered would add nothing.
        if self.mechanism == "none" and any(map(_NOT_ASKED.fullmatch, self.warnings)):
            statement = "No privacy was asked for: epsilon = inf, nothing protects the clients."
            notes = (f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in self.assumptions)
            return " ".join([statement, *notes])
        rows = [("promise", self._promise())]
        if math.isfinite(self.epsilon):
            rows += [
                (f"under {name}", f"epsilon = {value:.4g} ({_RELATION_NAMES[self.unit, name]})")
                for name, value in self.epsilon_under
            ]
            if self.epsilon_outsiders is not None:
                rows += [("outsiders", f"epsilon = {self.epsilon_outsiders:.4g} {_OUTSIDERS}")]
            if self.epsilon_per_recipient is not None:
                alone = f"epsilon = {self.epsilon_per_recipient:.4g} against each of them alone"
                rows += [("recipients", f"{alone}, {self.epsilon:.4g} against all together")]
            if self.epsilon_whole_client is not None:
                rows += [("whole client", f"epsilon = {self.epsilon_whole_client:.4g} {_WHOLE}")]
            if self.unit != "client" and self.epsilon > 0:
                rows += [("person", self._person())]
            rows += [("adversary", self.adversary), ("mechanism", self._mechanism())]
            rows += [("accountant", self.accountant)]
        elif self.mechanism != "none":
            rows += [("mechanism", self.mechanism)]
        for title in ("released", "not_released", "assumptions", "warnings"):
            label = "not covered" if title == "not_released" else title
            separator = "; " if title in ("assumptions", "warnings") else ", "
            if getattr(self, title):
                texts = (text.rstrip(".") for text in getattr(self, title))
                rows.append((label, separator.join(texts)))
        return "\n".join(["Privacy report", *report_lines(rows)])

    __repr__ = __str__

    def _person(self) -> str:
        k = self.rows_per_person
        if k is None:
            one = f"an {self.unit}" if self.unit == "event" else f"a {self.unit}"
            more = " and a larger delta" if self.delta else ""
            return (
                f"{one}, not a person: with k {self.unit}s a person has k times this epsilon{more}"
            )
        return f"epsilon = {k * self.epsilon:.4g} for a person, who has at most {k} {self.unit}s"

    def _promise(self) -> str:
        if math.isinf(self.epsilon):
            return "NONE: epsilon = inf, nothing protects the clients"
        if self.epsilon == 0:
            return "epsilon = 0: nothing that depends on the data is released"
        name = "pure" if self.delta == 0 else "approximate"
        neighbours = _RELATION_NAMES[self.unit, self.relation]
        return (
            f"epsilon = {self.epsilon:.4g}, delta = {self.delta:.4g} ({name} differential "
            f"privacy); unit: one {self.unit}; neighbours: {neighbours} "
            f"({self.relation})"
        )

    def _mechanism(self) -> str:
        if self.noise_std is None:
            return self.mechanism
        return (
            f"{self.mechanism}: noise sd {self.noise_std:.4g} for L2 sensitivity "
            f"{self.sensitivity:.4g}"
        )


def without_guarantee(report: PrivacyReport, reason: str) -> PrivacyReport:
    """The report with infinite epsilon and the reason as a warning: nothing is covered."""
    return dataclasses.replace(
        report,
        epsilon=math.inf,
        epsilon_under=(),
        epsilon_outsiders=None,
        epsilon_per_recipient=None,
        epsilon_whole_client=None,
        released=(),
        not_released=(*report.released, *report.not_released),
        warnings=tuple(dict.fromkeys((*report.warnings, reason))),
    )


def inherit_warnings(earlier: PrivacyReport, report: PrivacyReport) -> PrivacyReport:
    """Report of a fit that continues an earlier one."""
    # The assumptions of the earlier fit still hold, and so do warnings that it was chosen or
    # scored.
    inherited = [
        warning
        for warning in earlier.warnings
        if _CHOSEN_PHRASE in warning or _SCORED_PHRASE in warning
    ]
    return dataclasses.replace(
        report,
        warnings=tuple(dict.fromkeys((*report.warnings, *inherited))),
        assumptions=tuple(dict.fromkeys((*report.assumptions, *earlier.assumptions))),
    )


def chosen_by_scores(report: PrivacyReport) -> bool:
    """Whether the report says that a search chose the fit by scores without noise."""
    return any(_CHOSEN_PHRASE in text for text in report.warnings)


def finalize_report(estimator: Any, report: PrivacyReport) -> PrivacyReport:
    """Report of a fit, with a warning of what a search around it leaves unprotected; emit warnings.

    scikit-learn names the task that a fit has in a search. Only the chosen fit emits warnings,
    which comes last and in the process of the search. Fits that a search class with a `_run_search`
    of its own scores have no task: they emit warnings, and their reports do not mention scores.
    """
    if math.isinf(report.epsilon):  # there is no promise that a search could weaken
        return report
    tasks = [_SEARCH_TASKS[task] for task in fit_tasks(estimator) if task in _SEARCH_TASKS]
    emitted = report.warnings
    if tasks:
        report = dataclasses.replace(report, warnings=(*report.warnings, tasks[0]))
    if CHOSEN in tasks and report.epsilon > 0:
        emitted = report.warnings
    if emitted and SCORED not in tasks:  # in a nested search the outer one chooses last
        warn_caller(" ".join(emitted), PrivacyWarning)
    return report


def large_delta_warning(delta: float, n_clients: int) -> list[str]:
    """A warning if `delta` is so large that it allows publishing a client."""
    if delta <= 1 / n_clients:
        return []
    return [
        f"delta = {delta:.3g} is above 1 / n_clients = {1 / n_clients:.3g}, which allows "
        "publishing a client outright; choose a smaller delta."
    ]


def private_report(
    facts: dict[str, Any],
    *,
    n_clients: int,
    seeded: bool,
    seeded_part: str = "",
    caveats: tuple[str, ...] = (),
    arithmetic: str = "",
    public: str = "the number of clients and of rows of each client are public",
    tables: str = VALID_TABLES,
    adversary: str = "",
    **more: Any,
) -> PrivacyReport:
    """Report of one private release, with the warnings that its facts imply.

    `seeded_part` is a clause on which noise `random_state` was given for, if not for all of it.
    `arithmetic` is the assumption about the noise, by default ideal floating-point numbers or bits,
    and `public` that about what is known anyway.
    """
    weaknesses = list(caveats)
    if seeded:
        weaknesses.append(
            f"random_state was given{seeded_part}: anyone who knows the seed can reproduce the "
            "noise and remove it, and two fits with the same seed reveal their difference without "
            "noise to everyone; use random_state=None for a release."
        )
    weaknesses += large_delta_warning(facts["delta"], n_clients)
    assumptions = (
        public,
        tables,
        *more.pop("assumptions", ()),
        arithmetic or (_IDEAL_FLOATS if facts["noise_std"] is not None else _IDEAL_BITS),
    )
    plain: dict[str, Any] = {
        name: float(value) if isinstance(value, Real) else value for name, value in facts.items()
    }
    return PrivacyReport(
        **plain,
        n_clients=n_clients,
        noise_reproducible=seeded,
        adversary=adversary or ADVERSARIES[facts["trust"]],
        assumptions=assumptions,
        warnings=tuple(weaknesses),
        **more,
    )


_IDEAL_FLOATS = "ideal arithmetic: floating-point noise counts as exactly Gaussian"
_IDEAL_BITS = "ideal random bits (a seeded pseudo-random generator)"
ADVERSARIES = {
    "central": (
        "anyone who sees what is released, including all other clients together; the server that "
        "adds the noise is trusted with the exact messages"
    ),
    "local": "anyone who sees every message, including the server and all other clients",
}


def report_lines(rows: list[tuple[str, str]]) -> list[str]:
    """Lines of a printed report from pairs of a title and a text."""
    width = max(len(title) for title, _ in rows) + 2
    lines = []
    for title, text in rows:
        head, indent = f"  {title:<{width}}", " " * (width + 2)
        lines += textwrap.wrap(text, 96, initial_indent=head, subsequent_indent=indent) or [head]
    return lines
