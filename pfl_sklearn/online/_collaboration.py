"""The state of a collaborative mean between two calls, and what its agents make of it."""

import copy
import math
from numbers import Real
from typing import NamedTuple

import numpy as np
import pandas as pd

from pfl_sklearn._clients import match_clients
from pfl_sklearn.online import _privacy
from pfl_sklearn.online._decisions import (
    Estimates,
    Hearing,
    Mixture,
    Oracle,
    Own,
    Test,
    pooled,
    same_class,
)
from pfl_sklearn.online._variances import (
    SQUARE,
    coordinates,
    heard_variances,
    in_doubt,
    own_variances,
    shared_variance,
    with_doubt,
)
from pfl_sklearn.privacy._mechanisms._running_sums import bounded

_FREE = ("ledger", "n_jobs", "unseen")  # parameters that may change while a stream goes on
_FARTHEST, _NARROWEST = 1e150, 1e-150  # bounds and ranges whose squares are numbers
_UNLIKE = 1e12  # largest ratio of two ranges
_LEAST = 1e-24  # variance of a mean, in squared units


class Newcomers(NamedTuple):
    """Agents (k,) that join, and what was given for them."""

    ids: np.ndarray
    low: np.ndarray  # of the range of values
    high: np.ndarray
    variances: np.ndarray  # of a row, NaN if unknown
    labels: np.ndarray


class Arrivals(NamedTuple):
    """Valid rows of a call, in the order of time."""

    newcomers: Newcomers
    agents: np.ndarray  # (n,), whose row it is
    units: np.ndarray  # (n,), values in units of their ranges, from the middle
    clipped: np.ndarray  # (n,), whether it was


class Population(NamedTuple):
    """Mean of all agents' means as the messages show it, its standard error, and their spread."""

    mean: float
    mean_std: float
    std: float


class Unit(NamedTuple):
    """What arithmetic measures in: the lowest value of all ranges, and their common length."""

    low: float
    width: float


class Stream:
    """Agents in the order in which they joined, their messages, and how these are read."""

    def __init__(self, model, with_groups):
        self.params = _lasting(model)
        self.with_groups = with_groups
        self.agents = None  # Newcomers of all calls
        self.by_id = np.zeros(0, int)  # agents in the order of their ids
        self.n_clipped = np.zeros(0, int)
        self.senders = None
        self.decision = None

    def copy(self):
        """A stream to go on with, while this one stays as it is.

        Messages of a call that does not end are nobody's: the model shows a stream only once the
        call has ended. So they are no releases, and to go on from before them costs no privacy.
        Nevertheless their noise does not hide other rows later on, since a copy has noise of its
        own. With a seed it is the same noise, and the call that is repeated gives the same.
        """
        new, mechanism = copy.copy(self), self.senders.mechanism
        known = {id(self): new, id(mechanism): mechanism}  # what deepcopy takes for done
        new.senders = copy.deepcopy(self.senders, known)
        new.decision = copy.copy(self.decision)  # its classes are replaced, never changed
        return new

    def check(self, model, with_groups):
        """Raise ValueError if this stream cannot go on with a call of the model."""
        for name, now in _lasting(model).items():
            before, whose = self.params[name], ""
            if isinstance(now, dict) and isinstance(before, dict):  # clients may be added
                changed = [one for one in before if now.get(one) != before[one]]
                if not changed:
                    continue
                before, now = before[changed[0]], now.get(changed[0])
                whose = f" of client {changed[0]!r}"
            if now is not before and now != before:
                raise ValueError(
                    f"{name}{whose} was {before!r} when this stream began and is {now!r} now; call "
                    "fit to begin a new stream."
                )
        if with_groups != self.with_groups:
            began = "with" if self.with_groups else "without"
            raise ValueError(f"this stream began {began} groups=; go on like that, or call fit.")

    def read(self, model, encoded, y, labels):
        """Rows of a call, all of them valid; nothing of this stream changes."""
        n_known = 0 if self.agents is None else len(self.agents.ids)
        agent = np.full(len(encoded.ids), -1)
        if n_known:
            found = match_clients(encoded.ids, len(encoded.ids), self.agents.ids[self.by_id])
            agent = np.where(found < 0, -1, self.by_id[found])
        new = agent < 0
        agent[new] = n_known + np.arange(new.sum())
        labels = _labels(self, model, encoded.ids, agent, labels)
        newcomers = _newcomers(self, model, encoded.ids[new], y, labels[new])
        agents = agent[encoded.codes]
        _check_horizon(self, model, newcomers, agents)
        low, high = (self._joined(name, newcomers)[agents] for name in ("low", "high"))
        units, clipped = (y - low) / (high - low) - 0.5, np.zeros(len(y), bool)
        if model.bounds is not None:
            units, clipped = bounded(y, low, high)
        if model.out_of_bounds == "error" and clipped.any():
            row = int(np.flatnonzero(clipped)[0])
            raise ValueError(
                f"y[{row}] = {y[row]:.6g} is outside the bounds ({low[row]:.6g}, "
                f"{high[row]:.6g}), and out_of_bounds='error'."
            )
        return Arrivals(newcomers, agents, units, clipped)

    def take(self, model, arrivals):
        """Let the agents receive the rows, and send their messages."""
        self.params = _lasting(model)
        self._join(model, arrivals.newcomers)
        agents = arrivals.agents
        self.n_clipped += np.bincount(agents[arrivals.clipped], minlength=len(self.n_clipped))
        self.senders.take(agents, coordinates(arrivals.units, model.noise_variance is None))

    def estimates(self, model):
        """Means, their variances and degrees of freedom, and exact means, in the order of ids."""
        own, hearing, unit = self._known()
        decide = self._decision(model)
        if hearing.n_agents == 1:
            found = Estimates(own.means, own.variances)
        elif isinstance(decide, Mixture):
            found = decide.estimate(own, hearing)
        else:
            found = pooled(decide, own, hearing)
        means = unit.low + unit.width * found.means
        if model.bounds is not None:
            means = np.clip(means, self.agents.low, self.agents.high)
        variances, freedom = with_doubt(found.variances, own)
        variances *= unit.width**2
        local = unit.low + unit.width * own.means
        found = means, variances, freedom, local
        return (one[self.by_id] for one in found)

    def same_class(self, model):
        """Sparse (n, n), in the order of ids: whom each agent takes for its class."""
        own, hearing, _ = self._known()
        decide = self._decision(model)
        if isinstance(decide, Mixture):
            found = decide.same_class(own, hearing)
        else:
            found = same_class(decide, own, hearing)
        return found[self.by_id][:, self.by_id]

    def heard(self):
        """Noisy means and their standard deviations, in the order of ids.

        (n,) if everybody heard the same. Otherwise (n, n), with recipients first; in the diagonal
        is what agents know of themselves, and NaN and infinity where nothing was heard.
        """
        own, hearing, unit = self._known()
        if hearing.is_common:
            pairs = hearing.pairs(self.by_id[:1])
            means, variances = pairs.means[self.by_id, 0], pairs.variances[self.by_id, 0]
        else:
            pairs = hearing.pairs(np.arange(hearing.n_agents))
            means, variances = np.diag(own.means), np.diag(own.variances)
            told = np.where(np.isinf(pairs.variances), np.nan, pairs.means)
            means[pairs.recipients, pairs.senders] = told
            variances[pairs.recipients, pairs.senders] = pairs.variances
            means = means[self.by_id][:, self.by_id]
            variances = variances[self.by_id][:, self.by_id]
        return unit.low + unit.width * means, unit.width * np.sqrt(variances)

    def population(self):
        """Population that the messages show."""
        _, hearing, unit = self._known()
        mean, mean_std, std = _moments(*_by_sender(hearing))
        if self.params["bounds"] is not None:
            mean = min(max(mean, 0.0), 1.0)
        return Population(unit.low + unit.width * mean, unit.width * mean_std, unit.width * std)

    def _known(self):
        """What agents know of themselves and what they heard, and the unit that it is in."""
        _, low, high, known, _ = self.agents
        width, unit = high - low, Unit(low.min(), high.max() - low.min())
        low, width, known = (low - unit.low) / unit.width, width / unit.width, known / unit.width**2
        senders = self.senders
        rows, middle = senders.rows, low + width / 2
        variances = own = known
        doubt = np.ones(len(rows))
        largest = self._largest_variance()
        if len(senders.sums) == 2 and math.isinf(largest):
            variances = own = np.full(len(rows), math.inf)
        elif len(senders.sums) == 2:
            heard = senders.means(slice(None))
            shared = shared_variance(heard, largest)
            variances = width**2 * heard_variances(heard, shared)
            found, doubt = own_variances(
                rows, senders.sums, shared, bounded=self.params["bounds"] is not None
            )
            own = width**2 * found
        spread = np.maximum(own / np.maximum(rows, 1), _LEAST)
        own = Own(middle + width * senders.sums[0] / np.maximum(rows, 1), spread, doubt, rows)
        return own, Hearing(senders, middle, width, np.maximum(variances, _LEAST)), unit

    def _largest_variance(self):
        """Largest variance of rows, in units of their ranges; infinite if nothing limits it."""
        if self.params["bounds"] is not None:
            return 0.25
        n, (total, *squares) = self.senders.rows.sum(), self.senders.sums.sum(axis=1)
        if n == 1 or not squares:
            return math.inf
        return max((squares[0] / SQUARE - total**2 / n) / (n - 1) * in_doubt(n - 1), _LEAST)

    def _decision(self, model):
        """How agents find their class; labels come from the stream, classes from the last time."""
        if model.decision == "test":
            return Test(model.confidence)
        if model.decision == "oracle":
            return Oracle(self.agents.labels)
        if self.decision is None:
            self.decision = Mixture()
        self.decision.n_jobs = model.n_jobs
        self.decision.width = None if model.bounds is None else 1.0
        return self.decision

    def _join(self, model, newcomers):
        """Take in new agents, who have no rows yet."""
        if self.senders is None:
            kind = _privacy.chosen("schedule", model.schedule, _privacy.SCHEDULES, model.mechanism)
            mechanism = _privacy.mechanism_of(model, len(newcomers.ids))
            n_coordinates = 2 if model.noise_variance is None else 1
            weights = _privacy.weights_of(model)
            self.senders = _privacy.SENDERS[kind](
                mechanism, weights, n_coordinates, model.random_state
            )
        names = Newcomers._fields
        self.agents = Newcomers(*(self._joined(name, newcomers) for name in names))
        self.by_id = np.argsort(self.agents.ids, kind="stable")
        self.n_clipped = np.append(self.n_clipped, np.zeros(len(newcomers.ids), int))
        if len(newcomers.ids):
            self.senders.join(len(newcomers.ids))
        if isinstance(self.senders, _privacy.Restricted):
            self.senders.accepts = self._accepts

    def _joined(self, name, newcomers):
        """What is known of all agents, the newcomers last."""
        new = getattr(newcomers, name)
        return new if self.agents is None else np.concatenate([getattr(self.agents, name), new])

    def _joined_widths(self, ranges):
        """Lengths of the ranges of all agents, and of newcomers with `ranges` (2, k)."""
        new = ranges[1] - ranges[0]
        known = () if self.agents is None else self.agents.high - self.agents.low
        return np.append(known, new)

    def _accepts(self):
        """Which senders (n - 1, n), by turn, each agent takes for its class."""
        own, hearing, _ = self._known()
        decide = (
            Oracle(self.agents.labels)
            if self.params["decision"] == "oracle"
            else Test(self.params["confidence"])
        )
        pairs = hearing.pairs(np.arange(hearing.n_agents))
        return decide.alike(own, pairs) | np.isinf(pairs.variances)


def _lasting(model):
    """Parameters that a stream keeps, in a form that later changes do not reach."""
    params = model.get_params()
    return {name: _plain(value) for name, value in params.items() if name not in _FREE}


def _plain(value):
    """A parameter that compares by its values."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return tuple(np.asarray(value).tolist()) if isinstance(value, list | np.ndarray) else value


def _newcomers(stream, model, ids, y, labels):
    """Agents of a call that are new, with their bounds, variances and labels."""
    low, high = _ranges(stream, model, ids, y)
    variances = np.full(len(ids), np.nan)
    if model.noise_variance is not None:
        given = _given("noise_variance", model.noise_variance, ids)
        for client, variance in zip(ids.tolist(), given, strict=True):
            if not (isinstance(variance, Real) and 0 < variance < math.inf):
                raise ValueError(
                    f"noise_variance of client {client!r} must be a positive, finite number; got "
                    f"{variance!r}."
                )
        variances = given.astype(float)
    return Newcomers(ids, low, high, variances, labels)


def _ranges(stream, model, ids, y):
    """Ends of ranges (k,): the bounds, or a range of no consequence."""
    if model.bounds is None:
        if stream.agents is not None:  # the unit of the stream
            return np.full((2, len(ids)), [stream.agents.low[:1], stream.agents.high[:1]])
        return np.full((2, len(ids)), [[y.min()], [y.max() if np.ptp(y) else y.min() + 1.0]])
    pairs = _given("bounds", model.bounds, ids)
    if not isinstance(model.bounds, dict):
        return np.tile(_range(model.bounds, "")[:, None], len(ids))
    found = [
        _range(pair, f" of client {one!r}") for one, pair in zip(ids.tolist(), pairs, strict=True)
    ]
    found = np.array(found).reshape(len(ids), 2).T
    widths = stream._joined_widths(found)
    if len(widths) and widths.max() > _UNLIKE * widths.min():
        raise ValueError(
            f"bounds of all clients must be alike to a factor of 1e12; got ranges from "
            f"{widths.min():.3g} to {widths.max():.3g}."
        )
    return found


def _range(pair, whose):
    """A range (2,): its ends; raise ValueError for what is none."""
    try:
        found = np.asarray(pair, dtype=float)
        valid = found.shape == (2,) and found[1] - found[0] > _NARROWEST
        valid = valid and np.abs(found).max() < _FARTHEST
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"bounds{whose} must be a pair (low, high) of numbers with low < high, between -1e150 "
            f"and 1e150 and more than 1e-150 apart; got {pair!r}."
        )
    return found


def _given(name, value, ids):
    """What a parameter gives for every id, as objects (k,): the same for all, or by a dict."""
    found = np.empty(len(ids), dtype=object)
    if not isinstance(value, dict):
        found[:] = [value] * len(ids)
        return found
    for place, one in enumerate(ids.tolist()):
        if one not in value:
            raise ValueError(f"{name} has no entry for client {one!r}; give one for every client.")
        found[place] = value[one]
    return found


def _labels(stream, model, ids, agent, labels):
    """Labels (n,) of all agents of a call; None where they are not given or not needed."""
    found = np.full(len(ids), None, dtype=object)
    n_known = 0 if stream.agents is None else len(stream.agents.ids)
    new = agent >= n_known
    if labels is None:
        if model.decision == "oracle" and new.any():
            raise ValueError("decision='oracle' needs labels, one for every client; got None.")
        return found
    if model.decision != "oracle":
        raise ValueError(f"labels go with decision='oracle'; got decision={model.decision!r}.")
    if isinstance(labels, pd.Series):
        if not labels.index.is_unique:
            raise ValueError("labels must have one entry for a client; its index has duplicates.")
        labels = labels.to_dict()
    if isinstance(labels, dict):
        found[new] = _given("labels", labels, ids[new])
        found[~new] = [labels.get(one) for one in ids[~new].tolist()]
    else:
        values = np.asarray(labels)
        if values.shape != ids.shape:
            raise ValueError(
                f"labels must be a dict, or hold one label for each of the {len(ids)} clients in "
                f"the order of their ids; got shape {values.shape}."
            )
        found[:] = values.tolist()
    missing = pd.isna(found) & new
    if missing.any():
        raise ValueError(f"the label of client {ids[missing].tolist()[0]!r} is missing.")
    for one, k, label in zip(ids[~new].tolist(), agent[~new], found[~new], strict=True):
        if label is not None and label != stream.agents.labels[k]:
            raise ValueError(
                f"the label of client {one!r} was {stream.agents.labels[k]!r} when it joined and "
                f"is {label!r} now; call fit to begin a new stream."
            )
    return found


def _check_horizon(stream, model, newcomers, agents):
    """Refuse rows beyond the horizon before any of them is used."""
    if model.horizon is None:
        return
    n_known = 0 if stream.senders is None else len(stream.senders.rows)
    after = np.bincount(agents, minlength=n_known + len(newcomers.ids))
    if n_known:
        after[:n_known] += stream.senders.rows
    if after.max() > model.horizon:
        late = stream._joined("ids", newcomers).tolist()[after.argmax()]
        raise ValueError(
            f"horizon={model.horizon}, but client {late!r} would have {after.max()} rows; none of "
            "this call was used. Fit with a larger horizon, or with horizon=None."
        )


def _by_sender(hearing):
    """One mean per sender from all that was heard of it, and its variance (n,)."""
    n = hearing.n_agents
    if hearing.is_common:
        pairs = hearing.pairs(np.zeros(1, int))
        return pairs.means[:, 0], pairs.variances[:, 0]
    precision, sums = np.zeros(n), np.zeros(n)
    for block in hearing.blocks():
        pairs = hearing.pairs(block)
        weight = 1 / pairs.variances
        precision += np.bincount(pairs.senders.ravel(), weight.ravel(), n)
        sums += np.bincount(pairs.senders.ravel(), (weight * pairs.means).ravel(), n)
    told = precision > 0
    data = hearing.variances[told] / hearing.senders.rows[told]  # which all recipients share
    return sums[told] / precision[told], np.maximum(1 / precision[told], data)


def _moments(means, variances):
    """Mean of a population from means (n,) of known variances, by moments."""
    if len(means) == 0:
        return Population(math.nan, math.nan, math.nan)
    weight = 1 / variances
    if weight.sum() == 0:  # a single row
        return Population(float(means.mean()), math.inf, 0.0)
    centre = weight @ means / weight.sum()
    spare = weight.sum() - weight @ weight / weight.sum()
    excess = weight @ (means - centre) ** 2 - (len(means) - 1)
    between = max(excess / spare, 0.0) if spare > 0 else 0.0
    weight = 1 / (variances + between)
    return Population(
        float(weight @ means / weight.sum()),
        float(1 / math.sqrt(weight.sum())),
        math.sqrt(between),
    )
