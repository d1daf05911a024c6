"""Choice of the parts of a stack that predict for known or for new clients, by their losses."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pfl_sklearn._columns import MAX_LEVELS
from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn._typing import Integers
from pfl_sklearn._unwrap import is_package_class
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.compose._client_mixtures import CandidateErrors, best_mixture, errors_of
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    fit_inner,
    is_frozen,
    without_clients,
)
from pfl_sklearn.compose._out_of_fold import (
    EQUAL_LOSSES,
    Fold,
    TestedRows,
    fit_all,
    fit_and_predict,
    folds_of_clients,
    mean_losses,
    out_of_fold,
    out_of_two,
    simplest_not_worse,
    tested_rows,
)
from pfl_sklearn.compose._stack.final_rows import join_predictions
from pfl_sklearn.linear_model._mixed._groupings._variances import Roots

# Parts: the final estimator on predictions and columns of X, or on these columns alone.
STACK, FINAL, INTERCEPT = "stack", "final_estimator", "random_intercept"
RECENT = "recent_targets"  # a random intercept, and the client's last targets as a feature
POOLED, MEAN, MIXTURE = "pooled", "mean", "mixture"
# Parts with a smaller weight cost a fit and hardly change predictions.
_SMALLEST_PART = 0.02
# With fewer clients one cannot tell whether line or mean predicts better for new ones: the line
# comes first, and nothing is averaged. With three hospitals, the better of both had a log-loss of
# 0.70 instead of 0.47.
_FEWEST_CLIENTS = 10
# Significance level before the last fold. Five folds give four such looks, and by Bonferroni their
# false alarms add up to at most 0.1.
_EARLY_LEVEL = 0.025
_VARIANCES_MATTER_BELOW = 200  # rows of a table, see _for_folds
# Squared errors of linear models changed by at most 0.01 % in five tables.
TOL_IN_FOLDS = 0.1
_FEWEST_TESTED_ROWS = 30  # before the last fold; t tests of fewer skewed squared errors are off


class StackInFolds(NamedTuple):
    """Base estimators and a final one, their rows, and folds of known or of new clients."""

    named: list[InnerEstimator]
    personal: list[InnerEstimator]  # of columns of `X` alone
    final: InnerEstimator  # of predictions and columns of `X`
    table: TableRows
    columns: TableRows  # rows of the final estimator without the base estimators' predictions
    folds: list[Fold]
    codes: Integers | None  # clients (n,) of the rows if clients are the sample, as new ones are
    run: BatchMapper
    places: list  # of the base estimators' table, and of `columns`

    @property
    def classes(self):
        """Sorted classes, or None."""
        return self.named[0].classes


class Chosen(NamedTuple):
    """Weights of the parts that predict, and the final fits that they need, by name."""

    weights: dict[str, float]  # with sum 1
    final_fits: Mapping[str, tuple[InnerEstimator, TableRows] | None]  # None: a base estimator


def _plain_models(classes, columns):
    """Models of columns of `X` without clients: a line, if there are columns, and the mean."""
    plain = DummyRegressor() if classes is None else DummyClassifier(strategy="prior")
    mean = InnerEstimator(MEAN, plain, classes)
    if not columns.shape[1]:
        return [mean]
    linear = Ridge() if classes is None else LogisticRegression()
    with config_context(enable_metadata_routing=True):
        # A penalty on coefficients depends on the scale of the columns.
        scaler = StandardScaler().set_fit_request(sample_weight=True)
        linear.set_fit_request(sample_weight=True)
    steps = [scaler, linear]
    if levels := list(columns.select_dtypes("category")):  # a line has no groupings
        one_hot = OneHotEncoder(
            min_frequency=10,
            max_categories=MAX_LEVELS + 1,
            handle_unknown="infrequent_if_exist",
            sparse_output=False,
        )
        steps = [make_column_transformer((one_hot, levels), remainder="passthrough"), *steps]
    return [InnerEstimator(POOLED, make_pipeline(*steps), classes), mean]


def stack_for_new_clients(stack, seed):
    """The stack for new clients: in folds of whole clients."""
    # Trees recognize clients by columns that are constant within them, so losses for new clients
    # need clients that no part has seen.
    codes = stack.table.clients.codes
    return stack._replace(
        named=[without_clients(inner) for inner in stack.named],
        personal=[without_clients(inner) for inner in stack.personal],
        final=without_clients(stack.final),
        folds=folds_of_clients(len(stack.folds), codes, seed),
        codes=codes,
    )


def choose(stack, fallback):
    """Choose the parts for the clients of the stack's folds; the whole stack without `fallback`.

    Also mean losses of the candidates by name, and the base estimators' warnings in every fold.
    """
    stack = stack._replace(named=[_for_folds(base, len(stack.table.y)) for base in stack.named])
    named, table, columns, folds = stack.named, stack.table, stack.columns, stack.folds
    codes, run, places = stack.codes, stack.run, stack.places
    predicted, warned = out_of_fold([(base, places[0]) for base in named], folds, run)
    tested = tested_rows(folds, table.clients.codes)
    tested_columns = tested.of(columns)
    stacked_rows = join_predictions(named, predicted, tested_columns.X)
    final_fits = {STACK: (stack.final, tested_columns._replace(X=stacked_rows))}
    if not fallback:
        return Chosen({STACK: 1.0}, final_fits), {}, warned
    alone = _parts_without_bases(stack, tested.go_forward)
    final_fits |= {part.name: (part, columns) for part in alone}
    in_folds = [(_for_folds(part, len(table.y)), places[1]) for part in alone]
    predicted_alone, _ = out_of_fold(in_folds, folds, run)
    names = [part.name for part in (*alone, *named)]
    errors = errors_of([*predicted_alone, *predicted], table, tested.rows, stack.classes)
    errors = errors.take(tested.scored)
    losses = dict(zip(names, map(errors.losses, np.eye(len(names))), strict=True))
    row_weights = None if table.weights is None else errors.weights
    means = mean_losses(losses, row_weights)
    chosen = {simplest_not_worse(_simplest_first(losses, means, codes), row_weights, codes): 1.0}
    if len(tested.tests) > 1:  # weights of a mixture are learned in the other folds
        mixture, losses[MIXTURE] = _mixture(errors, tested.tests)
        means = mean_losses(losses, row_weights)
        single = means[next(iter(chosen))]
        if _enough_clients(codes) and single - means[MIXTURE] > EQUAL_LOSSES * abs(single):
            chosen = _positive_by_name(names, mixture)
    if len(folds) > 2:  # else no row is outside two folds, as a fair test of the stack needs
        stack_errors = StackErrors(stack, tested, predicted, errors)
        # Early forward folds have less history than others, and testing all costs no base fits.
        means[STACK], wins = compare_by_fold(
            STACK,
            stack_errors.losses,
            losses,
            tested.tests,
            row_weights,
            codes,
            early=not tested.go_forward,
        )
        if wins:
            chosen, ratio = stack_errors.mix_with(chosen, names)
            means[MIXTURE] = ratio * means[STACK]
    return Chosen(chosen, {name: final_fits.get(name) for name in chosen}), means, warned


def _parts_without_bases(stack, go_forward):
    """Estimators on columns of `X` alone: simple ones without clients, and personalized ones."""
    columns = stack.columns.X
    plain = _plain_models(stack.classes, columns)
    if not columns.shape[1]:
        return plain
    # Series that rise pass through their mean, which may be the best forecast of one origin.
    return [*(plain[:1] if go_forward else plain), *stack.personal]


def _for_folds(named, n_rows):
    """The estimator for folds, where cheaper fits of personalized models predict the same.

    Their variances are taken as known, and searched for until predictions hardly change.
    """
    # Averaging probabilities over the variances took a quarter of the time of stacks of classes.
    # Without it, out-of-fold losses changed by at most 0.11 % with 120 and 200 rows, and by up to 6
    # % with 60.
    if n_rows < _VARIANCES_MATTER_BELOW or is_frozen(named.estimator):
        return named
    params, cheaper = named.estimator.get_params(), {}
    for name, value in params.items():
        prefix, mark, last = name.rpartition("__")
        # In other packages such a parameter may mean something else.
        owner = params.get(prefix, named.estimator)
        if last != "uncertainty" or not isinstance(value, str) or not is_package_class(owner):
            continue
        if value == "full":
            cheaper[name] = "plug_in"
        tol = f"{prefix}{mark}tol"
        if tol in params:  # means have none
            cheaper[tol] = max(params[tol], TOL_IN_FOLDS)
    return named._replace(estimator=clone(named.estimator).set_params(**cheaper))


def _simplest_first(losses, means, codes):
    """Losses in order of preference: a simpler part need only be as good."""
    plain = [name for name in (POOLED, MEAN) if name in losses]
    if _enough_clients(codes):
        plain.sort(key=means.__getitem__)
    later = [name for name in losses if name not in (POOLED, MEAN)]
    return {name: losses[name] for name in (*plain, *later)}


def _enough_clients(codes):
    """Whether rows of known clients, or ten clients, suffice to distinguish similar parts."""
    return codes is None or bool(codes.max() + 1 >= _FEWEST_CLIENTS)


def _mixture(errors, tests):
    """Weights (K,) of the best mixture, and its losses (n,) with weights from other folds."""
    losses = np.empty(len(errors.values))
    for test in tests:
        train = np.setdiff1d(np.arange(len(losses)), test)
        weights = drop_small_weights(best_mixture(errors.take(train)))
        losses[test] = errors.take(test).losses(weights)
    return drop_small_weights(best_mixture(errors)), losses


def drop_small_weights(weights):
    """Weights (K,) without those that would cost a fit and hardly change predictions."""
    large = np.where(weights >= _SMALLEST_PART, weights, 0.0)
    return large / large.sum()


def _positive_by_name(names, weights):
    return {name: float(weight) for name, weight in zip(names, weights, strict=True) if weight}


class StackErrors:
    """Errors of the stack on tested rows, fold after fold; `errors` are those of its parts."""

    def __init__(
        self,
        stack: StackInFolds,
        tested: TestedRows,
        predicted: list[np.ndarray],
        errors: CandidateErrors,
    ) -> None:
        self.stack, self.tested, self.predicted, self.errors = stack, tested, predicted, errors
        self._pairs: dict = {}  # fits to the rows outside two folds
        self._starts: Roots = {}  # where searches of earlier folds ended
        self._values = np.full(len(errors.values), np.nan)

    def losses(self, k, rough=False):
        """Losses on the test rows of fold k.

        The final estimator's rows come from base fits without the fold. Otherwise clients
        with few rows would leak the target: if a client has two rows, each is predicted from the
        other. A `rough` look uses the out-of-fold predictions, which are there already. Forward
        folds use them as well, since these predictions saw nothing of the fold.
        """
        stack, tested = self.stack, self.tested
        train, test = tested.folds[k]
        if rough or tested.go_forward:
            inside = [values[train] for values in self.predicted]
        else:
            inside = out_of_two(
                k, stack.named, stack.places[0], stack.folds, self._pairs, stack.run
            )
        to_fit, to_test = (stack.columns.take(tested.rows[rows]) for rows in (train, test))
        outside = [values[test] for values in self.predicted]
        final = _for_folds(stack.final, len(stack.table.y))
        predicted, found = fit_and_predict(
            final._replace(starts=self._starts),
            to_fit._replace(X=join_predictions(stack.named, inside, to_fit.X)),
            to_test._replace(X=join_predictions(stack.named, outside, to_test.X)),
        )
        self._starts.update(found)
        errors = errors_of([predicted], stack.table, tested.rows[test], stack.classes)
        if not rough:
            self._values[tested.tests[k]] = errors.values[:, 0]
        return errors.losses(np.ones(1))

    def mix_with(self, chosen, names):
        """Weights of the stack and the chosen parts, learned in the folds tested so far.

        Also the loss of their average there over that of the stack.
        """
        rows = np.flatnonzero(~np.isnan(self._values))
        others = self.errors.values[rows] @ [chosen.get(name, 0.0) for name in names]
        values = np.column_stack([others, self._values[rows]])
        pair = self.errors.take(rows)._replace(values=values)
        weights = drop_small_weights(best_mixture(pair))
        mixed, alone = (
            np.average(pair.losses(shares), weights=pair.weights)
            for shares in (weights, np.array([0.0, 1.0]))
        )
        shares = [weights[0] * chosen.get(name, 0.0) for name in names]
        all_weights = drop_small_weights(np.append(shares, weights[1]))
        return _positive_by_name((*names, STACK), all_weights), mixed / alone if alone else 1.0


def fit_parts(chosen, named, place, run):
    """Fit the parts that predict to all rows: base estimators, and final fits by kind of clients.

    `chosen` has the key "known" and, if there are several clients, "new"; `place` is that of the
    base estimators' table. Final fits are None for a base estimator.
    """
    names = {name for choice in chosen.values() for name in choice.weights}
    bases = [(base, place) for base in named if names & {STACK, base.name}]
    by_name = dict(zip([base.name for base, _ in bases], fit_all(bases, run), strict=True))
    fits, parts = {}, {}
    # One after the other: their rows have predictions of base estimators, which no worker keeps.
    for kind, choice in chosen.items():
        parts[kind] = dict.fromkeys(choice.weights)
        for name, final_fit in choice.final_fits.items():
            # Stacks of known and of new clients learn from other rows; other parts are fitted once.
            key = (kind if name == STACK else "both", name)
            if final_fit is not None and key not in fits:
                fits[key] = fit_inner(*final_fit)
            parts[kind][name] = fits.get(key)
    return by_name, {"new": parts["known"], **parts}


def compare_by_fold(name, losses_in, others, tests, weights, codes=None, *, early=True):
    """Mean loss of one more candidate, and whether it is clearly better than the others.

    `losses_in(k)` gives its losses on the test rows of fold k, inexact but cheap ones with
    ``rough=True``; `others` are losses (n,) by name, in order of preference; `tests` are a
    partition of the rows; `codes` (n,) are given if clients are the sample.

    With `early`, the test goes fold by fold. The candidate wins before the last fold if it is
    clearly better than each of the others at level 0.025, of which four looks make 0.1. It loses if
    it is clearly worse than the best of them at level 0.1 or, after two folds, worse than one of
    them. Both need 30 rows and, if clients are the sample, ten of them to win and several to lose.
    Before that, a rough look at two folds may exclude the candidate; on radon and contraception,
    where it does, all folds would take 1.8 to 2.8 times as long. If some folds decide, the loss is
    that of the best other one times the ratio of the two in these folds.
    """
    losses, loss, wins, remaining = np.full(sum(map(len, tests)), np.nan), None, None, 0
    if early:
        data, remaining = (others, weights, codes), len(tests) - 1
        _, loss, wins = _until_clear(name, partial(losses_in, rough=True), tests[:2], *data)
        if wins is not False:  # a look at leaked rows may exclude a candidate, but not choose it
            losses, loss, wins = _until_clear(name, losses_in, tests[:-1], *data)
    if wins is None:
        for k in range(remaining, len(tests)):
            losses[tests[k]] = losses_in(k)
        loss = float(np.average(losses, weights=weights))
        wins = simplest_not_worse({**others, name: losses}, weights, codes) == name
    return loss, wins


def _until_clear(name, losses_in, tests, others, weights, codes):
    """Losses (n,) of a candidate by fold, its mean loss, and whether it wins (None: open)."""
    means = mean_losses(others, weights)
    rival = min(means, key=means.__getitem__)
    losses = np.full(len(others[rival]), np.nan)
    for k, test in enumerate(tests):
        losses[test] = losses_in(k)
        rows = np.flatnonzero(~np.isnan(losses))
        so_far = {part: values[rows] for part, values in {**others, name: losses}.items()}
        clients = None if codes is None else np.unique(codes[rows], return_inverse=True)[1]
        row_weights = None if weights is None else weights[rows]
        one_client = clients is not None and not clients.any()  # one cluster has no standard error
        if _effective_rows(row_weights, len(rows)) < _FEWEST_TESTED_ROWS or one_client:
            continue
        means_so_far = mean_losses(so_far, row_weights)
        best = simplest_not_worse(so_far, row_weights, clients, _EARLY_LEVEL)
        wins = _enough_clients(clients) and best == name
        pair = {name: so_far[name], rival: so_far[rival]}
        is_worse = simplest_not_worse(pair, row_weights, clients) == rival
        # A candidate that is behind after two folds would have to be clearly ahead in the end.
        if wins or is_worse or (k > 0 and means_so_far[name] > min(means_so_far.values())):
            loss = means_so_far[name]
            if means_so_far[rival]:  # else both are 0, or the ratio is undefined
                # Folds differ in difficulty; the rival's loss in all of them is known.
                loss *= means[rival] / means_so_far[rival]
            return losses, loss, wins
    return losses, None, None


def _effective_rows(weights, n_rows):
    """Kish's effective sample size of weighted rows."""
    return n_rows if weights is None else weights.sum() ** 2 / (weights**2).sum()


def check_client_sizes(clients):
    """Raise ValueError if no client has two rows."""
    if len(clients.codes) == len(clients.ids):
        raise ValueError(
            f"each of the {len(clients.ids)} clients has one row, so that no fold leaves a client "
            "a row to learn from; use an estimator without clients."
        )


def repeat_fold_warnings(warned, fitted):
    """Repeat warnings of every fold for base estimators that are not fitted to all rows."""
    for name in warned.keys() - fitted.keys():
        for text, category in warned[name]:
            warn_caller(f"{name!r} in the folds: {text}", category)


def weights_table(chosen):
    """Weights of the parts for known and new clients: a frame, with 0 for other parts."""
    by_kind = {kind: chosen.get(kind, chosen["known"]).weights for kind in ("known", "new")}
    return pd.DataFrame(by_kind).fillna(0.0)


def part_name(parts):
    """Name of the only part, or that of a mixture."""
    return next(iter(parts)) if len(parts) == 1 else MIXTURE


def final_model(parts):
    """The model behind base estimators or, failing that, of columns of `X` alone; or None."""
    order = (STACK, FINAL, INTERCEPT, RECENT, POOLED, MEAN)
    return next((parts[name] for name in order if parts.get(name) is not None), None)
