"""State of a collaborative mean between two calls, and the agents' estimates from it."""

from __future__ import annotations

import copy
import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pfl_sklearn._clients import EncodedClients, match_clients
from pfl_sklearn._typing import Bools, Floats, Integers
from pfl_sklearn.online import _privacy, _variances
from pfl_sklearn.online._decisions import MixtureDecision, OwnMeans, means_for_all
from pfl_sklearn.online._printed._acceptance import OracleDecision, TestDecision
from pfl_sklearn.online._printed._pairwise import (
    PairwiseMixture,
    Restricted,
    means_by_pair,
    pooled_by_sender,
)
from pfl_sklearn.online._received_means import ReceivedMessages
from pfl_sklearn.privacy._mechanisms._running_sums import bounded

_FREE = ("ledger", "n_jobs", "unseen")  # parameters that may change while a stream goes on
# Bounds and ranges whose squares are numbers.
_FARTHEST_BOUND, _NARROWEST_RANGE = 1e150, 1e-150
# Largest ratio of two ranges: beyond it the rounding in the widest hides the narrowest.
_WIDEST_TO_NARROWEST = 1e12
# Smallest variance of a row or a mean, in squared units: that of its rounding.
_ROUNDING_VARIANCE = 1e-24


class Agents(NamedTuple):
    """Agents (n,) in the order in which they joined, and what was given for them."""

    ids: np.ndarray
    low: Floats  # of the range of values
    high: Floats
    variances: Floats  # of a row, NaN if unknown
    labels: np.ndarray


class Collaboration:
    """Agents in the order in which they joined, their messages, and how these are read."""

    def __init__(self, model, with_groups: bool, ids: np.ndarray):
        self.params = lasting_parameters(model)
        self.with_groups = with_groups
        nobody = np.zeros(0)
        self.agents = Agents(ids[:0], nobody, nobody, nobody, nobody.astype(object))
        self.by_id = np.zeros(0, int)  # agents in the order of their ids
        self.n_clipped = np.zeros(0, int)
        self.senders = _privacy.new_senders(model, len(ids))
        if isinstance(self.senders, Restricted):
            self.senders.accepts = self._accepts
        # Its classes are where the next search starts.
        self.mixture = MixtureDecision() if self.senders.is_common else PairwiseMixture()

    def copy(self) -> Collaboration:
        """Copy of the stream to continue with, while this one stays as it is."""
        # Messages of an unfinished call reach nobody: the model shows a stream only once the call
        # has ended. So they are no releases, and to continue from before them costs no privacy.
        # Their noise does not hide other rows later on, since a copy has noise of its own. With a
        # seed it is the same noise, and a repeated call gives the same.
        new, mechanism = copy.copy(self), self.senders.mechanism
        done = {id(self): new, id(mechanism): mechanism}  # what deepcopy takes for done
        new.senders = copy.deepcopy(self.senders, done)
        new.mixture = copy.copy(self.mixture)  # its classes are replaced, never changed
        return new

    def check(self, model, with_groups: bool) -> None:
        """Raise ValueError if this stream cannot continue with a call of the model."""
        for name, now in lasting_parameters(model).items():
            before, whose = self.params[name], ""
            if isinstance(now, dict) and isinstance(before, dict):  # clients may be added
                changed = [key for key in before if now.get(key) != before[key]]
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

    def read(
        self, model, encoded: EncodedClients, y: Floats, labels: Any
    ) -> tuple[Agents, Integers, Floats, Bools]:
        """Valid rows of a call, in the order of time; nothing of this stream changes.

        These are all Agents, newcomers last; and by row (n_rows,) its agent, its value in units of
        the range from the middle, and whether that was outside the range.
        """
        n_known, agent = len(self.agents.ids), np.full(len(encoded.ids), -1)
        if n_known:
            place = match_clients(encoded.ids, len(encoded.ids), self.agents.ids[self.by_id])
            agent = np.where(place < 0, -1, self.by_id[place])
        new = agent < 0
        agent[new] = n_known + np.arange(new.sum())
        labels = _labels_of(self, model, encoded.ids, agent, labels)
        newcomers = _newcomers(self, model, encoded.ids[new], y, labels[new])
        pairs = zip(self.agents, newcomers, strict=True)
        everyone = Agents(*(np.concatenate(pair) for pair in pairs))
        agents = agent[encoded.codes]
        _check_horizon(self, model, everyone, agents)
        low, high = everyone.low[agents], everyone.high[agents]
        units, clipped = (y - low) / (high - low) - 0.5, np.zeros(len(y), bool)
        if model.bounds is not None:
            units, clipped = bounded(y, low, high)
        if model.out_of_bounds == "error" and clipped.any():
            row = int(np.flatnonzero(clipped)[0])
            raise ValueError(
                f"y[{row}] = {y[row]:.6g} is outside the bounds ({low[row]:.6g}, "
                f"{high[row]:.6g}), and out_of_bounds='error'."
            )
        return everyone, agents, units, clipped

    def take(
        self, model, everyone: Agents, agents: Integers, units: Floats, clipped: Bools
    ) -> None:
        """Let the agents receive the rows of :meth:`read`, and send their messages."""
        self.params = lasting_parameters(model)
        n_new = len(everyone.ids) - len(self.agents.ids)
        self.agents = everyone
        self.by_id = np.argsort(everyone.ids, kind="stable")
        self.n_clipped = np.append(self.n_clipped, np.zeros(n_new, int))
        self.n_clipped += np.bincount(agents[clipped], minlength=len(self.n_clipped))
        if n_new:
            self.senders.join(n_new)
        values = _variances.value_and_square(units, model.noise_variance is None)
        self.senders.take(agents, values)

    def estimates(self, n_jobs: int | None) -> tuple[Floats, ...]:
        """Means, their variances and degrees of freedom, and exact means, in the order of ids."""
        (own_means, messages), (low, width) = self._read_messages(), self._unit()
        means, variances = self._decision(n_jobs).estimate(own_means, messages)
        means = low + width * means
        if self.params["bounds"] is not None:
            means = np.clip(means, self.agents.low, self.agents.high)
        variances, freedom = _variances.with_student_factor(variances, own_means)
        variances *= width**2
        local = low + width * own_means.means
        return tuple(part[self.by_id] for part in (means, variances, freedom, local))

    def same_class(self, n_jobs: int | None) -> Any:
        """Sparse (n, n), in the order of ids: whom each agent takes for its class."""
        own_means, messages = self._read_messages()
        return self._decision(n_jobs).same_class(own_means, messages)[self.by_id][:, self.by_id]

    def received(self) -> tuple[Floats, Floats]:
        """Noisy means and their standard deviations, in the order of ids.

        (n,) if all messages go to everybody. Otherwise (n, n), with recipients first, the agents'
        own estimates in the diagonal, and NaN and infinity without messages.
        """
        (own_means, messages), (low, width) = self._read_messages(), self._unit()
        if messages.is_common:
            pairs = messages.pairs(self.by_id[:1])
            means, variances = pairs.means[self.by_id, 0], pairs.variances[self.by_id, 0]
        else:
            by_pair = means_by_pair(own_means, messages)
            means, variances = (values[self.by_id][:, self.by_id] for values in by_pair)
        return low + width * means, width * np.sqrt(variances)

    def population(self) -> tuple[float, float, float]:
        """Mean of the agents' means as messages show it, its standard error, and their spread."""
        (_, messages), (low, width) = self._read_messages(), self._unit()
        pooled = means_for_all if messages.is_common else pooled_by_sender
        mean, mean_std, std = _moments(*pooled(messages))
        if self.params["bounds"] is not None:  # noise may carry it out of the range
            mean = min(max(mean, 0.0), 1.0)
        return low + width * mean, width * mean_std, width * std

    def _unit(self):
        """What arithmetic measures in: lowest value of all ranges, and their common length."""
        lowest = self.agents.low.min()
        return lowest, self.agents.high.max() - lowest

    def _read_messages(self):
        """Own means of the agents, and the messages that they received, in the common unit."""
        _, low, high, known, _ = self.agents
        lowest, unit = self._unit()
        low, width, known = (low - lowest) / unit, (high - low) / unit, known / unit**2
        rows, sums, middle = self.senders.rows, self.senders.sums, low + width / 2
        variances, of_own, inflation = known, known, np.ones(len(rows))
        if len(sums) == 2:  # variances are unknown
            variances, of_own, inflation = self._estimated_variances(width)
        spread = np.maximum(of_own / np.maximum(rows, 1), _ROUNDING_VARIANCE)
        own_means = OwnMeans(
            middle + width * sums[0] / np.maximum(rows, 1), spread, inflation, rows
        )
        variances = np.maximum(variances, _ROUNDING_VARIANCE)
        return own_means, ReceivedMessages(self.senders, middle, width, variances)

    def _estimated_variances(self, width):
        """Variances (n,) of rows: from messages, and from own rows, with their inflation."""
        rows, largest = self.senders.rows, self._largest_variance()
        if math.isinf(largest):
            return np.full(len(rows), math.inf), np.full(len(rows), math.inf), np.ones(len(rows))
        received = self.senders.means(slice(None))
        shared = _variances.shared_variance(received, largest)
        own_variances, inflation = _variances.own_variances(
            rows, self.senders.sums, shared, bounded=self.params["bounds"] is not None
        )
        return (
            width**2 * _variances.received_variances(received, shared),
            width**2 * own_variances,
            inflation,
        )

    def _largest_variance(self):
        """Largest variance of rows, in units of their ranges; infinite if nothing limits it."""
        if self.params["bounds"] is not None:
            return 0.25  # half of the rows at either end
        n, (total, squares) = self.senders.rows.sum(), self.senders.sums.sum(axis=1)
        if n == 1:
            return math.inf
        # Of all agents' rows together, at the upper end of its interval. There is no privacy here.
        pooled = (squares / _variances.SQUARE - total**2 / n) / (n - 1)
        return max(pooled * _variances.student_factor(n - 1), _ROUNDING_VARIANCE)

    def _decision(self, n_jobs: int | None = None) -> Any:
        """Decision by which agents find their class."""
        if self.params["decision"] == "test":
            return TestDecision(self.params["confidence"])
        if self.params["decision"] == "oracle":
            return OracleDecision(self.agents.labels)
        self.mixture.n_jobs = n_jobs
        self.mixture.width = None if self.params["bounds"] is None else 1.0
        return self.mixture

    def _accepts(self):
        """Which senders (n - 1, n), by turn, each agent takes for its class."""
        own_means, messages = self._read_messages()
        pairs = messages.pairs(np.arange(messages.n_agents))
        # An agent without messages may be of any class.
        return self._decision().alike(own_means, pairs) | np.isinf(pairs.variances)


def lasting_parameters(model):
    """Parameters that a stream keeps, in a form that later changes do not reach."""
    params = model.get_params()
    return {name: _comparable(value) for name, value in params.items() if name not in _FREE}


def _comparable(value):
    """Copy of a parameter as a type that compares by its values."""
    if isinstance(value, dict):
        return {key: _comparable(entry) for key, entry in value.items()}
    return tuple(np.asarray(value).tolist()) if isinstance(value, list | np.ndarray) else value


def _newcomers(stream, model, ids, y, labels):
    """Agents of a call that are new, with their bounds, variances and labels."""
    low, high = _ranges(stream, model, ids, y)
    variances = np.full(len(ids), np.nan)
    if model.noise_variance is not None:
        values = _value_by_id("noise_variance", model.noise_variance, ids)
        for client, variance in zip(ids.tolist(), values, strict=True):
            if not (isinstance(variance, Real) and 0 < float(variance) < math.inf):
                raise ValueError(
                    f"noise_variance of client {client!r} must be a positive, finite number; got "
                    f"{variance!r}."
                )
        variances = values.astype(float)
    return Agents(ids, low, high, variances, labels)


def _ranges(stream, model, ids, y):
    """Ends of ranges (k,): the bounds, or a range of no consequence."""
    if model.bounds is None:
        if len(stream.agents.ids):  # the unit of the stream
            return np.full((2, len(ids)), [stream.agents.low[:1], stream.agents.high[:1]])
        return np.full((2, len(ids)), [[y.min()], [y.max() if np.ptp(y) else y.min() + 1.0]])
    if not isinstance(model.bounds, dict):
        return np.tile(_range(model.bounds, "")[:, None], len(ids))
    pairs = zip(ids.tolist(), _value_by_id("bounds", model.bounds, ids), strict=True)
    ranges = np.array([_range(pair, f" of client {client!r}") for client, pair in pairs])
    low, high = ranges.reshape(len(ids), 2).T
    widths = np.append(stream.agents.high - stream.agents.low, high - low)
    if len(widths) and widths.max() > _WIDEST_TO_NARROWEST * widths.min():
        raise ValueError(
            f"bounds of all clients must be alike to a factor of 1e12; got ranges from "
            f"{widths.min():.3g} to {widths.max():.3g}."
        )
    return low, high


def _range(pair, whose):
    """Ends (2,) of a range; raise ValueError for a pair that is no range."""
    try:
        ends = np.asarray(pair, dtype=float)
        valid = ends.shape == (2,) and ends[1] - ends[0] > _NARROWEST_RANGE
        valid = valid and np.abs(ends).max() < _FARTHEST_BOUND
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"bounds{whose} must be a pair (low, high) of numbers with low < high, between -1e150 "
            f"and 1e150 and more than 1e-150 apart; got {pair!r}."
        )
    return ends


def _value_by_id(name, value, ids):
    """Values of a parameter for every id, as objects (k,): one for all, or from a dict."""
    values = np.empty(len(ids), dtype=object)
    for place, client in enumerate(ids.tolist()):
        if isinstance(value, dict) and client not in value:
            raise ValueError(
                f"{name} has no entry for client {client!r}; give one for every client."
            )
        values[place] = value[client] if isinstance(value, dict) else value
    return values


def _labels_of(stream, model, ids, agent, labels):
    """Labels (n,) of all agents of a call; None where they are not given or not needed."""
    values = np.full(len(ids), None, dtype=object)
    new = agent >= len(stream.agents.ids)
    if labels is None:
        if model.decision == "oracle" and new.any():
            raise ValueError("decision='oracle' needs labels, one for every client; got None.")
        return values
    if model.decision != "oracle":
        raise ValueError(f"labels go with decision='oracle'; got decision={model.decision!r}.")
    if isinstance(labels, pd.Series):
        if not labels.index.is_unique:
            raise ValueError("labels must have one entry for a client; its index has duplicates.")
        labels = labels.to_dict()
    if not isinstance(labels, dict):
        labels = np.asarray(labels)
        if labels.shape != ids.shape:
            raise ValueError(
                f"labels must be a dict, or hold one label for each of the {len(ids)} clients in "
                f"the order of their ids; got shape {labels.shape}."
            )
        labels = dict(zip(ids.tolist(), labels.tolist(), strict=True))
    values[new] = _value_by_id("labels", labels, ids[new])
    values[~new] = [labels.get(client) for client in ids[~new].tolist()]
    missing = pd.isna(values) & new
    if missing.any():
        raise ValueError(f"the label of client {ids[missing].tolist()[0]!r} is missing.")
    for client, k, label in zip(ids[~new].tolist(), agent[~new], values[~new], strict=True):
        if label is not None and label != stream.agents.labels[k]:
            raise ValueError(
                f"the label of client {client!r} was {stream.agents.labels[k]!r} when it joined "
                f"and is {label!r} now; call fit to begin a new stream."
            )
    return values


def _check_horizon(stream, model, everyone, agents):
    """Refuse rows beyond the horizon before any of them is used."""
    if model.horizon is None:
        return
    after = np.bincount(agents, minlength=len(everyone.ids))
    after[: len(stream.senders.rows)] += stream.senders.rows
    if after.max() > model.horizon:
        late = everyone.ids.tolist()[after.argmax()]
        raise ValueError(
            f"horizon={model.horizon}, but client {late!r} would have {after.max()} rows; none of "
            "this call was used. Fit with a larger horizon, or with horizon=None."
        )


def _moments(means, variances):
    """Mean of a population from means (n,) of known variances, its error and spread, by moments."""
    if len(means) == 0:  # pairs that have not exchanged a message yet
        return (math.nan, math.nan, math.nan)
    weight = 1 / variances
    if weight.sum() == 0:  # a single row
        return (float(means.mean()), math.inf, 0.0)
    centre = weight @ means / weight.sum()
    # DerSimonian and Laird: the excess of the squares over their errors, divided by its factor.
    factor = weight.sum() - weight @ weight / weight.sum()
    excess = weight @ (means - centre) ** 2 - (len(means) - 1)
    between = max(excess / factor, 0.0) if factor > 0 else 0.0
    weight = 1 / (variances + between)
    return (
        float(weight @ means / weight.sum()),
        float(1 / math.sqrt(weight.sum())),
        math.sqrt(between),
    )
