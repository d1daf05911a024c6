"""Classifiers and regressors among neural estimators: their targets and predictions."""

import math
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.utils import assert_all_finite, check_array, check_consistent_length
from sklearn.utils.validation import check_is_fitted, column_or_1d

from pfl_sklearn._clients import Array
from pfl_sklearn._columns import name_bad_columns
from pfl_sklearn._compat import HasMethods, StrOptions, fit_context, names_class, with_callbacks
from pfl_sklearn._labels import (
    CLASSES,
    check_labels,
    class_assumption,
    given_classes,
    read_known_classes,
)
from pfl_sklearn._parameters import BETWEEN_0_AND_1, parameter, with_parameters
from pfl_sklearn._rounds.privacy import LABEL_SUMS, is_private, label_event, label_noise_std
from pfl_sklearn._rounds.run import CheckedTable, rounds_run, without_weights
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientClassifierMixin, ClientRegressorMixin
from pfl_sklearn.neural_network._base import backend
from pfl_sklearn.priors import DirichletPrior, SparseDirichletPrior

_PROBABILITY_SUM_TOLERANCE = 1e-3  # of sums of probabilities to 1
LABEL_SHARE = parameter(
    default=None,
    ranges=[BETWEEN_0_AND_1, None],
    text="""
    float in (0, 1) or None
        Share of the budget that the noisy sum for an unknown ``DirichletPrior`` takes: of the
        squared parameter mu of Gaussian DP that belongs to `epsilon` and `delta`. The rounds have
        the rest. With `noise_multiplier` it is the share of what the sum and `n_rounds` rounds
        spend together, in the limit of many rounds. None: 0.05. Without noise it has no effect.
    """,
)
_DEFAULT_SHARE = 0.05
_WHOLE_BUDGET = 1 - 1e-9  # of the budget, so that rounding does not exceed it


@with_parameters
class NeuralClassifierMixin(ClientClassifierMixin):
    """Labels and probabilities of neural classifiers.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.
    """

    classes: Any = CLASSES

    _is_classifier = True

    @property
    def _assumptions(self):
        return (*super()._assumptions, class_assumption(self))  # type: ignore[misc]  # BaseNeural's

    @without_weights
    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X: TableLike, y: Any, classes: Any = None, *, groups: Any = None) -> Self:
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds for any
        rows, charged before any data are read.

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
        features = self._features(X, earlier)
        check_has_target(y, self)
        y = column_or_1d(y, warn=True)
        with name_bad_columns(private=is_private(self)):
            assert_all_finite(y, input_name="y", estimator_name=type(self).__name__)
        check_consistent_length(features, y)
        check_labels(y)
        classes_before = None if earlier is None else self.classes_
        classes = self._listed_classes(given_classes(self, classes))
        classes, labels = read_known_classes(y, classes_before, classes, self, is_private(self))
        attributes = {**self._column_attributes(X), "classes_": classes}
        return CheckedTable(features, labels, attributes, len(classes))

    def _listed_classes(self, classes):
        """Classes that partial_fit was given or that the network lists; None if neither was."""
        listed = getattr(self._recipe(), "classes", None)
        if listed is None:
            return classes
        if classes is not None and set(classes) != set(listed):
            raise ValueError(f"got classes={classes!r}, but the net lists {listed!r}.")
        return listed

    @names_class
    def predict_proba(self, X: TableLike, *, groups: Any = None) -> Floats:
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
            If neither the network's criterion nor its ``predict_nonlinearity`` says how to read
            probabilities off its outputs, or if what they say gives none.
        """
        check_is_fitted(self)
        net = self._engines.population.net
        backend().checks.check_readable(net)
        probabilities = self._outputs(X, groups)
        # A nonlinearity of the user's may give anything, and log losses of it would mean nothing.
        if (probabilities < 0).any() or (
            np.abs(probabilities.sum(axis=1) - 1) > _PROBABILITY_SUM_TOLERANCE
        ).any():
            raise ValueError(
                f"the outputs of the net, read by criterion={type(net.criterion_).__name__} and "
                f"predict_nonlinearity={net.predict_nonlinearity!r}, are no probabilities; "
                "predict takes the largest of them, whatever they are."
            )
        return probabilities

    @names_class
    def predict_log_proba(self, X: TableLike, *, groups: Any = None) -> Floats:
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

    @names_class
    def predict(self, X: TableLike, *, groups: Any = None) -> Array:
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
        return self.classes_[self._outputs(X, groups).argmax(axis=1)]


@with_parameters
class LabelPriorMixin(NeuralClassifierMixin):
    """Classifiers that read a network through the clients' label frequencies.

    Attributes
    ----------
    label_prior_ : DirichletPrior, SparseDirichletPrior or another label prior
        Fitted prior of the label frequencies. Only with `label_prior`.
    """

    label_prior: Any = parameter(
        default=None,
        ranges=[HasMethods(["fit_counts", "log_frequencies"]), StrOptions({"client"}), None],
        text="""
            None, "client", DirichletPrior or SparseDirichletPrior
                Prior of the clients' label frequencies. Probabilities are multiplied by a client's
                frequency of each label over the population's, and made to sum to 1; personal
                networks are trained through this. "client" estimates a
                :class:`~pfl_sklearn.priors.SparseDirichletPrior`; with noise it is the flat
                Dirichlet prior. With noise, what a :class:`~pfl_sklearn.priors.DirichletPrior`
                leaves unknown is estimated from one noisy sum over all clients, which takes a part
                of epsilon and which further calls keep; other priors have to be known, and must not
                come from these data.
            """,
    )

    _population_attributes: ClassVar[tuple[str, ...]] = (
        "_population",
        "_server",
        "label_prior_",
    )

    def _default_component(self, name, value):
        if name == "label_prior" and value == "client":
            return SparseDirichletPrior()
        return super()._default_component(name, value)  # type: ignore[misc]  # BaseNeural's

    @property
    def _needs_probabilities(self):
        return self.label_prior is not None

    def _check_parameters(self):
        super()._check_parameters()  # type: ignore[misc]  # BaseNeural's
        prior, from_sums = self.label_prior, self._prior_from_sums
        if isinstance(prior, type):
            raise ValueError(
                f"label_prior must be an instance, such as {prior.__name__}(); got the class."
            )
        if is_private(self) and self._prior_is_unknown and not from_sums:
            raise ValueError(
                f"label_prior={prior!r} would be estimated from the clients' labels, which noise "
                "does not cover; give all its parameters, DirichletPrior(), which is estimated "
                "from one noisy sum, or 'client' for the flat Dirichlet prior."
            )
        if is_private(self) and from_sums and self._noisy_steps is not None:
            raise ValueError(
                f"label_prior={prior!r} would be estimated by a server that sees every client's "
                "label frequencies, and clients that add noise='per_step' themselves need not "
                "trust it; give all its parameters, or noise='per_round'."
            )
        share = getattr(self, "label_prior_share", None)
        if share is not None and not from_sums:
            raise ValueError(
                f"got label_prior_share={share!r} with label_prior={prior!r}, which is not "
                "estimated from a noisy sum; give label_prior=DirichletPrior(), or "
                "label_prior_share=None."
            )

    @property
    def _prior_is_given(self):
        """Whether the label prior is the user's, rather than None or a name."""
        return self.label_prior is not None and not isinstance(self.label_prior, str)

    @property
    def _prior_is_unknown(self):
        """Whether the label prior is the user's and has parameters to estimate."""
        return self._prior_is_given and getattr(self.label_prior, "is_known", False) is not True

    @property
    def _prior_from_sums(self):
        """Whether the label prior can be estimated from noisy sums, and has to be estimated."""
        return self._prior_is_unknown and hasattr(self.label_prior, "fit_sums")

    def _releases_labels(self, earlier):
        before = earlier is not None and "_label_sums" in earlier.attributes
        return is_private(self) and self._prior_from_sums and not before

    @property
    def _label_share(self):
        """Share of the budget for the label prior: all of it, if nothing else is released."""
        # Networks that are trained alone release nothing, so the sum may have the whole budget.
        if not self._communicates:
            return _WHOLE_BUDGET
        return min(self.label_prior_share or _DEFAULT_SHARE, _WHOLE_BUDGET)

    @property
    def _assumptions(self):
        assumptions = super()._assumptions
        values = vars(self.label_prior).values() if self._prior_is_given else ()
        if all(value is None for value in values):
            return assumptions
        users = "what label_prior gives is the user's: it was not computed from these data"
        return (*assumptions, users)

    def _label_prior(self, counts, sums):
        """Fitted prior of label frequencies: from counts (m, K), or with noise from their sums."""
        prior, n_classes = self.label_prior, counts.shape[1]
        if not is_private(self):
            return (SparseDirichletPrior() if isinstance(prior, str) else prior).fit_counts(counts)
        if isinstance(prior, str):
            # A prior that is known in advance costs no privacy: all parameters are 1.
            return DirichletPrior(np.full(n_classes, 1 / n_classes), float(n_classes))
        if self._prior_from_sums:
            return prior.fit_sums(**sums)
        return prior.fit_counts(np.ones_like(counts))  # it is known, so they do not matter

    def _noisy_sums(self, counts, plan):
        """Noisy sums over clients of label frequencies, from counts (m, K), and what they rest on.

        They are as ``DirichletPrior.fit_sums`` takes them.
        """
        std, seed = label_noise_std(label_event(self)), None
        if plan.setup_seed is not None:
            seed = (*plan.setup_seed, 1 + rounds_run(plan.earlier))
        sums = LABEL_SUMS.release(counts, std, np.random.default_rng(seed))
        return {
            "frequencies": sums["frequencies"],
            "square": float(sums["square"][0]),
            "n_rows": counts.sum(axis=1),
            "noise_std": std,
        }

    def _label_offsets(self, table, codes, plan):
        earlier, clients = plan.earlier, plan.clients
        sums = None if earlier is None else earlier.attributes.get("_label_sums")
        attributes = {} if sums is None else {"_label_sums": sums}
        if self.label_prior is None:
            return attributes, None
        n_classes = table.n_outputs
        counts = np.zeros((len(clients.ids), n_classes))
        if earlier is not None:
            # Clients without rows in this call keep the frequencies of an earlier one.
            counts[clients.earlier_at] = earlier.attributes.get("_label_counts", 0.0)
        cells = np.bincount(codes * n_classes + table.y, minlength=len(clients.now_at) * n_classes)
        counts[clients.now_at] = cells.reshape(-1, n_classes)
        if plan.is_frozen:  # the prior is the population's, which one client must not move
            prior = getattr(self, "label_prior_", None)
            if prior is None:
                raise self._changed_since_fit()
            offsets = prior.log_frequencies(counts) - np.log(prior.mean)
            return {"_offsets": offsets}, offsets
        if self._releases_labels(earlier):
            attributes["_label_sums"] = self._noisy_sums(counts, plan)
        prior = self._label_prior(counts, attributes.get("_label_sums"))
        # Bayes' rule: out with the population's frequencies, which the network has learned, in with
        # the client's.
        offsets = prior.log_frequencies(counts) - np.log(prior.mean)
        offsets[counts.sum(axis=1) == 0] = 0.0  # nothing is known of their labels
        attributes |= {"label_prior_": prior, "_label_counts": counts, "_offsets": offsets}
        return attributes, offsets


class NeuralRegressorMixin(ClientRegressorMixin):
    """Targets and predictions of neural regressors."""

    _is_classifier = False

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    @without_weights
    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X: TableLike, y: Any, *, groups: Any = None) -> Self:
        """Go on over rows, of clients seen before or new ones.

        Without noise this is one pass over the rows. With noise it is `n_rounds` rounds for any
        rows, charged before any data are read.

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
        features = self._features(X, earlier)
        check_has_target(y, self)
        with name_bad_columns(private=is_private(self)):
            y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=self)
        check_consistent_length(features, y)
        single = y.ndim == 1
        y = y.reshape(len(y), -1)
        if earlier is not None:
            seen = math.prod(self._engines.population.output_shape)
            if y.shape[1] != seen:
                raise ValueError(f"y has {y.shape[1]} columns, but fit saw {seen}.")
        return CheckedTable(
            features, y, {**self._column_attributes(X), "_single": single}, y.shape[1]
        )

    @names_class
    def predict(self, X: TableLike, *, groups: Any = None) -> Array:
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
        responses = self._outputs(X, groups)
        return responses.reshape(len(responses), *(() if self._single else (-1,)))


def check_has_target(y, estimator):
    """Raise scikit-learn's ValueError if there is no target."""
    if y is None:
        name = type(estimator).__name__
        raise ValueError(f"{name} requires y to be passed, but the target y is None")
