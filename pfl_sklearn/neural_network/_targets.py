"""Classifiers and regressors among neural estimators: their targets and predictions."""

import numpy as np
from sklearn.callback import with_callbacks
from sklearn.utils import assert_all_finite, check_array, check_consistent_length
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from pfl_sklearn._compat import HasMethods, StrOptions, fit_context
from pfl_sklearn._labels import read_known_classes
from pfl_sklearn._rounds.estimator import CheckedTable
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.neural_network._base import checks
from pfl_sklearn.priors import DirichletPrior, SparseDirichletPrior

_CLOSE = 1e-3  # of sums of probabilities to 1
LABEL_PRIOR = {  # ranges of a parameter that classifiers share
    "label_prior": [HasMethods(["fit_counts", "log_frequencies"]), StrOptions({"client"}), None],
}


class NeuralClassifierMixin(ClientClassifierMixin):
    """Labels and probabilities of neural classifiers."""

    _is_classifier = True

    def _default_component(self, name, value):
        if name == "label_prior" and value == "client":
            return SparseDirichletPrior()
        return super()._default_component(name, value)

    @property
    def _needs_probabilities(self):
        return self.label_prior is not None

    def _check_parameters(self):
        super()._check_parameters()
        prior = self.label_prior
        given = prior is not None and not isinstance(prior, str)
        if is_private(self) and given and getattr(prior, "is_known", False) is not True:
            raise ValueError(
                f"label_prior={prior!r} would be estimated from the clients' labels, which noise "
                "does not cover; give all its parameters, or 'client' for the flat Dirichlet prior."
            )

    def _label_prior(self, n_classes):
        """Prior of the clients' label frequencies; with noise it is known."""
        if not isinstance(self.label_prior, str):
            return self.label_prior
        uniform = DirichletPrior(np.full(n_classes, 1 / n_classes), float(n_classes))
        return uniform if is_private(self) else SparseDirichletPrior()

    def _label_offsets(self, table, clients, roster, earlier):
        if self.label_prior is None:
            return {}, None
        n_classes = table.details
        counts = np.zeros((len(roster.ids), n_classes))
        if earlier is not None:
            counts[roster.earlier] = earlier.found.get("_label_counts", 0.0)
        cells = np.bincount(
            clients.codes * n_classes + table.y, minlength=len(clients.ids) * n_classes
        )
        counts[roster.now] = cells.reshape(-1, n_classes)
        seen = np.ones_like(counts) if is_private(self) else counts  # with noise it is known
        prior = self._label_prior(n_classes).fit_counts(seen)
        offsets = prior.log_frequencies(counts) - np.log(prior.mean)
        offsets[counts.sum(axis=1) == 0] = 0.0  # nothing is known of their labels
        return {"label_prior_": prior, "_label_counts": counts, "_offsets": offsets}, offsets

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, classes=None, *, groups=None):
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds, whatever
        the rows are, and they are charged before any data are read.

        Parameters
        ----------
        X : array-like of shape (n_rows, ...)
            Features of the new rows.
        y : array-like of shape (n_rows,)
            Class labels.
        classes : array-like of shape (n_classes,), default=None
            All labels that are to occur, in the first call; None: those of `y`.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Clients that have no rows here keep their models.

        Returns
        -------
        self
        """
        return self._partial_fit(X, y, groups, classes=classes)

    def _read(self, X, y, earlier, classes=None):
        features, attributes = self._features(X, earlier)
        _check_given(y, self)
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y", estimator_name=type(self).__name__)
        check_consistent_length(features, y)
        check_classification_targets(y)
        known = None if earlier is None else self.classes_
        classes, labels = read_known_classes(y, known, classes, self)
        return CheckedTable(features, labels, {**attributes, "classes_": classes}, len(classes))

    def predict_proba(self, X, *, groups=None):
        """Probabilities of the classes, in the order of ``classes_``.

        Parameters
        ----------
        X : array-like of shape (n_rows, ...)
            Features, of the shape that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)

        Raises
        ------
        ValueError
            If neither the net's criterion nor its ``predict_nonlinearity`` says how to read
            probabilities off its outputs, or if what they say gives none.
        """
        check_is_fitted(self)
        net = self._engines.population.net
        checks().check_readable(net)
        found = self._outputs(X, groups)[0]
        if (found < 0).any() or (np.abs(found.sum(axis=1) - 1) > _CLOSE).any():
            raise ValueError(
                f"the outputs of the net, read by criterion={type(net.criterion_).__name__} and "
                f"predict_nonlinearity={net.predict_nonlinearity!r}, are no probabilities; "
                "predict takes the largest of them, whatever they are."
            )
        return found

    def predict_log_proba(self, X, *, groups=None):
        """Logarithms of the probabilities of the classes.

        Parameters
        ----------
        X : array-like of shape (n_rows, ...)
            Features, of the shape that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        return np.log(self.predict_proba(X, groups=groups))

    def predict(self, X, *, groups=None):
        """Class of every row whose probability, or other output, is the largest.

        Parameters
        ----------
        X : array-like of shape (n_rows, ...)
            Features, of the shape that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        check_is_fitted(self)
        return self.classes_[self._outputs(X, groups)[0].argmax(axis=1)]


class NeuralRegressorMixin(ClientRegressorMixin):
    """Targets and predictions of neural regressors."""

    _is_classifier = False

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, *, groups=None):
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds, whatever
        the rows are, and they are charged before any data are read.

        Parameters
        ----------
        X : array-like of shape (n_rows, ...)
            Features of the new rows.
        y : array-like of shape (n_rows,) or (n_rows, n_outputs)
            Responses, with as many columns as in the first call.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row. Clients that have no rows here keep their models.

        Returns
        -------
        self
        """
        return self._partial_fit(X, y, groups)

    def _read(self, X, y, earlier):
        features, attributes = self._features(X, earlier)
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=self)
        check_consistent_length(features, y)
        single = y.ndim == 1
        y = y.reshape(len(y), -1)
        return CheckedTable(features, y, {**attributes, "_single": single}, y.shape[1])

    def predict(self, X, *, groups=None):
        """Prediction for every row's client; the population's for unseen clients.

        Parameters
        ----------
        X : array-like of shape (n_rows, ...)
            Features, of the shape that ``fit`` saw.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, n_outputs)
        """
        found = self._outputs(X, groups)[0]
        return found.reshape(len(found)) if self._single else found.reshape(len(found), -1)


def _check_given(y, estimator):
    """Raise ValueError, in scikit-learn's words, if there is no target."""
    if y is None:
        name = type(estimator).__name__
        raise ValueError(f"{name} requires y to be passed, but the target y is None")
