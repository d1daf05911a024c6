"""What the PPSGD regressor and classifier share: rounds, and the models that they leave."""

import math
from numbers import Integral, Real
from os import PathLike

import numpy as np
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator, clone
from sklearn.callback import CallbackSupportMixin, with_callbacks
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._compat import Interval, StrOptions, fit_context, num_samples
from pfl_sklearn._rounds.checkpoint import Checkpoint
from pfl_sklearn._rounds.loop import both, observer, run_rounds
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.linear_model._ppsgd._fit import (
    check_continues,
    check_converged,
    check_learning_rate,
    fingerprints,
    first_state,
    linear_predictors,
    make_task,
    models,
    progress_after,
    rounds_of_a_pass,
    with_intercept,
)
from pfl_sklearn.linear_model._ppsgd._private import (
    check_privacy,
    is_private,
    mechanism_of,
    relation_of_rounds,
    report_of,
    round_events,
)
from pfl_sklearn.privacy import PrivacyLedger, PrivacyReport
from pfl_sklearn.privacy._ledger import charge_events
from pfl_sklearn.privacy._report import warn_once
from pfl_sklearn.privacy._search_cost import warn_of_search

_NAMES = (  # released, and not
    ("population_coef_", "population_intercept_", "the population model of every round"),
    ("local_coef_", "coef_", "intercept_", "history_", "clients_", "n_samples_per_client_"),
)


class BasePPSGD(CallbackSupportMixin, ClientMixin, BaseEstimator):
    """Rounds of PPSGD, and the models that they leave.

    A subclass reads its targets (`_read`) and turns predictors into predictions.
    """

    _client_attributes = ("_local", "n_samples_per_client_")
    _population_attributes = ("_population",)
    _state_attributes = (
        "_single",
        "classes_",
        "n_rounds_",
        "learning_rate_",
        "noise_multiplier_",
    )

    _parameter_constraints = {
        "alpha": [Interval(Real, 0, math.inf, closed="both")],
        "learning_rate": [
            Interval(Real, 0, None, closed="neither"),
            StrOptions({"auto", "theory"}),
        ],
        "n_rounds": [Interval(Integral, 1, None, closed="left")],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "client_fraction": [Interval(Real, 0, 1, closed="right")],
        "sampling": [StrOptions({"poisson", "fixed"})],
        "weighting": [StrOptions({"samples", "clients"})],
        "average": ["boolean"],
        "fit_intercept": ["boolean"],
        "shuffle": ["boolean"],
        "smoothness": [Interval(Real, 0, None, closed="neither"), None],
        "solution_norm": [Interval(Real, 0, None, closed="neither"), None],
        "gradient_std": [Interval(Real, 0, None, closed="neither"), None],
        "epsilon": [Interval(Real, 0, math.inf, closed="right")],
        "noise_multiplier": [Interval(Real, 0, None, closed="left"), None],
        "delta": [Interval(Real, 0, 1, closed="left")],
        "clip_norm": [Interval(Real, 0, None, closed="neither"), None],
        "clip_quantile": [Interval(Real, 0, 1, closed="neither"), None],
        "ledger": [PrivacyLedger, None],
        "warm_start": ["boolean"],
        "checkpoint": [str, PathLike, None],
        "checkpoint_every": [Interval(Integral, 1, None, closed="left")],
        "unseen": [StrOptions({"population", "error"})],
        "n_jobs": [Integral, None],
        "random_state": ["random_state"],
    }

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, *, groups=None):
        """Run `n_rounds` rounds; with `warm_start` those that are missing of them.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If parameters contradict one another, or the data do not go with them.
        DivergenceError
            If the rounds diverge. In either case the estimator is as it was. With noise a single
            client could cause that, and the error would tell of it: a client whose loss is not
            finite then keeps the model that it had, and sends nothing.
        """
        earlier = self._earlier() if self.warm_start else None
        self._check_parameters()
        missing = self.n_rounds - (earlier.state.round if earlier else 0)
        if missing < 0:
            raise ValueError(
                f"n_rounds={self.n_rounds} is less than the {earlier.state.round} rounds that were "
                "run before; with warm_start=True it counts them in."
            )
        events = round_events(self, missing, earlier and earlier.spent)
        mechanism_of(self, events)  # refuses bounds before anything is charged
        checkpoint = self._open_checkpoint(missing)
        if checkpoint is None or not checkpoint.resumes:
            charge_events(self, events, first_round=self.n_rounds - missing)
        warn_of_search(self)
        clients = self._encode_fit(groups, num_samples(X))
        if earlier and not np.array_equal(clients.ids, earlier.clients):
            raise ValueError(
                "warm_start=True continues with the clients of the rounds before, and groups holds "
                "others; use partial_fit, or warm_start=False."
            )
        drawn = checkpoint and checkpoint.entropy
        task = self._read_task(X, y, clients, earlier, drawn=drawn)
        return self._train((X, y, groups), task, missing, events, checkpoint)

    def _partial_fit(self, X, y, groups, classes=None):
        """One more pass over rows, of clients seen before or new."""
        earlier = self._earlier()
        self._check_parameters()
        clients = self._encode_fit(groups, num_samples(X))
        missing = rounds_of_a_pass(clients, self.batch_size, self.client_fraction)
        events = round_events(self, missing)
        mechanism_of(self, events)
        charge_events(self, events, first_round=earlier.state.round if earlier else 0)
        task = self._read_task(X, y, clients, earlier, classes)
        return self._train((X, y, groups), task, missing, events)

    def _earlier(self):
        """Rounds to go on from, or None before the first fit."""
        earlier = getattr(self, "_progress", None)
        if earlier is None and hasattr(self, "privacy_"):
            raise ValueError(
                f"this {type(self).__name__} is a model that was handed out (by release, "
                "for_client or a private selection): its rounds cannot go on. Fit a new one."
            )
        return earlier

    def _check_parameters(self):
        check_privacy(self)
        check_learning_rate(self)

    def _open_checkpoint(self, missing):
        """Checkpoint of a run of `missing` rounds, or None."""
        if self.checkpoint is None:
            return None
        unrelated = ("n_jobs", "ledger", "checkpoint", "checkpoint_every", "unseen", "random_state")
        params = {name: repr(value) for name, value in self.get_params(deep=False).items()}
        named = {name: value for name, value in params.items() if name not in unrelated}
        named |= {"class": type(self).__name__, "rounds to run": missing}
        named["ledger"] = None if self.ledger is None else self.ledger._id
        return Checkpoint(self.checkpoint, self.checkpoint_every, named)

    def _read_task(self, X, y, clients, earlier, classes=None, drawn=None):
        """Checked data, and what rounds on them need; without a seed they draw from `drawn`."""
        if earlier:
            check_continues(earlier, self.fit_intercept, self.average, self.n_features_in_)
        targets = self._read(X, y, earlier, classes)
        seed = drawn if self.random_state is None else self.random_state
        return make_task(self, targets, clients, earlier, seed)

    def _train(self, data, task, missing, events, checkpoint=None):
        """Run the missing rounds on copies, and set all fitted attributes at the end."""
        mechanism = mechanism_of(self, events, task.pairs is not None)
        state = first_state(task, mechanism, self.clip_quantile)
        last = state.round + missing
        if checkpoint is not None:
            state = checkpoint.restore(state, fingerprints(task))
        shared = {
            **task.targets.attributes,
            "_fitted_with_groups": data[2] is not None,
            "privacy_": PrivacyReport.unprotected("The fit has not ended."),
        }

        def watch(now):
            return {**shared, **models(now.copy(), task.roster.ids, task.pairs)}

        observe = observer(self, *data, last - state.round, watch)
        if checkpoint is not None:
            observe = both(observe, checkpoint.observe)
        run = task.run
        protected = is_private(self)
        run_rounds(run.method, run.rows, state, run.plan(last), mechanism, observe, protected)
        check_converged(state, run.learning_rate, protected)
        progress = progress_after(task, state, events, last)
        self._store(shared, progress, report_of(self, progress, _NAMES))
        if checkpoint is not None:
            checkpoint.remove()
        warn_once(self.privacy_)
        return self

    def _privacy_events(self):
        """Accounting events of a fit from the start."""
        return round_events(self, self.n_rounds)

    @property
    def _privacy_relation(self):
        return relation_of_rounds(self)

    def _store(self, shared, progress, report):
        """Set all fitted attributes."""
        found = {**shared, **models(progress.state, progress.clients, progress.pairs)}
        for name, value in found.items():
            setattr(self, name, value)
        self._progress = progress
        self.n_samples_per_client_ = progress.n_rows
        self.n_rounds_ = progress.state.round
        self.learning_rate_ = progress.learning_rate
        self.noise_multiplier_ = progress.noise_multiplier
        self.history_ = {name: np.array(values) for name, values in progress.state.history.items()}
        self.privacy_ = report

    def _inputs(self, X):
        """Attributes of the input's columns."""
        probe = clone(self)
        validate_data(probe, X, skip_check_array=True)
        names = ("n_features_in_", "feature_names_in_")
        return {name: getattr(probe, name) for name in names if hasattr(probe, name)}

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _features(self, features, earlier):
        """Checked features in the form that the rounds have."""
        if issparse(features):
            features = csr_array(features)
        if earlier is None or issparse(features) == (earlier.pairs is not None):
            return features
        return features.toarray() if issparse(features) else csr_array(features)

    def _predictors(self, X, groups):
        """Predictors (n, c) of rows under the models of their clients."""
        codes = self._encode_predict(X, groups)
        X = validate_data(self, X, reset=False, dtype=np.float64, accept_sparse="csr")
        design = with_intercept(X, len(self._population) > X.shape[1])
        local = self._local if hasattr(self, "clients_") else None
        return linear_predictors(design, codes, self._population, local)

    @property
    def population_coef_(self):
        """Coefficients w ([c,] d) of the population model."""
        return self._coefficients(self._population)

    @property
    def population_intercept_(self):
        """Intercepts ([c]) of the population model."""
        return self._intercepts(self._population)

    @property
    def local_coef_(self):
        """Coefficients theta_i (n_clients, [c,] d) of the clients' own models.

        If `X` was sparse, they are a sparse array (n_clients * c, d): c rows for every client.
        """
        self._require_fitted("clients_")
        if hasattr(self._local, "matrix"):
            return self._local.matrix()[:, : self.n_features_in_]
        return self._coefficients(self._local)

    @property
    def local_intercept_(self):
        """Intercepts (n_clients[, c]) of the clients' own models."""
        self._require_fitted("clients_")
        return self._intercepts(self._dense_local())

    def _dense_local(self):
        return self._local.dense() if hasattr(self._local, "dense") else self._local

    @property
    def coef_(self):
        """Coefficients w + theta_i (n_clients, [c,] d) of every client."""
        self._require_fitted("clients_")
        return self.population_coef_ + self._coefficients(self._dense_local())

    @property
    def intercept_(self):
        """Intercepts (n_clients[, c]) of every client."""
        return self.population_intercept_ + self.local_intercept_

    def _coefficients(self, values):
        """Coefficients ([m,] [c,] d) without the intercept, of values ([m,] p, c)."""
        check_is_fitted(self)
        found = np.moveaxis(values[..., : self.n_features_in_, :], -1, -2)
        return found[..., 0, :] if self._single else found

    def _intercepts(self, values):
        """Intercepts ([m,] [c]) of values ([m,] p, c); 0 without one."""
        check_is_fitted(self)
        if values.shape[-2] > self.n_features_in_:
            found = values[..., -1, :]
        else:
            found = np.zeros_like(values[..., 0, :])
        found = found[..., 0] if self._single else found
        return float(found) if found.ndim == 0 else found
