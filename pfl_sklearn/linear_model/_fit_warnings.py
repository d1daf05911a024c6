"""Warnings of fits of mixed models, and the columns that separate the responses.

Along a direction of separation no row's likelihood falls and some rise (Albert and Anderson, 1984;
Konis, 2007): the row's own class, or a count of 0, gets ever more likely.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linprog
from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._warnings import format_names, warn_caller
from pfl_sklearn.linear_model._mixed._predictions import predictors_at_modes

# Pearson's chi-square per degree of freedom from which a fit warns: intervals that should have 1.7
# times their length cover .74 instead of .95.
_OVERDISPERSED = 3.0
_CLEAR_SDS = 4.0  # standard errors above 1: one surprising count among tiny means is no evidence
_MOST_NAMED = 10  # features that a warning names
_MOST_ROUNDS = 100  # of programs, each with the rows that the one before broke
_MOST_COEFFICIENTS = 60  # of a program: larger ones take minutes, and a warning should not
_MOST_SHRUNK = 20  # columns of a first answer; of more a warning names few, and each is a program
_VIOLATION = 1e-7  # margin below 0 of a direction of length 1: the accuracy of a linear program
# Length of a direction whose mean margin is 1; a longer one separates by rounding alone.
_LONGEST_DIRECTION = 1e6


class SeparationWarning(UserWarning):
    """The likelihood has no finite maximum.

    Some combination of the features separates the classes, or rows of count 0 from the others; or
    the differences between clients diverge.
    """


def warn_not_converged(estimator, estimates, prior=None):
    """Warn that the search of a fit ran out of iterations, or is not sure of the maximum."""
    advice = ["Bring the features to similar scales"]
    # Laplace and discrete priors have no covariance that could be simpler.
    if prior is None or "covariance_type" in prior.get_params(deep=False):
        advice += ["take a simpler covariance_type", "let fewer coefficients vary (random)"]
    name = type(estimator).__name__
    # Below max_iter the search ended by itself, so more iterations would change nothing.
    if estimates.n_iter < estimator.max_iter:
        message = (
            f"{name} may have missed the maximum: the likelihood is flat, or has several maxima, "
            "and more iterations do not help."
        )
    else:
        message = (
            f"{name} did not converge in {estimates.n_iter} iterations "
            f"(max_iter={estimator.max_iter}, tol={estimator.tol}). Raise max_iter."
        )
    warn_caller(f"{message} {', or '.join(advice)}.", ConvergenceWarning)


def warn_of_separation(estimator, estimates, table, first):
    """Warn of maxima that only a weak prior keeps finite; `first` is the first free column."""
    scale, separated, weak = estimator._scale, estimator._separated, estimates.weak
    if weak.separated:
        subject = find_separation(table, estimates.family, first).text(table.names)
        warn_caller(
            f"{subject} {separated}, so the likelihood has no finite maximum. The population "
            "slopes got a normal prior with standard deviation 2.5 per standard deviation of their "
            "feature.",
            SeparationWarning,
        )
    pure = [("client", "clients")] if weak.spread.any() and not weak.runaway else []
    pure += [(f"level of {name!r}", "its levels") for name in weak.pure]
    for one, several in pure:
        message = (
            f"No {one} has rows of two classes, so the likelihood has no finite maximum in the "
            f"differences between {several}. Their standard deviations got a normal prior with "
            f"standard deviation 2.5 (in {scale})"
        )
        if estimates.family.n_outputs > 1:
            message += ", which alone sets their size: the data do not determine it"
        warn_caller(message + ". Give a known covariance instead.", SeparationWarning)
    if weak.far_apart:
        named = format_names(map(str, weak.far_apart))
        warn_caller(
            f"The differences between levels of {named} diverged to a standard deviation of more "
            f"than 10 {scale}: levels have too few rows, or separate {separated}. Their standard "
            f"deviations got a normal prior with standard deviation 1 (in {scale}). Give a known "
            "covariance instead, or leave the grouping out.",
            SeparationWarning,
        )
    if weak.runaway:
        warn_caller(
            "The differences between clients diverged to a standard deviation of more than 10 "
            f"{scale}: clients have too few rows for so many random coefficients, or these "
            f"separate {separated} of nearly every client. Their standard deviations got a normal "
            f"prior with standard deviation 1 (in {scale}). Give a known covariance instead, or "
            "let fewer coefficients vary by client (random).",
            SeparationWarning,
        )


def warn_of_lost_accuracy(estimator, estimates):
    """Warn of a search that ended early; advise more iterations only if it ran out of them."""
    if estimates.weak.coarse:
        warn_caller(
            f"quadrature={estimator.quadrature!r} takes too few points for clients so far apart: "
            "by more points the standard deviation between them differs by a factor of over 1.5. "
            "Take quadrature='auto'.",
            ConvergenceWarning,
        )
    if estimates.modes_found and estimates.converged:
        return
    # Rounding ends a search below max_iter, and modes that are lost stay lost.
    if estimates.modes_found and estimates.n_iter >= estimator.max_iter:
        warn_not_converged(estimator, estimates)
    else:
        warn_caller(
            f"{type(estimator).__name__} did not reach full accuracy: rounding stopped the search "
            "or the clients' modes. More iterations do not help; give a smaller covariance, or "
            "bring the features to a common scale.",
            ConvergenceWarning,
        )


def warn_of_overdispersion(estimates, table):
    """Warn of Poisson counts that differ much more than their means say."""
    dispersion, error = pearson_dispersion(estimates, table)
    if dispersion >= _OVERDISPERSED and dispersion - 1 > _CLEAR_SDS * error:
        warn_caller(
            f"The counts are overdispersed: squared residuals are {dispersion:.3g} times those "
            "that family='poisson' expects given clients and features, so errors and intervals are "
            "too small. Take family='negative_binomial'.",
            UserWarning,
        )


def pearson_dispersion(estimates, table):
    """Pearson's chi-square of Poisson counts over its degrees of freedom, and its error."""
    # Means are conditional on the clients' effects. Each row uses a share of a degree of freedom:
    # the posterior variance of its predictor over the variance of its own count.
    mean = np.exp(predictors_at_modes(estimates, table)[:, 0])
    weights = np.ones(len(mean)) if table.weights is None else table.weights
    dof = float(np.sum(weights))
    if estimates.rows is not None:  # the population takes a degree of freedom a coefficient
        dof -= weights * mean @ estimates.rows.variances + len(estimates.population)
    else:
        # Given the variances: averages over them would take longer than the fit.
        posterior = getattr(estimates.posterior, "plug_in", estimates.posterior)
        dof -= weights * mean @ posterior.variances(table.columns, table.codes)
    if dof < 1:  # every row has an effect of its own, which takes all dispersion
        return 1.0, np.inf
    square = np.sum(weights * (table.y - mean) ** 2 / mean)
    # The square of one count's residual has the variance 2 + 1 / mean.
    return float(square / dof), float(np.sqrt(np.sum(weights * (2 + 1 / mean))) / dof)


class Separation(NamedTuple):
    """Columns that separate: each by itself, or a combination that needs all of them."""

    columns: tuple  # positions
    references: tuple  # of positions: indicators whose rows of zeros separate
    combined: bool  # whether the columns separate together only

    def text(self, names):
        """Subject of a sentence, up to its verb."""
        columns = [names[k] for k in self.columns]
        if self.combined or not (columns or self.references):
            of = f" {format_names(columns, _MOST_NAMED)}" if columns else ""
            return f"A combination of the features{of} separates"
        parts = []
        if columns:
            parts.append(
                ("the feature " if len(columns) == 1 else "each of the features ")
                + format_names(columns, _MOST_NAMED)
            )
        for indicators in self.references:
            listed = format_names([names[k] for k in indicators], _MOST_NAMED)
            parts.append(f"the reference level of {listed} (rows that have none of them)")
        subject = ", and ".join(parts)
        verb = "separates" if len(parts) == 1 else "separate"
        return f"{subject[0].upper()}{subject[1:]} {verb}"


def find_separation(table, family, first):
    """Separation of a RegressionTable by as few of its columns as possible.

    It lists the columns and the reference levels that separate alone. If there are none, it gives a
    set of columns found by linear programs: a minimal one among up to 20 columns, and an empty one
    if there are too many coefficients. `first` is the first column with a free population
    coefficient.
    """
    labels, improvements = family.rising_directions(table.y)
    free = table.intercept is not None and table.intercept >= first
    others = np.arange(first, table.columns.shape[1])
    others = others[others != table.intercept]
    rows = _SeparationProgram(table.columns, labels, improvements, free, [])
    alone = tuple(int(k) for k in others if _separates_alone(rows, table.columns[:, k]))
    # Without a free intercept no combination of indicators is their reference level.
    runs = _reference_levels(table.columns, others) if free else []
    references = tuple(run for run, reference in runs if _separates_alone(rows, reference))
    if alone or references:
        return Separation(alone, references, False)
    return Separation(_smallest_set(rows, others), (), True)


class _SeparationProgram(NamedTuple):
    """Rows, and the directions of their predictors that raise their likelihood."""

    x: np.ndarray  # (n, p)
    labels: np.ndarray  # (n,)
    improvements: np.ndarray  # (n_labels, r, a), combinations of predictors that must not fall
    intercept: bool  # whether there is a free one
    active: list  # of (row, combination): constraints that some program broke

    def direction(self, columns):
        """Direction (k,) of separation in these columns, each in its spread; None if none is.

        None also where there are too many coefficients to look for one.
        """
        a = self.improvements.shape[2]
        if a * (len(columns) + self.intercept) > _MOST_COEFFICIENTS:
            return None
        x = self.x[:, columns]
        centre = x.mean(axis=0) if self.intercept else np.zeros(len(columns))
        scale = np.sqrt(np.mean((x - centre) ** 2, axis=0))
        x = (x - centre) / np.where(scale > 0, scale, 1.0)
        if self.intercept:
            x = np.column_stack([x, np.ones(len(x))])
        # Mean margin by coefficient (a, k).
        gain = self.improvements.sum(axis=1)[self.labels].T @ x / len(x)
        # Positive and negative parts; the intercept's cost nothing.
        cost = np.tile(np.append(np.ones(len(columns)), np.zeros(int(self.intercept))), 2 * a)
        most = 1 + 2 * gain.size // np.prod(self.improvements.shape[:2])  # of each combination
        for _ in range(_MOST_ROUNDS):
            constraints = np.array([np.outer(c, x[i]) for i, c in self.active])
            constraints = constraints.reshape(-1, gain.size)
            program: Any = linprog(
                cost,
                A_ub=np.hstack([-constraints, constraints]),
                b_ub=np.zeros(len(constraints)),
                A_eq=np.append(gain, -gain)[None],
                b_eq=[1.0],
            )
            if not program.success or program.fun > _LONGEST_DIRECTION:
                return None
            vector = np.subtract(*np.split(program.x, 2)).reshape(gain.shape)
            broken = self._violated_constraints(x @ vector.T / max(program.fun, 1.0), most)
            if not broken:
                return np.abs(vector[:, : len(columns)]).max(axis=0)
            self.active.extend(broken)
        return None

    def _violated_constraints(self, predictors, most):
        """Constraints of every label that predictors (n, a) break most."""
        broken = []
        for label, signs in enumerate(self.improvements):
            members = np.flatnonzero(self.labels == label)
            for combination in signs:
                margins = predictors[members] @ combination
                worst = np.argsort(margins)[:most]
                broken += [(i, combination) for i in members[worst[margins[worst] < -_VIOLATION]]]
        return broken


def _separates_alone(rows, column):
    """Whether a column (n,) separates on its own, with a free intercept if there is one."""
    # A direction that holds at a column's extremes, by label, holds in between.
    present = np.unique(rows.labels)
    values = [column[rows.labels == label] for label in present]
    ends = np.array([[part.min(), part.max()] for part in values]).ravel()
    if ends.min() == ends.max():
        return False
    short = rows._replace(x=ends[:, None], labels=np.repeat(present, 2), active=[])
    return short.direction([0]) is not None


def _reference_levels(x, columns):
    """Runs of indicators of which each row has one at most, and the rows (n,) that have none."""
    runs: list[tuple] = []
    run: list[int] = []
    taken = np.zeros(len(x), dtype=bool)

    def close():
        if len(run) > 1 and not taken.all():
            runs.append((tuple(run), (~taken).astype(float)))

    for k in columns:
        low, high = x[:, k].min(), x[:, k].max()
        member = x[:, k] == high
        indicator = low < high and np.all(member | (x[:, k] == low))
        if not indicator or np.any(taken & member):
            close()
            run, taken = [], np.zeros(len(x), dtype=bool)
        if indicator:
            run, taken = [*run, int(k)], taken | member
    close()
    return runs


def _smallest_set(rows, columns):
    """Positions of columns that separate together (none if they do not), minimal among up to 20."""
    sizes = rows.direction(columns)
    if sizes is None:
        return ()
    separating = columns[sizes > 0]
    if len(separating) > _MOST_SHRUNK:
        return tuple(separating.tolist())
    for k in separating[np.argsort(sizes[sizes > 0])]:
        rest = separating[separating != k]
        if k not in separating or not len(rest):
            continue
        sizes = rows.direction(rest)
        if sizes is not None:
            separating = rest[sizes > 0]
    return tuple(separating.tolist())
