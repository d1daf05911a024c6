"""What both stacks are and do."""

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
    fitted_to,
    read_client_rows,
    row_ids,
    rows_at,
    rows_to_predict,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    for_new_clients,
    lost_guarantees,
    of_client,
    outputs,
    prepared,
)
from pfl_sklearn.compose._named_estimators import (
    NamedEstimators,
    check_kind,
    check_parameters,
    check_strangers,
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
from pfl_sklearn.compose._stack.boosting import LIBRARIES, default_estimators, default_names
from pfl_sklearn.compose._stack.choice import (
    FINAL,
    INTERCEPT,
    MEAN,
    MIXTURE,
    POOLED,
    RECENT,
    STACK,
    StackInFolds,
    check_rows,
    choose,
    fit_parts,
    model_behind,
    only_name,
    stack_for_new_clients,
    warn_of_folds,
    weights_table,
)
from pfl_sklearn.compose._stack.final_rows import (
    check_names,
    encoded,
    fitted_passthrough,
    passed_columns,
    stacked,
)
from pfl_sklearn.compose._stack.recent import with_recent
from pfl_sklearn.privacy import PrivacyReport


@with_parameters
class PersonalizedStacking(ClientMixin, NamedEstimators):
    """What both stacks are and do. A subclass has `_kind`, a name, and `_default_final`.

    Its sections are those of the subclasses.

    Parameters
    ----------
    estimators : list of (str, estimator), {"lightgbm", "catboost"} or None, default=None
        Base estimators by name: any of scikit-learn's, and client-aware ones, which get the
        client ids. None: histogram gradient boosting without the clients, named "hgb", with the
        client as a feature, named "hgb_client", see
        :class:`~pfl_sklearn.compose.ClientAsFeature`, and for responses, named "hgb_residual", of
        what a personalized line leaves. They get the table as a
        :class:`~pfl_sklearn.compose.TableEncoder` makes numbers of it. Parameters inside are set
        as ``hgb__max_depth`` and ``hgb_client__estimator__max_depth``. "lightgbm" and "catboost"
        stand for the same with boosting of these libraries, if they are installed, named
        "lightgbm", "lightgbm_client" and so on. A list with the names of all default ones stands
        for these, with other parameters.
    final_estimator : estimator, default=None
        Personalized model of what the base estimators predict and of columns of `X`; None:
        :class:`~pfl_sklearn.PersonalizedLinearRegression`, or for classes
        :class:`~pfl_sklearn.PersonalizedLogisticRegression`, whose coefficients all vary.
    cv : int, "time", splitter or list, default=5
        Folds that the base estimators predict in: how many inside clients (None: 5), or a
        splitter or splits that test each row once; at least 3 with `fallback`. For forecasts
        "time", which is :class:`~pfl_sklearn.model_selection.ClientTimeSeriesSplit` of rows in
        order of time, with 5 splits, or fewer if no client has 7 rows, or any folds that go
        forward; see Notes. Predictions for new clients
        are made with as many folds of whole clients.
    passthrough : bool or transformer, default=True
        Columns that the final estimator gets beside predictions. True: all, as a
        :class:`~pfl_sklearn.compose.TableEncoder` makes numbers of words and gaps; a warning
        names columns that it leaves out. A transformer: what it makes of `X`, such as a
        ``TableEncoder`` with other parameters; it is fitted to all rows, without y.
    fallback : bool, default=True
        Let parts of the stack predict, alone or mixed, for known and for new clients; see Notes.
        False: always all estimators together.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see. "warn" warns if at least half of the
        rows are theirs.
    n_jobs : int or None, default=None
        Folds to fit at once. Results do not depend on it. Every worker gets the table once. The
        estimators inside it run one job each.
    random_state : int, RandomState instance or None, default=None
        Seed of the folds, and of the estimators that have none of their own.

    Attributes
    ----------
    weights_ : DataFrame
        Weights of the parts that predict for known and for new clients, which sum to 1: "stack"
        (all together), names of base estimators alone, "final_estimator", "random_intercept" and
        "recent_targets" (personalized models of columns of `X` alone), "pooled" (a linear model
        without clients) and "mean".
    known_part_, new_part_ : str
        The part that predicts alone for known and for new clients, or "mixture".
    losses_ : DataFrame
        Out-of-fold losses of the parts and of their mixture, squared errors or log-losses, for
        known and for new clients: the smaller the better; NaN for what is no part for these
        clients. Where the first folds decide on the stack, its loss is that of the best other one
        times the ratio of the two in these folds, which is rough if a rough look decides. Of folds
        that go forward, those count for known clients before which two rows of a client or more
        are tested. Empty with ``fallback=False``.
    named_estimators_ : Bunch
        Fitted base estimators that predictions need, by name.
    parts_ : dict of dict
        For "known" and "new" clients what is fitted behind the base estimators, or to columns of
        `X` alone, by the name of the part; None for a base estimator.
    final_estimator_, population_estimator_ : estimator or None
        The first of "stack", "final_estimator", "random_intercept", "recent_targets", "pooled" and
        "mean" among the parts of known and of new clients; None if base estimators predict alone.
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

    Notes
    -----
    Base estimators see interactions that a linear model does not; the final one shrinks what is
    special about each client, which they cannot. This is stacked generalization (Wolpert, 1992;
    van der Laan et al., 2007) with folds for clients:

    - Rows of the final estimator are predicted by fits to other rows of the same clients,
      because it will predict for these clients.
    - New clients have another final estimator, whose rows are predicted by fits to other
      clients. Trees memorize columns that are constant within a client; how well they predict
      for new clients can be seen only on clients left out. New clients get the population
      coefficients of their final estimator.

    With `fallback` parts predict by their losses on rows, or on clients, that nothing in them has
    seen. One part may predict alone: the first that is not clearly worse than the best one, by a
    one-sided test of the mean difference at level 0.1, for new clients with errors clustered by
    client. The order is pooled and mean, the better of them first if there are ten clients,
    random intercept, recent targets, final estimator, base estimators in their order. Or parts are
    averaged, with the weights (from 0 on, with sum 1) whose squared error or log-loss is smallest
    out of fold, and of which those below 0.02 are left out: if that average has a smaller loss than
    this part, by weights from the other folds. (The fits behind these predictions have seen the
    fold that is tested, which matters little for so few weights.) Probabilities are averaged, not
    their logarithms. For new clients this takes ten clients.

    "random_intercept" is there for classes, if no `final_estimator` is given: where clients have
    few rows, logistic coefficients that all vary run away. New clients get the default "hgb" and
    no other of the default base estimators, which memorize clients.

    For the stack, fits to the rows outside of two folds are needed: of a client with two rows the
    prediction for one is made of the other, so that a final estimator that saw both could tell
    the one from the other. The stack is tested fold after fold until it is clear. It is in if it
    is clearly better than the others and their average at level 0.025 (for new clients with ten
    of them tested); it is out if it is clearly worse than the best of them at level 0.1, or worse
    than one of them in the first two folds or more. Both take at least 30 rows. Before that, it may
    be out by the same rules at a rough look at two folds, which needs no more fits of base
    estimators: it takes the predictions that there are, although those for the final estimator's
    rows have seen the tested ones. A stack that is in is averaged with what else would predict, by
    the weights that do best on the rows that it was tested on. For new clients the stack takes
    part if there are at least three clients.

    Folds go forward if none is fitted to rows that it or a later one tests. The final estimator
    of known clients then learns from the tested rows, of which the first are none, and
    predictions for it are forecasts, as those it will get. It is tested in each fold by what it
    learns from earlier ones, which needs no more fits of base estimators. New clients are
    predicted in folds of whole clients, whatever the time. Levels of clients may drift: so known
    ones have one part more, "recent_targets", if no `final_estimator` is given. Its intercept
    varies, and it gets one more column, the mean of the client's targets before the row (of classes
    the share of each but the first), where each has half the weight of the next, shrunk to the mean
    of all by one row. Rows to predict are taken to come after the client's last one in ``fit``. So
    rows must be in order of time, unless a ``ClientTimeSeriesSplit`` has a column of times. Rows of
    one time count one after the other.

    With k folds each base estimator is fitted 2 k times for several clients if the stack is out
    at the rough look (10 times by default, and 5 times if it is not for new ones), 3 k times if it
    is in after one more fold for one kind of clients, and at most k (k + 1) times, on three to four
    fifths of the rows; and once to all rows if it predicts. The final estimator is fitted at most
    4 k + 7 times. ``fallback=False`` takes 2 k + 1 and 2 fits. Fits run on one thread each, so that
    results do not depend on `n_jobs`. Callbacks of scikit-learn's kind (``set_callbacks``), such as
    its ``ProgressBar``, see the phases "known-clients", "new-clients" and "final-fits", and in them
    each fit, but not those of the final estimator behind the base estimators. Of fits that workers
    share they see the end of all.

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
    _population_attributes = ("named_estimators_", "parts_", "weights_", "losses_")
    _client_attributes = ("n_samples_per_client_",)
    _state_attributes = ("classes_", "_passthrough", "_encoder")
    _kind: ClassVar[str]
    _default_final: ClassVar[Any]  # a function without arguments

    def _default_estimators(self, library: str | None) -> list[tuple[str, Any]]:
        if library is not None and not (isinstance(library, str) and library in LIBRARIES):
            return []  # to be refused by fit
        return default_estimators(library, self._kind)

    @property
    def _is_default(self):
        """Whether base estimators are default ones, which parameters may have been set of."""
        if not self._has_list:
            return True
        pairs: Any = self.estimators
        if not all(map(is_pair, pairs)):  # to be refused by fit
            return False
        return [name for name, _ in pairs] in default_names(self._kind)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan |= self._is_default  # an encoder fills the gaps
        return tags

    def _personal_parts(self):
        """Personalized models of columns of `X` alone, by name."""
        return [(FINAL, self._given_final())]

    def _given_final(self):
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

        Returns
        -------
        self
        """
        personal, bases = self._personal_parts(), self._checked_estimators()
        table = read_client_rows(self, X, y, groups, sample_weight, is_classifier(self))
        table = in_order_of_time(self.cv, table)
        classes = self._checked_classes([*bases, *personal], table, groups)
        n_clients = len(table.clients.ids)
        # Of the folds inside clients, of those of whole clients, and of each estimator.
        seeds = check_random_state(self.random_state).randint(
            2**31 - 1, size=2 + len(personal) + len(bases)
        )
        inner = prepared([*personal, *bases], classes, seeds[2:], table.weights is not None)
        personal, named = inner[: len(personal)], inner[len(personal) :]
        encoder, passthrough = self._fitted_transformers(table.X)
        columns = table._replace(X=passed_columns(passthrough, table.X))
        check_names(named, columns.X)

        folds = self._folds(table, classes, int(seeds[0]))
        chosen, losses = {}, {}
        with batch_mapper(self.n_jobs) as run, phases(self, 2 + (n_clients > 1)) as phase:
            if run.keeps:  # workers make the columns of the table that they have
                kept, _ = keep_table(run, table)
                places = [(kept, encoder), (kept, passthrough)]
            else:
                taken = columns if encoder is passthrough else encoded(encoder, table)
                places = [(taken, None), (columns, None)]
            parts = personal
            # Of a given final estimator the kind of model is unknown.
            if self.final_estimator is None and tested_rows(folds, table.clients.codes).go_forward:
                parts = with_recent(personal)
            stack = StackInFolds(named, parts, table, columns, folds, None, run, places)
            with phase("known-clients", run) as watched:
                chosen["known"], losses["known"], warned = choose(
                    stack._replace(run=watched), self.fallback
                )
            if n_clients > 1:  # with one, there is nobody to leave out
                stack = stack._replace(named=self._for_new(named), personal=personal)
                stack = stack_for_new_clients(stack, int(seeds[1]))
                with phase("new-clients", run) as watched:
                    chosen["new"], losses["new"], _ = choose(
                        stack._replace(run=watched), self.fallback
                    )
            with phase("final-fits", run) as watched:
                fitted, parts = fit_parts(chosen, named, places[0], watched)
        warn_of_folds(warned, fitted)

        attributes = {
            **fitted_to(self, X, table.clients, groups),
            "named_estimators_": Bunch(**fitted),
            "parts_": parts,
            "weights_": weights_table(chosen),
            "losses_": pd.DataFrame(losses),
            "_encoder": encoder,
            "_passthrough": passthrough,
            "privacy_": PrivacyReport.unprotected(
                f"{type(self).__name__} fits base estimators and folds without noise"
                + lost_guarantees([each.estimator for each in inner]),
                not_released=("clients_", *self._population_attributes),
                n_clients=n_clients,
            ),
        }
        if classes is not None:
            attributes["classes_"] = classes
        self._set_fitted(attributes)
        return self

    def _checked_classes(self, pairs, table, groups):
        """Sorted classes, or None, after all checks that need no fit, which may take hours."""
        check_responses(self, table)
        check_strangers(pairs, groups)
        classes = classes_of(self, table.y)
        check_rows(table.clients)
        last = self._given_final()
        check_kind(last, "regressor" if classes is None else "classifier", f"{FINAL}={last!r}")
        check_parameters(last, f"{FINAL} is given")
        return classes

    def _fitted_transformers(self, X):
        """Encoder of the table for default base estimators, or None, and the passthrough."""
        encoder = fitted_passthrough(True, X) if self._is_default else None
        if encoder is not None and not len(encoder.get_feature_names_out()):
            if not encoder.dropped_:
                raise ValueError("X has no columns; expected at least one feature.")
            why = "; ".join(f"{name!r} ({each})" for name, each in encoder.dropped_.items())
            raise ValueError(f"X has no column that default estimators can use: {why}.")
        if self.passthrough is True and encoder is not None:
            return encoder, encoder
        return encoder, fitted_passthrough(self.passthrough, X)

    def _for_new(self, named):
        """Base estimators that new clients may get: of the default ones, that without clients."""
        # The others memorize the known; in 12 tables they were not worth the time of their folds.
        return named[:1] if self._is_default else named

    def _folds(self, table, classes, seed):
        """Folds inside clients: at least three for the honest test of a stack."""
        folds = folds_within(splitter_of(self.cv, table, classes is not None, seed), table, self)
        if self.fallback and len(folds) < 3:
            raise ValueError(
                f"cv={self.cv!r} gives {len(folds)} folds, but fallback=True needs at least 3; "
                "take more folds, or fallback=False."
            )
        return folds

    @property
    def known_part_(self) -> str:
        """What predicts for known clients: the name of a part, or "mixture"."""
        return only_name(self.parts_["known"])

    @property
    def new_part_(self) -> str:
        """What predicts for new clients: the name of a part, or "mixture"."""
        return only_name(self.parts_["new"])

    @property
    def final_estimator_(self) -> Any:
        """Personalized model behind the base estimators, or of `X` alone, for known clients."""
        return model_behind(self.parts_["known"])

    @property
    def population_estimator_(self) -> Any:
        """The same for new clients, or a model without clients."""
        return model_behind(self.parts_["new"])

    @property
    def estimators_(self) -> list[Any]:
        """Fitted base estimators that predictions need, in their order."""
        return list(self.named_estimators_.values())

    @available_if(has_method(lambda self: final_estimator(self._given_final()), "summary"))
    def summary(self) -> pd.DataFrame:
        """Table of the personalized model of known clients, by its own ``summary``.

        Of the first of "stack", "final_estimator", "random_intercept" and "recent_targets" that
        predicts, alone or in an average, in which ``weights_`` says how much it counts.

        Returns
        -------
        DataFrame

        Raises
        ------
        ValueError
            If none of them predicts for known clients.
        """
        check_is_fitted(self)
        if not {STACK, FINAL, INTERCEPT, RECENT} & self.parts_["known"].keys():
            said = " and ".join(map(repr, self.parts_["known"]))
            raise ValueError(
                f"known clients get the predictions of {said}, so there is no personalized model "
                "to summarize; see losses_, or set fallback=False."
            )
        return final_estimator(self.final_estimator_).summary()

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone: base estimators, and that client's final coefficients.

        Base estimators and a `passthrough` without such a method are handed out as they are. Trees
        keep averages of other clients' rows, a nearest-neighbour imputer rows. Nothing protects
        these.

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
        for kind, parts in self.parts_.items():
            for name, fitted in parts.items():
                model.parts_[kind][name] = of_client(fitted, client_id)
        return without_originals(model)

    def release(self) -> NoReturn:
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
        """Responses (n,) or probabilities (n, K) of rows, each by its client's parts."""
        # No axis of classes if there are none.
        predicted = np.zeros((num_samples(X), *np.shape(getattr(self, "classes_", 0))))
        for rows, kind, tables, ids in self._by_kind(X, groups):
            for name, weight in self.weights_[kind].items():
                if weight:
                    predicted[rows] += weight * self._of_part(kind, name, tables, ids)
        return predicted

    def _by_kind(self, X, groups):
        """Rows of known and of new clients, their tables for both kinds of parts, and their ids."""
        X, codes = rows_to_predict(self, X, groups)
        ids = row_ids(self, groups, codes)
        for is_here, kind in ((codes >= 0, "known"), (codes < 0, "new")):
            rows = np.flatnonzero(is_here)
            if len(rows):  # estimators refuse tables without rows
                yield rows, kind, self._tables(rows_at(X, rows)), ids[rows]

    def _tables(self, X):
        """A table as base estimators take it, and as estimators behind them do."""
        columns = passed_columns(self._passthrough, X)
        if self._encoder is self._passthrough:
            return columns, columns
        return (X if self._encoder is None else passed_columns(self._encoder, X)), columns

    def _of_part(self, kind, name, tables, ids):
        """What a part predicts for rows of known or new clients."""
        fitted = self.parts_[kind][name]
        if fitted is None:
            return outputs(self._fitted_bases(kind)[name], tables[0], ids)
        final = InnerEstimator(name, fitted, getattr(self, "classes_", None))
        return outputs(final, self._final_rows(kind, name, tables, ids), ids)

    def _final_rows(self, kind, name, tables, ids):
        """Rows as the estimator behind the base estimators takes them in a part."""
        X, columns = tables
        if name != STACK:
            return columns
        bases = list(self._fitted_bases(kind).values())
        bases = self._for_new(bases) if kind == "new" else bases
        return stacked(bases, [outputs(each, X, ids) for each in bases], columns)

    def _fitted_bases(self, kind):
        """Base estimators by name, as known or new clients see them."""
        classes = getattr(self, "classes_", None)
        return {
            name: InnerEstimator(name, for_new_clients(each) if kind == "new" else each, classes)
            for name, each in self.named_estimators_.items()
        }
