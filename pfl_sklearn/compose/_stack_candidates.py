"""What may predict in place of a stack, for known and for new clients, and how well each does."""

from functools import partial
from typing import Any, NamedTuple

import pandas as pd
from sklearn import config_context
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.compose._inner_tables import InnerTable
from pfl_sklearn.compose._loss_comparison import first_as_good, judged, mean_losses
from pfl_sklearn.compose._out_of_fold import (
    Fold,
    Named,
    fit_all,
    log_odds,
    out_of_fold,
    outside_of,
    row_losses,
    tested,
)

# The final estimator on all it gets, or on columns of X alone; models of these without clients.
STACK, FINAL, POOLED, MEAN = "stack", "final_estimator", "pooled", "mean"
# Fewer clients do not tell whether the line or the mean predicts better for new ones, so the line
# comes first. With three hospitals the better of both had a log-loss of 0.70 instead of 0.47.
_FEWEST_CLIENTS = 10


class Stack(NamedTuple):
    """Base estimators and a final one, their rows, and folds of known or of new clients."""

    named: list[Named]
    final: Named
    table: InnerTable  # rows of the base estimators
    columns: InnerTable  # rows of the final estimator without what base estimators predict
    folds: list[Fold]
    codes: Integers | None  # clients (n,) of the rows if these are drawn, as new clients are
    n_jobs: int | None


class Choice(NamedTuple):
    """What predicts for clients of one kind, by name, and what was compared.

    `finals` has estimators behind the base estimators, with their rows; `losses` are means.
    `warned` has what base estimators warned of in every fold, as texts and categories by name.
    """

    chosen: str
    finals: dict[str, tuple[Named, InnerTable]]
    losses: dict[str, float]
    warned: dict[str, list[tuple[str, type[Warning]]]]


def _plain_models(classes, n_columns):
    """Models of columns of `X` that know no clients; a linear one only if there are any."""
    plain = DummyRegressor() if classes is None else DummyClassifier(strategy="prior")
    mean = Named(MEAN, plain, classes)
    if not n_columns:
        return [mean]
    linear = LinearRegression() if classes is None else LogisticRegression()
    with config_context(enable_metadata_routing=True):
        # A penalty on coefficients depends on the scale of the columns.
        scaler = StandardScaler().set_fit_request(sample_weight=True)
        linear.set_fit_request(sample_weight=True)
    return [Named(POOLED, make_pipeline(scaler, linear), classes), mean]


def choose(stack, fallback):
    """What predicts for the clients whose folds a stack has.

    Parameters
    ----------
    stack : Stack
    fallback : bool
        Whether something simpler than the stack may predict.

    Returns
    -------
    Choice
    """
    named, final, table, columns, folds, codes, n_jobs = stack
    warned: dict[str, Any] = {}
    predicted = out_of_fold([(each, table) for each in named], folds, n_jobs, warned)
    finals = {STACK: (final, columns._replace(X=stacked(named, predicted, columns.X)))}
    if not fallback:
        return Choice(STACK, finals, {}, warned)
    # For known clients the final estimator alone is the plainest.
    plain = [] if codes is None else _plain_models(final.classes, columns.X.shape[1])
    simpler = {each.name: (each, columns) for each in plain}
    if columns.X.shape[1]:
        simpler[FINAL] = final, columns
    by_name = dict(zip(simpler, out_of_fold(list(simpler.values()), folds, n_jobs), strict=True))
    by_name |= {each.name: values for each, values in zip(named, predicted, strict=True)}
    losses = {name: row_losses(each, table.y, final.classes) for name, each in by_name.items()}
    means = mean_losses(losses, table.weights)
    # In order of preference: what is simpler stands first and need only be as good.
    plainest = [each.name for each in plain]
    if plain and codes.max() + 1 >= _FEWEST_CLIENTS:
        plainest.sort(key=means.__getitem__)
    losses = {name: losses[name] for name in (*plainest, *losses)}
    chosen = first_as_good(losses, table.weights, codes)
    if len(folds) > 2:  # else no row is outside of two folds, as the honest test needs
        stack_losses = partial(_stack_losses, stack, predicted, {})
        tests = [test for _, test in folds]
        means[STACK], wins = judged(STACK, stack_losses, losses, tests, table.weights, codes)
        chosen = STACK if wins else chosen
    return Choice(chosen, finals | simpler, means, warned)


def _stack_losses(stack, predicted, pairs, k, rough=False):
    """Losses of the stack on the test rows of fold k.

    The rows that the final estimator learns from come from fits that saw nothing of the fold.
    Otherwise clients of few rows would give away what is to be predicted: of a client with two
    rows, the prediction for one is made of the other. A `rough` look takes the out-of-fold
    predictions nevertheless, since they are there already. `pairs` keeps fits to the rest of two
    folds.
    """
    train, test = stack.folds[k]
    if rough:
        inside = [each[train] for each in predicted]
    else:
        inside = outside_of(k, stack.named, stack.table, stack.folds, pairs, stack.n_jobs)
    to_fit, to_test = stack.columns.take(train), stack.columns.take(test)
    outside = [each[test] for each in predicted]
    final_outputs = tested(
        stack.final,
        to_fit._replace(X=stacked(stack.named, inside, to_fit.X)),
        to_test._replace(X=stacked(stack.named, outside, to_test.X)),
    )
    return row_losses(final_outputs, to_test.y, stack.final.classes)


def stacked(named, predicted, columns):
    """Predictions, as responses or log odds, beside other columns: a frame."""
    beside: dict[str, Floats] = {}
    for each, values in zip(named, predicted, strict=True):
        odds = values[:, None] if each.classes is None else log_odds(values)
        beside |= dict(zip(names_of(each), odds.T, strict=True))
    return pd.DataFrame(beside, index=columns.index).join(columns)


def names_of(named):
    """Names of the columns that an estimator's predictions make."""
    if named.classes is None or len(named.classes) == 2:
        return [named.name]
    return [f"{named.name}: {label}" for label in named.classes[1:]]


def fit_chosen(choices, named, table, n_jobs):
    """Fit to all rows what predicts for known and for new clients.

    Parameters
    ----------
    choices : dict of str to Choice
        For "known" and, if there are several clients, for "new" ones.
    named : list of Named
        Base estimators.
    table : InnerTable
    n_jobs : int or None

    Returns
    -------
    bases : dict of str to estimator
        Base estimators that predictions need, by name.
    known, new : tuple of (str, estimator or None)
        For known and for new clients, what predicts and what is fitted behind the base estimators.
    """
    names = {each.chosen for each in choices.values()}
    bases = {each.name: (each, table) for each in named if names & {STACK, each.name}}
    # Stacks of known and of new clients learn from different rows; anything else is fitted once.
    keys = {kind: (kind if each.chosen == STACK else "both") for kind, each in choices.items()}
    finals = {
        (keys[kind], each.chosen): each.finals[each.chosen]
        for kind, each in choices.items()
        if each.chosen in each.finals
    }
    fitted = fit_all([*bases.values(), *finals.values()], n_jobs)
    fits = dict(zip(finals, fitted[len(bases) :], strict=True))
    predictors = {
        kind: (each.chosen, fits.get((keys[kind], each.chosen))) for kind, each in choices.items()
    }
    by_name = dict(zip(bases, fitted[: len(bases)], strict=True))
    return by_name, predictors["known"], predictors.get("new", predictors["known"])
