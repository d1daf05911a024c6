"""Private fits of classes and counts: messages and posteriors of clients, and the fit.

Under the population of a round (coefficients b, standard deviations t between clients) a client
integrates its own effects z ~ N(0, I) out: one of them by quadrature, several by Laplace's
approximation. With scores s_j and curvatures v_j of its rows, averaged over z, let Z be the varying
columns, G = Z'VZ, and C the coefficients (q, p) of a regression of all columns on Z with weights V.
Its score in b is the sum of two parts, and so is its information:

    within   sum_j s_j (x_j - C'z_j),       sum_j v_j (x_j - C'z_j) (x_j - C'z_j)'
    between  C' T^-1 E[z],                  C' T^-1 A T^-1 C,    A = I - (I + T G T)^-1

with T = diag(t). The first is 0 for coefficients that vary, and grows with a client's rows. The
second does not, so each has its own scale. If the intercept alone varies, C is the mean of the
columns weighted by v. A third part is for the variances between clients: the excess
r^2 (E[z^2] - 1), proportional to the score in log t, and squares of r^2 times the diagonal of A.

The server chooses the units u, standard deviations of a typical client's own estimates, from public
numbers: u^2 = t^2 + 1 / g for its information g. The factors r = u / t give the parts between
clients their usual size whatever t is; without them these parts would vanish with t, but their
noise would not. In the part between clients, features whose coefficients do not vary are centred at
their means, which the server knows from earlier rounds.

A client's message has the same bits whatever the other clients are: sums over rows run row by row
over at least two clients, rows of weight 0 at the end add exactly 0, and systems are solved entry
by entry. Anything less would leak: where rows cancel, a message may be nothing but rounding errors,
scaled up by clipping. After the rounds every client computes its own effects from its own rows and
the released population.
"""

import dataclasses

import numpy as np

from pfl_sklearn._clients import client_batches
from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed._client_posterior import (
    axis_nodes,
    joined_posterior,
    normal_moments,
    weighted_nodes,
)
from pfl_sklearn.linear_model._mixed._marginal_likelihood import (
    EffectRows,
    choose_n_points,
    effect_stack,
    quadrature_nodes,
)
from pfl_sklearn.linear_model._mixed._posterior import RowPosterior
from pfl_sklearn.linear_model._mixed._reduction import CACHED_CELLS, MixedModelEstimates
from pfl_sklearn.linear_model._mixed._table import RowStack
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._link_server import LinkRounds, LinkServer
from pfl_sklearn.linear_model._private._messages import (
    LINK_MESSAGE,
    LinkShape,
    budget_shares,
    run_private_rounds,
)


def message_stack(stack, family):
    """The EffectStack of a RowStack, with weights even if all are 1, for client_messages."""
    stack = _pad_to_two_clients(stack)
    return effect_stack(stack, family)._replace(w=np.ascontiguousarray(stack.w.T))


def _pad_to_two_clients(stack):
    """The RowStack; a single client is doubled, as sums over one client are rounded otherwise."""
    if len(stack.y) > 1:
        return stack
    return stack.of_clients(np.zeros(2, dtype=int))._replace(clients=stack.clients)


def client_messages(stack, effects, shape, family, point):
    """Messages (b, k) of the clients of an EffectStack at a RoundPoint, and modes (q, b).

    `effects` (q, b) are modes of the previous round.
    """
    rows = effect_rows(stack, family, point)
    modes = posterior_modes(rows, effects)
    scores, curvatures, first, second = _posterior_averages(rows, modes)
    x, q = stack.columns * _signs(stack), shape.n_varying
    products, regression = _regress_on_varying(x, curvatures, q)
    within = x[q:].copy()
    for k in range(q):
        within -= regression[k, q:, None] * x[k]
    share = np.minimum(1.0, shape.max_rows_per_client / np.maximum((stack.w > 0).sum(axis=0), 1))
    score = np.sum(scores * _signs(stack) * within, axis=1) * share
    information = _weighted_products(within, curvatures) * share
    ratio = (point.units / point.spreads)[:, None]
    largest_mean = shape.factor * tuned.LARGEST_MEAN_EFFECT
    largest_excess = shape.factor * tuned.LARGEST_EXCESS
    mean = np.clip(ratio * first, -largest_mean, largest_mean)
    reliabilities = _reliabilities(products, point.spreads) * ratio[:, None] * ratio
    # In units of the effects; the intercept's effect centres the features that do not vary.
    regression[:, q:] *= (point.units[0] / point.units)[:, None, None]
    regression[0] -= point.means[:, None]
    excess = np.clip(ratio**2 * (second - 1), -largest_excess, largest_excess)
    diagonal = np.minimum(np.einsum("kkb->kb", reliabilities) ** 2, largest_excess)
    between = np.sum(regression * mean[:, None], axis=0), _sandwich(regression, reliabilities)
    parts = score, information, *between, np.concatenate([excess, diagonal])
    return LINK_MESSAGE.pack([part.T for part in parts], shape.layout), modes


def effect_rows(stack, family, point):
    """EffectRows of clients, with features (q, n, b) of their effects."""
    predictors = np.zeros(stack.y.shape) if stack.offset is None else stack.offset.copy()
    for coefficient, column in zip(point.population, stack.columns, strict=True):
        predictors += coefficient * column
    q = len(point.spreads)
    features = point.spreads[:, None, None] * stack.columns[:q]
    return EffectRows(family, features, predictors, stack.y, stack.w)


def posterior_modes(rows, effects):
    """Modes (q, b) of the effects' posteriors, by a fixed number of bounded Newton steps."""
    state, identity = np.empty(rows.y.shape), np.eye(len(effects))[..., None]
    for _ in range(tuned.NEWTON_STEPS):
        _log_likelihoods(rows, effects, state)
        score = np.sum(rows.features * rows.scores(state), axis=1) - effects
        inverse = _invert_entrywise(
            identity + _weighted_products(rows.features, rows.information(state))
        )
        step = np.sum(inverse * score, axis=1)
        longest = np.abs(np.sum(rows.features * step[:, None], axis=0)).max(axis=0)
        effects = effects + step * np.minimum(1.0, tuned.LONGEST_STEP / longest)
    return effects


def _log_likelihoods(rows, effects, state):
    """Log-likelihoods (b,) at effects (q, b); `state` (n, b) is overwritten by the family's."""
    predictors = rows.offset.copy()
    for feature, effect in zip(rows.features, effects, strict=True):
        predictors += feature * effect
    return rows.family.summed_log_likelihood(predictors, rows.y, rows.w, state)


def _posterior_averages(rows, modes):
    """Scores and curvatures (n, b), E[z] and E[z^2] (q, b), averaged over the posterior of z."""
    if len(modes) > 1:
        return _by_laplace(rows, modes)
    rows = rows._replace(features=rows.features[0])
    parts = [
        _by_quadrature(rows.of_clients(part), modes[:, part])
        for part in _client_slices(*rows.y.shape)
    ]
    return tuple(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))


def _by_quadrature(rows, modes):
    """As `_posterior_averages`, for one effect, features (n, b) and modes (1, b)."""
    nodes, log_weights = quadrature_nodes(tuned.POINTS)
    states = np.empty((tuned.POINTS, *rows.y.shape))
    rows.log_likelihoods(modes, states[0])
    size = (1 + np.sum(rows.features**2 * rows.information(states[0]), axis=0)) ** -0.5
    effects = modes + size * nodes[:, None]  # (k, b)
    # exp(x^2 / 2) undoes the weight of the rule, which is for a normal density.
    logs = (log_weights + nodes**2 / 2)[:, None] - effects**2 / 2
    for log, effect, state in zip(logs, effects, states, strict=True):
        log += rows.log_likelihoods(effect, state)
    share = np.exp(logs - logs.max(axis=0))
    share /= share.sum(axis=0)
    scores, curvatures = np.zeros((2, *rows.y.shape))
    for weight, state in zip(share, states, strict=True):
        scores += weight * rows.scores(state)
        curvatures += weight * rows.information(state)
    first, second = (np.sum(share * moment, axis=0)[None] for moment in (effects, effects**2))
    return scores, curvatures, first, second


def _by_laplace(rows, modes):
    """As `_posterior_averages`, by Laplace's approximation."""
    # Slopes of its log-likelihood, including the change of the curvature with the mode: E[z] is the
    # mode plus a shift. Without the shift, variances would be far too small for clients with few
    # rows.
    state, features = np.empty(rows.y.shape), rows.features
    _log_likelihoods(rows, modes, state)
    scores, curvatures = rows.scores(state), rows.information(state)
    slopes = rows.curvature_slopes(state)
    posterior = _invert_entrywise(
        np.eye(len(modes))[..., None] + _weighted_products(features, curvatures)
    )
    leverage = np.zeros(rows.y.shape)
    for feature, row in zip(features, posterior, strict=True):
        leverage += feature * np.sum(row[:, None] * features, axis=0)
    slopes = slopes * leverage
    shift = -0.5 * np.sum(posterior * np.sum(features * slopes, axis=1), axis=1)
    scores = scores - 0.5 * slopes - curvatures * np.sum(features * shift[:, None], axis=0)
    variances = np.einsum("kkb->kb", posterior)
    return scores, curvatures, modes + shift, modes**2 + 2 * modes * shift + variances


def _regress_on_varying(x, curvatures, q):
    """Products (q, q, b) of the varying columns, and coefficients (q, p, b) of all on them.

    Columns x (p, n, b) are weighted by curvatures (n, b).
    """
    p, _, b = x.shape
    products = np.empty((q, p, b))
    for k in range(q):
        weighted = curvatures * x[k]
        for j in range(p):
            products[k, j] = np.sum(weighted * x[j], axis=0)
    squares = products[:, :q]
    ridge = squares.copy()
    # The score does not depend on these coefficients, so a ridge does no harm. Without information
    # they are 0, as the effects are.
    diagonal = np.einsum("kkb->kb", ridge)
    diagonal += tuned.RIDGE * diagonal + np.finfo(float).tiny
    regression = np.zeros((q, p, b))
    regression[np.arange(q), np.arange(q)] = 1.0
    regression[:, q:] = np.sum(_invert_entrywise(ridge)[:, :, None] * products[:, q:], axis=1)
    return squares, regression


def _reliabilities(squares, spreads):
    """Reliabilities A (q, q, b) of clients' own estimates, from Z'VZ (q, q, b) and spreads (q,)."""
    scaled = squares * spreads[:, None, None] * spreads[:, None]
    identity = np.eye(len(spreads))[..., None]
    return identity - _invert_entrywise(identity + scaled)


def _sandwich(outer, middle):
    """Products outer' middle outer (p, p, b), for outer (q, p, b) and middle (q, q, b)."""
    right = np.sum(middle[:, :, None] * outer, axis=1)
    return np.sum(outer[:, :, None] * right[:, None], axis=0)


def _invert_entrywise(matrices):
    """Inverses (q, q, b) of positive definite matrices, by elimination entry by entry."""
    inverse = matrices.copy()
    for k in range(len(inverse)):
        pivot = inverse[k, k].copy()
        inverse[k, k] = 1.0
        row = inverse[k] / pivot
        column = inverse[:, k].copy()
        column[k] = 0.0
        inverse[:, k] = 0.0
        inverse -= column[:, None] * row
        inverse[k] = row
    return inverse


def _triangular_roots(matrices):
    """Upper triangles R (q, q, b) with R'R = matrices, which have no negative eigenvalues."""
    remainder, roots = matrices.copy(), np.zeros(matrices.shape)
    for k in range(len(remainder)):
        pivot = remainder[k, k].copy()
        regular = pivot > tuned.NO_PIVOT * matrices[k, k]
        root = np.sqrt(np.where(regular, pivot, 1.0))
        roots[k, k:] = np.where(regular, remainder[k, k:] / root, 0.0)
        remainder -= roots[k][:, None] * roots[k]
    return roots


def _signs(stack):
    """Signs (n, b) of the responses: the first column is 1 times them."""
    return stack.columns[0]


def _client_slices(n, b):
    """Slices of b >= 2 clients with n rows that fit the cache, none of a single client."""
    size = max(tuned.CELLS // (tuned.POINTS * n), 2)
    starts = list(range(0, b - 1, size))
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], b], strict=True)]


def _weighted_products(x, weights):
    """Sums (d, d, b) over the rows of x x', weighted, for x (d, n, b) and weights (n, b)."""
    d, _, b = x.shape
    products = np.empty((d, d, b))
    for i in range(d):
        weighted = weights * x[i]
        for j in range(i + 1):
            products[i, j] = products[j, i] = np.sum(weighted * x[j], axis=0)
    return products


# Fit ----------------------------------------------------------------------------------------------


def fit_private_link(table, prior, family, start, params, names):
    """MixedModelEstimates, and the PrivacyReport of all rounds.

    The first column of the RegressionTable is the intercept, which varies. The mean of the `prior`
    is unknown; known variances stay. `start` is a PrivateStart. `names` are the fitted attributes
    that are released, and those that are not.
    """
    m, q, d = table.n_clients, table.n_random, len(table.names) - 1
    factor = LINK_MESSAGE.factor(m, params)
    shape = LinkShape(
        d, params.max_rows_per_client, start.curvature, factor, q, start.typical_curvature
    )
    # In the rounds, features at their bound have the L2 norm of the root of d.
    scales = np.append(1.0, np.full(d, np.sqrt(d) / params.feature_bound))
    known = prior.known_variances(q)
    server = LinkServer(shape, start, m, None if known is None else known / scales[:q] ** 2)
    # No value is refused: an error would reveal it.
    with np.errstate(all="ignore"):
        rounds, report = run_private_rounds(
            server,
            LinkRounds(server.initial_state(), params.n_rounds),
            _message_sender(table._replace(columns=table.columns * scales), family, shape),
            LINK_MESSAGE.mechanism(params),
            budget_shares(params.n_rounds, q),
            params,
            table.names,
            what="sum over clients of bounded messages",
            assumed=f"feature_bound = {params.feature_bound:.4g}, max_rows_per_client = "
            f"{params.max_rows_per_client:.4g} and the start are the user's, not the data's"
            f"{params._public_response}",
        )
        released = rounds.point._replace(
            population=rounds.point.population * scales,
            spreads=rounds.point.spreads * scales[:q],
            covariance=rounds.point.covariance * np.multiply.outer(scales, scales),
        )
        estimates = _client_estimates(table, prior, family, released)
    rule = (
        f"finite numbers cause no refusal: fit clips {params._clipped_ranges}, features to "
        f"{tuned.LARGEST_FEATURE:g} times feature_bound of either sign, and a message that "
        "overflows counts as 0"
    )
    assumptions = *report.assumptions, rule
    return estimates, dataclasses.replace(
        report, assumptions=assumptions, released=names[0], not_released=names[1]
    )


def _message_sender(table, family, shape):
    """Function from LinkRounds to clients and their messages, batch by batch."""
    stacks = [message_stack(stack, family) for stack in table.stacks()]
    # Clients start from their modes of the previous round.
    effects = [np.zeros((shape.n_varying, stack.y.shape[1])) for stack in stacks]

    def send(rounds):
        for i, stack in enumerate(stacks):
            sent, effects[i] = client_messages(stack, effects[i], shape, family, rounds.point)
            yield stack.clients, sent[: len(stack.clients)]

    return send


def _client_estimates(table, prior, family, released):
    """MixedModelEstimates: every client's own posterior, given what was released."""
    # A client's numbers are the same bits whatever the other clients are: rows are not padded to a
    # common number.
    m, p, q = table.n_clients, table.columns.shape[1], table.n_random
    population, spreads = released.population, released.spreads
    # From released numbers: the spread of the rows would reveal others.
    n_points = choose_n_points("auto", family, np.diag(spreads), spreads[0])
    n_axis, parts = axis_nodes(q, np.inf, n_points), []
    for clients, at in client_batches(table.codes, m, CACHED_CELLS // p):
        offset = None if table.offset is None else table.offset[at]
        stack = RowStack(clients, table.columns[at], table.y[at], np.ones(at.shape), offset)
        posteriors = _client_posterior_parts(_pad_to_two_clients(stack), family, released, n_axis)
        parts.append([clients, *(part[: len(at)] for part in posteriors)])
    clients, deviations, rows, *nodes = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(clients)
    coefficients = np.tile(population, (m, 1, 1))
    coefficients[:, 0, :q] += deviations[order]
    known = prior.known_variances(q)
    covariance = np.diag(spreads**2 if known is None else known)
    ratio_root = np.zeros((p, q))
    ratio_root[:q] = np.diag(spreads)
    error_root = square_root(released.covariance)
    return MixedModelEstimates(
        population[None],
        released.covariance,
        coefficients,
        RowPosterior(rows[order], ratio_root, 1.0, error_root, np.ones(p)),
        # Slopes vary about raw columns.
        prior.with_values(population[:q], covariance).set_params(
            centered=prior.centered and q == 1
        ),
        covariance,
        None,
        np.nan,  # the likelihood of the exact rows is not released
        0,
        converged=True,
        estimable=np.ones((1, p), dtype=bool),
        effects=joined_posterior(np.diag(spreads), 1, n_axis, [clients], [nodes]),
        family=family,
    )


def _client_posterior_parts(stack, family, released, n_axis):
    """Parts of the posteriors of the clients of a RowStack, given what was released.

    Deviations (b, q) of coefficients at the modes, whitened rows (b, q, p), whose products are
    C' T^-1 A T^-1 C, and arrays for `joined_posterior`.
    """
    spreads, effects = released.spreads, effect_stack(stack, family)
    rows = effect_rows(effects, family, released)
    q, n, b = rows.features.shape
    # Twice as many steps as in a round, as there is no previous round to start from.
    modes, state = posterior_modes(rows, posterior_modes(rows, np.zeros((q, b)))), np.empty((n, b))
    _log_likelihoods(rows, modes, state)
    signs = _signs(effects)
    products, regression = _regress_on_varying(effects.columns * signs, rows.information(state), q)
    inverse = 1 / spreads[:, None]
    roots = _triangular_roots(_reliabilities(products, spreads) * inverse[:, None] * inverse)
    whitened = np.moveaxis(np.sum(roots[:, :, None] * regression, axis=1), 2, 0).copy()
    # Clients first. No matrix product may run over rows of several clients.
    modes, features = modes.T.copy(), (rows.features * signs).transpose(2, 1, 0)
    offset, w = (rows.offset * signs).T, stack.w.copy()
    # A client whose rows overflow gets the population model, as if it had no rows.
    overflow = ~(np.isfinite(modes).all(axis=1) & np.isfinite(whitened).all(axis=(1, 2)))
    for part in (modes, whitened, features, offset, w):
        part[overflow] = 0.0
    around = family, features, offset[..., None], stack.y, w, modes[..., None]
    nodes = normal_moments(*around) if n_axis is None else weighted_nodes(*around, n_axis)
    return [spreads * modes, whitened, *nodes]
