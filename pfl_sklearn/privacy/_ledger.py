"""The ledger: a file that records what private fits spend, for all copies of an estimator."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pfl_sklearn._unwrap import core_estimator
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy import _ledger_file
from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import Event, check_value, event_from_dict
from pfl_sklearn.privacy._report import PrivacyWarning
from pfl_sklearn.privacy._spending import (
    UNPROTECTED,
    have_finite_epsilon,
    noise_seed,
    seed_tags,
    stated_cost,
    sum_of_deltas,
    unit_of,
)

_BUDGET_TOLERANCE = 1e-9  # share of a budget; lets fits spend all of it despite rounding
_PRINTED_ENTRIES = 10


class BudgetExceeded(ValueError):
    """A fit would spend more than the budget of its privacy ledger; no data were read."""


class PrivacyLedger:
    """Append-only file of what private fits spent; it refuses fits beyond its budget.

    Give it to an estimator as `ledger`. Every fit is then written to the file before it reads any
    data, including the fits of clones in a search, in any thread or process.

    Parameters
    ----------
    path : str or path-like
        The file. It is opened if it exists and created otherwise. Every process must see it at
        this path.
    budget : float, (epsilon, delta) or None, default=None
        Epsilon that all fits together may spend, > 0. None takes the budget of an existing file; a
        new file then has no budget and only records.
    delta : float in (0, 1) or None, default=None
        Delta of the total. None takes that of the budget or of an existing file, and 1e-5 for a
        new file.
    relation : {"replace_one", "zero_out", "add_remove"} or None, default=None
        Neighbouring relation of the total. None takes that of an existing file, and "replace_one"
        for a new file. Local mechanisms and private clustering have a finite epsilon under
        "replace_one" only.
    unit : {"client", "row", "event"} or None, default=None
        What is protected; fits with another unit are refused, but a ledger of rows under
        "replace_one" takes fits that protect clients, whose epsilon holds for each of their rows.
        None takes that of an existing file, and "client" for a new file.
    period : {"year", "quarter", "month"} or None, default=None
        What the budget is for. None takes that of an existing file; a new file then has one budget
        for good.
    owner, purpose : str or None, default=None
        Who answers for the fits that this object records, and what they are for. Every entry keeps
        them; another object for the same file may have others.

    Attributes
    ----------
    path : str
        Absolute path of the file, with links resolved.
    budget : tuple (epsilon, delta) or None
    delta : float
    relation : str
    unit : str
    period, owner, purpose : str or None

    Raises
    ------
    OSError
        If the file cannot be opened, created, read or written, or no longer exists.
    ValueError
        If a parameter is out of range, if the file is not a ledger, if lines of it were edited or
        lost, or if it was created with other settings than those given.

    Notes
    -----
    *Total.* All entries compose as if all fits had read the same clients, by
    :func:`~pfl_sklearn.privacy.events_epsilon`: use one ledger for one set of clients. If all
    entries are Gaussian releases, a budget holds even if parameters, including those of privacy,
    depend on the results of earlier fits (Koskela, Tobaben and Honkela, 2023). With other entries,
    and without a budget, the total assumes that the privacy parameters of all fits were fixed
    beforehand. Scores without noise are not counted.

    *Adding and removing.* Most releases take the number of clients as public. Under "add_remove"
    they count with their figures under "zero_out": they protect what a client contributes. The
    printed ledger names their entries.

    *Periods.* With `period`, fits of one calendar year, quarter or month (UTC, by the clocks of the
    machines) share the budget. That is a rule for those who fit, and no renewal: what a client
    loses over all periods is :meth:`total`, which counts every entry. It is infinite once the
    deltas of all periods add up to more than `delta`.

    *When a fit counts.* The budget is checked and the entry written, under a lock (``flock``: POSIX
    systems, and file systems that honour it), before the fit reads any data. The incomplete line of
    a process that was killed does not count. If the fit fails later, for example on bad data, its
    entry stays, because the failure itself may reveal something. Incompatible parameters are
    detected earlier and cost nothing. A fit that releases nothing leaves an entry without events
    and costs nothing. A fit with ``epsilon=inf`` spends without bound: a ledger with a budget
    refuses it; without a budget the total is infinite from then on.

    *Seeds.* Two fits with the same `random_state` have the same noise, which cancels in their
    difference. Therefore a seeded private fit leaves a digest of its seed, and a later fit with the
    same seed counts as one with ``epsilon=inf``. Every round has noise of its own, so fits that run
    rounds count like that only if they share rounds of the same number. Anyone who can read the
    file can find the seed by trying all seeds: keep it as secret as the seed, or use
    ``random_state=None``.

    *Damage.* An edited, lost, added or moved line is an error, by SHA-256 of the line before each
    entry and a checksum of the last line. The hashes have no key: anyone who may write the file can
    forge it. A file that was deleted or replaced while in use is an error. Lines lost at the end
    leave no trace, so a shortened or restored file looks as if less was spent; to notice that, keep
    the number of entries and the ``"previous"`` of the last one elsewhere.

    *Copies.* Copies and pickles hold the path and the settings: they are the same ledger.

    References
    ----------
    Koskela, A., Tobaben, M. and Honkela, A. (2023). Individual privacy accounting with Gaussian
    differential privacy. ICLR.

    Examples
    --------
    >>> import tempfile
    >>> from pfl_sklearn.privacy import BudgetExceeded, GaussianEvent, PrivacyLedger
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = PrivacyLedger(folder.name + "/ledger.jsonl", budget=(1.8, 1e-5))
    >>> for _ in range(3):
    ...     ledger.spend([GaussianEvent(None, 0.25)], what="a fit")
    >>> round(ledger.total(), 2), round(ledger.remaining(), 2)
    (1.7, 0.1)
    >>> try:
    ...     ledger.spend([GaussianEvent(None, 0.25)], what="a fit")
    ... except BudgetExceeded:
    ...     print(len(ledger.entries))
    3
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: float | tuple[float, float] | None = None,
        *,
        delta: float | None = None,
        relation: str | None = None,
        unit: str | None = None,
        period: str | None = None,
        owner: str | None = None,
        purpose: str | None = None,
    ) -> None:
        settings = _ledger_file.checked_settings(budget, delta, relation, unit, period)
        for name, value in (("owner", owner), ("purpose", purpose)):
            check_value(name, value, value is None or isinstance(value, str), "a str or None")
        # Links are resolved, so that a ledger equals itself whichever link it was opened through.
        self.path = os.path.realpath(path)
        # The settings of the file count: other copies of the ledger were opened with them.
        header = _ledger_file.create_or_read(self.path, settings)
        self._id = header["id"]  # distinguishes this file from a later one at the same path
        self.delta: float = header["delta"]
        self.budget = None if header["budget"] is None else (header["budget"], self.delta)
        self.relation: str = header["relation"]
        self.unit: str = header["unit"]
        self.period: str | None = header["period"]
        self.owner, self.purpose = owner, purpose

    def spend(
        self,
        events: Iterable[Event],
        *,
        what: str,
        unit: str = "client",
        seed: int | np.random.RandomState | None = None,
        first_round: int = 0,
    ) -> None:
        """Write one entry or refuse it; estimators call this before they read any data.

        Parameters
        ----------
        events : iterable of GaussianEvent, SampledGaussian or PureEvent
            Accounting events of one fit; empty for a fit that releases nothing.
        what : str
            What spends them, for example the name of the estimator.
        unit : {"client", "row", "event"}, default="client"
            What the events protect.
        seed : int, RandomState instance or None, default=None
            Seed of the noise; None if the operating system provides it. If an earlier entry has the
            same seed and a round of the same number, the fit counts as unprotected.
        first_round : int, default=0
            Number of rounds before. The rounds of this entry are those from `first_round` on, as
            many as the events have.

        Raises
        ------
        BudgetExceeded
            If the total would exceed the budget. Nothing is written.
        ValueError
            If the ledger has another unit, `seed` is not a valid seed, or the file is damaged.
        OSError
            If the entry cannot be written. It does not count.
        """
        events = tuple(events)
        if not self._covers(unit):
            raise ValueError(
                f"{what} has unit={unit!r}, but the privacy ledger {self.path} has "
                f"unit={self.unit!r}; use another ledger with unit={unit!r}."
            )
        entry, tags = self._new_entry(events, what, unit, seed, first_round)
        # The budget is checked under the lock of the file. Two processes that checked first and
        # wrote afterwards could spend the same rest twice.
        _ledger_file.append_entry(self.path, self._id, partial(self._checked_entry, entry, tags))

    def _covers(self, unit: str) -> bool:
        """Whether epsilons of this unit hold for that of the ledger."""
        # A row replaced is a client replaced, but a client may have any number of rows.
        return unit == self.unit or (
            unit == "client" and (self.unit, self.relation) == ("row", "replace_one")
        )

    def _new_entry(
        self, events: tuple[Event, ...], what: str, unit: str, seed: Any, first_round: int
    ) -> tuple[dict[str, Any], list[str]]:
        """An entry without a number, and the tags of its seed up to its last round."""
        named = {"owner": self.owner, "purpose": self.purpose}
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "what": what,
            "unit": unit,
            **{name: text for name, text in named.items() if text is not None},
            "events": [event.to_dict() for event in events],
            "process": os.getpid(),
        }
        # Without noise, or without a release, there is nothing that could cancel.
        tags: list[str] = []
        if seed is not None and events and have_finite_epsilon(events):
            tags = seed_tags(seed, self._id, first_round + _n_rounds(entry))
            # The tag of the first round is enough: later fits derive from it where this one began.
            entry["seed"] = tags[first_round]
        return entry, tags

    def total(self) -> float:
        """Epsilon of all entries together, at `delta` and under `relation`.

        Returns
        -------
        float
            Infinity if an entry has no finite epsilon under `relation`. A PrivacyWarning then
            names the entry. Another one names entries that protect contributions only, although
            `relation` is "add_remove".
        """
        return self._total(self.entries)

    def _total(self, entries: list[dict[str, Any]]) -> float:
        """Epsilon of entries together, with a warning of what it does not say."""
        total = self._epsilon(entries)
        # One warning: once nothing is protected, weaker protection is of no interest.
        if math.isinf(total):
            reason = self._why_total_is_infinite(entries)
            warn_caller(f"The total is infinite {reason}.", PrivacyWarning)
        elif caveat := self._caveat(entries):
            warn_caller(caveat, PrivacyWarning)
        return total

    def remaining(self) -> float:
        """Epsilon that one more release with a pure epsilon may have.

        Returns
        -------
        float
            The budget less what was spent (in the current period, if there are periods), at least
            0; infinity without a budget. Gaussian releases may add up to more, because they cost
            less than the sum of their epsilons: ask :meth:`can_spend`.
        """
        if self.budget is None:
            return math.inf
        entries = self._of_period(self.entries, datetime.now(UTC).isoformat())
        return max(self.budget[0] - self._total(entries), 0.0)

    def _of_period(self, entries: list[dict[str, Any]], time: str) -> list[dict[str, Any]]:
        """Entries that share the budget with an entry of this time."""
        if self.period is None:
            return entries
        period = _period_name(time, self.period)
        return [each for each in entries if _period_name(each["time"], self.period) == period]

    def can_spend(self, estimator: Any) -> bool:
        """Whether one fit of an unfitted estimator is within the budget; nothing is written.

        Parameters
        ----------
        estimator : estimator
            A private estimator, alone or inside a pipeline, ClientColumn or GridSearchCV. It need
            not have this ledger.

        Returns
        -------
        bool
            False also for another unit, and for an estimator that protects nobody where there is a
            budget. Other processes may spend the rest before the fit.
        """
        cost = stated_cost(estimator)
        if not self._covers(cost.unit):
            return False
        events = UNPROTECTED if cost.events is None else cost.events
        seed = noise_seed(core_estimator(estimator)) if cost.seeded else None
        try:
            new = self._new_entry(events, "a fit", cost.unit, seed, 0)
            self._checked_entry(*new, self.entries)
        except BudgetExceeded:
            return False
        return True

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Entries of the file, oldest first, as dicts.

        The keys are "entry" (its number), "time" (UTC), "what", "unit", "events" (a list of dicts),
        "process" (its id) and "previous" (the SHA-256, in hexadecimal, of the line before it
        without its newline). "owner" and "purpose" are there if they were given. A seeded fit also
        has "seed" (a digest) and, if an earlier entry has the same noise, "seed_of" (the number of
        that entry).
        """
        return _ledger_file.read_entries(self.path, self._id)

    def to_frame(self) -> pd.DataFrame:
        """DataFrame of the entries, indexed by their numbers.

        Returns
        -------
        DataFrame
            Columns ``time`` (UTC), ``what``, ``owner``, ``purpose``, ``unit``, ``events`` (their
            kinds), and ``epsilon`` of the entry alone at `delta` and under `relation`. If
            `relation` is "add_remove", an entry that protects what a client contributes, not that
            it takes part, has its epsilon under "zero_out". For Gaussian releases the total is
            smaller than the sum of these.
        """
        return self._frame(self.entries)

    def _frame(self, entries: list[dict[str, Any]]) -> pd.DataFrame:
        """Table of these entries, read once, as other processes may add more meanwhile."""
        return pd.DataFrame(
            {
                "time": pd.to_datetime([entry["time"] for entry in entries], utc=True),
                "what": [entry["what"] for entry in entries],
                "owner": [entry.get("owner") for entry in entries],
                "purpose": [entry.get("purpose") for entry in entries],
                "unit": [entry["unit"] for entry in entries],
                "events": [", ".join(e["kind"] for e in entry["events"]) for entry in entries],
                "epsilon": [self._epsilon([entry]) for entry in entries],
            },
            index=pd.Index([entry["entry"] for entry in entries], name="entry", dtype=int),
        )

    def __repr__(self) -> str:
        given = {"budget": self.budget, "period": self.period}
        settings = [f", {name}={value!r}" for name, value in given.items() if value is not None]
        return f"PrivacyLedger({self.path!r}{''.join(settings)})"

    def __str__(self) -> str:
        entries = self.entries
        table, total = self._frame(entries), self._epsilon(entries)
        budget = "no budget" if self.budget is None else f"of a budget of {self.budget[0]:.4g}"
        if self.budget is not None and self.period is not None:
            now = datetime.now(UTC).isoformat()
            spent = self._epsilon(self._of_period(entries, now))
            budget = f"{spent:.4g} in {_period_name(now, self.period)} {budget} a {self.period}"
        lines = [
            f"Privacy ledger {self.path}",
            f"  spent: epsilon = {total:.4g}, {budget}, at delta = {self.delta:.4g} "
            f"({self.relation}, unit: one {self.unit}), in {len(table)} entries",
        ]
        # As lines of text: printing must not emit the warnings of `total`.
        if math.isinf(total):
            lines.append(f"  The total is infinite {self._why_total_is_infinite(entries)}.")
        if caveat := self._caveat(entries):
            lines.append(f"  {caveat}")
        if len(table) > _PRINTED_ENTRIES:
            lines.append(f"  the last {_PRINTED_ENTRIES}:")
        # Without what all entries have in common with the ledger, or lack.
        if len(table):
            shown = table.tail(_PRINTED_ENTRIES).dropna(axis="columns", how="all")
            if (shown["unit"] == self.unit).all():
                shown = shown.drop(columns="unit")
            lines.append(shown.to_string(float_format="%.4g"))
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrivacyLedger):
            return False
        # The path alone would equate a ledger with the one that replaced its file.
        return (self.path, self._id) == (other.path, other._id)

    def __hash__(self) -> int:
        return hash((self.path, self._id))

    @property
    def _counted_relation(self) -> str:
        """Relation that the entries are counted under."""
        # Whatever is finite under "add_remove" costs the same under "zero_out".
        return "zero_out" if self.relation == "add_remove" else self.relation

    def _events(self, entries: list[dict[str, Any]]) -> tuple[Event, ...]:
        """Accounting events of all entries, in the order of the file."""
        events: list[Event] = []
        for entry in entries:
            # An event that cannot be read is an error: skipping it would forget what was spent.
            try:
                events += [event_from_dict(event) for event in entry["events"]]
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"entry {entry['entry']} of the privacy ledger {self.path} has an event that "
                    f"this version of pfl_sklearn cannot read: {error}"
                ) from error
        return tuple(events)

    def _epsilon(self, entries: list[dict[str, Any]], relation: str | None = None) -> float:
        """Total epsilon of entries at the ledger's delta, by default under its own relation."""
        relation = relation or self._counted_relation
        return events_epsilon(self._events(entries), self.delta, relation)

    def _checked_entry(
        self, entry: dict[str, Any], tags: list[str], entries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Entry to write after `entries`; BudgetExceeded if the budget refuses it."""
        # Seeds first: a fit whose noise cancels is an unprotected one, which a budget refuses.
        entry = _with_repeated_seed(entry, tags, entries)
        # A fit that releases nothing costs nothing, even if the budget is used up.
        if self.budget is not None and entry["events"]:
            self._check_budget(entry, entries, self.budget[0])
        return entry

    def _check_budget(
        self, entry: dict[str, Any], entries: list[dict[str, Any]], budget: float
    ) -> None:
        """Raise BudgetExceeded if `entries` and the entry together exceed the budget."""
        # Composed and not added: Gaussian releases cost less than the sum of their epsilons.
        entries = self._of_period(entries, entry["time"])
        together = [*entries, entry]
        total, alone = self._epsilon(together), self._epsilon([entry])
        if total <= budget * (1 + _BUDGET_TOLERANCE):
            return
        reason_alone = reason_together = ""
        # Either the fit itself is infinite, or its sum with the others.
        if math.isinf(alone):
            reason_alone = f" ({self._why_entry_is_infinite(entry)})"
        elif math.isinf(total):
            reason_together = f" ({self._why_total_is_infinite(together)})"
        caveat = "; some fits count under zero_out" if self._caveat(together) else ""
        period = f" in {_period_name(entry['time'], self.period)}" if self.period else ""
        raise BudgetExceeded(
            f"{entry['what']} asks for epsilon = {alone:.6g}{reason_alone}; with the "
            f"{self._epsilon(entries):.6g} spent so far{period} the total would be {total:.6g}"
            f"{reason_together}, above the budget of {budget:.6g} (at delta = {self.delta:.4g}, "
            f"{self.relation}{caveat}) of {self.path}{self._advice(together, budget)}. The fit was "
            "refused before any data were read."
        )

    def _advice(self, entries: list[dict[str, Any]], budget: float) -> str:
        """Clause that names a relation under which all entries are within the budget, if any."""
        # The other two relations are counted under zero_out already.
        if self.relation != "replace_one":
            return ""
        total = self._epsilon(entries, "zero_out")
        if total > budget * (1 + _BUDGET_TOLERANCE):
            return ""
        return (
            f"; under zero_out it would be {total:.6g}, which needs a ledger with "
            "relation='zero_out'"
        )

    def _why_entry_is_infinite(self, entry: dict[str, Any]) -> str:
        """Reason for which an entry has no finite epsilon."""
        if "seed_of" in entry:
            return (
                f"it has the same random_state as entry {entry['seed_of']}, so their noise "
                "cancels; use random_state=None"
            )
        # Not "add_remove": whatever is finite under it is finite under "zero_out" as well.
        for other in ("replace_one", "zero_out"):
            if other != self.relation and math.isfinite(self._epsilon([entry], other)):
                return (
                    f"its epsilon is finite under {other} only, which needs a ledger with "
                    f"relation={other!r}"
                )
        return f"nothing protects its clients at delta = {self.delta:.4g}"

    def _why_total_is_infinite(self, entries: list[dict[str, Any]]) -> str:
        """Reason for an infinite total: an entry is infinite, or the deltas add up to too much."""
        # An entry that is infinite by itself explains the total, whatever the deltas are.
        for entry in entries:
            if math.isinf(self._epsilon([entry])):
                reason = self._why_entry_is_infinite(entry)
                return f"because of entry {entry['entry']} ({entry['what']}): {reason}"
        spent = sum_of_deltas(self._events(entries), self._counted_relation)
        # Sums of deltas such as 1e-6 round, so equality is to rounding.
        how = "uses up" if math.isclose(spent, self.delta) else "exceeds"
        return (
            f"because the deltas of the entries add up to {spent:.6g}, which {how} delta = "
            f"{self.delta:.6g}"
        )

    def _caveat(self, entries: list[dict[str, Any]]) -> str:
        """Sentence that names entries counted under "zero_out" in a ledger with "add_remove"."""
        # Under the other relations every finite figure means what it says.
        if self.relation != "add_remove":
            return ""
        numbers = [
            str(entry.get("entry"))  # an entry that is still to be written has no number
            for entry in entries
            if any(
                math.isinf(event.spending("add_remove").mu)
                and math.isfinite(event.spending("zero_out").mu)
                for event in self._events([entry])
            )
        ]
        if not numbers:
            return ""
        more = ", ..." if len(numbers) > _PRINTED_ENTRIES else ""
        return (
            "Entries that protect what a client contributes, not that it takes part: "
            f"{', '.join(numbers[:_PRINTED_ENTRIES])}{more}. They count with their figures under "
            "zero_out."
        )


def charge_fit(estimator: Any) -> None:
    """Write a fit to the estimator's ledger, if it has one, or refuse the fit."""
    # Events are computed for a ledger only: they may need a slow calibration of the noise.
    if getattr(estimator, "ledger", None) is not None:
        charge_events(estimator, estimator._privacy_events())


def charge_events(
    estimator: Any, events: tuple[Event, ...] | None, *, first_round: int = 0
) -> None:
    """Write the events of a fit to the estimator's ledger, if it has one, or refuse the fit.

    None means that nothing protects the clients. With one seed, rounds from `first_round` on have
    other noise than the rounds before.
    """
    if estimator.ledger is not None:
        estimator.ledger.spend(
            UNPROTECTED if events is None else events,
            what=type(estimator).__name__,
            unit=unit_of(estimator),
            seed=noise_seed(estimator),
            first_round=first_round,
        )


def _with_repeated_seed(
    entry: dict[str, Any], tags: list[str], entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """The entry, as an unprotected one if an earlier entry has the same seed and a common round.

    An entry holds the tag of its first round alone. `tags` are those of the rounds up to the last
    one of the new entry, so they show in which round an earlier entry with the same seed began.
    """
    # Two fits share noise if their ranges of rounds overlap: the earlier one began in a round whose
    # tag this fit knows, and ended after the round in which this one begins.
    rounds = {tag: number for number, tag in enumerate(tags)}
    for earlier in entries:
        began = rounds.get(earlier.get("seed", ""))
        if began is not None and began + _n_rounds(earlier) > rounds[entry["seed"]]:
            # Its own events stay in the record, next to one that costs an infinite epsilon.
            events = [*entry["events"], *(event.to_dict() for event in UNPROTECTED)]
            return {**entry, "events": events, "seed_of": earlier["entry"]}
    return entry


def _period_name(time: str, period: str) -> str:
    """Calendar year, quarter or month of a time of an entry."""
    date = datetime.fromisoformat(time).astimezone(UTC)
    if period == "year":
        return f"{date.year}"
    return f"{date.year} Q{(date.month + 2) // 3}" if period == "quarter" else f"{date:%Y-%m}"


def _n_rounds(entry: dict[str, Any]) -> int:
    """Number of rounds of an entry; any other release counts as one round."""
    return max(1, sum(event.get("n_rounds", 0) for event in entry["events"]))
