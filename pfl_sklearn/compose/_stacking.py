"""Boosted trees, and whatever else predicts, under a personalized linear model."""

import numpy as np

from pfl_sklearn._compat import num_samples
from pfl_sklearn._docs import fill_doc
from pfl_sklearn._labels import check_several_classes
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.compose._base_stacking import PersonalizedStacking
from pfl_sklearn.compose._out_of_fold import SMALLEST, with_std
from pfl_sklearn.compose._stack_candidates import FINAL, STACK
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
)

STACKING = {
    "parameters": """
        estimators : list of (str, estimator), default=None
            Base estimators by name: any of scikit-learn's, and client-aware ones, which get the
            client ids. None: histogram gradient boosting without the clients, named "hgb", and
            with the client as a feature, named "hgb_client", see
            :class:`~pfl_sklearn.compose.ClientAsFeature`. Parameters inside are set as
            ``hgb__max_depth`` and ``hgb_client__estimator__max_depth``.
        final_estimator : estimator, default=None
            Personalized model of what the base estimators predict and of columns of `X`; None:
            {final} with default parameters.
        cv : int, splitter or list, default=5
            Folds that the base estimators predict in: how many inside clients (None: 5), or a
            splitter or splits that test each row once; at least 3 with `fallback`. Predictions for
            new clients are made with as many folds of whole clients.
        passthrough : bool or transformer, default=True
            Columns that the final estimator gets beside predictions. True: those of numbers without
            missing values. A transformer: what it makes of `X`, such as a ``ColumnTransformer``
            that encodes categories; it is fitted to all rows, without y.
        fallback : bool, default=True
            Let the simplest part predict that does about as well as the best, for known and for
            new clients; see Notes. False: always all estimators together.
        unseen : {{"warn", "population", "error"}}, default="warn"
            What to do about clients that ``fit`` did not see. "warn" warns if at least half of the
            rows are theirs.
        n_jobs : int or None, default=None
            Folds to fit at once. Results do not depend on it.
        random_state : int, RandomState instance or None, default=None
            Seed of the folds, and of the estimators that have none of their own.
        """,
    "attributes": """
        known_part_, new_part_ : str
            What predicts for known and for new clients: "stack" (all together), the name of a base
            estimator alone, "final_estimator" (on columns of `X` alone) or, for new clients,
            "pooled" (a linear model without clients) or "mean".
        losses_ : DataFrame
            Out-of-fold losses of these parts, {loss}, for known and for new clients: the smaller
            the better; NaN for what is no part for these clients. Where the first folds decide on
            the stack, its loss is that of the best other part times the ratio of the two in these
            folds, which is rough if a rough look decides. Empty with ``fallback=False``.
        named_estimators_ : Bunch
            Fitted base estimators that predictions need, by name.
        final_estimator_, population_estimator_ : estimator or None
            What is fitted behind the base estimators, for known and for new clients; None if one
            of these predicts alone.
        clients_ : ndarray of shape (n_clients,)
            Sorted ids of the clients.
        n_samples_per_client_ : ndarray of shape (n_clients,)
            Rows of each client.
        privacy_ : PrivacyReport
            ``epsilon`` is infinite: nothing protects the fit.
        n_features_in_ : int
            Number of columns of `X`.
        feature_names_in_ : ndarray of shape (`n_features_in_`,)
            Names of the columns of `X`, if it has any.
        """,
    "notes": """
        Base estimators see interactions that a linear model does not; the final one shrinks what is
        special about each client, which they cannot. This is stacked generalization (Wolpert, 1992;
        van der Laan et al., 2007) with folds for clients:

        - Rows of the final estimator are predicted by fits to other rows of the same clients,
          because it will predict for these clients.
        - New clients have another final estimator, whose rows are predicted by fits to other
          clients. Trees memorize columns that are constant within a client; how well they predict
          for new clients can be seen only on clients left out. New clients get the population
          coefficients of their final estimator.

        With `fallback` a part predicts only after a test on rows, or on clients, that nothing in it
        has seen. For the stack this needs fits to the rows outside of two folds: of a client with
        two rows the prediction for one is made of the other, so that a final estimator that saw
        both could tell the one from the other. The first part predicts that is not clearly worse
        than the best one, by a one-sided test of the mean difference at level 0.1, for new clients
        with errors clustered by client. The order is pooled and mean, the better of them first if
        there are ten clients, final estimator alone, base estimators in their order, stack. For new
        clients the stack takes part if there are at least three clients.

        The stack is tested fold after fold until it is clear. It is in if it is clearly better than
        each other part at level 0.025; it is out if it is clearly worse than the best of them at
        level 0.1, or worse than one of them in the first two folds or more. Both take at least 30
        rows. Before that, it may be out by the same rules at a rough look at two folds, which needs
        no more fits of base estimators: it takes the predictions that there are, although those for
        the final estimator's rows have seen the tested ones.

        With k folds each base estimator is fitted 2 k times for several clients if the stack is out
        at the rough look (10 times by default), 3 k times if it is in after one more fold for one
        kind of clients (15 times), and at most k (k + 1) times, on three to four fifths of the
        rows; and once to all rows if it predicts. The final estimator is fitted at most 4 k + 6
        times. ``fallback=False`` takes 2 k + 1 and 2 fits. Fits run on one thread each, so that
        results do not depend on `n_jobs`.
        """,
    "references": """
        Wolpert, D. H. (1992). Stacked generalization. Neural Networks.

        van der Laan, M. J., Polley, E. C. and Hubbard, A. E. (2007). Super learner. Statistical
        Applications in Genetics and Molecular Biology.
        """,
}


def _texts(**words):
    filled = {**STACKING}
    for name in ("parameters", "attributes"):
        filled[name] = filled[name].format(**words)
    return filled


@fill_doc(_texts(final=":class:`~pfl_sklearn.PersonalizedLinearRegression`", loss="squared errors"))
class PersonalizedStackingRegressor(ClientRegressorMixin, PersonalizedStacking):
    """Regression for tables whose rows belong to clients: trees under a personalized linear model.

    Base estimators, by default boosted trees with and without the client, predict out of fold. A
    personalized linear regression of these predictions and the numeric columns gives each client
    its own coefficients. Where parts of this do as well, they predict alone.

    Parameters
    ----------
    %(parameters)s

    Attributes
    ----------
    %(attributes)s

    See Also
    --------
    PersonalizedStackingClassifier : the same for classes.
    sklearn.ensemble.StackingRegressor : stacking without clients.

    Notes
    -----
    %(notes)s

    References
    ----------
    %(references)s

    Examples
    --------
    >>> from pfl_sklearn.compose import PersonalizedStackingRegressor
    >>> from pfl_sklearn.datasets import load_parkinsons
    >>> visits = load_parkinsons().frame.query("subject <= 8")
    >>> X, y = visits[["test_time", "PPE", "DFA"]], visits["total_UPDRS"]
    >>> model = PersonalizedStackingRegressor(cv=3, random_state=0)
    >>> model = model.fit(X, y, groups=visits["subject"])
    >>> model.losses_["known"].round(1)[["final_estimator", "hgb", "hgb_client"]]
    final_estimator     0.6
    hgb                50.7
    hgb_client          0.1
    Name: known, dtype: float64
    """

    __metadata_request__predict = {"groups": True, "return_std": True}
    _boosting = "HistGradientBoostingRegressor"
    _default_final = PersonalizedLinearRegression

    def _classes_of(self, y):
        return None

    def predict(self, X, *, groups=None, return_std=False):
        """Response of every row's client; for new clients that of the population.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        return_std : bool, default=False
            Also return standard deviations, those of the final estimator: of a client's mean
            response given the base estimators. Where a base estimator or a model without clients
            predicts alone, it is the root mean squared error out of fold.

        Returns
        -------
        y : ndarray of shape (n_rows,)
        std : ndarray of shape (n_rows,)
            If `return_std`.
        """
        if not return_std:
            return self._outputs(X, groups)
        mean, std = np.empty((2, num_samples(X)))
        for rows, kind, part, table, ids in self._by_part(X, groups):
            name, behind = part
            if name in (STACK, FINAL):
                mean[rows], std[rows] = with_std(behind, self._rows(kind, name, table, ids), ids)
            else:
                losses = self.losses_.get(kind, self.losses_["known"])
                mean[rows], std[rows] = self._of_part(kind, part, table, ids), np.sqrt(losses[name])
        return mean, std


@fill_doc(_texts(final=":class:`~pfl_sklearn.PersonalizedLogisticRegression`", loss="log-losses"))
class PersonalizedStackingClassifier(ClientClassifierMixin, PersonalizedStacking):
    """Classification for tables whose rows belong to clients: trees under personalized logits.

    Base estimators, by default boosted trees with and without the client, predict out of fold. A
    personalized logistic regression of their log odds and the numeric columns gives each client its
    own coefficients. Where parts of this do as well, they predict alone.

    Parameters
    ----------
    %(parameters)s

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.
    %(attributes)s

    See Also
    --------
    PersonalizedStackingRegressor : the same for responses.
    sklearn.ensemble.StackingClassifier : stacking without clients.

    Notes
    -----
    Probabilities of final estimators that can (by ``integrate=True``) are averages over a client's
    posterior, or over the population for new clients. Log odds are of probabilities of at least
    1e-6, and so are losses.

    %(notes)s

    References
    ----------
    %(references)s

    Examples
    --------
    >>> from pfl_sklearn.compose import PersonalizedStackingClassifier
    >>> from pfl_sklearn.datasets import load_radon
    >>> homes = load_radon("MN").frame
    >>> model = PersonalizedStackingClassifier(cv=3, random_state=0)
    >>> model = model.fit(homes[["floor"]], homes["log_radon"] > 1.4, groups=homes["county"])
    >>> model.known_part_, model.new_part_
    ('final_estimator', 'pooled')
    """

    _boosting = "HistGradientBoostingClassifier"
    _default_final = PersonalizedLogisticRegression

    def _classes_of(self, y):
        classes = np.unique(y)
        check_several_classes(classes, self)
        return classes

    def predict_proba(self, X, *, groups=None):
        """Class probabilities for every row's client; for new clients those of the population.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
            In the order of ``classes_``.
        """
        return self._outputs(X, groups)

    def predict_log_proba(self, X, *, groups=None):
        """Logarithms of :meth:`predict_proba`, of probabilities of at least 1e-6.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        return np.log(np.maximum(self._outputs(X, groups), SMALLEST))

    def predict(self, X, *, groups=None):
        """Most likely class of every row.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        best = self._outputs(X, groups).argmax(axis=1)
        return self.classes_[best]
