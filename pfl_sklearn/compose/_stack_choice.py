"""What may predict in place of a stack, for known and for new clients, and how well each does."""

from functools import partial
from typing import NamedTuple

import numpy as np
from sklearn import config_context
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn._typing import Integers
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._final_rows import stacked
from pfl_sklearn.compose._inner_estimators import InnerEstimator, fit_inner, without_clients
from pfl_sklearn.compose._out_of_fold import (
    Fold,
    first_as_good,
    fit_all,
    folds_of_clients,
    mean_losses,
    out_of_fold,
    outside_of,
    row_losses,
    tested,
    tested_rows,
)

# The final estimator on all it gets, or on columns of X alone; models of these without clients.
STACK, FINAL, POOLED, MEAN = "stack", "final_estimator", "pooled", "mean"
# Fewer clients do not tell whether the line or the mean predicts better for new ones, so the line
# comes first. With three hospitals the better of both had a log-loss of 0.70 instead of 0.47.
_FEWEST_CLIENTS = 10
# By which a candidate may be in before the last fold. With five folds there are four such looks;
# by Bonferroni their chances of a false alarm add up to at most 0.1.
_EARLY_LEVEL = 0.025
_FEWEST_ROWS = 30  # before the last fold; squared errors are too skew for a t test of fewer


class StackInFolds(NamedTuple):
    """Base estimators and a final one, their rows, and folds of known or of new clients."""

    named: list[InnerEstimator]
    final: InnerEstimator
    table: TableRows  # rows of the base estimators
    columns: TableRows  # rows of the final estimator without what base estimators predict
    folds: list[Fold]
    codes: Integers | None  # clients (n,) of the rows if these are drawn, as new clients are
    run: BatchMapper
    places: list  # of `table` and of `columns`


def _plain_models(classes, n_columns):
    """Models of columns of `X` that know no clients; a linear one only if there are any."""
    plain = DummyRegressor() if classes is None else DummyClassifier(strategy="prior")
    mean = InnerEstimator(MEAN, plain, classes)
    if not n_columns:
        return [mean]
    linear = LinearRegression() if classes is None else LogisticRegression()
    with config_context(enable_metadata_routing=True):
        # A penalty on coefficients depends on the scale of the columns.
        scaler = StandardScaler().set_fit_request(sample_weight=True)
        linear.set_fit_request(sample_weight=True)
    return [InnerEstimator(POOLED, make_pipeline(scaler, linear), classes), mean]


def stack_for_new_clients(stack, seed):
    """The stack as clients see it that are new to it: in folds of whole clients."""
    # Trees know clients by columns that are constant within them. How well anything does for new
    # clients shows only on clients that nothing in it has seen.
    codes = stack.table.clients.codes
    return stack._replace(
        named=[without_clients(each) for each in stack.named],
        final=without_clients(stack.final),
        folds=folds_of_clients(len(stack.folds), codes, seed),
        codes=codes,
    )


def choose(stack, fallback):
    """What predicts for the clients whose folds a stack has.

    Parameters
    ----------
    stack : StackInFolds
    fallback : bool
        Whether something simpler than the stack may predict.

    Returns
    -------
    part : tuple of (str, tuple of (InnerEstimator, TableRows) or None)
        What predicts, by name, and the estimator behind the base estimators with its rows.
    losses : dict of str to float
        Mean losses of what was compared.
    warned : dict of str to list of (str, type)
        What base estimators warned of in every fold, by name.
    """
    named, final, table, columns, folds, codes, run, places = stack
    predicted, warned = out_of_fold([(each, places[0]) for each in named], folds, run)
    seen = tested_rows(folds, table.clients.codes)
    beside = seen.of(columns)
    behind = {STACK: (final, beside._replace(X=stacked(named, predicted, beside.X)))}
    if not fallback:
        return (STACK, behind[STACK]), {}, warned
    # For known clients the final estimator alone is the plainest.
    plain = [] if codes is None else _plain_models(final.classes, columns.X.shape[1])
    behind |= {each.name: (each, columns) for each in plain}
    if columns.X.shape[1]:
        behind[FINAL] = final, columns
    losses = _losses_of_parts(stack, seen, predicted, behind)
    weights = None if table.weights is None else table.weights[seen.rows[seen.judged]]
    means = mean_losses(losses, weights)
    # In order of preference: what is simpler stands first and need only be as good.
    plainest = [each.name for each in plain]
    if plain and codes.max() + 1 >= _FEWEST_CLIENTS:
        plainest.sort(key=means.__getitem__)
    losses = {name: losses[name] for name in (*plainest, *losses)}
    chosen = first_as_good(losses, weights, codes)
    if len(folds) > 2:  # else no row is outside of two folds, as the honest test needs
        stack_losses = partial(_stack_losses, stack, seen, predicted, {})
        # Early folds forward have less history than others, and all of them are tested for free.
        judge = judged_in_all if seen.go_forward else judged
        means[STACK], wins = judge(STACK, stack_losses, losses, seen.tests, weights, codes)
        chosen = STACK if wins else chosen
    return (chosen, behind.get(chosen)), means, warned


def _losses_of_parts(stack, seen, predicted, behind):
    """Losses (n_judged,) of each part but the stack: those without base estimators first."""
    alone = {name: (pair[0], stack.places[1]) for name, pair in behind.items() if name != STACK}
    outputs, _ = out_of_fold(list(alone.values()), stack.folds, stack.run)
    by_name = dict(zip(alone, outputs, strict=True))
    by_name |= {each.name: values for each, values in zip(stack.named, predicted, strict=True)}
    y, classes = stack.table.y[seen.rows], stack.final.classes
    return {name: row_losses(each, y, classes)[seen.judged] for name, each in by_name.items()}


def _stack_losses(stack, seen, predicted, pairs, k, rough=False):
    """Losses of the stack on the test rows of fold k.

    The rows that the final estimator learns from come from fits that saw nothing of the fold.
    Otherwise clients of few rows would give away what is to be predicted: of a client with two
    rows, the prediction for one is made of the other. A `rough` look takes the out-of-fold
    predictions nevertheless, since they are there already; if folds go forward, these saw nothing
    of the fold anyway. `pairs` keeps fits to the rest of two folds.
    """
    train, test = seen.folds[k]
    if rough or seen.go_forward:
        inside = [each[train] for each in predicted]
    else:
        inside = outside_of(k, stack.named, stack.places[0], stack.folds, pairs, stack.run)
    to_fit, to_test = (stack.columns.take(seen.rows[each]) for each in (train, test))
    outside = [each[test] for each in predicted]
    final_outputs = tested(
        stack.final,
        to_fit._replace(X=stacked(stack.named, inside, to_fit.X)),
        to_test._replace(X=stacked(stack.named, outside, to_test.X)),
    )
    return row_losses(final_outputs, to_test.y, stack.final.classes)


def fit_parts(parts, named, place, run):
    """Fit to all rows what predicts for known and for new clients.

    Parameters
    ----------
    parts : dict of str to tuple
        For "known" and, if there are several clients, for "new" ones, as of :func:`choose`.
    named : list of InnerEstimator
        Base estimators.
    place : tuple
        Of their table, as of ``keep_table``.
    run : BatchMapper

    Returns
    -------
    bases : dict of str to estimator
        Base estimators that predictions need, by name.
    known, new : tuple of (str, estimator or None)
        For known and for new clients, what predicts and what is fitted behind the base estimators.
    """
    names = {name for name, _ in parts.values()}
    bases = [(each, place) for each in named if names & {STACK, each.name}]
    # Stacks of known and of new clients learn from different rows; anything else is fitted once.
    keys = {kind: (kind if name == STACK else "both", name) for kind, (name, _) in parts.items()}
    finals = {keys[kind]: behind for kind, (_, behind) in parts.items() if behind is not None}
    by_name = dict(zip([each.name for each, _ in bases], fit_all(bases, run), strict=True))
    # In order: their rows have predictions of base estimators, which no worker keeps.
    fits = {key: fit_inner(*behind) for key, behind in finals.items()}
    predictors = {kind: (name, fits.get(keys[kind])) for kind, (name, _) in parts.items()}
    return by_name, predictors["known"], predictors.get("new", predictors["known"])


def judged_in_all(name, losses_in, losses, tests, weights, codes=None):
    """Mean loss of one more candidate in all folds, and whether it is clearly better than others.

    Parameters are those of :func:`judged`.
    """
    own = np.empty(sum(map(len, tests)))
    for k, test in enumerate(tests):
        own[test] = losses_in(k)
    loss = float(np.average(own, weights=weights))
    return loss, first_as_good({**losses, name: own}, weights, codes) == name


def judged(name, losses_in, losses, tests, weights, codes=None):
    """Test fold by fold whether one more candidate is clearly better than the others.

    It is in before the last fold if it is clearly better than each of the others at level 0.025,
    of which four looks make 0.1. It is out if it is clearly worse than the best of them at level
    0.1 or, after two folds, worse than one of them. Both take 30 rows, and several clients if
    these are drawn. All folds decide by :func:`first_as_good`. Before that, a rough look at two
    folds may rule it out, which needs no more fits of base estimators. On radon and contraception,
    where it does, all folds would take 1.8 to 2.8 times as long.

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
        wins = first_as_good({**losses, name: own}, weights, codes) == name
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
        wins = first_as_good(tested, row_weights, clients, _EARLY_LEVEL) == name
        pair = {name: tested[name], rival: tested[rival]}
        worse = first_as_good(pair, row_weights, clients) == rival
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
