"""What may predict in place of a stack, for known and for new clients, and how well each does."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.base import clone
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn._typing import Integers
from pfl_sklearn._unwrap import is_ours
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.compose._client_mixtures import best_mixture, errors_of
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    fit_inner,
    is_frozen,
    without_clients,
)
from pfl_sklearn.compose._out_of_fold import (
    ROUNDING,
    Fold,
    fit_all,
    folds_of_clients,
    mean_losses,
    out_of_fold,
    outside_of,
    simplest_not_worse,
    tested,
    tested_rows,
)
from pfl_sklearn.compose._stack.final_rows import stacked

# The final estimator on all it gets, or on columns of X alone; models of these without clients.
STACK, FINAL, INTERCEPT = "stack", "final_estimator", "random_intercept"
RECENT = "recent_targets"  # a random intercept, and the client's last targets as a feature
POOLED, MEAN, MIXTURE = "pooled", "mean", "mixture"
# Parts with less are left out: they cost a fit, and change predictions by next to nothing.
_SMALLEST_WEIGHT = 0.02
# Fewer clients do not tell whether the line or the mean predicts better for new ones, so the line
# comes first, and nothing is mixed. With three hospitals the better of both had a log-loss of 0.70
# instead of 0.47.
_FEWEST_CLIENTS = 10
# By which a candidate may be in before the last fold. With five folds there are four such looks;
# by Bonferroni their chances of a false alarm add up to at most 0.1.
_EARLY_LEVEL = 0.025
_MANY_ROWS = 200  # of a table, for which errors of variances change predictions little
_FEWEST_ROWS = 30  # before the last fold; squared errors are too skew for a t test of fewer


class StackInFolds(NamedTuple):
    """Base estimators and a final one, their rows, and folds of known or of new clients."""

    named: list[InnerEstimator]
    personal: list[InnerEstimator]  # of columns of `X` alone; the last one is the final estimator
    table: TableRows
    columns: TableRows  # rows of the final estimator without what base estimators predict
    folds: list[Fold]
    codes: Integers | None  # clients (n,) of the rows if these are drawn, as new clients are
    run: BatchMapper
    places: list  # of what base estimators take, and of `columns`

    @property
    def classes(self):
        """Sorted classes, or None."""
        return self.named[0].classes


class Chosen(NamedTuple):
    """Weights of the parts that predict, and what is fitted behind base estimators, by name."""

    weights: dict[str, float]  # that sum to 1
    behind: Mapping[str, tuple[InnerEstimator, TableRows] | None]  # with its rows; None: a base one


def _plain_models(classes, n_columns):
    """Models of columns of `X` that know no clients; a linear one only if there are any."""
    plain = DummyRegressor() if classes is None else DummyClassifier(strategy="prior")
    mean = InnerEstimator(MEAN, plain, classes)
    if not n_columns:
        return [mean]
    linear = Ridge() if classes is None else LogisticRegression()
    with config_context(enable_metadata_routing=True):
        # A penalty on coefficients depends on the scale of the columns.
        scaler = StandardScaler().set_fit_request(sample_weight=True)
        linear.set_fit_request(sample_weight=True)
    return [InnerEstimator(POOLED, make_pipeline(scaler, linear), classes), mean]


def stack_for_new_clients(stack, seed):
    """The stack as new clients see it: in folds of whole clients."""
    # Trees know clients by columns that are constant within them. How well anything does for new
    # clients shows only on clients that nothing in it has seen.
    codes = stack.table.clients.codes
    return stack._replace(
        named=[without_clients(each) for each in stack.named],
        personal=[without_clients(each) for each in stack.personal],
        folds=folds_of_clients(len(stack.folds), codes, seed),
        codes=codes,
    )


def choose(stack, fallback):
    """What predicts for the clients whose folds a stack has.

    Parameters
    ----------
    stack : StackInFolds
    fallback : bool
        Whether parts of the stack may predict, alone or mixed.

    Returns
    -------
    chosen : Chosen
    losses : dict of str to float
        Mean losses of what was compared.
    warned : dict of str to list of (str, type)
        What base estimators warned of in every fold, by name.
    """
    named, (*_, final), table, columns, folds, codes, run, places = stack
    predicted, warned = out_of_fold([(each, places[0]) for each in named], folds, run)
    seen = tested_rows(folds, table.clients.codes)
    beside = seen.of(columns)
    behind = {STACK: (final, beside._replace(X=stacked(named, predicted, beside.X)))}
    if not fallback:
        return Chosen({STACK: 1.0}, behind), {}, warned
    alone = _parts_alone(stack)
    behind |= {each.name: (each, columns) for each in alone}
    in_folds = [(_in_folds(each, len(table.y)), places[1]) for each in alone]
    found, _ = out_of_fold(in_folds, folds, run)
    names = [each.name for each in (*alone, *named)]
    errors = errors_of([*found, *predicted], table, seen.rows, stack.classes).take(seen.judged)
    losses = dict(zip(names, map(errors.losses, np.eye(len(names))), strict=True))
    row_weights = None if table.weights is None else errors.weights
    means = mean_losses(losses, row_weights)
    chosen = {simplest_not_worse(_in_order(losses, means, codes), row_weights, codes): 1.0}
    if len(seen.tests) > 1:  # else there are no other folds to learn weights in
        mixed, losses[MIXTURE] = _mixture(errors, seen.tests)
        means = mean_losses(losses, row_weights)
        single = means[next(iter(chosen))]
        if _tell_apart(codes) and single - means[MIXTURE] > ROUNDING * abs(single):
            chosen = _named(names, mixed)
    if len(folds) > 2:  # else no row is outside of two folds, as the honest test needs
        stack_errors = StackErrors(stack, seen, predicted, errors)
        # Early folds forward have less history than others, and all of them are tested for free.
        judge = judged_in_all if seen.go_forward else judged
        data = losses, seen.tests, row_weights, codes
        means[STACK], wins = judge(STACK, stack_errors.losses, *data)
        if wins:
            mixed, ratio = stack_errors.mixed_with(chosen, names)
            chosen, means[MIXTURE] = mixed, ratio * means[STACK]
    return Chosen(chosen, {name: behind.get(name) for name in chosen}), means, warned


def _parts_alone(stack):
    """Estimators on columns of `X` alone: simple ones without clients, and the final one."""
    n_columns = stack.columns.X.shape[1]
    plain = _plain_models(stack.classes, n_columns)
    return [*plain, *(stack.personal if n_columns else ())]


def _in_folds(named, n_rows):
    """The estimator for folds, with its variances as known where that changes little.

    Averages of probabilities over them took a quarter of the time of stacks of classes. Without
    them losses out of fold changed by 0.11 % at most with 120 and 200 rows, by up to 6 % with 60.
    """
    if n_rows < _MANY_ROWS or is_frozen(named.estimator):
        return named
    params = named.estimator.get_params()
    full = [
        name
        for name, value in params.items()
        if isinstance(value, str)
        and (name.rpartition("__")[2], value) == ("uncertainty", "full")
        # What others mean by such a parameter is theirs.
        and is_ours(params.get(name.rpartition("__")[0], named.estimator))
    ]
    plug_in = dict.fromkeys(full, "plug_in")
    return named._replace(estimator=clone(named.estimator).set_params(**plug_in))


def _in_order(losses, means, codes):
    """Losses in order of preference: what is simpler stands first and need only be as good."""
    plain = [name for name in (POOLED, MEAN) if name in losses]
    if _tell_apart(codes):
        plain.sort(key=means.__getitem__)
    later = [name for name in losses if name not in (POOLED, MEAN)]
    return {name: losses[name] for name in (*plain, *later)}


def _tell_apart(codes):
    """Whether clients, or rows of known ones, are enough to tell similar candidates apart."""
    return codes is None or bool(codes.max() + 1 >= _FEWEST_CLIENTS)


def _mixture(errors, tests):
    """Weights (K,) of the mixture that does best, and losses (n,) by weights of other folds."""
    losses = np.empty(len(errors.values))
    for test in tests:
        rest = np.setdiff1d(np.arange(len(losses)), test)
        losses[test] = errors.take(test).losses(drop_small_weights(best_mixture(errors.take(rest))))
    return drop_small_weights(best_mixture(errors)), losses


def drop_small_weights(weights):
    """Weights (K,) without those that would cost a fit and change next to nothing."""
    kept = np.where(weights >= _SMALLEST_WEIGHT, weights, 0.0)
    return kept / kept.sum()


def _named(names, weights):
    """Weights above 0 by name."""
    return {name: float(each) for name, each in zip(names, weights, strict=True) if each}


class StackErrors:
    """Errors of the stack on tested rows, fold after fold; `errors` are those of its parts."""

    def __init__(self, stack, seen, predicted, errors):
        self.stack, self.seen, self.predicted, self.errors = stack, seen, predicted, errors
        self._pairs = {}  # fits to the rest of two folds
        self._values = np.full(len(errors.values), np.nan)

    def losses(self, k, rough=False):
        """Losses on the test rows of fold k.

        The rows that the final estimator learns from come from fits that saw nothing of the fold.
        Otherwise clients of few rows would give away what is to be predicted: of a client with two
        rows, the prediction for one is made of the other. A `rough` look takes the out-of-fold
        predictions nevertheless, since they are there already; if folds go forward, these saw
        nothing of the fold anyway.
        """
        stack, seen, classes = self.stack, self.seen, self.stack.classes
        train, test = seen.folds[k]
        if rough or seen.go_forward:
            inside = [each[train] for each in self.predicted]
        else:
            inside = outside_of(
                k, stack.named, stack.places[0], stack.folds, self._pairs, stack.run
            )
        to_fit, to_test = (stack.columns.take(seen.rows[each]) for each in (train, test))
        outside = [each[test] for each in self.predicted]
        found = tested(
            _in_folds(stack.personal[-1], len(stack.table.y)),
            to_fit._replace(X=stacked(stack.named, inside, to_fit.X)),
            to_test._replace(X=stacked(stack.named, outside, to_test.X)),
        )
        errors = errors_of([found], stack.table, seen.rows[test], classes)
        if not rough:
            self._values[seen.tests[k]] = errors.values[:, 0]
        return errors.losses(np.ones(1))

    def mixed_with(self, chosen, names):
        """Weights of the stack and of what else was chosen, by the folds tested so far, and the
        loss of their average there over that of the stack."""
        rows = np.flatnonzero(~np.isnan(self._values))
        rest = self.errors.values[rows] @ [chosen.get(name, 0.0) for name in names]
        pair = self.errors.take(rows)._replace(values=np.column_stack([rest, self._values[rows]]))
        weights = drop_small_weights(best_mixture(pair))
        found, alone = (
            np.average(pair.losses(each), weights=pair.weights) for each in (weights, [0.0, 1.0])
        )
        shares = [weights[0] * chosen.get(name, 0.0) for name in names]
        mixed = _named((*names, STACK), drop_small_weights(np.append(shares, weights[1])))
        return mixed, found / alone if alone else 1.0


def fit_parts(chosen, named, place, run):
    """Fit to all rows what predicts for known and for new clients.

    Parameters
    ----------
    chosen : dict of str to Chosen
        For "known" and, if there are several clients, for "new" ones.
    named : list of InnerEstimator
        Base estimators.
    place : tuple
        Of their table, as of ``keep_table``.
    run : BatchMapper

    Returns
    -------
    bases : dict of str to estimator
        Base estimators that predictions need, by name.
    parts : dict of dict
        For "known" and "new" clients, what is fitted behind the base estimators, by name; None for
        a base estimator.
    """
    names = {name for each in chosen.values() for name in each.weights}
    bases = [(each, place) for each in named if names & {STACK, each.name}]
    by_name = dict(zip([each.name for each, _ in bases], fit_all(bases, run), strict=True))
    fits, parts = {}, {}
    # In order: their rows have predictions of base estimators, which no worker keeps.
    for kind, each in chosen.items():
        parts[kind] = dict.fromkeys(each.weights)
        for name, behind in each.behind.items():
            # Stacks of known and of new clients learn from other rows; the rest is fitted once.
            key = (kind if name == STACK else "both", name)
            if behind is not None and key not in fits:
                fits[key] = fit_inner(*behind)
            parts[kind][name] = fits.get(key)
    return by_name, {"new": parts["known"], **parts}


def judged_in_all(name, losses_in, losses, tests, weights, codes=None):
    """Mean loss of one more candidate in all folds, and whether it is clearly better than others.

    Parameters are those of :func:`judged`.
    """
    own = np.empty(sum(map(len, tests)))
    for k, test in enumerate(tests):
        own[test] = losses_in(k)
    loss = float(np.average(own, weights=weights))
    return loss, simplest_not_worse({**losses, name: own}, weights, codes) == name


def judged(name, losses_in, losses, tests, weights, codes=None):
    """Test fold by fold whether one more candidate is clearly better than the others.

    It is in before the last fold if it is clearly better than each of the others at level 0.025,
    of which four looks make 0.1. It is out if it is clearly worse than the best of them at level
    0.1 or, after two folds, worse than one of them. Both take 30 rows and, if clients are drawn,
    ten of them to be in, and several to be out. All folds decide by :func:`simplest_not_worse`.
    Before that, a rough look at two folds may rule it out, which needs no more fits of base
    estimators. On radon and contraception, where it does, all folds would take 1.8 to 2.8 times as
    long.

    Parameters
    ----------
    name : str
        Of the candidate, which comes after all others.
    losses_in : callable
        Its losses on the test rows of a fold, whose position it gets. With ``rough=True`` they may
        be off, but cheap to have.
    losses : dict of str to ndarray of shape (n,)
        Losses of the others, in order of preference.
    tests : list of ndarray
        Test rows of the folds, a partition.
    weights : ndarray of shape (n,) or None
    codes : ndarray of shape (n,) or None
        Clients of the rows, if clients are drawn.

    Returns
    -------
    loss : float
        Its mean loss. Where some folds decided, that of the best other one times the ratio of the
        two in these folds.
    wins : bool
    """
    data = losses, weights, codes
    _, loss, wins = _until_clear(name, partial(losses_in, rough=True), tests[:2], *data)
    if wins is not False:  # what has seen the tested rows may rule a candidate out, but not in
        own, loss, wins = _until_clear(name, losses_in, tests[:-1], *data)
    if wins is None:
        own[tests[-1]] = losses_in(len(tests) - 1)
        loss = float(np.average(own, weights=weights))
        wins = simplest_not_worse({**losses, name: own}, weights, codes) == name
    return loss, wins


def _until_clear(name, losses_in, tests, losses, weights, codes):
    """Test a candidate in folds: its losses (n,), mean loss, and whether it wins (None: open)."""
    means = mean_losses(losses, weights)
    rival = min(means, key=means.__getitem__)
    own = np.full(len(losses[rival]), np.nan)
    for k, test in enumerate(tests):
        own[test] = losses_in(k)
        rows = np.flatnonzero(~np.isnan(own))
        tested = {each: values[rows] for each, values in {**losses, name: own}.items()}
        clients = None if codes is None else np.unique(codes[rows], return_inverse=True)[1]
        row_weights = None if weights is None else weights[rows]
        one_client = clients is not None and not clients.any()  # a cluster has no standard error
        if _effective_rows(row_weights, len(rows)) < _FEWEST_ROWS or one_client:
            continue
        tested_means = mean_losses(tested, row_weights)
        enough = _tell_apart(clients)
        wins = enough and simplest_not_worse(tested, row_weights, clients, _EARLY_LEVEL) == name
        pair = {name: tested[name], rival: tested[rival]}
        worse = simplest_not_worse(pair, row_weights, clients) == rival
        # One that is behind after two folds would have to be clearly ahead of all in the end.
        if wins or worse or (k > 0 and tested_means[name] > min(tested_means.values())):
            loss = tested_means[name]
            if tested_means[rival]:  # else both are 0, or no ratio says anything
                # Folds differ in how hard they are; the rival's loss in all of them is known.
                loss *= means[rival] / tested_means[rival]
            return own, loss, wins
    return own, None, None


def _effective_rows(weights, n_rows):
    """Kish's effective sample size of weighted rows."""
    return n_rows if weights is None else weights.sum() ** 2 / (weights**2).sum()


def check_rows(clients):
    """Raise ValueError if no client has two rows."""
    if len(clients.codes) == len(clients.ids):
        raise ValueError(
            f"each of the {len(clients.ids)} clients has one row, so that no fold leaves a client "
            "a row to learn from; take an estimator without clients."
        )


def warn_of_folds(warned, fitted):
    """Repeat what base estimators warned of in every fold, if no fit to all rows said it again."""
    for name in warned.keys() - fitted.keys():
        for text, category in warned[name]:
            warn_caller(f"{name!r} in the folds: {text}", category)


def weights_table(chosen):
    """Weights of the parts for known and new clients, a frame with zeros for what is not in."""
    by_kind = {kind: chosen.get(kind, chosen["known"]).weights for kind in ("known", "new")}
    return pd.DataFrame(by_kind).fillna(0.0)


def only_name(parts):
    """Name of the only part, or that of several."""
    return next(iter(parts)) if len(parts) == 1 else MIXTURE


def model_behind(parts):
    """The estimator behind base estimators or, failing that, of columns of `X` alone; or None."""
    order = (STACK, FINAL, INTERCEPT, RECENT, POOLED, MEAN)
    return next((parts[name] for name in order if parts.get(name) is not None), None)
