"""Private fits of classes and counts: what clients compute of their rows, and the fit.

Under the population of a round (coefficients b, standard deviations t between clients) a client
integrates its own effects z ~ N(0, I) out: one of them by quadrature, several by Laplace's
approximation. With scores s_j and curvatures v_j of its rows, averaged over z, let Z be the varying
columns, G = Z'VZ, and C the coefficients (q, p) of a regression of all columns on Z with weights V.
Its score in b is the sum of two parts, and so is its information:

    within   sum_j s_j (x_j - C'z_j),       sum_j v_j (x_j - C'z_j) (x_j - C'z_j)'
    between  C' T^-1 E[z],                  C' T^-1 A T^-1 C,    A = I - (I + T G T)^-1

with T = diag(t). The first is 0 for coefficients that vary, and grows with a client's rows. The
second does not, so each has a scale of its own. If the level alone varies, C is the mean of the
columns weighted by v. A third part is for the variances between clients: the gaps
r^2 (E[z^2] - 1), which are the slopes in log t but for their factors, and squares of r^2 times the
diagonal of A.

The server chooses the units u, standard deviations of what a typical client finds for its own
coefficients, from public numbers: u^2 = t^2 + 1 / g for its information g. The factors r = u / t
give the parts between clients their usual size whatever t is; without them these parts vanish with
t, and the noise on them does not. Features whose coefficients do not vary are less their means,
which the server knows from earlier rounds, in the part between clients.

A client's message is the same bits whoever else is in the table: sums over rows run row by row
over at least two clients, rows of weight 0 at the end add exactly 0, and systems are solved entry
by entry. Rounding may be all that is left of a message whose rows cancel, so nothing less would do.
After the rounds every client finds its own effects, from its own rows and the released population.
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
    effect_stack,
    n_points_of,
    nodes_of,
)
from pfl_sklearn.linear_model._mixed._posterior import RowPosterior
from pfl_sklearn.linear_model._mixed._reduction import CACHED_CELLS, MixedModelEstimates
from pfl_sklearn.linear_model._mixed._table import RowStack
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._link_server import LinkRounds, LinkServer
from pfl_sklearn.linear_model._private._messages import (
    LINK,
    LinkShape,
    link_shares,
    run_rounds,
)


def message_stack(stack, family):
    """The EffectStack of a RowStack, for messages that depend on no other client.

    Its weights are there even if all are 1.
    """
    stack = _never_alone(stack)
    return effect_stack(stack, family)._replace(w=np.ascontiguousarray(stack.w.T))


def _never_alone(stack):
    """The RowStack; a lone client has a copy of itself beside it.

    Sums over the rows of one client alone would be rounded otherwise.
    """
    if len(stack.y) > 1:
        return stack
    return stack.of_clients(np.zeros(2, dtype=int))._replace(clients=stack.clients)


def client_messages(stack, effects, shape, family, point):
    """Messages (b, k) of the clients of an EffectStack at a RoundPoint, and modes (q, b).

    `effects` (q, b) are modes of the round before.
    """
    rows = effect_rows(stack, family, point)
    modes = fixed_modes(rows, effects)
    scores, curvatures, first, second = _averages(rows, modes)
    x, q = stack.columns * _signs(stack), shape.n_varying
    squares, own = _regression(x, curvatures, q)
    moved = x[q:].copy()
    for k in range(q):
        moved -= own[k, q:, None] * x[k]
    share = np.minimum(1.0, shape.max_rows_per_client / np.maximum((stack.w > 0).sum(axis=0), 1))
    slope = np.sum(scores * _signs(stack) * moved, axis=1) * share
    information = _products(moved, curvatures) * share
    raised = (point.units / point.spreads)[:, None]
    largest, furthest = shape.factor * tuned.LARGEST_PULL, shape.factor * tuned.LARGEST_GAP
    mean = np.clip(raised * first, -largest, largest)
    pulls = _pulls(squares, point.spreads) * raised[:, None] * raised
    own[:, q:] *= (point.units[0] / point.units)[:, None, None]
    own[0] -= point.means[:, None]
    gaps = np.clip(raised**2 * (second - 1), -furthest, furthest)
    diagonal = np.minimum(np.einsum("kkb->kb", pulls) ** 2, furthest)
    between = np.sum(own * mean[:, None], axis=0), _sandwich(own, pulls)
    parts = slope, information, *between, np.concatenate([gaps, diagonal])
    return LINK.packed([part.T for part in parts], shape.layout), modes


def effect_rows(stack, family, point):
    """EffectRows of clients, with features (q, n, b) of their effects."""
    predictors = np.zeros(stack.y.shape) if stack.offset is None else stack.offset.copy()
    for coefficient, column in zip(point.population, stack.columns, strict=True):
        predictors += coefficient * column
    q = len(point.spreads)
    features = point.spreads[:, None, None] * stack.columns[:q]
    return EffectRows(family, features, predictors, stack.y, stack.w)


def fixed_modes(rows, effects):
    """Modes (q, b) of effects, by a fixed number of Newton steps of bounded length."""
    state, identity = np.empty(rows.y.shape), np.eye(len(effects))[..., None]
    for _ in range(tuned.NEWTON_STEPS):
        _values(rows, effects, state)
        slope = np.sum(rows.features * rows.scores(state), axis=1) - effects
        inverse = _inverse(identity + _products(rows.features, rows.information(state)))
        step = np.sum(inverse * slope, axis=1)
        longest = np.abs(np.sum(rows.features * step[:, None], axis=0)).max(axis=0)
        effects = effects + step * np.minimum(1.0, tuned.LONGEST_STEP / longest)
    return effects


def _values(rows, effects, state):
    """Log-likelihoods (b,) at effects (q, b); `state` (n, b) becomes that of the family."""
    predictors = rows.offset.copy()
    for feature, effect in zip(rows.features, effects, strict=True):
        predictors += feature * effect
    return rows.family.summed_log_likelihood(predictors, rows.y, rows.w, state)


def _averages(rows, modes):
    """Scores and curvatures (n, b), E[z] and E[z^2] (q, b), averaged over the posterior of z."""
    if len(modes) > 1:
        return _laplace(rows, modes)
    rows = rows._replace(features=rows.features[0])
    parts = [
        _by_quadrature(rows.of_clients(part), modes[:, part]) for part in _in_pairs(*rows.y.shape)
    ]
    return tuple(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))


def _by_quadrature(rows, modes):
    """As `_averages`, for one effect, features (n, b) and modes (1, b)."""
    nodes, log_weights = nodes_of(tuned.POINTS)
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


def _laplace(rows, modes):
    """As `_averages`, by Laplace's approximation.

    They are slopes of its log-likelihood, with the curvature that moves with the mode: E[z] is the
    mode and a shift. Without it variances of few rows would be far too small.
    """
    state, features = np.empty(rows.y.shape), rows.features
    _values(rows, modes, state)
    scores, curvatures = rows.scores(state), rows.information(state)
    bend = rows.curvature_slopes(state)
    posterior = _inverse(np.eye(len(modes))[..., None] + _products(features, curvatures))
    leverage = np.zeros(rows.y.shape)
    for feature, row in zip(features, posterior, strict=True):
        leverage += feature * np.sum(row[:, None] * features, axis=0)
    bend = bend * leverage
    shift = -0.5 * np.sum(posterior * np.sum(features * bend, axis=1), axis=1)
    scores = scores - 0.5 * bend - curvatures * np.sum(features * shift[:, None], axis=0)
    own = np.einsum("kkb->kb", posterior)
    return scores, curvatures, modes + shift, modes**2 + 2 * modes * shift + own


def _regression(x, curvatures, q):
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
    # Any coefficients give the same score. Without information they are 0, as the effects are.
    diagonal = np.einsum("kkb->kb", ridge)
    diagonal += tuned.RIDGE * diagonal + np.finfo(float).tiny
    own = np.zeros((q, p, b))
    own[np.arange(q), np.arange(q)] = 1.0
    own[:, q:] = np.sum(_inverse(ridge)[:, :, None] * products[:, q:], axis=1)
    return squares, own


def _pulls(squares, spreads):
    """A (q, q, b), with squares Z'VZ (q, q, b) and spreads (q,)."""
    scaled = squares * spreads[:, None, None] * spreads[:, None]
    identity = np.eye(len(spreads))[..., None]
    return identity - _inverse(identity + scaled)


def _sandwich(own, middle):
    """Products (p, p, b) of coefficients (q, p, b) with a matrix (q, q, b) between them."""
    right = np.sum(middle[:, :, None] * own, axis=1)
    return np.sum(own[:, :, None] * right[:, None], axis=0)


def _inverse(matrices):
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


def _roots(matrices):
    """Upper triangles R (q, q, b) with R'R = matrices, which have no negative eigenvalues."""
    left, roots = matrices.copy(), np.zeros(matrices.shape)
    for k in range(len(left)):
        pivot = left[k, k].copy()
        kept = pivot > tuned.NO_PIVOT * matrices[k, k]
        root = np.sqrt(np.where(kept, pivot, 1.0))
        roots[k, k:] = np.where(kept, left[k, k:] / root, 0.0)
        left -= roots[k][:, None] * roots[k]
    return roots


def _signs(stack):
    """Signs (n, b) of the responses: the first column is 1 times them."""
    return stack.columns[0]


def _in_pairs(n, b):
    """Slices of b >= 2 clients with n rows that fit the cache, none of a single client."""
    size = max(tuned.CELLS // (tuned.POINTS * n), 2)
    starts = list(range(0, b - 1, size))
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], b], strict=True)]


def _products(x, weights):
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

    Parameters
    ----------
    table : RegressionTable
        Its level varies, and is the first column.
    prior : GaussianPrior
        With an unknown mean; known variances stay.
    family : Binomial or Poisson
    start : PrivateStart
    params : estimator
        With `epsilon`, `delta`, `feature_bound`, `max_rows_per_client`, `n_rounds` and
        `random_state`.
    names : pair of tuples of str
        Fitted attributes that are released, and those that are not.
    """
    m, q, d = table.n_clients, table.n_random, len(table.names) - 1
    factor = LINK.factor(m, params)
    shape = LinkShape(d, params.max_rows_per_client, start.curvature, factor, q, start.usual)
    # Features at their bound have the L2 norm of the root of d in the rounds.
    scales = np.append(1.0, np.full(d, np.sqrt(d) / params.feature_bound))
    known = prior.known_variances(q)
    server = LinkServer(shape, start, m, None if known is None else known / scales[:q] ** 2)
    # No value is refused: an error would reveal it.
    with np.errstate(all="ignore"):
        rounds, report = run_rounds(
            server,
            LinkRounds(server.begin(), params.n_rounds),
            _sender(table._replace(columns=table.columns * scales), family, shape),
            LINK.mechanism(params),
            link_shares(params.n_rounds, q),
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
        f"finite numbers cause no refusal: fit cuts {params._cut_to}, features to "
        f"{tuned.LARGEST_FEATURE:g} times feature_bound of either sign, and a message that "
        "overflows counts as 0"
    )
    assumptions = *report.assumptions, rule
    return estimates, dataclasses.replace(
        report, assumptions=assumptions, released=names[0], not_released=names[1]
    )


def _sender(table, family, shape):
    """Function of the LinkRounds: clients and their messages, batch by batch."""
    stacks = [message_stack(stack, family) for stack in table.stacks()]
    # Clients remember their modes.
    effects = [np.zeros((shape.n_varying, stack.y.shape[1])) for stack in stacks]

    def send(rounds):
        for i, stack in enumerate(stacks):
            sent, effects[i] = client_messages(stack, effects[i], shape, family, rounds.point)
            yield stack.clients, sent[: len(stack.clients)]

    return send


def _client_estimates(table, prior, family, released):
    """Every client's own posterior around what was released.

    A client's numbers are the same bits whoever else is in the table, or their last digits would
    tell: rows are not padded to those of others.
    """
    m, p, q = table.n_clients, table.columns.shape[1], table.n_random
    population, spreads = released.population, released.spreads
    # By what was released: the rows' own spread would tell of others.
    n_points = n_points_of("auto", family, np.diag(spreads), spreads[0])
    n_axis, parts = axis_nodes(q, np.inf, n_points), []
    for clients, at in client_batches(table.codes, m, CACHED_CELLS // p):
        offset = None if table.offset is None else table.offset[at]
        stack = RowStack(clients, table.columns[at], table.y[at], np.ones(at.shape), offset)
        own = _client_parts(_never_alone(stack), family, released, n_axis)
        parts.append([clients, *(part[: len(at)] for part in own)])
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


def _client_parts(stack, family, released, n_axis):
    """What the clients of a RowStack know of themselves, given what was released.

    Returns
    -------
    list of ndarray
        Deviations (b, q) of coefficients at the modes, whitened rows (b, q, p), whose products are
        C' T^-1 A T^-1 C, and a part for `joined_posterior`.
    """
    spreads, effects = released.spreads, effect_stack(stack, family)
    rows = effect_rows(effects, family, released)
    q, n, b = rows.features.shape
    # Twice as many steps as in a round: there is no round before.
    modes, state = fixed_modes(rows, fixed_modes(rows, np.zeros((q, b)))), np.empty((n, b))
    _values(rows, modes, state)
    signs = _signs(effects)
    squares, own = _regression(effects.columns * signs, rows.information(state), q)
    inverse = 1 / spreads[:, None]
    roots = _roots(_pulls(squares, spreads) * inverse[:, None] * inverse)
    whitened = np.moveaxis(np.sum(roots[:, :, None] * own, axis=1), 2, 0).copy()
    # What the posterior is made of, by client. No matrix product runs over rows of several clients.
    modes, features = modes.T.copy(), (rows.features * signs).transpose(2, 1, 0)
    offset, w = (rows.offset * signs).T, stack.w.copy()
    # A client whose rows overflow keeps the population, as if it had none.
    lost = ~(np.isfinite(modes).all(axis=1) & np.isfinite(whitened).all(axis=(1, 2)))
    for part in (modes, whitened, features, offset, w):
        part[lost] = 0.0
    around = family, features, offset[..., None], stack.y, w, modes[..., None]
    nodes = normal_moments(*around) if n_axis is None else weighted_nodes(*around, n_axis)
    return [spreads * modes, whitened, *nodes]
