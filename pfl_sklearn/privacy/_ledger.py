"""The ledger: what private fits spend, in a file that all copies of an estimator share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.privacy import _ledger_file
from pfl_sklearn.privacy._accounting._composition import events_epsilon
from pfl_sklearn.privacy._accounting._events import Event, event_from_dict
from pfl_sklearn.privacy._report import PrivacyWarning
from pfl_sklearn.privacy._spending import (
    UNPROTECTED,
    noise_seed,
    protect,
    seed_tags,
    sum_of_deltas,
    unit_of,
)

# Relation that the entries of a ledger are counted under. Whatever is finite under "add_remove"
# costs the same under "zero_out".
_COUNTED = {"replace_one": "replace_one", "zero_out": "zero_out", "add_remove": "zero_out"}
# Estimators that take the number of clients as public, although their entries in files of earlier
# versions claim a finite epsilon under "add_remove".
_PUBLIC_NUMBER = ("GaussianMean", "BernoulliMean")
_ROUNDING = 1e-9  # share of a budget; lets a fit spend all of it despite rounding
_SHOWN = 10  # entries in the printed ledger


class BudgetExceeded(ValueError):
    """A fit would spend more than the budget of its privacy ledger; no data were read."""


class PrivacyLedger:
    """Append-only file of what private fits spent; it refuses fits beyond its budget.

    Give it to an estimator as `ledger`. Every fit is then written to the file before it reads any
    data, including the fits of clones that a search makes, in any thread or process.

    Parameters
    ----------
    path : str or path-like
        The file. It is opened if it exists and created otherwise. Every process must see it at
        this path.
    budget : float, (epsilon, delta) or None, default=None
        What all fits together may spend, > 0. None takes the budget of an existing file; a new
        file then has no budget and only records.
    delta : float in (0, 1) or None, default=None
        Delta of the total. None takes that of the budget or of an existing file, and 1e-5 for a
        new file.
    relation : {"replace_one", "zero_out", "add_remove"} or None, default=None
        Neighbouring relation of the total. None takes that of an existing file, and "replace_one"
        for a new file. Local mechanisms and private clustering have a finite epsilon under
        "replace_one" only.
    unit : {"client", "row"} or None, default=None
        What is protected. None takes that of an existing file, and "client" for a new file. The
        ledger refuses fits with another unit.

    Attributes
    ----------
    path : str
        Absolute path of the file, with links resolved.
    budget : tuple (epsilon, delta) or None
        What all fits together may spend.
    delta : float
        Delta of the total.
    relation : str
        Neighbouring relation of the total.
    unit : str
        What is protected.

    Raises
    ------
    OSError
        If the file cannot be opened, created, read or written, or no longer exists.
    ValueError
        - If a parameter is out of range.
        - If the file is not a ledger, or lines of it were edited or lost.
        - If the file was created with other settings than those given.

    See Also
    --------
    PrivacyReport : Privacy statement of one fitted estimator.

    Notes
    -----
    *Total.* All entries compose as if all fits had read the same clients, so use one ledger for
    one set of clients. Gaussian releases compose exactly, by Gaussian DP; for everything else see
    :func:`~pfl_sklearn.privacy.events_epsilon`. If all entries are Gaussian releases, a budget
    holds even when parameters, including those of privacy, depend on the results of earlier fits
    (Koskela, Tobaben and Honkela, 2023). With other entries, and without a budget, the total
    assumes that the privacy parameters of all fits were fixed beforehand.

    *Adding and removing.* Most releases take the number of clients as public. Under "add_remove"
    they count with their figures under "zero_out". They then protect what a client contributes, and
    the printed ledger names their entries.

    *Models, not scores.* A ledger counts what fits release. It does not count scores without
    noise, which a search keeps and chooses by.

    *What is written.* A fit counts from before it reads any data. If it fails later, for example
    on bad data, its entry stays: the failure itself may reveal something about the data, and
    nothing bounds what a failed run revealed. Incompatible parameters are detected earlier
    and cost nothing. A fit that releases nothing (the population is known) leaves an entry without
    events and costs nothing. A fit with ``epsilon=inf`` has no bound on what it spends: a ledger
    with a budget refuses it, and without a budget the total is infinite from then on.

    *Seeds.* Two fits with the same `random_state` have the same noise, which cancels in their
    difference. Therefore a private fit with a seed leaves a digest of the seed, and a later fit
    with the same seed counts as one with ``epsilon=inf``. Every round has noise of its own. Fits
    that run rounds therefore count like that only if they have rounds of one number in common: not
    if one ends where the other goes on. Anyone who can read the file can find the seed by trying
    all seeds. Keep the file as secret as the seed, or use ``random_state=None``.

    *Safety.* Checking the budget and writing the entry is one step under a lock on the file
    (``flock``: POSIX systems, and file systems that honour it). The entry is on the disk before
    the fit goes on. If a process is killed while it writes, the incomplete line belongs to a fit
    that never began; it does not count, and the next entry replaces it. A file that was deleted or
    replaced is an error.

    *Edits and losses.* Every entry holds the SHA-256 of the line before it. So a line that was
    edited, lost, added or moved is an error, the settings on the first line included. The last line
    is covered by its own checksum, which notices damage but is easily computed anew. Lines lost at
    the end leave no trace: a file that was cut between two lines, or restored from an older copy,
    looks like one in which less was spent. To notice that, keep the number of entries and the
    ``"previous"`` of the last one elsewhere, and compare them later. The hashes have no key, so
    anyone who may write the file can forge all of it. Files of earlier versions are read without
    hashes; the next entry then holds the SHA-256 of everything before it, and so covers all of it.

    *Copies.* Copies and pickles hold the path and the settings but no entries: they are the same
    ledger.

    References
    ----------
    Koskela, A., Tobaben, M. and Honkela, A. (2023). Individual privacy accounting with Gaussian
    differential privacy. ICLR.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.privacy import BudgetExceeded, PrivacyLedger
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = PrivacyLedger(folder.name + "/ledger.jsonl", budget=(2.0, 1e-5))
    >>> model = GaussianMean(epsilon=1.0, clip_norm=3.0, noise_variance=1.0, ledger=ledger)
    >>> y, clinic = np.tile([1.0, 2.0, 3.0], 200), np.repeat(np.arange(300), 2)
    >>> for _ in range(3):
    ...     model = model.fit(np.zeros((600, 1)), y, groups=clinic)
    >>> round(ledger.total(), 2)
    1.83
    >>> try:
    ...     model.fit(np.zeros((600, 1)), y, groups=clinic)
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
    ) -> None:
        settings = _ledger_file.checked_settings(budget, delta, relation, unit)
        # Links are resolved, so that a ledger equals itself whichever link it was opened through.
        self.path = os.path.realpath(path)
        # What the file says counts: other copies of the ledger were opened with its settings.
        header = _ledger_file.create_or_read(self.path, settings)
        self._id = header["id"]  # tells this file from a later one at the same path
        self.delta: float = header["delta"]
        self.budget = None if header["budget"] is None else (header["budget"], self.delta)
        self.relation: str = header["relation"]
        self.unit: str = header["unit"]

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
        unit : {"client", "row"}, default="client"
            What the events protect.
        seed : int, RandomState instance or None, default=None
            Seed of the noise. None means that the operating system provides it. If an earlier
            entry has the same seed and a round of the same number, the noise of both cancels and
            the fit counts as unprotected.
        first_round : int, default=0
            Number of rounds before. Every round has noise of its own, so the noise of two fits with
            the same seed cancels only in rounds that both have: those from `first_round` on, as
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
        # Epsilons of rows and of clients do not compose: a client may have any number of rows.
        if unit != self.unit:
            raise ValueError(
                f"{what} has unit={unit!r}, but the privacy ledger {self.path} has "
                f"unit={self.unit!r}; use another ledger with unit={unit!r}."
            )
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "what": what,
            "unit": unit,
            "events": [event.to_dict() for event in events],
            "process": os.getpid(),
        }
        # Without noise, or without a release, a seed repeats nothing that could cancel.
        tags: list[str] = []
        if seed is not None and events and protect(events):
            tags = seed_tags(seed, self._id, first_round + _n_rounds(entry))
            # The first round's digest alone: later fits work out from it where this one began.
            entry["seed"] = tags[first_round]
        # The budget is checked under the lock of the file: two processes that both checked first
        # and wrote afterwards could spend the same rest twice.
        _ledger_file.add(self.path, self._id, partial(self._allowed, entry, tags))

    def total(self) -> float:
        """Epsilon of all entries together, at `delta` and under `relation`.

        Returns
        -------
        float
            Infinity if an entry has no finite epsilon under `relation`. A PrivacyWarning then
            names the entry. Another one names entries that protect contributions only, although
            `relation` is "add_remove".
        """
        entries = self.entries
        total = self._epsilon(entries)
        # One warning: what protects less is of no interest once nothing is protected.
        if math.isinf(total):
            warn_caller(f"The total is infinite {self._because(entries)}.", PrivacyWarning)
        elif caveat := self._caveat(entries):
            warn_caller(caveat, PrivacyWarning)
        return total

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Entries of the file, oldest first, as dicts.

        The keys are "entry" (its number), "time" (UTC), "what", "unit", "events" (a list of dicts),
        "process" (its id) and "previous" (the SHA-256, in hexadecimal, of the line before it in the
        file without its newline; if that is an entry without a hash, of everything before it).
        Entries of earlier versions have no "previous". A seeded fit also has "seed" (a digest) and,
        if an earlier entry has the same noise, "seed_of" (the number of that entry).
        """
        return _ledger_file.read(self.path, self._id)

    def to_frame(self) -> pd.DataFrame:
        """Table of the entries.

        Returns
        -------
        DataFrame
            One row per entry, indexed by its number, with columns ``time`` (UTC), ``what``,
            ``unit``, ``events`` (their kinds), and ``epsilon`` of this entry alone at `delta` and
            under `relation`. If `relation` is "add_remove", an entry that protects what a client
            contributes, not that it takes part, has its epsilon under "zero_out". For Gaussian
            releases the total is smaller than the sum of these.
        """
        return self._frame(self.entries)

    def _frame(self, entries: list[dict[str, Any]]) -> pd.DataFrame:
        """Table of these entries, read once, as other processes may add more meanwhile."""
        return pd.DataFrame(
            {
                "time": pd.to_datetime([entry["time"] for entry in entries], utc=True),
                "what": [entry["what"] for entry in entries],
                "unit": [entry["unit"] for entry in entries],
                "events": [", ".join(e["kind"] for e in entry["events"]) for entry in entries],
                "epsilon": [self._epsilon([entry]) for entry in entries],
            },
            index=pd.Index([entry["entry"] for entry in entries], name="entry", dtype=int),
        )

    def __repr__(self) -> str:
        budget = "" if self.budget is None else f", budget={self.budget!r}"
        return f"PrivacyLedger({self.path!r}{budget})"

    def __str__(self) -> str:
        entries = self.entries
        table, total = self._frame(entries), self._epsilon(entries)
        budget = "no budget" if self.budget is None else f"of a budget of {self.budget[0]:.4g}"
        lines = [
            f"Privacy ledger {self.path}",
            f"  spent: epsilon = {total:.4g}, {budget}, at delta = {self.delta:.4g} "
            f"({self.relation}, unit: one {self.unit}), in {len(table)} entries",
        ]
        # As lines of text: printing must not emit the warnings of `total`.
        if math.isinf(total):
            lines.append(f"  The total is infinite {self._because(entries)}.")
        if caveat := self._caveat(entries):
            lines.append(f"  {caveat}")
        if len(table) > _SHOWN:
            lines.append(f"  the last {_SHOWN}:")
        # Unit left out: it is the ledger's own for every entry.
        if len(table):
            lines.append(table.drop(columns="unit").tail(_SHOWN).to_string(float_format="%.4g"))
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrivacyLedger):
            return False
        # The path alone would equate a ledger with the one that replaced its file.
        return (self.path, self._id) == (other.path, other._id)

    def __hash__(self) -> int:
        return hash((self.path, self._id))

    def _epsilon(self, entries: list[dict[str, Any]]) -> float:
        """Total epsilon of entries at the ledger's delta and relation."""
        events = _events(entries, self.path)
        return events_epsilon(events, self.delta, _COUNTED[self.relation])

    def _allowed(
        self, entry: dict[str, Any], tags: list[str], entries: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Entry to write after `entries`; BudgetExceeded if the budget refuses it."""
        # Seeds first: noise that cancels makes the fit an unprotected one, which a budget refuses.
        entry = _with_repeated_seed(entry, tags, entries)
        # A fit that releases nothing costs nothing, even if nothing is left of the budget.
        if self.budget is not None and entry["events"]:
            self._check_budget(entry, entries, self.budget[0])
        return entry

    def _check_budget(
        self, entry: dict[str, Any], entries: list[dict[str, Any]], most: float
    ) -> None:
        """Raise BudgetExceeded if `entries` and the entry together exceed the budget."""
        # Composed and not added: Gaussian releases cost less than the sum of their epsilons.
        together = [*entries, entry]
        total, alone = self._epsilon(together), self._epsilon([entry])
        if total <= most * (1 + _ROUNDING):
            return
        reason_alone = reason_together = ""
        # Say which of the two is infinite: the fit itself, or what it adds up to with the others.
        if math.isinf(alone):
            reason_alone = f" ({self._why(entry)})"
        elif math.isinf(total):
            reason_together = f" ({self._because(together)})"
        caveat = "; some fits count under zero_out" if self._contributions_only(together) else ""
        raise BudgetExceeded(
            f"{entry['what']} asks for epsilon = {alone:.6g}{reason_alone}; with the "
            f"{self._epsilon(entries):.6g} spent so far the total would be {total:.6g}"
            f"{reason_together}, above the budget of {most:.6g} (at delta = {self.delta:.4g}, "
            f"{self.relation}{caveat}) of {self.path}{self._advice(together, most)}. The fit was "
            "refused before any data were read."
        )

    def _advice(self, entries: list[dict[str, Any]], most: float) -> str:
        """Clause that names a relation under which all entries are within the budget, if any."""
        # The other two relations are counted under zero_out already.
        if self.relation != "replace_one":
            return ""
        total = events_epsilon(_events(entries, self.path), self.delta, "zero_out")
        if total > most * (1 + _ROUNDING):
            return ""
        return (
            f"; under zero_out it would be {total:.6g}, which needs a ledger with "
            "relation='zero_out'"
        )

    def _why(self, entry: dict[str, Any]) -> str:
        """Reason for which an entry has no finite epsilon."""
        if "seed_of" in entry:
            return (
                f"it has the same random_state as entry {entry['seed_of']}, so their noise "
                "cancels; use random_state=None"
            )
        # Not "add_remove": whatever is finite under it is finite under "zero_out" as well.
        events = _events([entry], self.path)
        for other in ("replace_one", "zero_out"):
            if other != self.relation and math.isfinite(events_epsilon(events, self.delta, other)):
                return (
                    f"its epsilon is finite under {other} only, which needs a ledger with "
                    f"relation={other!r}"
                )
        return f"nothing protects its clients at delta = {self.delta:.4g}"

    def _contributions_only(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Entries that do not protect whether a client takes part, although the relation does."""
        # Under the other relations every finite figure means what it says.
        if self.relation != "add_remove":
            return []
        return [entry for entry in entries if _protects_contributions(entry, self.path)]

    def _caveat(self, entries: list[dict[str, Any]]) -> str:
        """Sentence about entries that protect contributions only; empty if there are none."""
        numbers = [str(entry["entry"]) for entry in self._contributions_only(entries)]
        if not numbers:
            return ""
        shown = ", ".join(numbers[:_SHOWN]) + (", ..." if len(numbers) > _SHOWN else "")
        return (
            f"Entries that protect what a client contributes, not that it takes part: {shown}. "
            "They count with their figures under zero_out."
        )

    def _because(self, entries: list[dict[str, Any]]) -> str:
        """Reason for which a total is infinite: an entry is, or the deltas add up to too much."""
        # An entry that is infinite by itself explains the total, whatever the deltas are.
        for entry in entries:
            if math.isinf(self._epsilon([entry])):
                return f"because of entry {entry['entry']} ({entry['what']}): {self._why(entry)}"
        spent = sum_of_deltas(_events(entries, self.path), _COUNTED[self.relation])
        # Sums of deltas such as 1e-6 round, so equality is to rounding.
        how = "uses up" if math.isclose(spent, self.delta) else "exceeds"
        return (
            f"because the deltas of the entries add up to {spent:.6g}, which {how} delta = "
            f"{self.delta:.6g}"
        )


def charge_events(
    estimator: Any, events: tuple[Event, ...] | None, *, first_round: int = 0
) -> None:
    """Write the events of a fit to the estimator's ledger, or refuse it; None: no protection.

    Callers work events out for a ledger only, as that may take a slow calibration of the noise.
    With one seed, rounds from `first_round` on have other noise than the rounds before.
    """
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
    # Two fits share noise if their ranges of rounds overlap: the earlier one began in a round that
    # this fit knows the tag of, and ended after the round in which this one begins.
    rounds = {tag: number for number, tag in enumerate(tags)}
    for earlier in entries:
        began = rounds.get(earlier.get("seed", ""))
        if began is not None and began + _n_rounds(earlier) > rounds[entry["seed"]]:
            # Its own events stay in the record, beside one that costs an infinite epsilon.
            events = [*entry["events"], *(event.to_dict() for event in UNPROTECTED)]
            return {**entry, "events": events, "seed_of": earlier["entry"]}
    return entry


def _n_rounds(entry: dict[str, Any]) -> int:
    """Number of rounds of an entry, whose noise differs; anything else counts as one."""
    return max(1, sum(event.get("n_rounds", 0) for event in entry["events"]))


def _events(entries: list[dict[str, Any]], path: str) -> tuple[Event, ...]:
    """Accounting events of all entries, in the order of the file."""
    events: list[Event] = []
    for entry in entries:
        # An event that cannot be read is an error: skipping it would forget what was spent.
        try:
            events += [event_from_dict(event) for event in entry["events"]]
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"entry {entry['entry']} of the privacy ledger {path} has an event that this "
                f"version of pfl_sklearn cannot read: {error}"
            ) from error
    return tuple(events)


def _protects_contributions(entry: dict[str, Any], path: str) -> bool:
    """Whether an entry has an event that protects under "zero_out" and not under "add_remove"."""
    relations = ("add_remove", "zero_out")
    mus = [[event.spending(name).mu for name in relations] for event in _events([entry], path)]
    # Earlier versions wrote a finite epsilon for removals here; the number of clients is public.
    claimed = entry["what"] in _PUBLIC_NUMBER
    return any((claimed or math.isinf(added)) and math.isfinite(zeroed) for added, zeroed in mus)
