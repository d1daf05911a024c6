"""Choice of hyper-parameters within a stated privacy budget."""

import dataclasses
import math
from numbers import Integral, Real
from typing import Any, Self

import numpy as np

from pfl_sklearn._compat import (
    BaseEstimator,
    HasMethods,
    Interval,
    MetaEstimatorMixin,
    StrOptions,
    fit_context,
)
from pfl_sklearn._delegation import DelegationMixin
from pfl_sklearn._fitted import FittedMixin
from pfl_sklearn._parameters import (
    BETWEEN_0_AND_1,
    PrivateFit,
    parameter,
    with_parameters,
)
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import Wraps, core_estimator, innermost_estimator
from pfl_sklearn.model_selection._selection_plan import epsilon_of_trials, plan_selection
from pfl_sklearn.model_selection._trials import best_trial, draw_candidates, read_data
from pfl_sklearn.privacy import PrivacyReport, PureEvent
from pfl_sklearn.privacy._accounting._selection import DISTRIBUTIONS
from pfl_sklearn.privacy._ledger import charge_fit
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._pipeline_report import report_of_fits
from pfl_sklearn.privacy._report import ADVERSARIES, finalize_report
from pfl_sklearn.privacy._spending import relation_of, unit_of

_RELEASED_BY_SELECTION = ("best_params_", "best_score_")  # in addition to the model
_OTHER_TRIALS = "the other trials, their scores, their number and so the running time"


@with_parameters
class PrivateSelectCV(FittedMixin, DelegationMixin, MetaEstimatorMixin, PrivateFit, BaseEstimator):
    """The best of a random number of private fits, within one privacy budget for all of them.

    The selection draws a number of trials :math:`K`. Each trial draws its parameters from
    `param_distributions`, fits a new clone of `estimator`, and is scored, publicly or privately.
    Only the best model is released. This costs little more than one fit, for any mean number of
    trials, whereas a grid search costs as much as all its fits.

    Attributes
    ----------
    best_estimator_ : estimator
        Model of the best trial, not refitted. Its privacy report is that of the selection, so you
        cannot continue its rounds (``warm_start``, ``partial_fit``).
    best_params_ : dict
        Parameters that this trial drew.
    best_score_ : float
        Score of this trial: noisy, or on public rows. The largest of several noisy scores is too
        high on average.
    trial_params_ : dict
        Parameters that were set on the estimators of all trials. They do not depend on the data.
    privacy_ : PrivacyReport
        Report of the whole selection.
    classes_ : ndarray of shape (n_classes,)
        Class labels, if `estimator` is a classifier.
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.

    Raises
    ------
    ValueError
        If parameters contradict each other, `epsilon` is too small for the number of trials, no
        client has a row to hold out, ``groups`` differ from the column of ids, or all scores on
        public rows are NaN. In the last case the epsilon counts as spent.
    RuntimeError
        If the number of trials is 0 (Poisson). The epsilon counts as spent.

    Notes
    -----
    The method is that of Papernot and Steinke (2022), by Renyi differential privacy. The number of
    trials must stay secret, so nothing of the losing trials is kept: there is no ``cv_results_``,
    and their warnings are dropped. The running time of ``fit`` reveals something about the number.

    A trial loses to all others if its score is undefined or it diverges (an ArithmeticError). Any
    other error of a trial ends ``fit``, and the epsilon counts as spent. Before anything is spent,
    candidates are checked: all of a grid of up to 500, otherwise those that differ from the first
    in one listed value. Values from a distribution are checked when they are drawn.

    *Private scores.* Every client scores its own model on its own held-out rows and clips the score
    to `score_range`; an undefined or failed score counts as the lowest. The scores enter a sum with
    Gaussian noise, to which one client contributes at most the width of the range. The noise on the
    mean has standard deviation (highest - lowest) / (mu n_clients), where mu is the Gaussian-DP
    parameter of (`score_share` * `epsilon`, `delta`). The number of clients divides the sum, so an
    estimator with ``relation="add_remove"`` needs `holdout`. Errors and warnings of `scoring` would
    reveal rows, so they are dropped: try it first without privacy, on public rows.

    *No refit.* The best model is fitted to the rows that were not held out, because a fit to all
    rows would be another release.

    References
    ----------
    Papernot, N. and Steinke, T. (2022). Hyperparameter tuning with Renyi differential privacy.
    ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> from pfl_sklearn.model_selection import PrivateSelectCV
    >>> rng = np.random.default_rng(0)
    >>> site = np.repeat(np.arange(500), 8)
    >>> y = rng.normal(size=500)[site] + rng.normal(size=4000)
    >>> select = PrivateSelectCV(
    ...     GaussianMean(noise_variance=1.0),
    ...     {"clip_norm": [0.1, 1.0, 3.0, 10.0, 100.0]},
    ...     epsilon=2.0,
    ...     score_range=(-10.0, 0.0),
    ... )
    >>> select = select.fit(np.zeros((4000, 1)), y, groups=site)
    >>> select.privacy_.epsilon
    2.0
    >>> round(select.trial_params_["epsilon"], 2)
    0.73
    """

    estimator: Any = parameter(
        ranges=[HasMethods(["fit"])],
        kw_only=False,
        text="""
            estimator
                A private estimator with parameters `epsilon` (or `noise_multiplier`) and `delta`,
                or a pipeline or :class:`~pfl_sklearn.compose.ClientColumn` around one whose other
                steps learn nothing. The selection overwrites these parameters and the seed. With a
                finite `epsilon`, callbacks and other wrappers (a search, bagging) are refused.
        """,
    )
    param_distributions: Any = parameter(
        ranges=[dict, list],
        kw_only=False,
        text="""
            dict or list of dicts
                Lists, or distributions with a method ``rvs``, by parameter. Every trial draws from
                all of them, with replacement; from a list of dicts, it first draws a dict.
                Parameters that change the cost (numbers of rounds, sampling) are refused.
        """,
    )
    expected_trials: float = parameter(
        default=10,
        ranges=[Interval(Real, 1, None, closed="left")],
        text="""
            float, >= 1
                Mean number of trials.
        """,
    )
    distribution: str = parameter(
        default="geometric",
        ranges=[StrOptions(set(DISTRIBUTIONS))],
        text="""
            {"geometric", "poisson", "logarithmic"}
                Distribution of the number of trials. Poisson numbers vary least but can be 0, which
                gives no model and an error. Logarithmic numbers are most often 1 and cost least.
        """,
    )
    epsilon = parameter(
        also="""
            It covers the whole selection, and the noise of the trials is calibrated to it. With
            infinity `estimator` keeps its own `epsilon`.
        """,
    )
    delta = parameter(
        also="It covers the whole selection, and must be above 0 for a finite `epsilon`.",
    )
    scoring: Any = parameter(
        default=None,
        ranges=[str, callable, None],
        text="""
            str, scorer or None
                As in scikit-learn; larger is better. None: "accuracy" for classifiers, else
                "neg_mean_squared_error".
        """,
    )
    holdout: tuple[TableLike, ...] | None = parameter(
        default=None,
        ranges=[tuple, None],
        text="""
            tuple (X, y) or (X, y, groups)
                Public rows to score on, at no cost in privacy. They are scored with the population
                model, because the promise does not cover the clients' own models. None: rows of the
                clients are held out.
        """,
    )
    score_range: tuple[float, float] | None = parameter(
        default=None,
        ranges=[tuple, list, None],
        text="""
            tuple (lowest, highest)
                Range to which a client's score is clipped. Choose it without looking at the data.
                It is needed for a finite `epsilon` without `holdout`, except for scores between 0
                and 1 ("accuracy", "balanced_accuracy", "f1", "roc_auc").
        """,
    )
    score_share: float = parameter(
        default=0.2,
        ranges=[BETWEEN_0_AND_1],
        text="""
            float in (0, 1)
                Share of `epsilon` that the noise on one score alone would spend.
        """,
    )
    test_size: float = parameter(
        default=0.25,
        ranges=[BETWEEN_0_AND_1],
        text="""
            float in (0, 1)
                Share of each client's rows that is held out without `holdout`, drawn once at random
                and rounded; every client tests at least one row and keeps at least one.
        """,
    )
    client_column: str | int | None = parameter(
        default=None,
        ranges=[str, Integral, None],
        text="""
            str or int
                Column of ids of `X`, if `estimator` is a ClientColumn. Otherwise pass ``groups``.
        """,
    )
    ledger = parameter(also="A selection is one entry.")
    random_state = parameter(
        also="""
            It is also the source of the number of trials, their parameters and the held-out rows.
        """,
    )

    _wraps = Wraps("estimator", "best_estimator_", fits_once=False)

    @fit_context(prefer_skip_nested_validation=False)
    def fit(self, X: TableLike, y: TableLike = None, **params: Any) -> Self:
        """Fit a random number of trials and keep the best.

        Parameters
        ----------
        X : array-like of n_rows rows
            Features, as the estimator's ``fit`` takes them.
        y : array-like of shape (n_rows,), default=None
            Targets, as the estimator's ``fit`` takes them.
        **params : dict
            ``groups`` (client id of every row) and other parameters of the estimator's ``fit``.
        """
        plan = plan_selection(self)
        charge_fit(self)  # before data are read, or an error would give a free look at them
        rng, seeded = noise_generator(self.random_state)
        candidates = draw_candidates(self, plan, rng)
        rows, score = read_data(self, plan, X, y, params, rng)
        model, best_params, best_score = best_trial(
            self, plan, candidates, rows, score, rng, seeded
        )
        report = finalize_report(self, _selection_report(self, plan, model))
        # The model carries the cost of the whole selection, not that of one trial.
        released = innermost_estimator(model)
        # Unbound, since it may be of another package. Without progress, rounds cannot continue.
        FittedMixin._set_fitted(released, {"privacy_": report}, dropped={"_progress"})
        attributes = {
            "best_estimator_": model,
            "best_params_": best_params,
            "best_score_": best_score,
            "trial_params_": plan.params,
            "privacy_": report,
        }
        self._set_fitted(attributes)
        return self

    @property
    def n_features_in_(self) -> int:
        """Number of columns of `X`."""
        return self.best_estimator_.n_features_in_

    @property
    def feature_names_in_(self) -> np.ndarray:
        """Names of the columns of `X`."""
        return self.best_estimator_.feature_names_in_

    # The cost of a selection, for searches around it and for the ledger.
    @property
    def _privacy_relation(self):
        return relation_of(core_estimator(self.estimator))

    @property
    def _privacy_unit(self):
        return unit_of(core_estimator(self.estimator))

    def _privacy_events(self):
        """Accounting events of a fit: only epsilon and delta of the whole are stated."""
        return (PureEvent(float(self.epsilon), float(self.delta), self._privacy_relation),)


def _selection_report(select, plan, model):
    """Report of a planned selection, from the report of the released model."""
    trial = PrivacyReport.unprotected(f"{type(model).__name__} has no privacy.")
    if hasattr(innermost_estimator(model), "privacy_"):
        trial = report_of_fits(model)
    if math.isinf(plan.total) or math.isinf(trial.epsilon):
        reason = "the selection has epsilon=inf."
        return PrivacyReport.unprotected(
            reason if math.isinf(plan.total) else " ".join(trial.warnings),
            not_released=(*trial.released, *trial.not_released, *_RELEASED_BY_SELECTION),
            n_clients=trial.n_clients,
        )
    return dataclasses.replace(
        trial,
        epsilon=float(select.epsilon) if plan.total > 0 else 0.0,
        delta=float(select.delta),
        unit=plan.unit,
        relation=plan.relation,
        trust="central",
        # Even if clients add the noise of a trial, the server sees all trials to choose the best.
        adversary=ADVERSARIES["central"],
        mechanism=f"best of a random number of trials ({select.distribution}, "
        f"{select.expected_trials:g} expected), of each: {trial.mechanism}",
        accountant="Renyi differential privacy of the selection (Papernot and Steinke, 2022)",
        epsilon_under=_under_other(select, plan),
        epsilon_outsiders=None,
        released=(*trial.released, *_RELEASED_BY_SELECTION),
        not_released=(*trial.not_released, _OTHER_TRIALS),
        assumptions=(
            *trial.assumptions,
            "param_distributions come from the user, not from the data",
            "the server that runs the trials is trusted with their messages and scores",
            _score_assumption(plan),
        ),
        noise_reproducible=select.random_state is not None,
    )


def _under_other(select, plan):
    """Epsilon under the other relation, if it is finite."""
    other = "zero_out" if plan.relation == "replace_one" else "replace_one"
    epsilon = epsilon_of_trials(select, plan.events, other)
    return ((other, epsilon),) if math.isfinite(epsilon) else ()


def _score_assumption(plan):
    """Assumption of the privacy statement about the scores."""
    if plan.mechanism is None:
        return "holdout is public"
    low, high = plan.score_range
    return (
        f"score_range = ({low:.4g}, {high:.4g}) comes from the user, and the number of clients "
        f"whose scores are averaged is public; noise of sd {plan.mechanism.noise_std:.4g} times "
        "the width of the range on their sum"
    )
