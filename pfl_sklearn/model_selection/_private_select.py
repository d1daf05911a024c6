"""Choice of hyper-parameters within a stated privacy budget."""

import math
from numbers import Integral, Real

from sklearn.base import BaseEstimator, MetaEstimatorMixin

from pfl_sklearn._compat import HasMethods, Interval, StrOptions, fit_context
from pfl_sklearn._delegation import DelegationMixin
from pfl_sklearn._nesting import innermost_estimator, releasing_core
from pfl_sklearn.model_selection._selection_plan import plan_selection, selection_report
from pfl_sklearn.model_selection._trials import (
    best_trial,
    draw_candidates,
    read_data,
    warn_again,
)
from pfl_sklearn.privacy import PrivacyLedger, PureEvent
from pfl_sklearn.privacy._accounting._selection import DISTRIBUTIONS
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._report import warn_once
from pfl_sklearn.privacy._spending import charge
from pfl_sklearn.privacy._stated import relation_of, unit_of


class PrivateSelectCV(DelegationMixin, MetaEstimatorMixin, BaseEstimator):
    r"""The best of a random number of private fits, within one privacy budget for all of them.

    A number of trials :math:`K` is drawn. Each draws its parameters from `param_distributions`,
    fits a new clone of `estimator` and is scored, publicly or privately; the best of them is
    released as it is, and nothing of the others is. That costs little more than one fit does,
    however many trials there are on average; a grid search costs as much as all of its fits.

    Parameters
    ----------
    estimator : estimator
        A private estimator with parameters `epsilon` (or `noise_multiplier`) and `delta`, or a
        pipeline or :class:`~pfl_sklearn.compose.ClientColumn` around one, whose other steps learn
        nothing. These parameters and its seed are set here, whatever they are. When `epsilon` is
        finite it may have no callbacks, and nothing else (a search, bagging) may be around it.
    param_distributions : dict or list of dicts
        Lists, or distributions with a method ``rvs``, by parameter. Every trial draws anew from
        all of them, with replacement; from a list of dicts, it draws a dict first. All candidates
        have to spend the same, so what changes that (numbers of rounds, sampling) is refused.
    expected_trials : float, >= 1, default=10
        Mean of the number of trials.
    distribution : {"geometric", "poisson", "logarithmic"}, default="geometric"
        Of the number of trials. Poisson numbers vary least, and can be 0: then there is no model,
        and ``fit`` raises. Logarithmic ones are 1 most often and cost least.
    epsilon : float in (0, inf], default=inf
        Privacy of everything together. The noise of the trials is calibrated to it. Infinity: no
        privacy; `estimator` is used with the `epsilon` that it has.
    delta : float in [0, 1), default=1e-5
        Must be above 0 when `epsilon` is finite.
    scoring : str, scorer or None, default=None
        As in scikit-learn; larger is better. None: "accuracy" for classifiers, else
        "neg_mean_squared_error".
    holdout : tuple (X, y) or (X, y, groups), default=None
        Public rows to score on; by giving them you state that they are public. Scores cost nothing
        then. They are those of the population model, for all rows: the clients' own models are not
        covered by their privacy promise. None: rows of the clients are held out.
    score_range : tuple (lowest, highest), default=None
        To which the score of a client on its own held-out rows is clipped; yours, never taken from
        the data. Needed without `holdout` when `epsilon` is finite, except for scores that are
        between 0 and 1 by nature ("accuracy", "balanced_accuracy", "f1", "roc_auc").
    score_share : float in (0, 1), default=0.2
        Share of `epsilon` that the noise on one score would spend by itself.
    test_size : float in (0, 1), default=0.25
        Share of the rows of every client that is held out, drawn at random once, without
        `holdout`: rounded, at least one row, and one row less than the client has at most.
    client_column : str or int, default=None
        The column of ids of `X`, if `estimator` is a ClientColumn; else ids come as ``groups``.
    ledger : PrivacyLedger or None, default=None
        File to which a fit is written, as one entry, before it reads any data, and which refuses a
        fit beyond its budget.
    random_state : int, RandomState instance or None, default=None
        Seed of the number of trials, their parameters, the held-out rows and all noise. None draws
        it from the operating system. A seed makes the noise reproducible, hence not private to
        whoever knows it: the report says so.

    Attributes
    ----------
    best_estimator_ : estimator
        The model of the best trial, not fitted again. Its privacy report is that of the selection,
        so its rounds cannot go on (``warm_start``, ``partial_fit``).
    best_params_ : dict
        What that trial drew.
    best_score_ : float
        Its score: noisy, or on public rows. The largest of several noisy scores is too high on
        average.
    trial_params_ : dict
        What was set on the estimators of all trials, which follows from `epsilon` alone.
    privacy_ : PrivacyReport
    classes_ : ndarray of shape (n_classes,)
        If `estimator` is a classifier.
    clients_ : ndarray of shape (n_clients,)
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (`n_features_in_`,)

    Raises
    ------
    ValueError
        If parameters contradict one another, the total is too small for that many trials, or no
        client has a row to hold out.
    RuntimeError
        If the number of trials is 0 (Poisson). The epsilon counts as spent.

    See Also
    --------
    pfl_sklearn.privacy.selection_epsilon : What a selection costs.
    pfl_sklearn.privacy.search_cost : What a scikit-learn search has cost.

    Notes
    -----
    After Papernot and Steinke (2022), by Renyi differential privacy. The number of trials must stay
    unknown, so it is not kept, nor is anything of the trials that lost: no ``cv_results_`` and no
    warnings of theirs. How long ``fit`` took tells of it. A trial whose score is not defined, or
    that diverged (an ArithmeticError), loses to all others. With any other error of a trial ``fit``
    ends, and the epsilon counts as spent. Candidates are checked before anything is spent, all of
    a grid of up to 500, else those that differ from the first in one listed value; what comes from
    a distribution is checked when it is drawn. Trials run one after the other; the estimator's own
    ``n_jobs`` applies.

    *Private scores.* Every client scores its own model on its own held-out rows; the score is
    clipped to `score_range` (the lowest, if it is not defined or fails) and enters a sum with
    Gaussian noise, in which one client counts for at most the width of the range. Errors and
    warnings of `scoring` tell of clients' rows and are not passed on: one that fails for all
    clients leaves nothing but noise to choose by, so try it without privacy, on rows that are
    public. Under add/remove the
    number of clients that divides the sum is taken as public. Noise on the mean score has a
    standard deviation of (highest - lowest) / (mu n_clients), mu being the Gaussian-DP parameter
    of (`score_share` * `epsilon`, `delta`).

    *No refit.* The best model is fitted to the rows that were not held out. Fitting it once more
    to all rows would be one more release.

    References
    ----------
    Papernot, N. and Steinke, T. (2022). Hyperparameter tuning with Renyi differential privacy.
    ICLR.

    Examples
    --------
    >>> import warnings
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

    _fitted_name = "best_estimator_"

    _parameter_constraints = {
        "estimator": [HasMethods(["fit"])],
        "param_distributions": [dict, list],
        "expected_trials": [Interval(Real, 1, None, closed="left")],
        "distribution": [StrOptions(set(DISTRIBUTIONS))],
        "epsilon": [Interval(Real, 0, math.inf, closed="right")],
        "delta": [Interval(Real, 0, 1, closed="left")],
        "scoring": [str, callable, None],
        "holdout": [tuple, None],
        "score_range": [tuple, list, None],
        "score_share": [Interval(Real, 0, 1, closed="neither")],
        "test_size": [Interval(Real, 0, 1, closed="neither")],
        "client_column": [str, Integral, None],
        "ledger": [PrivacyLedger, None],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        estimator,
        param_distributions,
        *,
        expected_trials=10,
        distribution="geometric",
        epsilon=math.inf,
        delta=1e-5,
        scoring=None,
        holdout=None,
        score_range=None,
        score_share=0.2,
        test_size=0.25,
        client_column=None,
        ledger=None,
        random_state=None,
    ):
        self.estimator = estimator
        self.param_distributions = param_distributions
        self.expected_trials = expected_trials
        self.distribution = distribution
        self.epsilon = epsilon
        self.delta = delta
        self.scoring = scoring
        self.holdout = holdout
        self.score_range = score_range
        self.score_share = score_share
        self.test_size = test_size
        self.client_column = client_column
        self.ledger = ledger
        self.random_state = random_state

    @fit_context(prefer_skip_nested_validation=False)
    def fit(self, X, y=None, **params):
        """Fit a random number of trials, and keep the best.

        Parameters
        ----------
        X : array-like of n_rows rows
            Features, as the estimator's ``fit`` takes them.
        y : array-like of shape (n_rows,), default=None
            Targets, as the estimator's ``fit`` takes them.
        **params : dict
            ``groups`` (client id of every row) and whatever else the estimator's ``fit`` takes.

        Returns
        -------
        self
        """
        plan = plan_selection(self)
        charge(self)
        rng, seeded = noise_generator(self.random_state)
        candidates = draw_candidates(self, plan, rng)
        rows, score = read_data(self, plan, X, y, params, rng)
        best = best_trial(self, plan, candidates, rows, score, rng, seeded)
        report = selection_report(self, plan, best.model)
        released = innermost_estimator(best.model)
        released.privacy_ = report
        released.__dict__.pop("_progress", None)  # rounds that went on would forget the selection
        self.best_estimator_ = best.model
        self.best_params_ = best.params
        self.best_score_ = best.score
        self.trial_params_ = plan.params
        self.privacy_ = report
        warn_again(best)
        warn_once(report)
        return self

    @property
    def n_features_in_(self):
        """Columns of `X`."""
        return self.best_estimator_.n_features_in_

    @property
    def feature_names_in_(self):
        """Names of the columns of `X`."""
        return self.best_estimator_.feature_names_in_

    @property
    def _privacy_relation(self):
        return relation_of(releasing_core(self.estimator).estimator)

    @property
    def _privacy_unit(self):
        return unit_of(releasing_core(self.estimator).estimator)

    def _privacy_events(self):
        """Accounting events of a fit: of the whole only its epsilon and delta are stated."""
        return (PureEvent(float(self.epsilon), float(self.delta), self._privacy_relation),)
