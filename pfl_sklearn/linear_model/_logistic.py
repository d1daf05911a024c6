"""Personalized logistic regression: one coefficient vector per client under a Gaussian prior."""

import math
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import fit_context
from pfl_sklearn._labels import check_labels, read_classes
from pfl_sklearn._parameters import CLASS_WEIGHT, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientClassifierMixin, check_level
from pfl_sklearn.linear_model._algebra import class_probabilities, likeliest_class
from pfl_sklearn.linear_model._link import LinkRegression, checked_offset
from pfl_sklearn.linear_model._mixed._families import class_family
from pfl_sklearn.linear_model._mixed._predictions import averaged_probabilities, probability_bounds
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._link_server import PrivateStart

_HIGHEST_LEVEL = 0.99  # at which 8,192 values have 41 in a tail
_LATENT_VARIANCE = np.pi**2 / 3  # of the logistic distribution


@with_parameters
class PersonalizedLogisticRegression(ClientClassifierMixin, LinkRegression):
    r"""Logistic regression with coefficients that vary by client around those of the population.

    Row j of client i belongs to the second of two classes with log odds

    .. math:: \eta_{ij} = x_{ij}^\top (\beta + E b_i), \qquad b_i \sim N(0, S),

    where E selects the coefficients that vary by client (`random`); all clients share the others.
    :math:`\beta` and S maximize the marginal likelihood, with the :math:`b_i` integrated out by
    adaptive quadrature or Laplace's approximation (`quadrature`). A client's coefficients are its
    posterior mode. With K > 2 classes every class has coefficients :math:`\beta_k` and deviations
    :math:`b_{ik} \sim N(0, S)`, independent over the classes, and the probabilities are the softmax
    of the logits. The :ref:`user guide <logistic_regression>` has the mathematics and examples.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    coef_ : ndarray of shape (n_clients, d), or (n_clients, K, d)
        Posterior modes of the clients' coefficients. With two classes they are those of the log
        odds of ``classes_[1]``. With K > 2 classes they sum to 0 over the classes.
    intercept_ : ndarray of shape (n_clients,), or (n_clients, K)
    coef_std_, intercept_std_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior standard deviations, from the curvature at the mode and the uncertainty of the
        population coefficients, and of the variance between clients as far as `uncertainty` says.
        Where several coefficients vary they take it as known, so with few clients they are too
        small. NaN for coefficients that are not identified.
    shrinkage_, intercept_shrinkage_ : ndarrays of the shapes of `coef_` and `intercept_`
        Posterior variance over prior variance, given the population: 0 where the client's own rows
        determine a coefficient, 1 where the population does. 1 also for coefficients that do not
        vary.
    population_coef_, population_intercept_ : ndarrays of shape (d,) and (), or (K, d) and (K,)
        Coefficients of a typical client. Probabilities averaged over clients are less extreme than
        those of a typical client.
    population_coef_std_, population_intercept_std_ : ndarrays of the same shapes
        Standard errors from the observed information of the integrated likelihood, or averaged over
        the variance between clients, as `uncertainty` says. NaN for coefficients that are not
        identified: the feature is 0 or constant, or a combination of others, as in a full set of
        indicators.
    population_covariance_ : ndarray of shape (p, p), or (K p, K p)
        Covariance behind these standard errors: the intercept first, then the features, class by
        class. It is a pseudo-inverse where some coefficients are not identified.
    aic_, bic_ : float
        Information criteria; smaller is better. They count the estimated population coefficients
        that are identified (for K - 1 classes), also where a penalty shrinks them, and the free
        parameters of the covariance.
    icc_ : float
        Intraclass correlation of the log odds, for two classes: the variance between clients (its
        mean over the rows, if slopes vary) over that variance and :math:`\pi^2 / 3`, the variance
        of the logistic distribution.
    marginal_r2_, conditional_r2_ : float
        Share of the variance of the latent response that the population coefficients explain, and
        that they and the clients' coefficients explain, for two classes (Nakagawa and Schielzeth,
        2013; Johnson, 2014).

    Raises
    ------
    ValueError
        For ids that are missing or of mixed types, NaN or infinity, values above 1e150 or only
        values below 1e-140 (and not 0) in a column of `X`, only one class, a row's weight above 1e6
        or weights that sum to less than 1e-3.

        For unknown or ambiguous names in `random`, a number of quadrature points where several
        coefficients vary or K > 2, and a known covariance that holds NaN (the `prior_` of a fit of
        a single client) or infinity, or lets the predictors vary by more than 1e7 logits.

        For a covariance that the data do not identify: every client has one row; a column named in
        `random` is constant over all rows, beside a random intercept, and the covariance is not
        spherical; the covariance is full and there are fewer clients than random coefficients.

        With a finite `epsilon` also for a missing bound, sample weights, an intercept that is not
        to vary, an estimated covariance of several coefficients that is not "diag", noise of half
        of a coefficient's variance or more where several vary, a prior with a mean,
        and another number of classes than two. Finite numbers in `X` or the offset are then no
        error, nor is a covariance that the data do not identify, as an error would reveal them:
        they are cut to public ranges (see `privacy_`).

    Warns
    -----
    SeparationWarning
        If the likelihood has no finite maximum, because a combination of the features separates the
        classes, no client has rows of two classes, or the differences between clients diverge. A
        weak normal prior then keeps the estimates finite (see the user guide).
    ConvergenceWarning
        If `max_iter` was too small, or if rounding stopped the search. More iterations do not help
        in the second case.
    PrivacyWarning
        If a private fit released mostly noise, or numbers that the bounds make implausible.
    UserWarning
        If the labels look like counts: more than 20 classes that are whole numbers, the largest of
        which has a single row.
    NotEstimableWarning
        If columns are combinations of others, so that their coefficients are not identified, and in
        predictions for rows of which that is not true (:ref:`row_space`).

    See Also
    --------
    PersonalizedLinearRegression : The same model for continuous responses.
    sklearn.linear_model.LogisticRegression : One model for all clients, or one for each alone.
    pfl_sklearn.inspection.likelihood_ratio_test : Test of what a larger model adds.

    Notes
    -----
    The model is that of Section 3 and Appendix F of Ozkara et al. (2023). The joint density that
    the paper minimizes (equation 55, ICLR) has no minimum and lacks a minus sign, and the prior's
    gradient in Algorithm 5 (ICLR) has the wrong sign. We maximize the marginal likelihood directly.

    *Accuracy.* Laplace's approximation needs more rows per client than random coefficients. With
    fewer, estimated variances are often too small: give a covariance, and choose it by
    cross-validation.

    *Centring.* We centre columns where an intercept can absorb their means: features with common
    coefficients, and features that vary beside a random intercept, unless the prior has
    ``centered=False``. Centre other features yourself if they lie far from zero.

    *Classes and weights.* We report coefficients with mean 0 over K > 2 classes, so their variance
    around the population is (1 - 1/K) S. A weight multiplies the log-likelihood of its row, as if
    the row occurred that often; a row of weight 0 is absent.

    If everything is known we only compute the modes. A single client gets the maximum of its own
    likelihood, without any prior, and its covariance is NaN.

    *Predictions* of known clients are averages over the client's own posterior given the
    estimates, by a grid of nodes for up to six effects (those of K > 2 classes are K - 1 times as
    many), and by a normal density around the posterior mean beyond. See the :ref:`user guide
    <client_posteriors>`.

    *Memory* beyond the input: two copies of `X` and ``8 k p`` bytes per client, where k is the
    smaller of p and the largest number of rows of a client; K squared times that for K > 2 classes.
    The nodes of its posterior are at most 3 kB a client, and 60 bytes for one effect.

    *Privacy.* With a finite `epsilon` the population and the spread between clients come from
    `n_rounds` noisy sums of messages of the clients, each clipped to norm 1; replacing all data of
    one client changes what is released within (`epsilon`, `delta`). The intercept alone varies
    unless `random` names slopes, whose covariance is then diagonal for the columns as they are. The
    stated errors of the population count the noise, and take the spreads as known; the guide says
    for which rare outcomes and features intervals do not hold. Clients' own coefficients use their
    exact rows and are for them alone. See the :ref:`user guide <private_link>`.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Johnson, P. C. D. (2014). Extension of Nakagawa & Schielzeth's R2_GLMM to random slopes models.
    Methods in Ecology and Evolution.

    Nakagawa, S. and Schielzeth, H. (2013). A general and simple method for obtaining R2 from
    generalized linear mixed-effects models. Methods in Ecology and Evolution.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.linear_model import PersonalizedLogisticRegression
    >>> rng = np.random.default_rng(0)
    >>> X, hospital = rng.normal(size=(600, 1)), np.repeat(np.arange(20), 30)
    >>> odds = 2 * X[:, 0] + rng.normal(size=20)[hospital]
    >>> y = rng.random(600) < 1 / (1 + np.exp(-odds))
    >>> model = PersonalizedLogisticRegression(random="intercept").fit(X, y, groups=hospital)
    >>> model.population_coef_.round(1), model.intercept_.shape
    (array([2.3]), (20,))
    >>> model.predict_proba(X[:1], groups=[3]).shape
    (1, 2)
    """

    __metadata_request__predict_proba = {"groups": True, "offset": True, "integrate": True}
    __metadata_request__predict_log_proba = {"groups": True, "offset": True, "integrate": True}
    __metadata_request__decision_function = {"offset": True, "integrate": True}

    _likelihood = "logistic"
    _scale, _separated = "logits", "the classes"
    _sparse_alternative = "PPSGDClassifier"
    _public_response = "; the classes are public, and both occur"
    _population_attributes = (*LinkRegression._population_attributes, "classes_")

    prior = parameter(
        also="With K > 2 classes the mean is one number, or K q numbers class by class."
    )

    class_weight: dict[Any, float] | str | None = parameter(
        default=None,
        ranges=CLASS_WEIGHT,
        text="""
            dict, "balanced" or None
                Weights of the classes, which multiply those of their rows: by label (1 where none
                is given), or "balanced": the same sum for each class. Probabilities are then those
                of a population in which classes have these weights. With two classes a weight of w
                for the second moves the intercepts by about log(w), and hardly the slopes. Goes
                with an infinite `epsilon`.
        """,
    )

    @fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: TableLike,
        y: TableLike,
        *,
        groups: TableLike = None,
        sample_weight: Any = None,
        offset: TableLike = None,
    ) -> Self:
        """Estimate the population and every client's coefficients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features; an intercept is added if `fit_intercept` is True. With it and `groups` there
            may be no features (d = 0): clients then have an intercept alone.
        y : array-like of shape (n_rows,)
            Class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. None: all rows belong to one client, with a warning.
        sample_weight : array-like of shape (n_rows,), default=None
            How often each row counts; a row of weight 0 is absent.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; for two classes.

        Returns
        -------
        self
        """
        return self._fit_link(X, y, groups, sample_weight, partial(checked_offset, offset))

    def _checked_response(self, y, with_offset=False):
        check_labels(y)
        return y

    def _family_of(self, y):
        private = math.isfinite(self.epsilon)
        if private and len(np.unique(y)) != 2:  # an error that names no label
            raise ValueError(
                f"a private {type(self).__name__} takes two classes, which are public; y holds "
                "another number of them."
            )
        # Classes that only rows of weight 0 have are absent, as these rows are.
        classes, labels = read_classes(y, self, private)
        return class_family(len(classes)), labels, {"classes_": classes}

    def _private_start(self):
        if self.class_weight is not None:
            raise ValueError(
                f"class_weight={self.class_weight!r} is not supported when epsilon is finite: "
                '"balanced" would be learned from the labels, and max_rows_per_client says how '
                "much a client counts."
            )
        # Log odds of 0; the curvature of a row is at most 1/4.
        return PrivateStart(0.0, tuned.LOG_ODDS_SD, 0.25, "an offset near it")

    def decision_function(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        offset: TableLike = None,
        integrate: bool = True,
    ) -> Floats:
        """Log odds of the second class, or logits of all K > 2 classes, which sum to 0.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.
        integrate : bool, default=True
            Whether they are those of the averaged probabilities, as of :meth:`predict_proba`.
            Otherwise they are the linear predictors of the posterior mode.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, K)
        """
        if not integrate:
            return self._predictors_with(X, groups, offset)[0]
        chances = self.predict_proba(X, groups=groups, offset=offset)
        logits = np.log(np.maximum(chances, np.finfo(float).tiny))  # 0 is an underflow
        if logits.shape[1] == 2:
            return logits[:, 1] - logits[:, 0]
        return logits - logits.mean(axis=1, keepdims=True)

    def predict_proba(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        offset: TableLike = None,
        integrate: bool = True,
    ) -> Floats:
        """Class probabilities of rows of their clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.
        integrate : bool, default=True
            Whether to average the probability over the client's posterior given the estimates, or
            over the prior for unseen clients (if ``fit`` saw several clients). Otherwise it is that
            of the posterior mode, which is more extreme and too sure of itself.

        Returns
        -------
        ndarray of shape (n_rows, K)
            In the order of ``classes_``.
        """
        if not integrate:
            return class_probabilities(self._predictors_with(X, groups, offset)[0])
        return averaged_probabilities(self._law(X, groups, offset)[0])

    def predict_interval(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        offset: TableLike = None,
        level: float = 0.95,
    ) -> tuple[Floats, Floats]:
        """Central intervals of the class probabilities of rows of their clients.

        They are for the probabilities, given the data; a label has no interval.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.
        level : float in (0, 1), default=0.95
            Posterior probability of the interval of each class.

        Returns
        -------
        lower, upper : ndarrays of shape (n_rows, K)
            In the order of ``classes_``. Two classes: at quantiles of the log odds.
            K > 2 classes: quantiles of 8,192 quasi-random values, whose tails of 2.5 % are exact to
            about .001; about a millisecond a row. Bounds do not sum to 1. NaN, with a warning, for
            rows whose prediction the data do not determine (:ref:`row_space`).

        Raises
        ------
        ValueError
            For a level above .99 with K > 2 classes: the values do not reach that far.
        """
        check_level(level)
        law, x = self._law(X, groups, offset)
        if len(self.classes_) > 2 and level > _HIGHEST_LEVEL:
            raise ValueError(
                f"level must be at most {_HIGHEST_LEVEL} for more than two classes; got {level!r}."
            )
        moments_of = partial(self._posterior_moments, x, law.codes)
        bounds = probability_bounds(law.predictors, moments_of, law.coding, level)
        return tuple(self._where_estimable(x, each) for each in bounds)

    def predict_log_proba(
        self,
        X: TableLike,
        *,
        groups: TableLike = None,
        offset: TableLike = None,
        integrate: bool = True,
    ) -> Floats:
        """Logarithms of :meth:`predict_proba`; minus infinity where a probability is 0.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.
        integrate : bool, default=True
            Whether to average the probability, before the logarithm is taken.

        Returns
        -------
        ndarray of shape (n_rows, K)
            In the order of ``classes_``.
        """
        chances = self.predict_proba(X, groups=groups, offset=offset, integrate=integrate)
        with np.errstate(divide="ignore"):  # the logarithm of 0 is minus infinity, as documented
            return np.log(chances)

    def predict(
        self, X: TableLike, *, groups: TableLike = None, offset: TableLike = None
    ) -> NDArray[Any]:
        """Most likely class of rows of their clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        check_is_fitted(self)
        # Of two classes an average prefers the same as the mode; of more it may prefer another.
        logits = self.decision_function(
            X, groups=groups, offset=offset, integrate=len(self.classes_) > 2
        )
        return likeliest_class(self.classes_, logits)

    def score(
        self,
        X: TableLike,
        y: TableLike = None,
        *,
        groups: TableLike = None,
        sample_weight: Any = None,
        offset: TableLike = None,
    ) -> float:
        """Accuracy of the predictions, each row by its own client's model.

        Parameters
        ----------
        X : array-like of shape (n_rows, d)
            Features, with the columns that ``fit`` saw.
        y : array-like of shape (n_rows,)
            Observed classes.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.

        Returns
        -------
        float
        """
        predicted = self.predict(X, groups=groups, offset=offset)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))

    def _variance_within(self, name):
        # Contrasts of K > 2 logits have correlated latent errors, so there is no one variance.
        if len(self.classes_) > 2:
            raise AttributeError(
                f"{name} needs two classes, whose log odds have one scale; got "
                f"{len(self.classes_)} classes."
            )
        return _LATENT_VARIANCE
