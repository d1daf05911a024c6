"""What stacks of both kinds have in common: their fit, and which part predicts for whom."""

from numbers import Integral

import numpy as np
import pandas as pd
from sklearn.base import is_classifier
from sklearn.utils import Bunch, check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._clients import row_counts
from pfl_sklearn._compat import (
    HasMethods,
    StrOptions,
    available_if,
    fit_context,
    num_samples,
    safe_indexing,
)
from pfl_sklearn._nesting import final_estimator
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.compose._client_feature import ClientAsFeature
from pfl_sklearn.compose._frozen_estimators import (
    check_strangers,
    for_new_clients,
    is_frozen,
    without_clients,
    without_originals,
)
from pfl_sklearn.compose._inner_tables import (
    as_table,
    check_responses,
    check_splits,
    check_takes_weights,
    ids_of_rows,
    read_table,
)
from pfl_sklearn.compose._named_estimators import (
    NamedEstimators,
    check_kind,
    check_parameters,
    of_client,
)
from pfl_sklearn.compose._out_of_fold import (
    Named,
    folds_of_clients,
    folds_within,
    outputs,
    prepared,
    splitter_of,
)
from pfl_sklearn.compose._passthrough import fitted_passthrough
from pfl_sklearn.compose._stack_candidates import (
    FINAL,
    MEAN,
    POOLED,
    STACK,
    fit_chosen,
    names_of,
    parts_of,
    plain_models,
    stacked,
)
from pfl_sklearn.privacy import PrivacyReport


def _final_has(method):
    """Check for ``available_if``: the final estimator, given or default, has a method."""

    def check(self):
        getattr(final_estimator(self._given_final()), method)
        return True

    return check


class PersonalizedStacking(ClientMixin, NamedEstimators):
    """What both have in common. A subclass has `_boosting`, a name, and `_default_final`."""

    _reserved_names = (STACK, POOLED, MEAN)
    _population_attributes = (
        "named_estimators_",
        "final_estimator_",
        "population_estimator_",
        "known_part_",
        "new_part_",
        "losses_",
    )
    _client_attributes = ("n_samples_per_client_",)
    _state_attributes = ("classes_", "_passthrough")

    _parameter_constraints = {
        "estimators": [list, None],
        "final_estimator": [HasMethods(["fit", "predict"]), None],
        "cv": ["cv_object"],
        "passthrough": ["boolean", HasMethods(["fit_transform", "transform"])],
        "fallback": ["boolean"],
        "unseen": [StrOptions({"warn", "population", "error"})],
        "n_jobs": [Integral, None],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        estimators=None,
        final_estimator=None,
        *,
        cv=5,
        passthrough=True,
        fallback=True,
        unseen="warn",
        n_jobs=None,
        random_state=None,
    ):
        self.estimators = estimators
        self.final_estimator = final_estimator
        self.cv = cv
        self.passthrough = passthrough
        self.fallback = fallback
        self.unseen = unseen
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _default_estimators(self):
        from sklearn import ensemble  # slow to import

        boosting = getattr(ensemble, self._boosting)
        return [("hgb", boosting()), ("hgb_client", ClientAsFeature(boosting()))]

    def _given_final(self):
        return self._default_final() if self.final_estimator is None else self.final_estimator

    def _default_component(self, name, value):
        return self._default_final() if name == "final_estimator" and value is None else None

    @fit_context(prefer_skip_nested_validation=False)
    def fit(self, X, y, *, groups=None, sample_weight=None):
        """Fit base estimators in folds, then the final estimator to what they predict.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            Features, as the base estimators take them.
        y : array-like of shape (n_rows,)
            Responses or class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; None: all rows are one client's.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows. All estimators must take them.

        Returns
        -------
        self
        """
        bases = self._checked_estimators()
        table = read_table(self, X, y, groups, sample_weight, is_classifier(self))
        check_responses(self, table)
        if groups is None:
            check_strangers([*bases, (FINAL, self._given_final())])
        clients, classes = table.clients, self._classes_of(table.y)
        _check_rows(clients)
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=len(bases) + 3)
        named, final = self._prepared(bases, classes, seeds[2:], table.weights is not None)
        if table.weights is not None:
            check_splits(self.cv, table.weights, sample_weight)
        columns = fitted_passthrough(self.passthrough, table.X)
        own = table._replace(X=columns.frame(table.X))
        _check_names(named, own.X)

        splitter = splitter_of(self.cv, classes is not None, int(seeds[0]))
        folds = {"known": folds_within(splitter, table, self)}
        if self.fallback and len(folds["known"]) < 3:
            raise ValueError(
                f"cv={self.cv!r} gives {len(folds['known'])} folds, but fallback=True needs at "
                "least 3; take more folds, or fallback=False."
            )
        plain = {"known": [], "new": plain_models(classes, own.X.shape[1])}
        if len(clients.ids) > 1:
            folds["new"] = folds_of_clients(len(folds["known"]), clients.codes, int(seeds[1]))
        drawn = {"known": None, "new": clients.codes}
        strangers = [without_clients(each) for each in named]
        seen = {"known": (named, final), "new": (strangers, without_clients(final))}
        parts = {
            kind: parts_of(
                *(*seen[kind], plain[kind], table, own, folds[kind]),
                drawn[kind],
                self.fallback,
                self.n_jobs,
            )
            for kind in folds
        }
        chosen = {kind: each.chosen for kind, each in parts.items()}
        fitted = fit_chosen(chosen, parts, named, table, self.n_jobs)
        for name in parts["known"].warned.keys() - fitted.bases.keys():  # those fits did not warn
            for text, category in parts["known"].warned[name]:
                warn_caller(f"{name!r} in the folds: {text}", category)

        validate_data(self, as_table(X), skip_check_array=True)
        self.named_estimators_ = Bunch(**fitted.bases)
        self.known_part_, self.final_estimator_ = fitted.known
        self.new_part_, self.population_estimator_ = fitted.new
        self.losses_ = pd.DataFrame({kind: each.losses for kind, each in parts.items()})
        self._passthrough = columns
        if classes is not None:
            self.classes_ = classes
        self.clients_ = clients.ids
        self.n_samples_per_client_ = row_counts(clients.codes, len(clients.ids))
        self._fitted_with_groups = groups is not None
        self.privacy_ = PrivacyReport.unprotected(
            f"{type(self).__name__} fits base estimators and folds without noise.",
            not_released=("clients_", *self._population_attributes),
            n_clients=len(clients.ids),
        )
        return self

    def _prepared(self, bases, classes, seeds, weighted):
        """Base estimators and the final one, ready to be fitted to rows with weights or without."""
        last = self._given_final()
        kind = "regressor" if classes is None else "classifier"
        check_kind(last, kind, f"final_estimator={last!r}")
        check_parameters(last, "final_estimator is given")
        final, *named = (
            Named(name, prepared(each, seed), classes)
            for (name, each), seed in zip([(FINAL, last), *bases], seeds, strict=True)
        )
        for each in (*named, final):
            if weighted and not is_frozen(each.estimator):
                check_takes_weights(each.estimator, each.name)
        return named, final

    @property
    def estimators_(self):
        """Fitted base estimators that predictions need, in their order."""
        return list(self.named_estimators_.values())

    @available_if(_final_has("summary"))
    def summary(self):
        """Table of the final estimator of known clients, by its own ``summary``.

        Returns
        -------
        DataFrame

        Raises
        ------
        ValueError
            If a base estimator alone predicts for known clients.
        """
        check_is_fitted(self)
        if self.final_estimator_ is None:
            raise ValueError(
                f"known clients get the predictions of {self.known_part_!r} alone, so there is no "
                "final estimator to summarize; see losses_, or set fallback=False."
            )
        return final_estimator(self.final_estimator_).summary()

    def for_client(self, client_id):
        """Model of one client alone: base estimators, and that client's final coefficients.

        Base estimators and a `passthrough` are handed out as they are, unless they have a
        ``for_client`` of their own. Trees keep averages of other clients' rows in their leaves, a
        nearest-neighbour imputer keeps rows; nothing protects these.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Returns
        -------
        estimator
            Fitted estimator of the same class, with ``clients_ == [client_id]``.
        """
        model = super().for_client(client_id)
        for name, fitted in self.named_estimators_.items():
            model.named_estimators_[name] = of_client(fitted, client_id)
        for name in ("final_estimator_", "population_estimator_"):
            setattr(model, name, of_client(getattr(self, name), client_id))
        return without_originals(model)

    def release(self):
        """Refused: base estimators and their folds have no noise.

        Raises
        ------
        ValueError
            Always. Trees memorize columns that are constant within a client, for example.
        """
        check_is_fitted(self)
        raise ValueError(
            f"release() of this {type(self).__name__} would publish base estimators, which were "
            "fitted without noise: trees memorize columns that are constant within a client. Take "
            "an estimator with an epsilon, such as PersonalizedLinearRegression or PPSGDClassifier."
        )

    def _outputs(self, X, groups):
        """Responses (n,) or probabilities (n, K) of rows, each by its client's part."""
        found = None
        for rows, kind, part, table, ids in self._by_part(X, groups):
            each = self._of_part(kind, part, table, ids)
            if found is None:
                found = np.empty((num_samples(X), *each.shape[1:]))
            found[rows] = each
        return found

    def _by_part(self, X, groups):
        """Rows of known and of new clients, their kind and part, and their features and ids."""
        check_is_fitted(self)
        X = as_table(X)
        validate_data(self, X, reset=False, skip_check_array=True)
        codes = self._encode_predict(X, groups)
        ids = ids_of_rows(self, groups, codes)
        known = self.known_part_, self.final_estimator_
        new = self.new_part_, self.population_estimator_
        for rows, kind, part in ((codes >= 0, "known", known), (codes < 0, "new", new)):
            if rows.all():
                yield slice(None), kind, part, X, ids
            elif rows.any():
                yield rows, kind, part, safe_indexing(X, np.flatnonzero(rows)), ids[rows]

    def _of_part(self, kind, part, X, ids):
        """What a part predicts for rows of known or new clients."""
        name, behind = part
        if behind is None:
            (base,) = [each for each in self._fitted_bases(kind) if each.name == name]
            return outputs(base, base.estimator, X, ids)
        final = Named(name, behind, getattr(self, "classes_", None))
        return outputs(final, behind, self._rows(kind, name, X, ids), ids)

    def _rows(self, kind, name, X, ids):
        """Rows as the estimator behind the base estimators takes them in a part."""
        columns = self._passthrough.frame(X)
        if name != STACK:
            return columns
        bases = self._fitted_bases(kind)
        return stacked(bases, [outputs(each, each.estimator, X, ids) for each in bases], columns)

    def _fitted_bases(self, kind):
        classes, found = getattr(self, "classes_", None), self.named_estimators_
        if kind == "new":
            found = {name: for_new_clients(each) for name, each in found.items()}
        return [Named(name, each, classes) for name, each in found.items()]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        inner = [get_tags(each) for each in self._estimator_objects()]
        tags.input_tags.allow_nan = all(each.input_tags.allow_nan for each in inner)
        tags.input_tags.sparse = False
        return tags


def _check_rows(clients):
    """Raise ValueError if no client has two rows."""
    n_clients = len(clients.ids)
    if row_counts(clients.codes, n_clients).max() == 1:
        raise ValueError(
            f"each of the {n_clients} clients has one row, so that no fold leaves a client a row "
            "to learn from; take an estimator without clients."
        )


def _check_names(named, columns):
    """Raise ValueError if what a base estimator predicts has the name of a column."""
    names = [name for each in named for name in names_of(each)]
    taken = [name for name in names if name in columns.columns]
    if taken:
        raise ValueError(
            f"predictions have the name {taken[0]!r} in estimators, which is also a column of X "
            "that the final estimator gets; rename one of them."
        )
