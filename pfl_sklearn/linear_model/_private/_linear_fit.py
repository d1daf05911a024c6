"""Private linear regressions: what clients compute of their rows, and the fits.

A first pass over the rows reduces them twice: clipped moments for one release, and exact rotated
rows, from which a client makes its messages of rounds and, after them, its own posterior. Nothing
after it reads a row. Clients share what is released and nothing else. Columns are in the order of
the prior.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed._normal_rows._closed_form import fit_without_pooling
from pfl_sklearn.linear_model._mixed._posterior import RowPosterior
from pfl_sklearn.linear_model._mixed._reduction import (
    MixedModelEstimates,
    RotatedTable,
    column_facts,
    original_rows,
    rotate,
    row_batches,
    row_parts,
    sum_of_clients,
    table_of_statistics,
)
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._checks import known_population, linear_release
from pfl_sklearn.linear_model._private._linear_population import (
    ReleasedPopulation,
    estimate_population,
    released_sizes,
)
from pfl_sklearn.linear_model._private._linear_server import LevelServer, SlopeServer
from pfl_sklearn.linear_model._private._messages import (
    bounds_in_words,
    moments_message,
    of_public_numbers,
    report_of_moments,
    run_rounds,
)
from pfl_sklearn.privacy import GaussianMechanism, PrivacyReport, RegressionMoments
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.statistics._clipping import scaled_triangles

_UNTRUSTED_NOISE = (
    "The released noise variance is lost in the privacy noise, so every client keeps its own "
    "regression. Give noise_variance, tighter bounds or a larger epsilon."
)


class PrivateTable(NamedTuple):
    """What a private fit keeps of the rows of m clients."""

    moments: RegressionMoments  # of which the messages of one release are made
    total: np.ndarray | None  # (length,), sum of these messages; None if there are none
    exact: RotatedTable  # of which a client's part goes into its own messages and posterior alone

    @property
    def sizes(self):
        """Rows (m,) of every client."""
        return self.exact.sizes


def private_table(design, features, rows, prior, params):
    """PrivateTable of features (n, d); `rows` holds targets and clients.

    No value is refused, as an error would reveal it. A message is clipped whatever it is made of;
    among the exact rows those that are too large to be squared count as absent.
    """
    moments = moments_message(features.shape[1], design.fit_intercept, params)
    original, total = original_rows(design, features, rows.y, None), None
    if linear_release(params, prior, len(rows.clients.ids)) == "moments":
        send = partial(_moments_of_rows, original, moments, column_facts(design)[1], params.unit)
        batches = row_batches(rows.clients, len(design.names) + 2)
        total = sum_of_clients(map_batches(send, batches, 1), len(rows.clients.ids))
    original = original._replace(too_large=tuned.LARGEST_ENTRY)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = rotate(original, rows.clients, column_facts(design), keep=True)
    return PrivateTable(moments, total, exact)


def _moments_of_rows(original, moments, intercept, unit, clients, numbers):
    """A batch of clients, and their moments (b, length); their rows have numbers (b, n)."""
    n, messages = numbers.shape[1], 0.0
    # A client's message is the mean over its rows, so its bound does not grow with their number.
    share = 1 / n if unit == "client" else 1.0
    for part in row_parts(numbers, moments.n_features + 2):
        values = original.values(numbers[:, part])
        features, targets = values[..., :-2], values[..., -2]
        if intercept is not None:
            features = np.delete(features, intercept, axis=-1)
        shares = np.full(targets.shape, share)
        # The parts of a client share its inverse number of rows, 1 / n.
        inverse = targets.shape[1] / n / n
        messages = messages + moments.total(features, targets, shares, inverse)
    return clients, messages


def private_table_of_statistics(design, statistics, prior, params):
    """PrivateTable of ClientStatistics whose rows were scaled to the bounds beforehand."""
    moments = moments_message(statistics.n_features, design.fit_intercept, params)
    exact, total = table_of_statistics(statistics, design), None
    if linear_release(params, prior, exact.n_clients) == "moments":
        # Features in the order of the prior, which is that of the rows' messages.
        at = [0, *(k for k in design.order if k), statistics.n_features + 1]
        parts = []
        for block in statistics._blocks():
            triangles = statistics._triangles(block, clipped=True)[..., at]
            if params.unit == "client":  # the mean over its rows, whatever their number
                triangles /= np.sqrt(exact.sizes[block])[:, None, None]
            message = moments._summed(*scaled_triangles(moments, triangles))
            parts.append((np.arange(block.start, block.stop), message))
        total = sum_of_clients(parts, exact.n_clients)
    return PrivateTable(moments, total, exact)


# Messages of rounds -------------------------------------------------------------------------------


def level_messages(batch, state, server):
    """`LEVEL` messages (b, length) of a batch of clients and rows, before they are clipped.

    Both parts are products of a matrix with itself, so that they are positive semi-definite up to
    rounding, whatever the rows are.
    """
    clients, rows = batch
    # As they lie in memory, so that no bit depends on the number of clients in the batch.
    rows = np.ascontiguousarray(rows)
    ones, values, slopes = rows[..., -1:], rows[..., 1:-1], state.population[1:]
    # Rows that are too large to be squared are absent, and so perhaps all of a client.
    means = np.sum(values * ones, axis=1) / np.maximum(np.sum(ones**2, axis=1), 1.0)
    weights = server.within_weights[clients] / np.maximum(server.sizes[clients] - 1, 1)
    own = with_residuals(values - ones * means[:, None], slopes)
    own *= np.sqrt(weights)[:, None, None]
    means = with_residuals(means, slopes)
    means[:, -1] -= state.population[0]
    means = np.column_stack([np.ones(len(means)), means])
    means *= np.sqrt(server.between_weights(state)[clients])[:, None]
    parts = own.swapaxes(1, 2) @ own, means[:, :, None] * means[:, None, :]
    return server.message.packed(parts, server.layout(state))


def slope_messages(batch, state, server):
    """`SLOPES` messages (b, length) of a batch of clients and rows, before they are clipped."""
    clients, rows = batch
    q, weights = server.n_random, server.within_weights[clients]
    rows = _finite(with_residuals(np.ascontiguousarray(rows)[..., :-1], state.population))
    squares, rank = own_residuals(rows)
    ratio = np.sqrt(state.between / state.noise)
    _, whitened = whiten_batch(clients, rows, np.diag(ratio))
    columns = whitened[:, :, :q] * ratio
    information = columns.swapaxes(1, 2) @ columns
    effects = np.sum(columns * whitened[:, :, q:], axis=1) / np.sqrt(state.noise)
    effects = np.column_stack([np.ones(len(rows)), effects])
    within = weights * squares / np.maximum(server.sizes[clients] - rank, 1)
    parts = (
        effects[:, :, None] * effects[:, None, :],
        information,
        information**2,
        within[:, None],
    )
    return server.message.packed(parts, server.layout(state))


def own_residuals(rows):
    """What least squares of each client leave (b,) of rows (b, k, q + 1), and their rank (b,).

    A column that others explain, as one that is constant within the client, takes no direction: up
    to rounding it has an arbitrary one, which would take its share of the residuals.
    """
    rows = rows.copy()
    sizes, rank = np.linalg.norm(rows, axis=1), np.zeros(len(rows), int)
    for k in range(rows.shape[2] - 1):
        lengths = np.linalg.norm(rows[..., k], axis=1)
        there = lengths > tuned.EXPLAINED * sizes[:, k]
        direction = rows[..., k] / np.where(there, lengths, np.inf)[:, None]
        rest = rows[..., k + 1 :]
        rest -= direction[..., None] * np.sum(direction[..., None] * rest, axis=1, keepdims=True)
        rank += there
    return np.sum(rows[..., -1] ** 2, axis=1), rank


def with_residuals(values, coefficients):
    """Columns, and the residuals under coefficients (p,), of columns and targets (..., p + 1)."""
    columns = values[..., :-1]
    residuals = values[..., -1] - np.sum(columns * coefficients, axis=-1)
    return np.concatenate([columns, residuals[..., None]], axis=-1)


# Posteriors of clients ----------------------------------------------------------------------------


def client_posteriors(table, released, covariance):
    """Coefficients (m, p) and their posterior under N(released.mean, covariance + its error).

    We add the error of the released mean to the prior covariance (q, q) of the random coefficients,
    so if the mean is all noise every client keeps its own regression. The posterior of the fixed
    coefficients has their released error; we ignore its correlation with the others. We do not
    remove a client's own contribution from the release, where it is one of many under noise.

    A client's numbers are the same bits whoever else is in the table. Otherwise their last digits
    would tell. So no matrix product runs over the rows of several clients, and sums over columns
    run in one layout.

    If the released noise variance is of no use, we treat rows as nearly exact: every client keeps
    its own regression, falls back on the released mean where its rows leave coefficients open, and
    states no standard deviation. Rows that are too large to be squared count as absent.
    """
    q, p = table.n_random, table.n_columns
    noise = released.noise if released.trusted else tuned.NEARLY_NO_NOISE * released.noise
    ratio, error = (covariance + released.covariance[:q, :q]) / noise, np.zeros((p, p))
    error[q:, q:] = released.covariance[q:, q:]
    # Gathered rows lie in memory as their number of clients has it, and last digits follow.
    residuals = (
        (clients, with_residuals(np.ascontiguousarray(rows)[..., :-1], released.mean))
        for clients, rows in table.batches
    )
    # What overflows is one client's own, and a warning would tell everybody of its rows.
    with np.errstate(over="ignore", invalid="ignore"):
        root = square_root(ratio)
        solved = map_batches(partial(whiten_batch, root=root), residuals, 1)
        coefficients = np.tile(released.mean, (table.n_clients, 1))
        # The same width for every table, so that it does not reveal the largest client's rows.
        rows = np.zeros((table.n_clients, q, p))
        for clients, whitened in solved:
            pulled = whitened[:, None, :, -1] @ whitened[:, :, :q]
            coefficients[clients, :q] += (pulled @ ratio)[:, 0]
            rows[clients, : whitened.shape[1]] = whitened[:, :, :-1]
    stated = released.noise if released.trusted else np.nan
    ratio_root = np.vstack([root, np.zeros((p - q, q))])
    return coefficients, RowPosterior(rows, ratio_root, stated, square_root(error), np.ones(p))


def whiten_batch(clients, rows, root):
    """Clients, and rows (b, k, p + 1) times the inverse root of I + Z P Z', P = root root'.

    Singular values cope with rows of any size; k is at most the number q of random columns.
    """
    q = len(root)
    rows = _finite(rows)
    if rows.shape[1] > q:
        triangular: Any = np.linalg.qr(rows, mode="r")
        rows = triangular[:, :q]
    left, values, _ = np.linalg.svd(rows[:, :, :q] @ root, full_matrices=False)
    return clients, left.transpose(0, 2, 1) @ rows / np.hypot(1, values)[..., None]


def _finite(rows):
    """Rows (b, k, p), in place; those too large to be squared count as absent.

    An error would tell that a client has such a residual.
    """
    rows[~(np.abs(rows).max(axis=2) < tuned.LARGEST_ENTRY)] = 0.0  # NaN fails the comparison, too
    return rows


# Fits ---------------------------------------------------------------------------------------------


def fit_private_linear(table, prior, params, names):
    """Fit around what is released of a population, and the clients' posteriors around that.

    Parameters
    ----------
    table : PrivateTable
    prior : GaussianPrior
        Its unknown variances are estimated, if there are several clients.
    params : estimator
        `method`, `solver` and their parameters have no effect.
    names : pair of tuples of str
        Fitted attributes that are released, and those that are not.

    Returns
    -------
    MixedModelEstimates, PrivacyReport
    """
    exact = table.exact
    mean, covariance, alone = known_population(params, prior, exact.n_random, exact.n_clients)
    if mean is not None:
        released = ReleasedPopulation(mean, np.zeros_like(covariance), params.noise_variance, True)
        # Numbers of clients are public where one that is replaced leaves them as they are.
        n_clients = exact.n_clients if params.relation == "replace_one" else None
        report = PrivacyReport.of_known_population(names[0], names[1], None)
        report = of_public_numbers(report, params, n_clients)
    elif linear_release(params, prior, exact.n_clients) == "rounds":
        released, covariance, report = _after_rounds(exact, params)
    else:
        released, report = _after_one_release(table, covariance, params)
    if not released.trusted:
        warn_caller(_UNTRUSTED_NOISE, UserWarning)
    if covariance is None:
        covariance = np.full((exact.n_random,) * 2, np.nan)
    if alone and mean is None:  # there is no other to borrow from
        local = fit_without_pooling(exact, prior, params, covariance)
        coefficients, posterior = local.coefficients, local.posterior
    else:
        coefficients, posterior = client_posteriors(exact, released, covariance)
    estimates = MixedModelEstimates(
        released.mean,
        released.covariance,
        coefficients,
        posterior,
        prior.with_values(released.mean[: exact.n_random], covariance),
        covariance,
        released.noise,
        math.nan,  # the likelihood of the exact rows is not released
        1,
        True,
    )
    return estimates, dataclasses.replace(report, released=names[0], not_released=names[1])


def _after_one_release(table, covariance, params):
    """Fitted population and privacy report, from a noisy sum of moments."""
    exact, moments = table.exact, table.moments
    # One mechanism for all moments at once: two would have to share the epsilon.
    rng, seeded = noise_generator(params.random_state)
    mechanism = GaussianMechanism(moments.sensitivity, params.epsilon, params.delta)
    noisy = moments.split(mechanism.privatize(table.total, rng), mechanism.noise_std)
    # A message has the intercept first, if there is one: `place` has the columns' positions in it.
    q, place = exact.n_random, np.arange(exact.n_columns)
    if exact.intercept is not None:
        place[: exact.intercept] += 1
        place[exact.intercept] = 0
    between = np.zeros((exact.n_columns,) * 2)
    if covariance is not None:
        between[np.ix_(place[:q], place[:q])] = covariance
    sizes = released_sizes(noisy, exact.sizes, params)
    population = estimate_population(noisy, moments, sizes, between, params.noise_variance)
    n_units = max(noisy.weight, 1.0)
    if params.relation == "replace_one":
        n_units = exact.n_rows if params.unit == "row" else exact.n_clients
    report = report_of_moments(moments, mechanism, params, exact.n_clients, n_units, seeded)
    mean, covariance = population.mean[place], population.covariance[np.ix_(place, place)]
    return population._replace(mean=mean, covariance=covariance), report


def _after_rounds(exact, params):
    """Fitted population, covariance between clients (q, q), and report, from rounds."""
    level = exact.n_random == 1 and exact.random_intercept
    kind, send = (LevelServer, level_messages) if level else (SlopeServer, slope_messages)
    server = kind(
        params.feature_bound,
        params.target_bound,
        exact.n_columns - exact.random_intercept,
        exact.sizes,
        params.noise_variance,
        kind.message.factor(exact.n_clients, params),
        exact.random_intercept,
    )
    with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of a client's rows
        batches = list(exact.batches)
    state, report = run_rounds(
        server,
        server.begin(),
        lambda state: ((batch[0], send(batch, state, server)) for batch in batches),
        kind.message.mechanism(params),
        tuned.ROUND_SHARES,
        params,
        exact.names[: exact.n_random],
        what="summed moments of the clients within and between them",
        assumed=f"{bounds_in_words(params)} are the user's, not the data's",
    )
    population = ReleasedPopulation(state.population, state.covariance, state.noise, True)
    return population, np.diag(state.between), report
