"""Means of many agents who receive values one at a time and help one another."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from pfl_sklearn._client_means import BaseClientMean, MeanRegressorMixin
from pfl_sklearn._clients import EncodedClients
from pfl_sklearn._columns import check_float_range, name_bad_columns
from pfl_sklearn._compat import StrOptions, fit_context
from pfl_sklearn._parameters import (
    AT_LEAST_ONE,
    BETWEEN_0_AND_1,
    POSITIVE,
    UNSEEN,
    PrivateFit,
    parameter,
    with_parameters,
)
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.online import _privacy
from pfl_sklearn.online._collaboration import Collaboration
from pfl_sklearn.online._variances import half_width
from pfl_sklearn.privacy import PrivacyWarning
from pfl_sklearn.privacy._report import finalize_report, inherit_warnings

_PAIRS_PER_SECOND = 8e7  # that "test" compares, as measured with 8,000 agents
_MANY_PAIRS = 60 * _PAIRS_PER_SECOND


@with_parameters
class CollaborativeMean(MeanRegressorMixin, PrivateFit, BaseClientMean):
    """Means of agents who receive values one at a time, helped by those with the same mean.

    Every agent (a client) has a stream of values and estimates its own mean at every step. It knows
    its own values exactly and receives a noisy mean from every other agent. Agents with equal means
    form a class, but the classes are unknown. Each agent infers whose means are equal to its own
    and combines them.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted ids; row i of every per-client array is ``clients_[i]``.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Values of each client so far.
    means_, stds_ : ndarrays of shape (n_clients,)
        Each client's estimate of its mean, from its own exact values and the messages, and its
        standard deviation (for "test" and "oracle", if those who were accepted are of one class).
        With estimated variances, that of a normal distribution with the same central 95 % as
        Student's; infinite for a single value of unknown variance without `bounds`.
    local_means_ : ndarray of shape (n_clients,)
        Means of the clients' own values, clipped to `bounds`.
    received_means_, received_stds_ : ndarrays of shape (n_clients,) or (n_clients, n_clients)
        Means of the clients according to the messages, and their standard deviations; between pairs
        with recipients first. NaN and infinity if nothing was received yet; on the diagonal, what a
        client knows of itself. Computed on access.
    classes_of_ : csr_array of shape (n_clients, n_clients)
        Clients that each client assigns to its class, itself included ("mixture": with a posterior
        probability above one half). Computed on access; up to ``n_clients ** 2`` entries.
    n_clipped_ : int
        Values that were outside `bounds`.
    population_mean_, population_mean_std_, population_std_ : float
        Mean of the clients' means as the messages show it, its standard error, and the standard
        deviation of means between clients.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.
    privacy_ : PrivacyReport
        A single value is protected, with `epsilon` against all others together and
        `epsilon_per_recipient` against one of them; `epsilon_whole_client` is for all values of a
        client up to the horizon (or so far, without one).

    Raises
    ------
    ValueError
        For ids that are missing or of mixed types, missing values in `y`, more values than
        `horizon` (nothing of the call is used then), a parameter that changes during a stream, a
        value outside `bounds` with ``out_of_bounds="error"``, a finite `epsilon` without `bounds`,
        messages between pairs without `noise_variance`, and `weights`, `schedule` or `accounting`
        that do not go with `mechanism`.

    Notes
    -----
    Algorithm 1 and sections III and IV of Yakimenka et al. (2024), with these differences;
    :ref:`streams` has the mathematics:

    - Its epsilon is for a single recipient. By default an agent sends one stream to everybody.
    - For PM-II it adds up the epsilons of the levels of a tree; we add up squares of the
      Gaussian-DP parameter. So PM-II has less noise than PM-I, not more, with
      ``accounting="exact"``.
    - Its restricted schedule leaks an agent's mean; the report says so.
    - The range of values must be known for all agents together, not for those of a class.
    - It accepts every agent that a test does not reject, which for a long time is worse than
      working alone. The default averages over mixtures instead.

    Messages are only post-processed, so classes, weights and decisions cost no privacy. Unknown
    variances are estimated from sums of squares in the messages, which cost no epsilon; to its own
    values a client adds up to four at the common variance. Intervals are normal, or Student's where
    variances are estimated; "test" and "oracle" assume that all accepted agents are of one class.

    Messages do not depend on how rows are split into calls (with a seed, if every client has a row
    in every step). Estimates depend on it a little: classes are looked for again only when the
    messages hold 2 % more information.

    Pickles contain exact sums and the noise of the messages; the promise does not cover them. Do
    not continue two copies of one stream: they would send different sums with equal noise.

    Memory per client and coordinate (two without `noise_variance`): 8 (2 d + 3) bytes for "sqrt",
    where d is 8 for a horizon of 1,000, 11 for 30,000 and 16 without one; 8 (4 levels + 3) for
    "tree", with 11 levels for 1,000 steps. Pairs take 16 bytes each ("pm1", ``weights="last"``). A
    call takes them twice, because it works on a copy: if it fails, the stream stays as it was.

    References
    ----------
    Yakimenka, Y., Weng, C.-W., Lin, H.-Y., Rosnes, E. and Kliewer, J. (2024).
    Differentially-private collaborative online personalized mean estimation. arXiv:2411.07094.

    Fichtenberger, H., Henzinger, M. and Upadhyay, J. (2023). Constant matters: fine-grained error
    bound on differentially private continual observation. ICML.

    Examples
    --------
    Two hundred shops of two classes; a call takes in twenty days. The noise is new in every run.

    >>> import numpy as np
    >>> from pfl_sklearn.online import CollaborativeMean
    >>> rng = np.random.default_rng(0)
    >>> shop = np.arange(200)
    >>> means = np.where(shop < 100, 0.3, 0.7)
    >>> model = CollaborativeMean(epsilon=4.0, bounds=(0, 1), horizon=200)
    >>> for _ in range(10):  # a gain of 0 would be nine standard deviations away
    ...     y = np.clip(means + rng.normal(scale=0.2, size=(20, 200)), 0, 1).ravel()
    ...     model = model.partial_fit(np.zeros((4000, 1)), y, groups=np.tile(shop, 20))
    >>> alone, together = model.local_means_ - means, model.means_ - means
    >>> bool(np.abs(together).mean() < np.abs(alone).mean())
    True
    """

    __metadata_request__fit = {"groups": True, "labels": True}
    __metadata_request__partial_fit = {"groups": True, "labels": True}

    # One value of a stream is protected; the cost of all of a client's grows with their number.
    _privacy_unit = "row"
    # Student's intervals need degrees of freedom, too.
    _client_attributes = ("n_samples_per_client_", "means_", "stds_", "_freedom", "local_means_")
    _population_attributes = _privacy.POPULATION_ATTRIBUTES

    epsilon = parameter(
        also="""
            It protects a single value of an agent, over its whole stream. With messages between
            pairs of agents it holds against a single recipient; the report says what all recipients
            together can tell.
        """,
    )
    delta = parameter(
        default=1e-6,
        also="The default is the paper's: values are protected, and there are many of a client.",
    )
    bounds: ArrayLike | dict[Any, Any] | None = parameter(
        default=None,
        ranges=["array-like", dict, None],
        text="""
            tuple (low, high), dict or None
                Range of the values, or a dict with a range for every client id, to which those of
                new clients may be added. Choose it without looking at the data; it is needed if
                `epsilon` is finite.
        """,
    )
    horizon: int | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int or None
                Largest number of values of an agent. None: any number, which about doubles the
                variance of the noise. "pm2" plans for pairs of the agents of the first call, and so
                needs less noise the more of them there are.
        """,
    )
    mechanism: str = parameter(
        default="sqrt",
        ranges=[StrOptions({"sqrt", "tree", "pm1", "pm2"})],
        text="""
            {"sqrt", "tree", "pm1", "pm2"}
                Noise of the messages:

                - "sqrt": one stream of messages for everybody, with noise from the square-root
                  factorization;
                - "tree": the same with noise from a binary tree of partial sums;
                - "pm1", "pm2": the paper's mechanisms. Every pair of agents has noise of its own.
        """,
    )
    weights: str = parameter(
        default="auto",
        ranges=[StrOptions({"auto", "last", "mom", "wmom", "blue"})],
        text="""
            {"auto", "last", "mom", "wmom", "blue"}
                How a recipient forms a mean from a sender's messages:

                - "last": the latest mean;
                - "mom": the mean of all means so far;
                - "wmom": the mean of the means since the last message whose number is a power of
                  two;
                - "blue": the linear combination with the least noise.

                "auto" is "blue" for "sqrt" and "tree", "last" for "pm1" and "wmom" for "pm2".
                Without noise "auto" and "blue" are "last", which has the least variance then.
        """,
    )
    schedule: str = parameter(
        default="auto",
        ranges=[StrOptions({"auto", "round_robin", "restricted", "broadcast"})],
        text="""
            {"auto", "round_robin", "restricted", "broadcast"}
                Recipients of messages: at each of its steps an agent sends one message to everybody
                ("broadcast"), or asks one other in turn ("round_robin"), or one of those that it
                takes for its class ("restricted", which leaks its mean). "auto" is "broadcast" for
                "sqrt" and "tree", and "round_robin" for "pm1" and "pm2".
        """,
    )
    decision: str = parameter(
        default="mixture",
        ranges=[StrOptions({"mixture", "test", "oracle"})],
        text="""
            {"mixture", "test", "oracle"}
                How an agent finds its class:

                - "mixture": mixtures of one to five classes, averaged over numbers and spreads of
                  classes;
                - "test": everybody whose mean a test does not tell apart from its own (the
                  paper's);
                - "oracle": those with the same label in `labels`.

                The last two compare all pairs of agents, and warn before if these take minutes.
        """,
    )
    noise_variance: float | dict[Any, float] | None = parameter(
        default=None,
        ranges=[POSITIVE, dict, None],
        text="""
            float, dict or None
                Variance of an agent's values, or a dict with one for every client id. None:
                messages also hold the sum of squares, which costs no further epsilon.
        """,
    )
    confidence: float | None = parameter(
        default=None,
        ranges=[BETWEEN_0_AND_1, None],
        text="""
            float in (0, 1) or None
                Confidence of the test. None: 1 - .05 / ln(t + 1) after t values.
        """,
    )
    accounting: str = parameter(
        default="exact",
        ranges=[StrOptions({"exact", "printed"})],
        text="""
            {"exact", "printed"}
                "printed" is the paper's noise for "pm1" and "pm2". The report's epsilon is exact
                with both.
        """,
    )
    out_of_bounds: str = parameter(
        default="clip",
        ranges=[StrOptions({"clip", "error"})],
        text="""
            {"clip", "error"}
                What to do with values outside `bounds`: clip and count them, or raise an error.
        """,
    )
    ledger = parameter(also="It records a stream before its first value is read.")
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(
        default=None,
        ranges=[Integral, None],
        text="""
            int or None
                Processes for ``decision="mixture"`` where agents receive different messages.
        """,
    )
    random_state = parameter()

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self, X: TableLike, y: TableLike = None, *, groups: TableLike = None, labels: Any = None
    ) -> Self:
        """Begin a new stream with the given rows.

        Parameters
        ----------
        X : array-like of n_rows rows
            Only its length and feature names are read.
        y : array-like of shape (n_rows,)
            Values; those of one agent are in the order of time.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.
        labels : dict, Series, or array-like of shape (n_clients,), default=None
            For ``decision="oracle"``: the class of every client, by id (a Series by its index), or
            in the order of the ids.
        """
        _privacy.check_promise(self)
        self._charge()  # a stream is paid for as a whole, before any value is read
        y = _checked_values(self, X, y)
        clients = self._encode_fit(groups, len(y))
        stream = Collaboration(self, groups is not None, clients.ids)
        attributes = self._received(stream, X, y, clients, labels, begins=True)
        # Where warnings are errors, the model stays as it was.
        attributes["privacy_"] = finalize_first_report(self, attributes["privacy_"])
        self._set_fitted(attributes)
        return self

    def _warn_of_pairs(self, n_agents):
        if self.decision == "mixture" or n_agents**2 < _MANY_PAIRS:
            return
        minutes = n_agents**2 / _PAIRS_PER_SECOND / 60
        warn_caller(
            f"decision={self.decision!r} compares all {n_agents**2:.1e} pairs of {n_agents} "
            f"agents, which takes about {minutes:.0f} min; decision='mixture' compares none.",
            UserWarning,
        )

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self, X: TableLike, y: TableLike = None, *, groups: TableLike = None, labels: Any = None
    ) -> Self:
        """Continue the stream, or begin one.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in :meth:`fit`.
        y : array-like of shape (n_rows,)
            Further values. The rows of an agent are its next steps, in their order: in step j of
            the call all agents that have a j-th row receive it, then they exchange messages.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; agents may be silent, or new.
        labels : dict, Series, or array-like of shape (n_clients,), default=None
            For ``decision="oracle"``: the class of every new client, by id (a Series by its index),
            or of every client of this call in the order of the ids.
        """
        stream = getattr(self, "_stream", None)
        # Copies that were handed out hold neither exact sums nor the noise of the messages.
        if stream is None and hasattr(self, "privacy_"):
            raise ValueError(
                "this model was handed out without the stream's state, so that it cannot go on; "
                "use the one that it was taken from."
            )
        if stream is None:
            return self.fit(X, y, groups=groups, labels=labels)
        _privacy.check_promise(self)
        stream.check(self, groups is not None)  # other parameters would break its promise
        y = _checked_values(self, X, y)
        clients = EncodedClients(np.zeros(1, dtype=np.intp), np.zeros(len(y), dtype=np.intp))
        if groups is not None:  # only the first call without groups warns
            clients = self._encode_fit(groups, len(y))
        # An interrupted call leaves the old stream as it was.
        attributes = self._received(stream.copy(), X, y, clients, labels, begins=False)
        attributes["privacy_"] = inherit_warnings(self.privacy_, attributes["privacy_"])
        self._set_fitted(attributes)
        return self

    @property
    def classes_of_(self) -> csr_array:
        """Clients that each client takes for its class: sparse booleans (n_clients, n_clients)."""
        return self._open_stream().same_class(self.n_jobs)

    @property
    def received_means_(self) -> Floats:
        """Means of the clients as messages show them: (n_clients,) if these go to everybody.

        Otherwise (n_clients, n_clients), with recipients first, own estimates in the diagonal, and
        NaN without messages.
        """
        return self._open_stream().received()[0]

    @property
    def received_stds_(self) -> Floats:
        """Standard deviations of `received_means_`; infinite without messages."""
        return self._open_stream().received()[1]

    @property
    def _new_client_std(self):
        """Standard deviation of the mean of a client without values around the population's."""
        return math.hypot(self.population_std_, self.population_mean_std_)

    def _interval(self, level):
        """Bounds of the clients' central intervals, normal or Student's."""
        # Deviations are right for 95 %; at other levels Student's quantiles have another ratio.
        half = half_width(self.stds_, self._freedom, level)
        return self.means_ - half, self.means_ + half

    def _privacy_events(self):
        """Accounting events of a stream."""
        return _privacy.stream_events(self)

    def _population_copy(self):
        """Clone with the population attributes, without those of clients and of the server."""
        model = super()._population_copy()
        # Dicts by client name the others' ids, which a client or the public need not know.
        for name in ("bounds", "noise_variance"):
            if isinstance(getattr(model, name), dict):
                model.set_params(**{name: None})
        return model

    def _open_stream(self):
        """The stream of the model; raise NotFittedError if it has none."""
        self._require_fitted("_stream")
        return self._stream

    def _received(self, stream, X, y, clients, labels, begins):
        """Fitted attributes of a model whose stream takes in the rows of a call."""
        arrivals = stream.read(self, clients, y, labels)
        # Refusals come before the messages, which take most of a call's time.
        columns = self._column_attributes(X, reset=begins)
        stream.take(self, *arrivals)
        self._warn_of_pairs(len(stream.agents.ids))
        return self._attributes_of(stream) | columns

    def _attributes_of(self, stream):
        """Fitted attributes of a model with this stream."""
        order = stream.by_id  # agents are kept in the order in which they joined
        means, variances, freedom, local = stream.estimates(self.n_jobs)
        mean, mean_std, std = stream.population()
        return {
            "_stream": stream,
            "_fitted_with_groups": stream.with_groups,
            "clients_": stream.agents.ids[order],
            "n_samples_per_client_": stream.senders.rows[order],
            "n_clipped_": int(stream.n_clipped.sum()),
            "means_": means,
            "stds_": np.sqrt(variances),
            "local_means_": local,
            "_freedom": freedom,
            "population_mean_": mean,
            "population_mean_std_": mean_std,
            "population_std_": std,
            "privacy_": _privacy.report(self, stream.senders, len(order)),
        }


def _checked_values(model, X, y):
    """Validated values (n,) of a call."""
    model._require_targets(y)
    y = column_or_1d(y, warn=True)
    with name_bad_columns(private=math.isfinite(model.epsilon)):
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
    check_consistent_length(X, y)
    if math.isinf(model.epsilon):  # with privacy the error would reveal a value
        check_float_range("y", y)
    return y


def finalize_first_report(model, report):
    """Report of a first call; warn of its weaknesses, and of a schedule that breaks the promise."""
    if model.schedule == "restricted" and report.mechanism != "none":
        warn_caller(report.warnings[-1], PrivacyWarning)
    return finalize_report(model, report)
