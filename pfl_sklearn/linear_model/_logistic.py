"""Personalized logistic regression: one coefficient vector per client under a Gaussian prior."""

import math
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import fit_context
from pfl_sklearn._labels import (
    CLASSES,
    check_classes,
    check_labels,
    class_assumption,
    read_known_classes,
)
from pfl_sklearn._parameters import CLASS_WEIGHT, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientClassifierMixin, check_level
from pfl_sklearn.linear_model._algebra import class_probabilities, likeliest_class
from pfl_sklearn.linear_model._link import LinkRegression, checked_offset
from pfl_sklearn.linear_model._mixed._families import class_family
from pfl_sklearn.linear_model._mixed._predictions import averaged_probabilities, probability_bounds
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._link_server import PrivateStart
from pfl_sklearn.linear_model._totals import RowMeans

_HIGHEST_LEVEL = 0.99  # at which 8,192 values have 41 in a tail
_LEAST_SPREAD = 1e-3  # variance of a predictor
_LATENT_VARIANCE = np.pi**2 / 3  # of the logistic distribution


@with_parameters
class PersonalizedLogisticRegression(ClientClassifierMixin, LinkRegression):
    r"""Logistic regression with coefficients that vary by client around those of the population.

    Row j of client i belongs to the second of two classes with log odds

    .. math:: \eta_{ij} = x_{ij}^\top (\beta + E b_i), \qquad b_i \sim N(0, S),

    where E selects the coefficients that vary by client (`random`); all clients share the others.
    Levels of further columns of X may have effects, too (`groupings`, for two classes). A client's
    coefficients are its posterior mode. With K > 2 classes every class has coefficients
    :math:`\beta_k` and deviations :math:`b_{ik} \sim N(0, S)`, independent over the classes, and
    the probabilities are the softmax of the logits. See the :ref:`user guide
    <logistic_regression>`.

    Attributes
    ----------
    classes_ : ndarray of shape (K,)
    coef_, intercept_ : ndarrays of shape (n_clients, [K,] d) and (n_clients[, K])
        Posterior modes. With two classes they refer to the log odds of ``classes_[1]``; with
        K > 2 classes they sum to 0 over the classes, so their variance around the population is
        (1 - 1/K) S.
    population_coef_, population_intercept_ : ndarrays of shape (d,) and (), or (K, d) and (K,)
        Coefficients of a typical client. Probabilities averaged over clients are less extreme.

    Raises
    ------
    ValueError
        For missing ids or ids of mixed types, NaN or infinity, values above 1e150 or a column whose
        nonzero values are all below 1e-140, only one class, a row's weight above 1e6 or weights
        that sum to less than 1e-3.

        For unknown or ambiguous names in `random`, a number of quadrature points where several
        coefficients vary or K > 2, and a known covariance that holds NaN (the `prior_` of a fit of
        a single client) or infinity, or gives the predictors a standard deviation above 1e7 logits.

        If the data do not identify the covariance: every client has one row; a column named in
        `random` is constant over all rows, there is a random intercept, and the covariance is not
        spherical; the covariance is full and there are fewer clients than random coefficients.

        For `groupings` with K > 2 classes or a number of quadrature points; for a column of
        `groupings` that holds dates, lists, or strings that read as dates (or, under "auto", as
        numbers); has as many levels as rows; groups the rows as another one does; or has fewer
        levels than coefficients with a full covariance. For more effects than fit into memory.

        With a finite `epsilon`: for `groupings`, a missing bound, sample weights, an intercept that
        does not vary, an estimated covariance of several coefficients that is not "diag", noise of
        half of a coefficient's variance or more where several vary, a prior with a mean, and more
        or fewer than two classes. Numbers in `X` or the offset, and covariances that the data do
        not identify, then raise no error, which would reveal them: they are clipped (see
        `privacy_`).

    Warns
    -----
    SeparationWarning
        If the likelihood has no finite maximum: a combination of the features separates the
        classes, no client has rows of two classes, or the differences between clients, or levels,
        diverge. A weak normal prior then keeps the estimates finite.
    ConvergenceWarning
        If `max_iter` was too small, or rounding stopped the search; more iterations help only in
        the first case.
    UserWarning
        If the labels look like counts (more than 20 classes that are whole numbers, the largest of
        which has a single row), or a column of `groupings` is left out.
    NotEstimableWarning
        If columns are linear combinations of others, and if rows to predict break such a relation
        (:ref:`row_space`).
    PrivacyWarning
        If a private fit released mostly noise, or numbers that the bounds make implausible.

    Notes
    -----
    The model is that of Section 3 and Appendix F of Ozkara et al. (2023). The joint density that
    the paper minimizes (equation 55, ICLR) has no minimum and lacks a minus sign, and the prior's
    gradient in Algorithm 5 (ICLR) has the wrong sign.

    `aic_` and `bic_` count the population coefficients that are identified (for K - 1 classes),
    also where a penalty shrinks them. `icc_` and R2 are those of the log odds of two classes,
    whose variance within clients is :math:`\pi^2 / 3` (Nakagawa and Schielzeth, 2013).

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

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
    _range_of_means = (0.0, 1.0)
    _scale, _separated = "logits", "the classes"
    _sparse_alternative = "PPSGDClassifier"
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
                is given), or "balanced" for equal sums. Probabilities are then those of a
                population with these weights; with two classes a weight of w for the second moves
                the intercepts by about log(w), and hardly the slopes. Needs an infinite `epsilon`.
        """,
    )

    classes: Any = CLASSES

    @property
    def _public_response(self):
        if self.classes is None:
            return "; the classes are public, and both occur"
        return f"; {class_assumption(self)}"

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
            Features and columns of `groupings`; an intercept is added if `fit_intercept` is True.
            With it and `groups` there may be no features (d = 0): clients then have an intercept
            alone.
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
        check_classes(self.classes, 2 if math.isfinite(self.epsilon) else None)
        return self._fit_link(X, y, groups, sample_weight, partial(checked_offset, offset))

    def _draw_response(self, predictors, noise_variance, rng):
        labels = np.array([0, 1]) if self.classes is None else np.unique(self.classes)
        return labels[(rng.random_sample(len(predictors)) < expit(predictors)).astype(int)]

    def _checked_response(self, y, with_offset=False):
        check_labels(y)
        return y

    def _family_of(self, y):
        private = math.isfinite(self.epsilon)
        if private and self.classes is None and len(np.unique(y)) != 2:  # names no label
            raise ValueError(
                f"a private {type(self).__name__} takes two classes, which are public; y holds "
                "another number of them."
            )
        # Classes that only rows of weight 0 have are absent, as these rows are.
        classes, labels = read_known_classes(y, None, self.classes, self, private)
        absent = np.setdiff1d(classes, y)
        if len(absent) and not private:
            raise ValueError(f"no row is of the class {absent.tolist()[0]!r}, one of classes=.")
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
            Features and groupings, with the columns that ``fit`` saw.
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
            Features and groupings, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.
        integrate : bool, default=True
            Whether to average the probability over the client's posterior given the estimates, or
            over the prior for unseen clients (if ``fit`` saw several clients). Otherwise it is that
            of the posterior mode, which is too extreme.

        Returns
        -------
        ndarray of shape (n_rows, K)
            In the order of ``classes_``.
        """
        if not integrate:
            return class_probabilities(self._predictors_with(X, groups, offset)[0])
        return averaged_probabilities(self._predictor_law(X, groups, offset)[0])

    def _rows_with(self, X, groups, offset=None):
        return self._predictors_with(X, groups, offset)

    def _mean_responses(self, predictors):
        return expit(predictors)

    def _drawn_responses(self, predictors, weights, rng):
        is_second = rng.random_sample(len(predictors)) < expit(predictors)
        return self.classes_[is_second.astype(int)]

    def _row_means(self, X, groups, offset=None):
        law, x = self._predictor_law(X, groups, offset)
        if law.predictors.shape[1] > 1:
            raise ValueError(
                f"predict_total needs two classes; got a model of {len(self.classes_)}."
            )

        def means(shift):
            return averaged_probabilities(law._replace(predictors=law.predictors + shift))[:, 1]

        mean, step = means(0.0), 0.01
        noise = mean * (1 - mean)
        slopes = (means(step) - means(-step)) / (2 * step)
        # The average slope is that of p (1 - p), so this is the variance of p in the posterior.
        spread = np.maximum(noise - slopes, 0.0)
        given = law.covariances_of(np.arange(len(x)), np.ones((1, 1)))[:, 0, 0]
        is_wide = given > _LEAST_SPREAD  # below, the difference of both would lose its digits
        slopes[is_wide] = np.sqrt(spread[is_wide] / given[is_wide])
        return RowMeans(x, law.codes, mean, slopes, noise, "logit")

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
            Features and groupings, with the columns that ``fit`` saw.
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
        law, x = self._predictor_law(X, groups, offset)
        if len(self.classes_) > 2 and level > _HIGHEST_LEVEL:
            raise ValueError(
                f"level must be at most {_HIGHEST_LEVEL} for more than two classes; got {level!r}."
            )
        moments_of = partial(self._posterior_moments, x, law)
        bounds = probability_bounds(law.predictors, moments_of, law.coding, level)
        return tuple(self._mask_inestimable(x, bound) for bound in bounds)

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
            Features and groupings, with the columns that ``fit`` saw.
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
            Features and groupings, with the columns that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        offset : array-like of shape (n_rows,), default=None
            Known part of the log odds; needed if ``fit`` got one.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        check_is_fitted(self)
        # With two classes we follow the sign of the decision function. An average of probabilities
        # prefers the same class, except for a skewed posterior near one half; with more classes it
        # often prefers another.
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
            Features and groupings, with the columns that ``fit`` saw.
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
