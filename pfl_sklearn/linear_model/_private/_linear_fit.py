"""Private linear regressions: messages and posteriors of clients, and the fits.

A first pass over the rows reduces them twice: to clipped moments for one release, and to exact
rotated rows, from which a client computes its messages of rounds and its own posterior. Clients
share only what is released. Columns are in the order of the prior.
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
    column_layout,
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
from pfl_sklearn.linear_model._private._linear_server import InterceptServer, SlopeServer
from pfl_sklearn.linear_model._private._messages import (
    describe_bounds,
    moments_message,
    moments_report,
    run_private_rounds,
    set_unit_and_relation,
)
from pfl_sklearn.privacy import GaussianMechanism, PrivacyReport, RegressionMoments
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.statistics._clipping import scaled_triangles

_UNTRUSTED_NOISE = (
    "The released noise variance is lost in the privacy noise, so every client keeps its own "
    "regression. Give noise_variance, tighter bounds or a larger epsilon."
)


class PrivateTable(NamedTuple):
    """Reduced rows of m clients."""

    moments: RegressionMoments  # defines the messages of a single release
    total: np.ndarray | None  # (length,), sum of these messages; None for other releases
    exact: RotatedTable  # a client's part enters its own messages and posterior only

    @property
    def sizes(self):
        """Rows (m,) of every client."""
        return self.exact.sizes


def private_table(design, features, rows, prior, params):
    """PrivateTable of features (n, d); `rows` holds targets and clients."""
    # No value is refused, because an error would reveal it: messages are clipped, and exact rows
    # too large to be squared count as absent.
    moments = moments_message(features.shape[1], design.fit_intercept, params)
    original, total = original_rows(design, features, rows.y, None), None
    if linear_release(params, prior, len(rows.clients.ids)) == "moments":
        send = partial(_moments_of_rows, original, moments, column_layout(design)[1], params.unit)
        batches = row_batches(rows.clients, len(design.names) + 2)
        total = sum_of_clients(map_batches(send, batches, 1), len(rows.clients.ids))
    original = original._replace(too_large=tuned.LARGEST_ENTRY)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = rotate(original, rows.clients, column_layout(design), keep=True)
    return PrivateTable(moments, total, exact)


def _moments_of_rows(original, moments, intercept, unit, clients, numbers):
    """A batch of clients, and their moments (b, length); their rows have numbers (b, n)."""
    n, messages = numbers.shape[1], 0.0
    # A client's message is the mean over its rows, so its bound does not grow with n.
    share = 1 / n if unit == "client" else 1.0
    for part in row_parts(numbers, moments.n_features + 2):
        values = original.values(numbers[:, part])
        features, targets = values[..., :-2], values[..., -2]
        if intercept is not None:
            features = np.delete(features, intercept, axis=-1)
        shares = np.full(targets.shape, share)
        # Parts of a client's rows add up to its inverse number of rows, 1 / n.
        inverse = targets.shape[1] / n / n
        messages = messages + moments.total(features, targets, shares, inverse)
    return clients, messages


def private_table_of_statistics(design, statistics, prior, params):
    """PrivateTable of ClientStatistics whose rows were scaled to the bounds."""
    moments = moments_message(statistics.n_features, design.fit_intercept, params)
    exact, total = table_of_statistics(statistics, design), None
    if linear_release(params, prior, exact.n_clients) == "moments":
        # Features in the order of the prior, as in messages of rows.
        columns = [0, *(k for k in design.order if k), statistics.n_features + 1]
        parts = []
        for block in statistics._blocks():
            triangles = statistics._triangles(block, clipped=True)[..., columns]
            if params.unit == "client":  # the mean over its rows
                triangles /= np.sqrt(exact.sizes[block])[:, None, None]
            message = moments._summed(*scaled_triangles(moments, triangles))
            parts.append((np.arange(block.start, block.stop), message))
        total = sum_of_clients(parts, exact.n_clients)
    return PrivateTable(moments, total, exact)


# Messages of rounds -------------------------------------------------------------------------------


def intercept_messages(batch, state, server):
    """Messages (b, length) of a batch of clients for a random intercept, not yet clipped."""
    # Both parts are products of a matrix with itself, hence positive semi-definite up to rounding.
    clients, rows = batch
    # One memory layout, so that no bit depends on the number of clients in the batch.
    rows = np.ascontiguousarray(rows)
    ones, values, slopes = rows[..., -1:], rows[..., 1:-1], state.population[1:]
    # A client may have no row left: those too large to be squared are absent.
    means = np.sum(values * ones, axis=1) / np.maximum(np.sum(ones**2, axis=1), 1.0)
    weights = server.within_weights[clients] / np.maximum(server.sizes[clients] - 1, 1)
    deviations = to_residuals(values - ones * means[:, None], slopes)
    deviations *= np.sqrt(weights)[:, None, None]
    means = to_residuals(means, slopes)
    means[:, -1] -= state.population[0]
    means = np.column_stack([np.ones(len(means)), means])
    means *= np.sqrt(server.between_weights(state)[clients])[:, None]
    parts = deviations.swapaxes(1, 2) @ deviations, means[:, :, None] * means[:, None, :]
    return server.message.pack(parts, server.layout(state))


def slope_messages(batch, state, server):
    """Messages (b, length) of a batch of clients and rows for random slopes, not clipped yet."""
    clients, rows = batch
    q, weights = server.n_random, server.within_weights[clients]
    rows = _zero_unsquarable(to_residuals(np.ascontiguousarray(rows)[..., :-1], state.population))
    squares, rank = least_squares_residuals(rows)
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
    return server.message.pack(parts, server.layout(state))


def least_squares_residuals(rows):
    """Residual sums of squares (b,) and ranks (b,) of each client's rows (b, k, q + 1)."""
    # A column that others explain, such as one that is constant within the client, is skipped:
    # rounding leaves it an arbitrary direction, which would absorb some of the residuals.
    rows = rows.copy()
    sizes, rank = np.linalg.norm(rows, axis=1), np.zeros(len(rows), int)
    for k in range(rows.shape[2] - 1):
        lengths = np.linalg.norm(rows[..., k], axis=1)
        independent = lengths > tuned.EXPLAINED * sizes[:, k]
        direction = rows[..., k] / np.where(independent, lengths, np.inf)[:, None]
        rest = rows[..., k + 1 :]
        rest -= direction[..., None] * np.sum(direction[..., None] * rest, axis=1, keepdims=True)
        rank += independent
    return np.sum(rows[..., -1] ** 2, axis=1), rank


def to_residuals(values, coefficients):
    """Columns and targets (..., p + 1), with residuals under coefficients (p,) for targets."""
    columns = values[..., :-1]
    residuals = values[..., -1] - np.sum(columns * coefficients, axis=-1)
    return np.concatenate([columns, residuals[..., None]], axis=-1)


# Posteriors of clients ----------------------------------------------------------------------------


def client_posteriors(table, released, covariance):
    """Coefficients (m, p) and their posterior under N(released.mean, covariance + its error).

    The error of the released mean is added to the prior covariance (q, q) of the random
    coefficients, so if the mean is all noise every client keeps its own regression. Fixed
    coefficients have their released error; its correlation with the others is ignored, and so is
    the client's own contribution to the release.

    A client's numbers are the same bits whatever the other clients are; otherwise their last digits
    could reveal the others. So no matrix product runs over the rows of several clients, and sums
    over columns run in one memory layout.

    If the released noise variance is not trusted, rows count as nearly exact: every client keeps
    its own regression, uses the released mean where its rows do not identify a coefficient, and has
    no standard deviations.
    """
    q, p = table.n_random, table.n_columns
    noise = released.noise if released.trusted else tuned.NEARLY_NO_NOISE * released.noise
    ratio, error = (covariance + released.covariance[:q, :q]) / noise, np.zeros((p, p))
    error[q:, q:] = released.covariance[q:, q:]
    # The memory layout of gathered rows depends on their number of clients; last digits follow it.
    residuals = (
        (clients, to_residuals(np.ascontiguousarray(rows)[..., :-1], released.mean))
        for clients, rows in table.batches
    )
    # An overflow concerns one client, and a warning would reveal it to everybody.
    with np.errstate(over="ignore", invalid="ignore"):
        root = square_root(ratio)
        solved = map_batches(partial(whiten_batch, root=root), residuals, 1)
        coefficients = np.tile(released.mean, (table.n_clients, 1))
        # The same width for every table, so that it does not reveal the largest client's rows.
        rows = np.zeros((table.n_clients, q, p))
        for clients, whitened in solved:
            scores = whitened[:, None, :, -1] @ whitened[:, :, :q]
            coefficients[clients, :q] += (scores @ ratio)[:, 0]
            rows[clients, : whitened.shape[1]] = whitened[:, :, :-1]
    noise = released.noise if released.trusted else np.nan
    ratio_root = np.vstack([root, np.zeros((p - q, q))])
    return coefficients, RowPosterior(rows, ratio_root, noise, square_root(error), np.ones(p))


def whiten_batch(clients, rows, root):
    """Clients, and rows (b, k, p + 1) times the inverse root of I + Z P Z', P = root root'."""
    # Singular values cope with rows of any size; k is at most the number q of random columns.
    q = len(root)
    rows = _zero_unsquarable(rows)
    if rows.shape[1] > q:
        triangular: Any = np.linalg.qr(rows, mode="r")
        rows = triangular[:, :q]
    left, values, _ = np.linalg.svd(rows[:, :, :q] @ root, full_matrices=False)
    return clients, left.transpose(0, 2, 1) @ rows / np.hypot(1, values)[..., None]


def _zero_unsquarable(rows):
    """Rows (b, k, p), in place, where those too large to be squared become 0."""
    # An error would reveal that a client has such a residual.
    rows[~(np.abs(rows).max(axis=2) < tuned.LARGEST_ENTRY)] = 0.0  # NaN fails the comparison, too
    return rows


# Fits ---------------------------------------------------------------------------------------------


def fit_private_linear(table, prior, params, names):
    """MixedModelEstimates and PrivacyReport of a private fit to a PrivateTable.

    Variances that the `prior` leaves unknown are estimated if there are several clients; `method`
    and `solver` of `params` have no effect. `names` are the fitted attributes that are released,
    and those that are not.
    """
    exact = table.exact
    mean, covariance, alone = known_population(params, prior, exact.n_random, exact.n_clients)
    if mean is not None:
        released = ReleasedPopulation(mean, np.zeros_like(covariance), params.noise_variance, True)
        # The number of clients is public under replacement, which does not change it.
        n_clients = exact.n_clients if params.relation == "replace_one" else None
        report = PrivacyReport.of_known_population(names[0], names[1], None)
        report = set_unit_and_relation(report, params, n_clients)
    elif linear_release(params, prior, exact.n_clients) == "rounds":
        released, covariance, report = _fit_rounds(exact, params)
    else:
        released, report = _fit_one_release(table, covariance, params)
    if not released.trusted:
        warn_caller(_UNTRUSTED_NOISE, UserWarning)
    if covariance is None:
        covariance = np.full((exact.n_random,) * 2, np.nan)
    if alone and mean is None:  # one client has no others to borrow strength from
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


def _fit_one_release(table, covariance, params):
    """ReleasedPopulation and privacy report, from a noisy sum of moments."""
    exact, moments = table.exact, table.moments
    # One mechanism for all moments: two would have to share the epsilon.
    rng, seeded = noise_generator(params.random_state)
    mechanism = GaussianMechanism(moments.sensitivity, params.epsilon, params.delta)
    noisy = moments.split(mechanism.privatize(table.total, rng), mechanism.noise_std)
    # Positions of the columns in a message, which has the intercept first.
    q, position = exact.n_random, np.arange(exact.n_columns)
    if exact.intercept is not None:
        position[: exact.intercept] += 1
        position[exact.intercept] = 0
    between = np.zeros((exact.n_columns,) * 2)
    if covariance is not None:
        between[np.ix_(position[:q], position[:q])] = covariance
    sizes = released_sizes(noisy, exact.sizes, params)
    population = estimate_population(noisy, moments, sizes, between, params.noise_variance)
    n_units = max(noisy.weight, 1.0)
    if params.relation == "replace_one":
        n_units = exact.n_rows if params.unit == "row" else exact.n_clients
    report = moments_report(moments, mechanism, params, exact.n_clients, n_units, seeded)
    error = population.covariance[np.ix_(position, position)]
    return population._replace(mean=population.mean[position], covariance=error), report


def _fit_rounds(exact, params):
    """ReleasedPopulation, covariance between clients (q, q), and report, from rounds."""
    only_intercept = exact.n_random == 1 and exact.random_intercept
    kind = InterceptServer if only_intercept else SlopeServer
    send = intercept_messages if only_intercept else slope_messages
    server = kind(
        params.feature_bound,
        params.target_bound,
        exact.n_columns - exact.random_intercept,
        exact.sizes,
        params.noise_variance,
        kind.message.factor(exact.n_clients, params),
        exact.random_intercept,
    )
    with np.errstate(over="ignore", invalid="ignore"):  # a warning would reveal a client's rows
        batches = list(exact.batches)
    state, report = run_private_rounds(
        server,
        server.initial_state(),
        lambda state: ((batch[0], send(batch, state, server)) for batch in batches),
        kind.message.mechanism(params),
        tuned.ROUND_SHARES,
        params,
        exact.names[: exact.n_random],
        what="summed moments of the clients within and between them",
        assumed=f"{describe_bounds(params)} are the user's, not the data's",
    )
    population = ReleasedPopulation(state.population, state.covariance, state.noise, True)
    return population, np.diag(state.between), report
