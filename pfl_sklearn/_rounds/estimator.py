"""The base of estimators on rounds, whatever their model.

It leads from parameters to events and a ledger entry, from a table to a run, and from a run to
fitted attributes and more rounds. A family of models adds what :class:`BaseRounds` names.
"""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import (
    BaseEstimator,
    fit_context,
    num_samples,
    with_callbacks,
)
from pfl_sklearn._fitted import check_report
from pfl_sklearn._labels import check_classes
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._rounds.checkpoint import Checkpoint, describe_parameters
from pfl_sklearn._rounds.parameters import RoundsParameters
from pfl_sklearn._rounds.personal import (
    encode_personal,
    expected_rounds,
    frozen_progress,
    personal_part,
    with_personal,
)
from pfl_sklearn._rounds.privacy import (
    check_noise_parameters,
    fit_events,
    is_private,
    relation_of_rounds,
    round_mechanism,
    rounds_report,
)
from pfl_sklearn._rounds.run import (
    RoundCallbacks,
    arrays_of_fit,
    first_state,
    plan_fit,
    progress_after,
    rounds_run,
    seeds,
    warn_of_few_clients,
    without_weights,
)
from pfl_sklearn._rounds.stopping import (
    check_converged,
    check_final_loss,
    run_to_end,
    warn_of_failures,
    with_last_phase,
)
from pfl_sklearn._typing import TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.privacy._ledger import charge_events
from pfl_sklearn.privacy._report import finalize_report, inherit_warnings

if TYPE_CHECKING:
    from pfl_sklearn._compat import CallbackSupportMixin
else:
    from sklearn.callback import CallbackSupportMixin  # imports rich, which only rounds need

_PERSONALIZED = (
    "personal models made by personalize, which are the client's own and which nothing protects"
)
_PRIVATE_ROUNDS = 100  # with noise, where n_rounds is None: the data have no say in it


@with_parameters
class BaseRounds(RoundsParameters, CallbackSupportMixin, ClientMixin, BaseEstimator):
    """Fits that run rounds: warm starts, checkpoints, ledger, callbacks, seeds and reports.

    A family of models provides

    - ``_read(X, y, earlier, **options)``: a :class:`CheckedTable` with as many features as the
      `earlier` rounds had, if there are any;
    - ``_make_rounds(table, plan)``: the :class:`ModelRounds` of a :class:`FitPlan`, or a ValueError
      if the earlier rounds had a model of another shape;
    - ``_models(state, ids, layout)``: the fitted attributes of a state, of which `_server` holds
      the server's arrays;
    - ``_frozen_layout()``: what `layout` is for clients of whom the fit knows nothing;
    - ``_rounds_of_a_pass(clients)``: rounds of one ``partial_fit`` without noise;
    - ``_check_parameters()``, if parameters of its own can contradict one another;
    - ``_check_ahead(X, last)``, if its model may refuse rows by their shape and type, or rounds;
    - `_noisy_steps`, if clients add the noise in their local steps;
    - ``_releases_labels(earlier)``, if the clients' label frequencies may be summed with noise
      before the rounds, and `_label_share`, the share of the budget that this takes;
    - `_assumptions`: what the privacy of a fit rests on besides;
    - `tol`, `max_rounds` and `validation_fraction` among its parameters, if `n_rounds` may be None:
      without noise ``_make_rounds`` then gives a rule, if ``plan.until_flat``;
    - `_optional_names`, fitted attributes that not every fit has, and `_released_names` and
      `_kept_names`, what the privacy report covers and what it does not.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client in ``fit`` and all calls to ``partial_fit`` since.
    n_rounds_ : int
        Rounds that led to the models.
    noise_multiplier_ : float
        Noise multiplier of the last call; 0 without noise.
    history_ : dict of ndarrays, one value per round
        "n_clients" that took part, "bytes_sent" in their messages, their mean "loss" before the
        round (NaN if nobody took part, infinite if it overflowed), the share that was "clipped",
        and the bound "clip_norm". These values are exact, hence not protected.
    privacy_ : PrivacyReport
        What the fit promises, and what it does not.
    n_features_in_ : int
        Number of features.
    feature_names_in_ : ndarray of shape (d,)
        Their names, if `X` was a data frame.
    """

    _released_names: ClassVar[tuple[str, ...]] = ()
    _kept_names: ClassVar[tuple[str, ...]] = ()
    _optional_names: ClassVar[tuple[str, ...]] = ()
    _normalizes_messages = False  # whether noise without clip_norm scales messages to length one

    @without_weights
    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: TableLike, y: Any, *, groups: Any = None) -> Self:
        """Run `n_rounds` rounds; with `warm_start` those that are missing of them.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features. Neural networks take rows of any shape, but no sparse matrices. Rows may stay
            :ref:`in a file <rows_in_files>`.
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
            Responses, or class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: one client, with a warning.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If parameters contradict one another or do not go with the data.
        DivergenceError
            If a model or a loss is not finite, or the training loss ends a thousand times above
            that of the best constant and that before the rounds. (Twice is a
            ``ConvergenceWarning``.) Fits with noise never look at the loss, which would
            reveal something about single clients: a client whose loss is not finite keeps the model
            that it had and sends nothing.

        Notes
        -----
        After an error the estimator is as it was before.
        """
        earlier = self._earlier() if self.warm_start else None
        if earlier:
            earlier = earlier._replace(n_rows=np.zeros_like(earlier.n_rows))  # seen again
        self._check_all_parameters()
        n_rounds = self._missing_rounds(earlier)
        events = fit_events(self, n_rounds, earlier, earlier and earlier.spent)
        mechanism = round_mechanism(self, events)  # refuses bounds before anything is charged
        checkpoint = self._open_checkpoint(n_rounds)
        self._check_ahead(X, rounds_run(earlier) + n_rounds)
        if checkpoint is None or not checkpoint.resumes:
            charge_events(self, events, first_round=rounds_run(earlier))
        clients = self._encode_fit(groups, num_samples(X))
        if earlier and not np.array_equal(clients.ids, earlier.clients):
            raise ValueError(
                "groups holds other clients than the rounds before, which warm_start=True "
                "continues; use partial_fit, or warm_start=False."
            )
        table = self._read(X, y, earlier)
        seed, flat = self._seed(checkpoint), self._ends_when_flat
        plan = plan_fit(self, clients, earlier, n_rounds, events, mechanism, seed, flat)
        rounds = self._make_rounds(table, plan)
        return self._train((X, y, groups), table, plan, rounds, checkpoint)

    def _partial_fit(self, X, y, groups, **options):
        """Go on over rows of clients seen before or new ones.

        Without noise this is one pass. The number of rounds of a pass depends on the rows, so with
        noise it is `n_rounds` rounds, which are charged before any data are read.
        """
        earlier = self._earlier()
        self._check_all_parameters()
        n_rounds = self._last_round(0)
        events = fit_events(self, n_rounds, earlier)
        mechanism = round_mechanism(self, events)
        self._check_ahead(X, rounds_run(earlier) + n_rounds)
        charge_events(self, events, first_round=rounds_run(earlier))
        clients = self._encode_fit(groups, num_samples(X))
        if not is_private(self):
            n_rounds = self._rounds_of_a_pass(clients)
        table = self._read(X, y, earlier, **options)
        seed = self.random_state
        plan = plan_fit(self, clients, earlier, n_rounds, events, mechanism, seed)
        rounds = self._make_rounds(table, plan)
        warn_of_few_clients(self, plan)
        return self._train((X, y, groups), table, plan, rounds)

    @fit_context(prefer_skip_nested_validation=True)
    def personalize(self, X: TableLike, y: Any, *, groups: Any = None) -> Self:
        """Give new clients, or known ones with new rows, their own part of the model.

        The population model and all other clients stay as they are, bit by bit. Nothing is
        released, so this costs no privacy. Models of ``release`` or ``for_client`` can do it, too.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features, with the columns or the shape that ``fit`` saw. One row of a client is enough,
            unless the network has layers such as ``BatchNorm``.
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
            Responses, or class labels that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: all rows belong to the only client that the model knows,
            or to one new client of a released model.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If the rows do not go with the fit, or clients of the method keep nothing of their own.
        DivergenceError
            If the steps of a client diverge.

        Notes
        -----
        A client takes part in as many rounds as it would on average in a fit of T rounds: about q T
        with the `client_fraction` q, fewer with a `drop_fraction`, and more with `train_unsampled`,
        for the rounds that it catches up on. It trains against the final population model, with the
        learning rates of rounds spread evenly over the T, and then does what clients do after the
        rounds. The result replaces what it had, and depends on its own rows and an integer
        `random_state` alone. Further rounds, of ``partial_fit`` or a ``warm_start``, forget these
        clients: call this again.
        """
        check_is_fitted(self)
        check_report(self)  # it goes on, with the personal parts of clients
        self._check_parameters()
        clients = encode_personal(self, groups, num_samples(X))
        frozen = frozen_progress(self, clients.ids)
        table, drawn = self._read(X, y, frozen), seeds(self.random_state)
        parts = []
        for code in range(len(clients.ids)):
            rows = np.flatnonzero(clients.codes == code)
            client_table = table._replace(features=table.features[rows], y=table.y[rows])
            parts.append(personal_part(self, client_table, clients.ids[[code]], frozen, drawn))
        merged = with_personal(self, clients, parts)
        not_released = dict.fromkeys((*self.privacy_.not_released, _PERSONALIZED))
        report = dataclasses.replace(self.privacy_, not_released=tuple(not_released))
        by_groups = self._fitted_with_groups if hasattr(self, "clients_") else groups is not None
        fitted = {**merged, "privacy_": report, "_fitted_with_groups": by_groups}
        self._set_fitted(fitted, dropped=())
        return self

    def _rounds_of_a_client(self, n_rounds):
        """Rounds of `n_rounds` in which a client takes steps."""
        return expected_rounds(self._participation, n_rounds)

    def _changed_since_fit(self):
        """Error of a model whose clients, or whose population, lack what its parameters ask for."""
        return ValueError(
            f"parameters of this {type(self).__name__} changed since fit, so that its clients have "
            "other parts than these would; fit anew, or set the parameters back."
        )

    @property
    def _ends_when_flat(self):
        """Whether the data say when the rounds of ``fit`` are over."""
        return self.n_rounds is None and not is_private(self)

    def _last_round(self, before):
        """Number of the last round of a fit, at most, after so many rounds before."""
        if self.n_rounds is not None:
            return self.n_rounds
        return before + self.max_rounds if self._ends_when_flat else max(before, _PRIVATE_ROUNDS)

    def _missing_rounds(self, earlier):
        """Rounds that are missing of those of a fit, at most, after the earlier ones."""
        before = rounds_run(earlier)
        missing = self._last_round(before) - before
        if missing < 0:
            raise ValueError(
                f"n_rounds={self.n_rounds} is less than the {before} rounds that were "
                "run before; with warm_start=True it counts them in."
            )
        return missing

    def _seed(self, checkpoint):
        """Seed of a fit; without one of the user's, a checkpoint has the entropy of its rounds."""
        if self.random_state is None and checkpoint is not None:
            return checkpoint.entropy
        return self.random_state

    @property
    def _participation(self):
        """Share of the rounds that a client is expected to take part in."""
        return self.client_fraction * (1 - self.drop_fraction)

    @property
    def _noisy_steps(self):
        """Mechanism of the clients' steps, whatever its noise; None if sums get the noise."""
        return None

    @property
    def _communicates(self):
        """Whether the rounds send anything."""
        return True

    def _releases_labels(self, earlier):
        """Whether the fit sums the clients' label frequencies, with noise, before its rounds."""
        return False

    @property
    def _assumptions(self):
        """Further assumptions of the privacy report."""
        return ()

    def _check_parameters(self):
        """Raise ValueError if parameters of the family contradict one another."""

    def _check_ahead(self, X, last):
        """Raise ValueError if a fit cannot take rows of X's shape and type, or `last` rounds.

        It comes before the charge, and looks at no value.
        """

    def _check_all_parameters(self):
        check_noise_parameters(self)
        check_classes(getattr(self, "classes", None))
        self._check_parameters()

    def _earlier(self):
        """Rounds to go on from, or None before the first fit."""
        earlier = getattr(self, "_progress", None)
        if earlier is None and hasattr(self, "privacy_"):
            raise ValueError(
                f"this {type(self).__name__} is a model that was handed out (by release, "
                "for_client or a private selection), so its rounds cannot go on; fit a new one."
            )
        return earlier

    def _open_checkpoint(self, missing):
        """Checkpoint of a run of `missing` rounds, or None."""
        if self.checkpoint is None:
            return None
        ledger = None if self.ledger is None else self.ledger._id
        more = {**self._defaults(), "rounds to run": missing, "ledger": ledger}
        return Checkpoint(self.checkpoint, self.checkpoint_every, describe_parameters(self, **more))

    def _defaults(self):
        """Components that parameters stand for, and their parameters, as if they had been given."""
        components: dict[str, Any] = {}
        for name, value in self.get_params(deep=False).items():
            component = self._default_component(name, value)
            if component is not None:
                params = component.get_params(deep=True)
                nested = {f"{name}__{part}": value for part, value in params.items()}
                components |= {name: component, **nested}
        return components

    def _train(self, data, table, plan, rounds, checkpoint=None):
        """Run the rounds on copies, and set all fitted attributes at the end."""
        X, y, groups = data
        run = rounds.make_run(plan, self.n_jobs, is_private(self))
        start = partial(first_state, plan, rounds, self.clip_quantile)
        state, ids = start(), plan.clients.ids
        if checkpoint is not None:
            state = checkpoint.restore(state, arrays_of_fit(table, plan))
        unchanged = {
            **table.attributes,
            **rounds.attributes,
            "clients_": ids,
            "_fitted_with_groups": groups is not None,
        }

        def attributes(state):
            return {**unchanged, **self._models(state, ids, rounds.layout)}

        # In this process: workers have their own rows and rounds, and would get these rows again.
        alone, earlier_arrays = run._replace(n_jobs=1), state.phase_arrays

        def ended_state(state):
            return with_last_phase(alone, state, earlier_arrays, rounds.rule)

        callbacks = RoundCallbacks(
            self, X, y, groups, run.n_rounds - state.round, attributes, checkpoint, ended_state
        )
        state, flat = run_to_end(run, state, callbacks, rounds.rule)
        check_converged(state, ids, rounds.advice, run.protected)
        check_final_loss(rounds.final_loss, state, start, rounds.advice)
        callbacks.end()
        seeded = self.random_state is not None
        progress = progress_after(plan, rounds, state, seeded, callbacks.may_end)
        # Warnings come first: where they are errors, the estimator stays as it was.
        report = finalize_report(self, rounds_report(self, progress))
        if plan.earlier is not None:
            report = inherit_warnings(self.privacy_, report)
        warn_of_failures(self, state.failures)
        if rounds.rule is not None:
            self._warn_of_end(state.round, flat)
        self._store(attributes(state), progress, report, anew=plan.earlier is None)
        if checkpoint is not None:
            checkpoint.remove()
        return self

    def _warn_of_end(self, n_rounds, flat):
        """Warn if the rounds ended before the loss was flat; it was lowest after `n_rounds`."""
        if not flat:
            warn_caller(
                f"{type(self).__name__} ran max_rounds={self.max_rounds} rounds, too few to tell "
                f"that the loss is flat; it was lowest after {n_rounds}, and these are the models. "
                "Raise max_rounds, or tol if they are good enough.",
                ConvergenceWarning,
            )

    def _store(self, attributes, progress, report, anew):
        """Set all fitted attributes; rounds begun `anew` keep no names of an earlier fit's columns.

        A call that is interrupted before this point has charged the ledger, but leaves no trace in
        the model, so `privacy_` does not list its releases: the next call goes on from the rounds
        before it. Its noise is new, or the same again with a seed; the ledger counts a seed that
        comes again as no protection.
        """
        state = progress.state
        history = {name: np.array(seen) for name, seen in state.history.items()}
        if not self._communicates:  # a method that adds up nothing has made messages for nobody
            history["bytes_sent"] = np.zeros(state.round, dtype=int)
        attributes = {
            **attributes,
            "n_samples_per_client_": progress.n_rows,
            "n_rounds_": state.round,
            "noise_multiplier_": progress.noise_multiplier,
            "history_": history,
            "privacy_": report,
            "_progress": progress,
        }
        self._set_fitted(attributes, dropped=None if anew else self._optional_names)

    def _privacy_events(self):
        """Accounting events of a fit from the start."""
        return fit_events(self, self._last_round(0))

    @property
    def _privacy_relation(self):
        return relation_of_rounds(self)
