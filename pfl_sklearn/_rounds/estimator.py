"""The life of an estimator on rounds, whatever its model.

From parameters to events and a ledger entry, from a table to a run, from a run to fitted
attributes, and on to more rounds. A family of models brings what :class:`BaseRounds` names.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import validate_data

from pfl_sklearn._compat import (
    BaseEstimator,
    fit_context,
    num_samples,
    with_callbacks,
)
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._rounds.callbacks import both, observer
from pfl_sklearn._rounds.checkpoint import Checkpoint, described
from pfl_sklearn._rounds.loop import Plan, check_converged, run_last_phase, run_rounds
from pfl_sklearn._rounds.parameters import RoundsParameters
from pfl_sklearn._rounds.privacy import (
    check_noise_parameters,
    fit_events,
    is_private,
    relation_of_rounds,
    round_mechanism,
    rounds_report,
)
from pfl_sklearn._rounds.stopping import run_until_flat
from pfl_sklearn._rounds.task import (
    Task,
    first_state,
    progress_after,
    roster_of,
    rounds_before,
    seeds,
)
from pfl_sklearn._typing import TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.privacy._ledger import charge_events
from pfl_sklearn.privacy._report import going_on_from, settled

if TYPE_CHECKING:
    from pfl_sklearn._compat import CallbackSupportMixin
else:
    from sklearn.callback import CallbackSupportMixin  # imports rich, which only rounds need

_PRIVATE_ROUNDS = 100  # with noise, where n_rounds is None: the data have no say in it


@with_parameters
class BaseRounds(RoundsParameters, CallbackSupportMixin, ClientMixin, BaseEstimator):
    """Fits that run rounds: warm starts, checkpoints, ledger, callbacks, seeds and reports.

    A family of models provides

    - ``_read(X, y, earlier, **given)``: a :class:`CheckedTable` of checked data, which has as many
      features as those of the `earlier` rounds, if there are any;
    - ``_make_run(table, clients, roster, earlier, order, mechanism)``: a :class:`Run`, or a
      ValueError if the `earlier` rounds had a model of another shape; `order` is the entropy of
      what is drawn before the rounds, or None;
    - ``_models(state, ids, layout)``: the fitted attributes of a state;
    - ``_rounds_of_a_pass(clients)``: rounds of one ``partial_fit`` without noise;
    - ``_check_parameters()``, if parameters of its own can contradict one another;
    - `_noisy_steps`, if clients add the noise in their local steps;
    - ``_releases_labels(earlier)``, if the clients' label frequencies may be summed with noise
      before the rounds, and `_label_share`, the share of the budget that this takes;
    - `_assumptions`: what the privacy of a fit rests on besides;
    - `tol`, `max_rounds` and `validation_fraction` among its parameters, if `n_rounds` may be None:
      without noise ``_make_run`` then takes `until_flat` and gives a run with a rule;
    - `_optional_names`: fitted attributes that not every fit has;
    - `_released_names` and `_kept_names`: what the privacy report covers and what it does not.

    Attributes
    ----------
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client: those of ``fit``, and of all calls to ``partial_fit`` since.
    n_rounds_ : int
        Rounds that led to the models.
    noise_multiplier_ : float
        Noise multiplier of the last call; 0 without noise.
    history_ : dict of ndarrays, one value per round
        "n_clients" that took part, their mean "loss" before the round, the share that was
        "clipped", and the bound "clip_norm". These values are exact, hence not protected. The
        loss is NaN where nobody took part, and infinite where it overflowed.
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

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: TableLike, y: Any, *, groups: Any = None) -> Self:
        """Run `n_rounds` rounds; with `warm_start` those that are missing of them.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_rows, d)
            Features. Nets take rows of any shape, but no sparse matrices.
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
            If the rounds diverge. Fits with noise never raise it because of one client, which
            would reveal something about that client: a client whose loss is not finite keeps the
            model that it had and sends nothing.

        Notes
        -----
        After an error the estimator is as it was before.
        """
        earlier = self._earlier() if self.warm_start else None
        if earlier:
            earlier = earlier._replace(n_rows=np.zeros_like(earlier.n_rows))  # seen again
        self._check_all_parameters()
        before = earlier.state.round if earlier else 0
        missing = self._last_round(before) - before
        if missing < 0:
            raise ValueError(
                f"n_rounds={self.n_rounds} is less than the {before} rounds that were "
                "run before; with warm_start=True it counts them in."
            )
        events = fit_events(self, missing, earlier, earlier and earlier.spent)
        mechanism = round_mechanism(self, events)  # refuses bounds before anything is charged
        checkpoint = self._open_checkpoint(missing)
        if checkpoint is None or not checkpoint.resumes:
            charge_events(self, events, first_round=before)
        clients = self._encode_fit(groups, num_samples(X))
        if earlier and not np.array_equal(clients.ids, earlier.clients):
            raise ValueError(
                "groups holds other clients than the rounds before, which warm_start=True "
                "continues; use partial_fit, or warm_start=False."
            )
        drawn = checkpoint and checkpoint.entropy
        flat = self._ends_when_flat
        task = self._make_task(X, y, clients, earlier, mechanism, missing, drawn, until_flat=flat)
        return self._train((X, y, groups), task, missing, events, checkpoint)

    def _partial_fit(self, X, y, groups, **given):
        """Go on over rows of clients seen before or new ones.

        Without noise for one pass. The number of rounds of a pass depends on the rows, so with
        noise for `n_rounds` rounds, which are charged before any data are read.
        """
        earlier = self._earlier()
        self._check_all_parameters()
        missing = self._last_round(0)
        events = fit_events(self, missing, earlier)
        mechanism = round_mechanism(self, events)
        charge_events(self, events, first_round=earlier.state.round if earlier else 0)
        clients = self._encode_fit(groups, num_samples(X))
        if not is_private(self):
            missing = self._rounds_of_a_pass(clients)
        task = self._make_task(X, y, clients, earlier, mechanism, missing, **given)
        return self._train((X, y, groups), task, missing, events)

    @property
    def _ends_when_flat(self):
        """Whether the data say when the rounds of ``fit`` are over."""
        return self.n_rounds is None and not is_private(self)

    def _last_round(self, before):
        """Number of the last round of a fit, at most, after so many rounds before."""
        if self.n_rounds is not None:
            return self.n_rounds
        return before + self.max_rounds if self._ends_when_flat else max(before, _PRIVATE_ROUNDS)

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

    def _check_all_parameters(self):
        check_noise_parameters(self)
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
        return Checkpoint(self.checkpoint, self.checkpoint_every, described(self, **more))

    def _defaults(self):
        """Components that parameters stand for, and their parameters, as if they had been given."""
        components: dict[str, Any] = {}
        for name, value in self.get_params(deep=False).items():
            component = self._default_component(name, value)
            if component is not None:
                own = component.get_params(deep=True)
                components |= {name: component, **{f"{name}__{part}": own[part] for part in own}}
        return components

    def _make_task(
        self, X, y, clients, earlier, mechanism, missing, drawn=None, until_flat=False, **given
    ):
        """Checked data and the run on them; without a seed rounds draw from the entropy `drawn`."""
        flat = {"until_flat": True} if until_flat else {}
        table = self._read(X, y, earlier, **given)
        last = missing + (earlier.state.round if earlier else 0)
        roster = roster_of(earlier, clients.ids, last)
        order, entropy = seeds(drawn if self.random_state is None else self.random_state)
        run = self._make_run(table, clients, roster, earlier, order, mechanism, **flat)
        return Task(table, clients, earlier, roster, run, entropy)

    def _train(self, data, task, missing, events, checkpoint=None):
        """Run the missing rounds on copies, and set all fitted attributes at the end."""
        table, run, ids = task.table, task.run, task.roster.ids
        X, y, groups = data
        state = first_state(task, self.clip_quantile)
        last = state.round + missing
        if checkpoint is not None:
            entropy, before = np.array(task.entropy or ()), rounds_before(task.earlier)
            depends_on = (table.features, table.y, *task.clients, entropy, *before)
            state = checkpoint.restore(state, depends_on)
        shared = {
            **table.attributes,
            **run.settled,
            "clients_": ids,
            "_fitted_with_groups": groups is not None,
        }
        observe, end = observer(
            self,
            X,
            y,
            groups,
            last - state.round,
            lambda now: {**shared, **self._models(now, ids, run.layout)},
        )
        if checkpoint is not None:
            observe = both(observe, checkpoint.observe)
        state, flat = self._run(run, state, last, task.entropy, observe)
        check_converged(state, run.advice, is_private(self), ids)
        end()
        mechanism = round_mechanism(self, events)
        noise, seeded = mechanism.noise_multiplier, self.random_state is not None
        progress = progress_after(task, state, events, last, noise, seeded)
        # Warnings come first: where they are errors, the estimator stays as it was.
        report = settled(self, rounds_report(self, progress))
        if task.earlier is not None:
            report = going_on_from(self.privacy_, report)
        self._warn_of_failures(state.failures)
        if run.rule is not None:
            self._warn_of_end(state.round, flat)
        self._store(shared, progress, report, anew=task.earlier is None)
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

    def _warn_of_failures(self, kinds):
        """Warn of exceptions that did not end a fit with noise, by their classes alone.

        Which clients they were, how many and in which round would say more about them, and so might
        the text of an exception.
        """
        if kinds:
            warn_caller(
                f"In this {type(self).__name__} with noise, training failed on rows of some client "
                f"({', '.join(sorted(kinds))}). Such a client counts as 0 and keeps the model that "
                "it had. To see the error, fit rows that you may look at without noise. The noise "
                "does not cover this warning: do not publish it.",
                RuntimeWarning,
            )

    def _run(self, run, state, last, entropy, observe):
        """State after the round `last` or an earlier end, and whether it ended as it should."""
        watch, protected = _Watch(observe), is_private(self)
        plan = Plan(last, run.sampling, entropy, self.n_jobs)
        if run.rule is None:
            run_rounds(run.method, run.rows, state, plan, run.release, watch, protected)
            return state, True
        alone = run.method._replace(last_phase=None)

        def run_on(state, until):
            there = plan._replace(n_rounds=until)
            run_rounds(alone, run.rows, state, there, run.release, watch)
            return watch.ended

        state, flat = run_until_flat(run_on, state, last - state.round, run.rule)
        if run.all_rows is not None:
            rows, clients = run.all_rows
            state.clients |= clients
            state.own = run_last_phase(run.method.last_phase, rows, state, plan)
        return state, flat

    def _store(self, shared, progress, report, anew):
        """Set all fitted attributes; rounds begun `anew` keep no names of an earlier fit's columns.

        Releases of a call that is interrupted before have been charged to the ledger. They are not
        in `privacy_`, since nothing that they went into is in the model: the next call goes on from
        the rounds before. Its rounds have noise of their own; with a seed the same noise again, and
        the ledger counts a seed that comes again as no protection.
        """
        state = progress.state
        attributes = {
            **shared,
            **self._models(state, progress.clients, progress.layout),
            "n_samples_per_client_": progress.n_rows,
            "n_rounds_": state.round,
            "noise_multiplier_": progress.noise_multiplier,
            "history_": {name: np.array(seen) for name, seen in state.history.items()},
            "privacy_": report,
            "_progress": progress,
        }
        names = ("feature_names_in_",) if anew else ()
        self._set_fitted(attributes, (*names, *self._optional_names))

    def _inputs(self, X):
        """Attributes of the input's columns."""
        probe = clone(self)
        validate_data(probe, X, skip_check_array=True)
        names = ("n_features_in_", "feature_names_in_")
        return {name: getattr(probe, name) for name in names if hasattr(probe, name)}

    def _privacy_events(self):
        """Accounting events of a fit from the start."""
        return fit_events(self, self._last_round(0))

    @property
    def _privacy_relation(self):
        return relation_of_rounds(self)


class _Watch:
    """Observer that remembers whether it ended the rounds."""

    def __init__(self, observe):
        self.observe, self.ended = observe, False

    def __call__(self, state):
        self.ended = self.observe is not None and bool(self.observe(state))
        return self.ended
