"""Private fits of regressions with a link: noisy sums of clients' messages, round by round.

The server starts from public numbers. In every round it adds Gaussian noise to the sum of the
messages, once, and moves the population by a step of Newton's method: `_private_messages` says what
a message holds, and `_private_server` what becomes of the sums. The first half of the rounds has
the smaller part of the budget, as it only has to come near; the second half is averaged. After the
rounds every client finds its own effects, from its own rows and the released population. Nothing
else of a client reaches another one.
"""

import dataclasses
from typing import Any

import numpy as np

from pfl_sklearn._clients import client_batches, encode_clients
from pfl_sklearn.linear_model._design import column_names, resolve_design
from pfl_sklearn.linear_model._mixed._client_posterior import (
    axis_nodes,
    normal_moments,
    posterior_of,
    weighted_nodes,
)
from pfl_sklearn.linear_model._mixed._fit import GlmmEstimates
from pfl_sklearn.linear_model._mixed._population_search import n_points_of
from pfl_sklearn.linear_model._mixed._posterior import RowPosterior
from pfl_sklearn.linear_model._mixed._quadrature import effect_stack
from pfl_sklearn.linear_model._mixed._reduction import CACHED_CELLS
from pfl_sklearn.linear_model._mixed._table import RowStack, stack_rows
from pfl_sklearn.linear_model._private._link_messages import (
    MessageShape,
    client_messages,
    client_view,
)
from pfl_sklearn.linear_model._private._link_server import (
    LEAST_SPREAD,
    Server,
    spread_scales,
)
from pfl_sklearn.linear_model._private._rounds import (
    round_mechanisms,
    rounds_report,
    scale_factor,
)
from pfl_sklearn.privacy import GaussianMechanism
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

_SENSITIVITY = 2.0  # of the sum, if a message of norm at most 1 is replaced by another
# Of the budget (mu^2) for the first half of the rounds. Spreads of slopes take longer to come near.
_FIRST_SHARE, _FIRST_SHARE_OF_SLOPES = 0.15, 0.4
_GROWTH, _LARGEST_FACTOR = 0.5, 4.0  # of scales with many clients: a power, and a limit
_LARGEST_NOISE = 0.5  # on a variance between clients, as a share of a coefficient's own
_LARGEST_FEATURE = 1e30  # times the bound: its fourth power, times anything public, is finite
_LARGEST_BOUND, _LARGEST_CAP = 1e6, 10**6  # nothing overflows or rounds to 0


def cut_features(features, bound):
    """Features (n, d) between -1e30 and 1e30 times the feature bound."""
    return np.clip(features, -_LARGEST_FEATURE * bound, _LARGEST_FEATURE * bound)


def check_private_parameters(params, prior, sample_weight):
    """Raise ValueError if the parameters allow no private fit; no data is touched."""
    name = type(params).__name__
    if params.delta == 0:  # no scale of Gaussian noise gives pure differential privacy
        raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")
    limits = {
        "feature_bound": (1 / _LARGEST_BOUND, _LARGEST_BOUND),
        "rows_cap": (1, _LARGEST_CAP),
    }
    for bound, (low, high) in limits.items():
        value = getattr(params, bound)
        if value is None:
            raise ValueError(
                f"{bound} must be given when epsilon is finite; choose it without looking at "
                "the data."
            )
        if not low <= value <= high:
            more = " Rescale X, and the bound with it." if bound == "feature_bound" else ""
            raise ValueError(f"{bound} must lie between {low:g} and {high:g}; got {value!r}.{more}")
    if prior.mean is not None or params.population_penalty:
        raise ValueError(
            f"a private {name} takes a prior without a mean, and no population_penalty; got "
            f"{prior!r} and population_penalty={params.population_penalty}."
        )
    if sample_weight is not None:
        raise ValueError(
            "sample_weight is not supported when epsilon is finite: rows_cap says how much a "
            "client counts."
        )


def private_random(random):
    """What varies by client in a private fit: as `random`, whose "auto" reads no row here."""
    return "intercept" if isinstance(random, str) and random == "auto" else random


def check_private_design(params, prior, X, groups):
    """Raise ValueError if too much varies for a private fit; no value of X is read.

    Where slopes vary, names and the number of the columns decide. If their variances are unknown,
    so does the number of clients, which is public: ids are read for it alone. A level alone needs
    none of them.
    """
    name, q = type(params).__name__, 1
    if private_random(params.random) not in ("intercept", ["intercept"]):
        shape = np.shape(X)
        if len(shape) != 2:
            return  # the check of the data says so
        random, names = private_random(params.random), column_names(X)
        design = resolve_design(random, shape[1], params.fit_intercept, names)
        q = len(design.random) if design.fit_intercept and design.random[0] == 0 else 0
    if not params.fit_intercept or q == 0:
        raise ValueError(
            f"in a private {name} the intercept varies by client; got random={params.random!r} and "
            f"fit_intercept={params.fit_intercept}."
        )
    known = prior.known_variances(q)
    least = (LEAST_SPREAD * spread_scales(q, params.feature_bound)) ** 2
    if known is not None and not ((known >= least) & np.isfinite(known)).all():
        raise ValueError(
            f"known variances have to be finite and at least {least[0]:.2g} in a private {name} "
            f"(over the squared feature_bound for slopes), as messages are divided by their "
            f"roots; got {prior.covariance!r}."
        )
    if q == 1 or known is not None:  # the level alone is worth a try with any noise
        return
    if prior.covariance_type != "diag":
        raise ValueError(
            f"a private {name} estimates a diagonal covariance; got covariance_type="
            f"{prior.covariance_type!r}."
        )
    n_clients = 1 if groups is None else max(len(encode_clients(groups, shape[0]).ids), 1)
    mechanism = GaussianMechanism(_SENSITIVITY, params.epsilon, params.delta)
    shape = _shape_of(params, len(design.names) - 1, q, n_clients, mechanism)
    late = mechanism.noise_std / np.sqrt(1 - _FIRST_SHARE_OF_SLOPES)
    noise = shape.variance_scales[0] * late / n_clients
    if noise >= _LARGEST_NOISE:
        raise ValueError(
            f"with {n_clients} clients and epsilon={params.epsilon:g} the noise on the variance of "
            f"each of {q} coefficients would be {noise:.3g} times a coefficient's own variance; "
            f"expected less than {_LARGEST_NOISE}. More clients, a larger epsilon, or fewer "
            "coefficients in random lower it."
        )


def _shape_of(params, n_features, n_varying, n_clients, mechanism, curvature=1.0, usual=1.0):
    """MessageShape for the noise of a mechanism on the sum over clients."""
    factor = scale_factor(n_clients, mechanism.noise_std, _GROWTH, _LARGEST_FACTOR)
    return MessageShape(n_features, params.rows_cap, curvature, factor, n_varying, usual)


def fit_private_glmm(table, prior, outcome, start, params):
    """GlmmEstimates, the mechanism of all rounds together, whether its noise has a seed, caveats.

    Parameters
    ----------
    table : RegressionTable
        Its level varies, and is the first column.
    prior : GaussianPrior
        With an unknown mean; known variances stay.
    outcome : Binomial or Poisson
    start : PrivateStart
    params : estimator
        With `epsilon`, `delta`, `feature_bound`, `rows_cap`, `n_rounds` and `random_state`.
    """
    mechanism = GaussianMechanism(_SENSITIVITY, params.epsilon, params.delta)
    q = table.n_random
    curvatures = start.curvature, start.usual
    shape = _shape_of(params, len(table.names) - 1, q, table.n_clients, mechanism, *curvatures)
    rng, seeded = noise_generator(params.random_state)
    rounds = round_mechanisms(mechanism, budget_shares(params.n_rounds, q))
    known, scales = prior.known_variances(q), _column_scales(params, shape.n_features)
    known = None if known is None else known / scales[:q] ** 2
    server = Server(shape, start, table.n_clients, known)
    # No value is refused: an error would reveal it. A message that is not finite counts as 0.
    with np.errstate(all="ignore"):
        scaled = table._replace(columns=table.columns * scales)
        released, sums = _released(scaled, outcome, server, rounds, rng)
        caveats = server.caveats(released, sums, table.names)
        released = released._replace(
            population=released.population * scales,
            spreads=released.spreads * scales[:q],
            covariance=released.covariance * np.multiply.outer(scales, scales),
        )
        estimates = _client_estimates(table, prior, outcome, released)
    return estimates, mechanism, seeded, caveats


def _column_scales(params, d):
    """Factors (p,) after which features at their bound have the L2 norm of the root of d."""
    return np.append(1.0, np.full(d, np.sqrt(d) / params.feature_bound))


def _released(table, outcome, server, rounds, rng):
    """The RoundPoint after rounds with these mechanisms, and what the later half released."""
    rows = table.columns, table.y, table.weights, table.codes, table.n_clients, table.offset
    stacks = [message_stack(stack, outcome) for stack in stack_rows(*rows)]
    m, shape, point = table.n_clients, server.shape, server.begin()
    # Clients remember their modes.
    effects = [np.zeros((shape.n_varying, stack.y.shape[1])) for stack in stacks]
    averaged_from = len(rounds) - len(rounds) // 2
    sums, points, messages = [], [], np.empty((m, sum(shape.widths)))
    for k, mechanism in enumerate(rounds):
        for i, stack in enumerate(stacks):
            sent, effects[i] = client_messages(stack, effects[i], shape, outcome, point)
            messages[stack.clients] = sent[: len(stack.clients)]
        noisy = mechanism.release(messages, mechanism.start(), m, rng).total
        sums.append(shape.split(noisy / m, mechanism.noise_multiplier / m))
        points.append(point)
        # In the first half the later half of the rounds so far: those before were further away.
        first = averaged_from if k >= averaged_from else (k + 1) // 2
        means = server.column_means(sums, points)
        point = server.next_point(sums[first:], points[first:], means)
        point = point._replace(information=server.typical_information(sums, points))
    return point, sums[averaged_from:]


def message_stack(stack, outcome):
    """The EffectStack of a RowStack, for messages that depend on no other client.

    Its weights are there even if all are 1, and a lone client has a copy of itself beside it.
    """
    if len(stack.clients) == 1:
        twice: Any = (None if part is None else part.repeat(2, axis=0) for part in stack[1:])
        stack = RowStack(stack.clients, *twice)
    return effect_stack(stack, outcome)._replace(w=np.ascontiguousarray(stack.w.T))


def budget_shares(n_rounds, n_varying):
    """Shares of the budget (mu^2) of every round; they sum to 1."""
    first = _FIRST_SHARE_OF_SLOPES if n_varying > 1 else _FIRST_SHARE
    late = n_rounds // 2
    early = n_rounds - late
    return [first / early] * early + [(1 - first) / late] * late


def _client_estimates(table, prior, outcome, released):
    """Every client's own posterior around what was released.

    A client's numbers are the same bits whoever else is in the table, or their last digits would
    tell: rows are not padded to those of others, and a client that is alone in its batch has a copy
    of itself beside it, as sums over the rows of one client are rounded otherwise.
    """
    m, p, q = table.n_clients, table.columns.shape[1], table.n_random
    population, spreads = released.population, released.spreads
    coefficients, rows = np.tile(population, (m, 1, 1)), np.zeros((m, q, p))
    # By what was released: the rows' own spread would tell of others.
    n_points = n_points_of("auto", outcome, np.diag(spreads), spreads[0])
    n_axis = axis_nodes(q, np.inf, n_points)
    batches, parts = [], []
    for clients, at in client_batches(table.codes, m, CACHED_CELLS // p):
        both = at if len(at) > 1 else at.repeat(2, axis=0)
        offset = None if table.offset is None else table.offset[both]
        ones = np.ones(both.shape)
        stack = RowStack(clients, table.columns[both], table.y[both], ones, offset)
        view = client_view(effect_stack(stack, outcome), outcome, released)
        own = np.concatenate([spreads * view.effects.T, view.rows.reshape(q * p, -1).T], axis=1)
        # A client whose rows overflow keeps the population, as if it had none.
        lost = ~np.isfinite(own).all(axis=1)
        own[lost] = 0.0
        posterior = _posterior_parts(stack, outcome, population, spreads, own[:, :q], lost, n_axis)
        parts.append([part[: len(at)] for part in posterior])
        batches.append(clients)
        own = own[: len(at)]
        coefficients[clients, 0, :q] += own[:, :q]
        rows[clients] = own[:, q:].reshape(-1, q, p)
    known = prior.known_variances(q)
    covariance = np.diag(spreads**2 if known is None else known)
    ratio = np.zeros((p, p))
    ratio[:q, :q] = np.diag(spreads**2)
    order = np.argsort(np.concatenate(batches))
    joined = [np.concatenate(arrays)[order] for arrays in zip(*parts, strict=True)]
    return GlmmEstimates(
        population[None],
        released.covariance,
        np.ones((1, p), dtype=bool),
        coefficients,
        RowPosterior(rows, ratio, 1.0, released.covariance, np.ones(p)),
        posterior_of(np.diag(spreads), 1, n_axis, joined),
        # Slopes vary about raw columns.
        prior.with_values(population[:q], covariance).set_params(
            centered=prior.centered and q == 1
        ),
        covariance,
        outcome,
        np.nan,  # the likelihood of the exact rows is not released
        0,
        converged=True,
        modes_found=True,
        separated=False,
    )


def _posterior_parts(stack, outcome, population, spreads, deviations, lost, n_axis):
    """What `posterior_of` takes of the clients of a RowStack, with deviations (b, q) at the modes.

    Of clients that are `lost`, the rows count as absent.
    """
    columns, w = stack.x.copy(), stack.w.copy()
    columns[lost], w[lost] = 0.0, 0.0
    stack = stack._replace(x=columns, w=w)
    offset, features = stack.predictors(population[None]), columns[:, :, : len(spreads)] * spreads
    rows = outcome, features, offset, stack.y, w, (deviations / spreads)[..., None]
    return normal_moments(*rows) if n_axis is None else weighted_nodes(*rows, n_axis)


def private_link_report(params, n_clients, mechanism, seeded, caveats, names):
    """Report of all rounds; `names` are attributes that are released, and those that are not."""
    report = rounds_report(
        mechanism,
        "sum over clients of bounded messages",
        params.n_rounds,
        f"feature_bound = {params.feature_bound:.4g}, rows_cap = {params.rows_cap:.4g} and the "
        f"start are the user's, not the data's{params._public_outcome}",
        names,
        moved=_SENSITIVITY / 2,
        n_clients=n_clients,
        seeded=seeded,
        caveats=caveats,
    )
    cut = (
        f"finite numbers cause no refusal: fit cuts {params._cut_to}, features to "
        f"{_LARGEST_FEATURE:g} times feature_bound of either sign, and a message that overflows "
        "counts as 0"
    )
    return dataclasses.replace(report, assumptions=(*report.assumptions, cut))
