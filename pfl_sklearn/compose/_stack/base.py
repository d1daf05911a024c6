"""Base class of the stacks for regression and for classification."""

import warnings
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import pandas as pd
from sklearn.base import is_classifier
from sklearn.utils import Bunch, check_random_state
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import (
    HasMethods,
    StrOptions,
    available_if,
    fit_context,
    num_samples,
    with_callbacks,
)
from pfl_sklearn._parallel import batch_mapper, phases
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import final_estimator, has_method
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.compose._client_rows import (
    check_responses,
    client_attributes,
    read_client_rows,
    row_ids,
    rows_to_predict,
    take_rows,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    for_new_clients,
    model_of_client,
    predict_inner,
    seeded_clones,
    unprotected_report,
)
from pfl_sklearn.compose._many_levels import many_level_columns, takes_groupings, with_levels
from pfl_sklearn.compose._named_estimators import (
    NamedEstimators,
    check_frozen_clients,
    check_kind,
    check_parameters,
    classes_of,
    is_pair,
    without_originals,
)
from pfl_sklearn.compose._out_of_fold import (
    folds_within,
    in_order_of_time,
    keep_table,
    splitter_of,
    tested_rows,
)
from pfl_sklearn.compose._stack.boosting import (
    LIBRARIES,
    default_estimators,
    default_names,
    for_classes,
)
from pfl_sklearn.compose._stack.choice import (
    FINAL,
    INTERCEPT,
    MEAN,
    MIXTURE,
    POOLED,
    RECENT,
    STACK,
    StackInFolds,
    check_client_sizes,
    choose,
    final_model,
    fit_parts,
    part_name,
    repeat_fold_warnings,
    stack_for_new_clients,
    weights_table,
)
from pfl_sklearn.compose._stack.final_rows import (
    check_names,
    encode_table,
    fit_encoder,
    fit_passthrough,
    join_predictions,
    passed_columns,
    passed_levels,
)
from pfl_sklearn.compose._stack.recent import with_recent


@with_parameters
class PersonalizedStacking(ClientMixin, NamedEstimators):
    """Base of both stacks. A subclass has `_kind`, a name, and `_default_final`.

    Parameters
    ----------
    estimators : list of (str, estimator), {"lightgbm", "catboost"} or None, default=None
        Base estimators by name; client-aware ones get the client ids. None: histogram gradient
        boosting without the clients ("hgb"), with the client as a feature ("hgb_client", see
        :class:`~pfl_sklearn.compose.ClientAsFeature`) and, for responses, of the residuals of a
        personalized line ("hgb_residual"), on the table that a
        :class:`~pfl_sklearn.compose.TableEncoder` makes; see Notes for columns with more than 10
        levels. "lightgbm" and "catboost" are the same with boosting of these libraries. Parameters
        inside are ``hgb__max_depth``, ``hgb_client__estimator__max_depth`` and so on.
    final_estimator : estimator, default=None
        Personalized model of the base estimators' predictions and of columns of `X`; None:
        :class:`~pfl_sklearn.PersonalizedLinearRegression`, or for classes
        :class:`~pfl_sklearn.PersonalizedLogisticRegression`, all of whose coefficients vary, or
        the intercept if most rows are of clients with no more of them than coefficients. Parameters
        that you set inside (``final_estimator__tol``) are those of the former.
    cv : int, "time", splitter or list, default=5
        Folds for the base estimators: their number inside clients (None: 5), or a splitter or
        splits that test each row once; at least 3 with `fallback`. Folds may also go forward in
        time: "time" is :class:`~pfl_sklearn.model_selection.ClientTimeSeriesSplit` of rows in order
        of time, with 5 splits, or 4 if no client has 7 rows. If no client has 6, and for splitters
        of fewer than three splits, folds inside clients replace them, with a warning. Predictions
        for new clients come from as many folds of whole clients.
    passthrough : bool or transformer, default=True
        Columns that the final estimator gets with the predictions. True: all, by a
        :class:`~pfl_sklearn.compose.TableEncoder`, with a warning for columns that it leaves out
        and for levels that it merges; see Notes. A transformer is fitted to all rows of `X`,
        without y, and must return numbers, apart from columns that
        ``TableEncoder(many_levels="pass")`` hands on.
    fallback : bool, default=True
        Let parts of the stack predict, alone or averaged; see Notes. False: always the whole stack.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see. "warn" warns if they have at least half
        of the rows.
    n_jobs : int or None, default=None
        Folds to fit at once, with one thread each; results do not depend on it.
    random_state : int, RandomState instance or None, default=None
        Seed of the folds, and of estimators that have none of their own.

    Attributes
    ----------
    weights_ : DataFrame
        Weights of the parts for known and for new clients, with sum 1: "stack" (all together),
        names of base estimators alone, "final_estimator", "random_intercept" and "recent_targets"
        (personalized models of columns of `X` alone), "pooled" (a linear model without clients) and
        "mean".
    known_part_, new_part_ : str
        The part that predicts alone, or "mixture".
    losses_ : DataFrame
        Out-of-fold squared errors or log-losses of the parts and their mixture, for known and new
        clients; NaN where a part is not available. Empty with ``fallback=False``.
    folds_ : str
        How folds were made for known clients: "forward in time", "inside clients" (with a reason
        if forward folds were asked for) or "given".
    named_estimators_ : Bunch
        Fitted base estimators that predictions need, by name.
    parts_ : dict of dict
        For "known" and "new" clients, the fitted model of each part; None for a base estimator.
    final_estimator_, population_estimator_ : estimator or None
        First of "stack", "final_estimator", "random_intercept", "recent_targets", "pooled" and
        "mean" among the parts for known and for new clients.
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client.
    privacy_ : PrivacyReport
        ``epsilon`` is infinite: nothing protects the fit.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.

    Notes
    -----
    This is stacked generalization (Wolpert, 1992; van der Laan et al., 2007) with folds for
    clients. For known clients, the final estimator learns from predictions for rows that the base
    estimators had not seen, though they had seen other rows of the same clients. For new clients, a
    second final estimator learns from predictions for clients that they had not seen at all.

    With `fallback`, the part that predicts is the first in a fixed order that is not clearly worse
    than the best, by a one-sided test at level 0.1; or the average with the smallest loss, if its
    weights from the other folds beat that part. Weights below 0.02 are dropped. The stack competes
    only if it is clearly better than its parts: fits without two folds at a time test this until
    the result is clear, and a rough check of two folds may exclude it earlier. Without a given
    `final_estimator`, "random_intercept" is a part for classes, in place of "final_estimator" if
    slopes do not predict held-out rows, and "recent_targets" for forward folds, where rows to
    predict follow the client's last row. For new clients, averages and the choice between line and
    mean need ten clients, and the stack needs three; of the default base estimators, new clients
    get only the first.

    Fits to folds only have to predict. In tables with 200 rows or more, their personalized models
    take variances between clients as known, and end searches for them at ``tol=0.1``. Searches of
    models with groupings begin where those of an earlier fold ended, and linear models with more
    than 1,000 effects besides the clients' use conjugate gradients.

    Columns of strings or categories with more than 10 levels, and at most half as many levels as
    rows, are groupings of personalized models with ``groupings="auto"``, whether these are given or
    default ones. Boosted trees of scikit-learn, LightGBM and CatBoost get them as categories or as
    target means, like the client in :class:`~pfl_sklearn.compose.ClientAsFeature`; trees of
    residuals get no target means. Levels that ``fit`` did not see, and missing ones, are no errors.
    The pooled model, and a final estimator without groupings, get the 30 most frequent levels
    and "other". The default trees, and linear models with them, also get columns of more than
    30 levels if at least half of the rows share theirs with another row, such as the mother of
    a birth. Ids that are integers stay numbers; make strings of them. The encoder leaves out
    columns of strings or categories with one level for each client, with a warning.

    Default trees without clients, and all default ones of scikit-learn and LightGBM for classes,
    are small, with 150 iterations. With K classes of three or more the latter have 300 / K, and 30
    at least.

    With k folds each base estimator is fitted 2 k to k (k + 1) times on parts of the rows (with
    ``fallback=False`` 2 k times), and once to all rows if it predicts. Callbacks
    (``set_callbacks``) see the phases "known-clients", "new-clients" and "final-fits" and the fits
    in them.

    References
    ----------
    Wolpert, D. H. (1992). Stacked generalization. Neural Networks.

    van der Laan, M. J., Polley, E. C. and Hubbard, A. E. (2007). Super learner. Statistical
    Applications in Genetics and Molecular Biology.
    """

    estimators: list[tuple[str, Any]] | str | None = parameter(
        default=None, ranges=[list, StrOptions(LIBRARIES), None], kw_only=False
    )
    final_estimator: Any = parameter(
        default=None, ranges=[HasMethods(["fit", "predict"]), None], kw_only=False
    )
    passthrough: Any = parameter(
        default=True, ranges=["boolean", HasMethods(["fit_transform", "transform"])]
    )
    fallback: bool = parameter(default=True, ranges=["boolean"])

    _reserved_names = (STACK, INTERCEPT, RECENT, POOLED, MEAN, MIXTURE)
    _population_attributes = ("named_estimators_", "parts_", "weights_", "losses_", "folds_")
    _client_attributes = ("n_samples_per_client_",)
    _state_attributes = ("classes_", "_passthrough", "_encoder")
    _kind: ClassVar[str]
    _default_final: ClassVar[Any]  # a function without arguments

    def _default_estimators(self, library: str | None) -> list[tuple[str, Any]]:
        if library is not None and not (isinstance(library, str) and library in LIBRARIES):
            return []  # fit refuses it
        return default_estimators(library, self._kind)

    @property
    def _is_default(self):
        """Whether base estimators are default ones, perhaps with other parameters."""
        pairs: Any = self.estimators
        if not isinstance(pairs, list):
            return True
        names = [pair[0] for pair in pairs if is_pair(pair)]
        return len(names) == len(pairs) and names in default_names(self._kind)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan |= self._is_default  # the encoder fills missing values
        return tags

    def _personal_parts(self):
        """Personalized models by name; the last one is final."""
        return [(FINAL, self._requested_final())]

    def _parts_alone(self, personal, _columns, _n_bases):
        """Personalized models of columns of `X` alone, and the final one."""
        return personal, personal[-1]

    def _requested_final(self):
        return self._default_final() if self.final_estimator is None else self.final_estimator

    def _default_component(self, name: str, value: Any) -> Any:
        return self._default_final() if name == "final_estimator" and value is None else None

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=False)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
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
        """
        personal, bases = self._personal_parts(), self._checked_estimators()
        table = read_client_rows(self, X, y, groups, sample_weight, is_classifier(self))
        table = in_order_of_time(self.cv, table)
        classes = self._checked_classes([*bases, *personal], table, groups)
        n_clients = len(table.clients.ids)
        encoder, passthrough = self._fitted_transformers(table, classes)
        levels = many_level_columns(table.X) if encoder is None else passed_levels(encoder)
        passed = passed_levels(passthrough)
        columns = table._replace(X=passed_columns(passthrough, table.X))
        # Of the folds inside clients, of those of whole clients, and of each estimator.
        n_seeds = 2 + len(personal) + len(bases)
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=n_seeds)
        pairs = [(name, with_levels(part, passed, classes)) for name, part in personal]
        bases = for_classes(bases, classes)
        pairs += [(name, with_levels(base, levels, classes)) for name, base in bases]
        inner = seeded_clones(pairs, classes, seeds[2:], table.weights is not None)
        personal, named = inner[: len(personal)], inner[len(personal) :]
        personal, final = self._parts_alone(personal, columns, len(named))
        check_names(named, columns.X)
        folds, made = self._folds(table, classes, int(seeds[0]))
        chosen, losses = {}, {}
        with batch_mapper(self.n_jobs) as run, phases(self, 2 + (n_clients > 1)) as phase:
            places = _places(run, table, columns, encoder, passthrough)
            parts = personal
            # A given final estimator need not have a random intercept.
            if self.final_estimator is None and tested_rows(folds, table.clients.codes).go_forward:
                parts = with_recent(personal)
            stack = StackInFolds(named, parts, final, table, columns, folds, None, run, places)
            with phase("known-clients", run) as watched:
                chosen["known"], losses["known"], warned = choose(
                    stack._replace(run=watched), self.fallback
                )
            if n_clients > 1:  # with one, no client can be left out
                stack = stack._replace(named=self._for_new(named), personal=personal)
                stack = stack_for_new_clients(stack, int(seeds[1]))
                with phase("new-clients", run) as watched:
                    chosen["new"], losses["new"], _ = choose(
                        stack._replace(run=watched), self.fallback
                    )
            with phase("final-fits", run) as watched:
                fitted, parts = fit_parts(chosen, named, places[0], watched)
        repeat_fold_warnings(warned, fitted)
        attributes = {
            **client_attributes(self, X, table.clients, groups, classes),
            "named_estimators_": Bunch(**fitted),
            "parts_": parts,
            "weights_": weights_table(chosen),
            "losses_": pd.DataFrame(losses),
            "folds_": made,
            "_encoder": encoder,
            "_passthrough": passthrough,
            "privacy_": unprotected_report(self, [named.estimator for named in inner], n_clients),
        }
        self._set_fitted(attributes)
        return self

    def _checked_classes(self, pairs, table, groups):
        """Sorted classes, or None; raises what can be refused before fits, which may take hours."""
        check_responses(self, table)
        check_frozen_clients(pairs, groups)
        classes = classes_of(self, table.y)
        check_client_sizes(table.clients)
        last = self._requested_final()
        check_kind(last, "regressor" if classes is None else "classifier", f"{FINAL}={last!r}")
        check_parameters(last, f"{FINAL} is given")
        return classes

    def _fitted_transformers(self, table, classes):
        """Encoder of the table for default base estimators, or None, and the passthrough."""
        with warnings.catch_warnings():
            if self.passthrough is not True:
                # The user chose an encoding for the final estimator, and has no choice for trees.
                warnings.filterwarnings("ignore", "TableEncoder merges")
            encoder = fit_encoder(table, for_trees=True) if self._is_default else None
        if encoder is not None and not len(encoder.get_feature_names_out()):
            if not encoder.dropped_:
                raise ValueError("X has no columns; expected at least one feature.")
            reasons = "; ".join(f"{name!r} ({why})" for name, why in encoder.dropped_.items())
            raise ValueError(f"X has no column that the default estimators can use: {reasons}.")
        takes_levels = takes_groupings(self._requested_final(), classes)
        if self.passthrough is not True or encoder is None:
            return encoder, fit_passthrough(self.passthrough, table, takes_levels)
        # Linear models shrink levels of a row or two exactly, Laplace's approximation does not.
        if not passed_levels(encoder) or (takes_levels and classes is None):
            return encoder, encoder
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TableEncoder leaves out")  # it did before
            passthrough = fit_encoder(table, takes_levels)
        is_same = passed_levels(passthrough) == passed_levels(encoder)
        return encoder, encoder if is_same else passthrough

    def _for_new(self, named):
        """Base estimators for new clients: of the default ones, only that without clients."""
        # The others memorize known clients; in 12 tables they were not worth the time of their
        # folds.
        return named[:1] if self._is_default else named

    def _folds(self, table, classes, seed):
        """Folds inside clients; a fair test of the stack needs at least three."""
        splitter, made = splitter_of(self.cv, table, classes is not None, seed)
        folds = folds_within(splitter, table, self)
        if self.fallback and len(folds) < 3:
            raise ValueError(
                f"cv={self.cv!r} gives {len(folds)} folds, but fallback=True needs at least 3; "
                "take more folds, or fallback=False."
            )
        return folds, made

    @property
    def known_part_(self) -> str:
        """Part that predicts for known clients, or "mixture"."""
        return part_name(self.parts_["known"])

    @property
    def new_part_(self) -> str:
        """Part that predicts for new clients, or "mixture"."""
        return part_name(self.parts_["new"])

    @property
    def final_estimator_(self) -> Any:
        """First model of known clients' parts behind the base estimators, or of `X` alone."""
        return final_model(self.parts_["known"])

    @property
    def population_estimator_(self) -> Any:
        """First such model of new clients' parts."""
        return final_model(self.parts_["new"])

    @property
    def estimators_(self) -> list[Any]:
        """Fitted base estimators that predictions need, in their order."""
        return list(self.named_estimators_.values())

    @available_if(has_method(lambda self: final_estimator(self._requested_final()), "summary"))
    def summary(self) -> pd.DataFrame:
        """Table of the personalized model of known clients, by its own ``summary``.

        It is the first of "stack", "final_estimator", "random_intercept" and "recent_targets" that
        predicts, alone or in an average; ``weights_`` says how much it counts. Raises ValueError if
        none of them does.
        """
        check_is_fitted(self)
        if not {STACK, FINAL, INTERCEPT, RECENT} & self.parts_["known"].keys():
            names = " and ".join(map(repr, self.parts_["known"]))
            raise ValueError(
                f"known clients get the predictions of {names}, so there is no personalized model "
                "to summarize; see losses_, or set fallback=False."
            )
        return final_estimator(self.final_estimator_).summary()

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone: base estimators, and that client's final coefficients.

        Base estimators and a `passthrough` without a ``for_client`` are handed out as they are.
        Trees keep averages of other clients' rows, a nearest-neighbour imputer keeps rows; nothing
        protects them.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.
        """
        model = super().for_client(client_id)
        for name, fitted in self.named_estimators_.items():
            model.named_estimators_[name] = model_of_client(fitted, client_id)
        for kind, parts in self.parts_.items():
            for name, fitted in parts.items():
                model.parts_[kind][name] = model_of_client(fitted, client_id)
        return without_originals(model)

    def release(self) -> NoReturn:
        """Raise ValueError, because base estimators and their folds have no noise."""
        check_is_fitted(self)
        raise ValueError(
            f"release() of this {type(self).__name__} would publish base estimators, which were "
            "fitted without noise: trees memorize columns that are constant within a client. Use "
            "an estimator with an epsilon, such as PersonalizedLinearRegression or PPSGDClassifier."
        )

    def _outputs(self, X, groups):
        """Responses (n,) or probabilities (n, K) of rows, each by its client's parts."""
        # Without classes there is no second axis.
        predicted = np.zeros((num_samples(X), *np.shape(getattr(self, "classes_", 0))))
        for rows, kind, tables, ids in self._by_kind(X, groups):
            for name, weight in self.weights_[kind].items():
                if weight:
                    predicted[rows] += weight * self._predict_part(kind, name, tables, ids)
        return predicted

    def _by_kind(self, X, groups):
        """Rows of known and of new clients, their tables for both kinds of parts, and their ids."""
        X, codes = rows_to_predict(self, X, groups)
        ids = row_ids(self, groups, codes)
        for is_of_kind, kind in ((codes >= 0, "known"), (codes < 0, "new")):
            rows = np.flatnonzero(is_of_kind)
            if len(rows):  # estimators refuse tables without rows
                yield rows, kind, self._tables(take_rows(X, rows)), ids[rows]

    def _tables(self, X):
        """A table as base estimators take it, and its columns for the final estimator."""
        columns = passed_columns(self._passthrough, X)
        if self._encoder is self._passthrough:
            return columns, columns
        return (X if self._encoder is None else passed_columns(self._encoder, X)), columns

    def _predict_part(self, kind, name, tables, ids):
        """Predictions of a part for rows of known or new clients."""
        fitted = self.parts_[kind][name]
        if fitted is None:
            return predict_inner(self._fitted_bases(kind)[name], tables[0], ids)
        final = InnerEstimator(name, fitted, getattr(self, "classes_", None))
        return predict_inner(final, self._final_rows(kind, name, tables, ids), ids)

    def _final_rows(self, kind, name, tables, ids):
        """Rows of a part's final estimator: columns, and for the stack predictions as well."""
        X, columns = tables
        if name != STACK:
            return columns
        bases = list(self._fitted_bases(kind).values())
        bases = self._for_new(bases) if kind == "new" else bases
        return join_predictions(bases, [predict_inner(base, X, ids) for base in bases], columns)

    def _fitted_bases(self, kind):
        """Base estimators by name, as they predict for known or new clients."""
        classes = getattr(self, "classes_", None)
        return {
            name: InnerEstimator(name, for_new_clients(base) if kind == "new" else base, classes)
            for name, base in self.named_estimators_.items()
        }


def _places(run, table, columns, encoder, passthrough):
    """Places of the base estimators' table and of the final estimator's, for workers."""
    if run.stores:  # workers transform the table that they keep
        stored, _ = keep_table(run, table)
        return [(stored, encoder), (stored, passthrough)]
    encoded = columns if encoder is passthrough else encode_table(encoder, table)
    return [(encoded, None), (columns, None)]
