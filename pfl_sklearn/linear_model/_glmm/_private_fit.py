"""Private fits of regressions with a link: noisy sums of clients' messages, round by round.

The server starts from public numbers. In every round it adds Gaussian noise to the sum of the
messages, once, and moves the population by a step of Newton's method; `_private_messages` says what
a message holds. The first half of the rounds has a seventh of the budget, as it only has to come
near; the second half is averaged. Coefficients are those of a Bayesian regression of the score on
the information, around a public prior: where noise swamps the rounds, they stay near the start and
say so by their errors. After the rounds every client finds its own effect, from its own rows and
the released population. Nothing else of a client reaches another one.

The recipe was found by trials on simulated and public tables; none of its constants looks at data.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import client_batches
from pfl_sklearn.linear_model._glmm._fit import GlmmEstimates
from pfl_sklearn.linear_model._glmm._likelihood import RowStack, stack_rows
from pfl_sklearn.linear_model._glmm._private_messages import (
    MessageShape,
    client_messages,
    client_view,
)
from pfl_sklearn.linear_model._glmm._quadrature import effect_stack
from pfl_sklearn.linear_model._posterior import RowPosterior
from pfl_sklearn.linear_model._table import CACHED_CELLS
from pfl_sklearn.privacy import ClippedSum, GaussianMechanism
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._report import private_report

_SENSITIVITY = 2.0  # of the sum, if a message of norm at most 1 is replaced by another
_FIRST_SHARE = 0.15  # of the budget (mu^2) for the first half of the rounds
_SLOPE_SD = 2.0  # of the prior, in predictors of a row at the feature bound
_LONGEST_MOVE = 2 / 3  # of the population in a round, in standard deviations of the prior
_SPREAD = 1.0  # scale of the half-Cauchy prior of t, and its start
_LONGEST_LOG_MOVE = 0.5  # of log t in a round
_LONGEST_FACTOR = 2.0  # of the information of a typical client in a round
_SPREADS = np.linspace(0.05, 5.0, 2000)  # t is one of them, but for moves of bounded length
_LEAST_SQUARE = 0.3  # of a client's information on t, in units of a typical one's: it is about 1
_LOST = 0.15  # of a gap by clipping, in simulations with factor 1; with factor f about .15 / f^3
_LEAST_LEVEL = 0.3  # information on the level, per client: it has at least a row or two
_LEAST_DIRECTION = 0.1  # information in a direction, over that of a typical one
_LEAST_SD = 0.3  # of a known spread: scores are divided by it, and so is their noise
# Noise on a mean of messages at which the scales of messages were found (300 clients, epsilon 2).
# With less, clipping is the larger error, so scales are larger; at most by a factor.
_USUAL_NOISE, _LARGEST_FACTOR = 0.02, 4.0
# Variance of the noise that stated errors count, over its own: it also moves the points of rounds,
# the means of features and t. By simulation, so that intervals cover .9 or more.
_STATED = 2.5
# Standard deviations of their priors, from which coefficients count as far from the start.
_FAR_LEVEL, _FAR_SLOPE = 1.5, 3.0
_LEAST_PULL = 0.5  # of clients towards their own level, in units of a typical one's
_LARGEST_BOUND, _LARGEST_CAP = 1e50, 10**9  # squares and products stay finite


class PrivateStart(NamedTuple):
    """Public numbers from which a private fit starts."""

    level: float  # population intercept
    level_sd: float  # of its prior
    curvature: float  # largest one of a row


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
            raise ValueError(f"{bound} must lie between {low:g} and {high:g}; got {value!r}.")
    if params.random not in ("auto", "intercept", ["intercept"]) or not params.fit_intercept:
        raise ValueError(
            f"a private {name} lets the intercept alone vary by client; got random="
            f"{params.random!r} and fit_intercept={params.fit_intercept}."
        )
    known = prior.known_covariance(1)
    if known is not None and not _LEAST_SD**2 <= known[0, 0] < np.inf:
        raise ValueError(
            f"a known covariance has to be at least {_LEAST_SD**2:.2g} in a private {name}, as "
            f"scores are divided by its root; got {prior.covariance!r}."
        )
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


def fit_private_glmm(table, prior, outcome, start, params):
    """GlmmEstimates, the mechanism of all rounds together, whether its noise has a seed, caveats.

    Parameters
    ----------
    table : RegressionTable
        Its level varies, and is the first column.
    prior : GaussianPrior
        With an unknown mean; a known variance stays.
    outcome : Binomial or Poisson
    start : PrivateStart
    params : estimator
        With `epsilon`, `delta`, `feature_bound`, `rows_cap`, `n_rounds` and `random_state`.
    """
    mechanism, d = (
        GaussianMechanism(_SENSITIVITY, params.epsilon, params.delta),
        len(table.names) - 1,
    )
    factor = np.sqrt(_USUAL_NOISE * table.n_clients / mechanism.noise_std)
    factor = float(np.clip(factor, 1.0, _LARGEST_FACTOR))
    shape = MessageShape(d, params.feature_bound, params.rows_cap, start.curvature, factor)
    rng, seeded = noise_generator(params.random_state)
    # Rounds of Gaussian noise add up in 1 / noise_std^2.
    rounds = [
        ClippedSum(1.0, mechanism.noise_std / np.sqrt(share))
        for share in budget_shares(params.n_rounds)
    ]
    variance = prior.known_covariance(1)
    server = _Server(shape, start, table.n_clients, None if variance is None else variance[0, 0])
    # No value is refused: an error would reveal it. A message that is not finite counts as 0.
    with np.errstate(all="ignore"):
        released, sums = _released(table, outcome, server, rounds, rng)
        estimates = _client_estimates(table, prior, outcome, released)
    return estimates, mechanism, seeded, server.caveats(released, sums)


def _released(table, outcome, server, rounds, rng):
    """The _Point after rounds with these mechanisms, and what the later half released."""
    rows = table.columns, table.y, table.weights, table.codes, table.n_clients, table.offset
    stacks = [message_stack(stack, outcome) for stack in stack_rows(*rows)]
    effects = [np.zeros(stack.y.shape[1]) for stack in stacks]  # clients remember theirs
    m, shape, point = table.n_clients, server.shape, server.begin()
    averaged_from = len(rounds) - len(rounds) // 2
    sums, points, messages = [], [], np.empty((m, sum(shape.widths)))
    for k, mechanism in enumerate(rounds):
        for i, stack in enumerate(stacks):
            sent, effects[i] = client_messages(
                stack,
                effects[i],
                shape,
                outcome,
                point.population,
                point.t,
                point.unit,
                point.means,
            )
            messages[stack.clients] = sent[: len(stack.clients)]
        noisy = mechanism.release(messages, mechanism.start(), m, rng).total
        sums.append(shape.split(noisy / m, mechanism.noise_multiplier / m))
        points.append(point)
        # In the first half every round stands alone: those before were further away.
        first = min(k, averaged_from)
        means = server.column_means(sums, points)
        point = server.next_point(sums[first:], points[first:], means)
        point = point._replace(information=server.typical_information(sums, points))
    return point, sums[averaged_from:]


class _Point(NamedTuple):
    """Where a round is, or what the rounds point to."""

    population: np.ndarray  # (p,)
    t: float
    information: float  # of a typical client on its own level
    means: np.ndarray  # (p,), of the columns, by curvature; 0 for the level
    covariance: np.ndarray  # (p, p), of the population's error

    @property
    def unit(self):
        """Standard deviation of what a typical client finds for its own level."""
        return np.sqrt(self.t**2 + 1 / self.information)


class _Server(NamedTuple):
    """What the server knows besides the released sums: public numbers."""

    shape: MessageShape
    start: PrivateStart
    n_clients: int
    known_variance: float | None  # between clients

    @property
    def prior_sds(self):
        """Standard deviations (p,) of the prior of the coefficients."""
        slopes = np.full(self.shape.n_features, _SLOPE_SD / self.shape.feature_bound)
        return np.append(self.start.level_sd, slopes)

    def begin(self):
        """The _Point of the first round."""
        population = np.append(self.start.level, np.zeros(self.shape.n_features))
        t = _SPREAD if self.known_variance is None else float(np.sqrt(self.known_variance))
        means = np.zeros(len(population))
        return _Point(population, t, self.largest_information, means, np.diag(self.prior_sds**2))

    @property
    def largest_information(self):
        """Of a client on its level, with the rows of a typical one."""
        return max(self.shape.curvature * self.shape.rows_cap, _LEAST_LEVEL)

    def next_point(self, sums, points, means):
        """The _Point after rounds of equal noise, whose sums are averaged."""
        goal, covariance = self._goal(sums, points, means)
        move = (goal - points[-1].population) / self.prior_sds
        move *= min(1.0, _LONGEST_MOVE / max(np.abs(move).max(), _LONGEST_MOVE))
        t = points[-1].t
        if self.known_variance is None:
            factor = self._spread(sums, points) / t
            t *= np.exp(np.clip(np.log(factor), -_LONGEST_LOG_MOVE, _LONGEST_LOG_MOVE))
            t = float(np.clip(t, _SPREADS[0], _SPREADS[-1]))
        return points[-1]._replace(
            population=points[-1].population + move * self.prior_sds,
            t=t,
            means=means,
            covariance=covariance,
        )

    def column_means(self, sums, points):
        """Means (p,) of the columns, as all rounds tell them: information on the level goes along.

        They are posterior means around 0: the first rounds are mostly noise.
        """
        d, size = self.shape.n_features, self.shape.feature_bound
        means, weights = np.zeros(d), 0.0
        for each, point in zip(sums, points, strict=True):
            level = max(each.around[0, 0], _LEAST_LEVEL)
            weight = 2 * (level / (self.shape.scales[3] * each.noise_std)) ** 2
            means += weight * (point.means[1:] + each.around[0, 1:] / level)
            weights += weight
        return np.append(0.0, means / (weights + d / size**2))

    def typical_information(self, sums, points):
        """Information of a typical client on its level, as all rounds tell it.

        With information d a client has the pull unit^2 d / (1 + t^2 d). Clipping takes as much of
        the pulls as of their squares, so their ratio is used.
        """
        weights = np.array([each.noise_std for each in sums]) ** -2.0
        pull, square = weights @ [(each.around[0, 0], each.variance[1]) for each in sums]
        unit, t = weights @ [(point.unit**2, point.t**2) for point in points] / weights.sum()
        ratio = max(square, 0.0) / max(pull, _LEAST_LEVEL * weights.sum())
        found, known = ratio / max(unit - ratio * t, np.finfo(float).tiny), points[-1].information
        found = np.clip(found, known / _LONGEST_FACTOR, known * _LONGEST_FACTOR)
        return float(np.clip(found, _LEAST_LEVEL, self.largest_information))

    def _goal(self, sums, points, means):
        """Coefficients (p,) that the rounds point to, and the covariance of their error.

        At the coefficients b of a round the mean score is about I (goal - b), with the information
        I. Its errors are the noise of the release and the variance of clients, which is I over
        their number. The stated errors count the noise on the information, too; the estimate does
        not, as that would only pull it to the start.
        """
        # Features about their means: there the level does not depend on what is said of slopes.
        centring, moves = _centring(means), [_centring(point.means - means) for point in points]
        at = np.array([centring @ point.population for point in points])
        middle, prior = at.mean(axis=0), np.diag(self.prior_sds**-2)
        origin = self.begin().population
        score, score_noise = self._score(sums, points, moves)
        between, within, noise = self._information(sums, points, moves)
        information = between + within
        # Rounds at a small unit know more of what differs between clients: they count by it.
        known = [
            max(each.around[0, 0], _LEAST_LEVEL) / p.unit**2
            for each, p in zip(sums, points, strict=True)
        ]
        score = score + between @ (np.average(at, axis=0, weights=known) - middle)

        def solved(more_noise):
            error = np.diag(score_noise + more_noise) + information / self.n_clients
            pulled = np.linalg.solve(error, information)
            covariance = np.linalg.inv(information @ pulled + prior)
            return middle + covariance @ (pulled.T @ score + prior @ (origin - middle)), covariance

        goal = solved(0.0)[0]
        distance = np.mean(np.sum((at - goal) ** 2, axis=1))
        back = np.linalg.inv(centring)
        covariance = solved((_STATED - 1) * score_noise + noise * distance)[1]
        return back @ goal, back @ covariance @ back.T

    def _score(self, sums, points, moves):
        """Mean score (p,) of rounds in centred coefficients, and variances (p,) of its noise."""
        units = np.array([point.unit for point in points])
        score = np.mean(
            [s.within + a.T @ s.between / u for s, u, a in zip(sums, units, moves, strict=True)],
            axis=0,
        )
        within, _, between, _ = self.shape.scales
        variance = np.full(len(score), between**2 * np.mean(units**-2.0))
        variance[1:] += within**2
        return score, variance * sums[0].noise_std ** 2 / len(sums)

    def _information(self, sums, points, moves):
        """Mean information between and within (p, p), and variances (p,) of the noise on both."""
        inverse = np.array([point.unit for point in points]) ** -2.0
        _, within, _, around = self.shape.scales
        noise = sums[0].noise_std / np.sqrt(len(sums))
        moved = np.mean(
            [k * a.T @ s.around @ a for s, k, a in zip(sums, inverse, moves, strict=True)], axis=0
        )
        variance = np.full(len(moved), np.mean(inverse**2) * around**2 * noise**2)
        between = _shrunk(moved, np.sqrt(variance[0]), has_level=True)
        own = np.zeros_like(between)
        if len(own) > 1:
            mean = np.mean([each.information for each in sums], axis=0)
            own[1:, 1:] = _shrunk(mean, within * noise, has_level=False)
        variance[1:] += (within * noise) ** 2
        return between, own, variance

    def _spread(self, sums, points):
        """Standard deviation T between clients that the rounds point to.

        At t the mean of the gaps is about that of the squares times (T^2 - t^2) / unit^2. So each
        round tells T^2; we take the median of the posterior of T under a half-Cauchy prior.
        """
        units = np.array([point.unit for point in points]) ** 2
        weights = units**-2 / np.sum(units**-2)  # the errors of gaps are alike
        gaps, squares = np.array([each.variance for each in sums]).T
        square = max(squares.mean(), _LEAST_SQUARE)
        # A level that is off lets all clients seem apart, by the square of the mean of their z. Far
        # off, gaps are cut, and would not show as much.
        noise = sums[0].noise_std
        shifts = np.array([each.between[0] for each in sums]) ** 2
        gaps = (
            gaps
            - np.minimum(shifts, np.maximum(gaps, 0.0))
            + (self.shape.scales[2] * noise) ** 2
            + _LOST / self.shape.factor**3
        )
        variances = np.array([point.t for point in points]) ** 2
        variance = weights @ (variances + units * gaps / square)
        error = (self.shape.variance_scales[0] * noise / square) ** 2 * (weights**2 @ units**2)
        # A client's own estimate of its squared level has twice the square of its variance.
        own = _SPREADS**2 + 1 / np.mean([point.information for point in points])
        error = error + 2 * own**2 / (self.n_clients * square)
        logs = -((variance - _SPREADS**2) ** 2) / (2 * error) - np.log(error) / 2
        logs -= np.log1p((_SPREADS / _SPREAD) ** 2)
        density = np.exp(logs - logs.max())
        below = np.cumsum(density) - density / 2
        return np.interp(0.5, below / density.sum(), _SPREADS)

    def caveats(self, released, sums):
        """What the released numbers themselves make doubtful."""
        away = np.abs(released.population - self.begin().population) / self.prior_sds
        # Where the rest of most messages is far too long, clipping leaves hardly any pull.
        noise = self.shape.scales[3] * sums[0].noise_std / np.sqrt(len(sums))
        pull = np.mean([each.around[0, 0] for each in sums]) + 2 * noise
        if away[0] < _FAR_LEVEL and away[1:].max(initial=0.0) < _FAR_SLOPE and pull > _LEAST_PULL:
            return ()
        return (
            "the released coefficients are far from what the bounds make plausible, so their "
            "errors may be too small; a smaller feature_bound or a wider rate_range would help, "
            "but a further fit spends its epsilon again.",
        )


def message_stack(stack, outcome):
    """The EffectStack of a RowStack, for messages that depend on no other client.

    Its weights are there even if all are 1, and a lone client has a copy of itself beside it.
    """
    if len(stack.clients) == 1:
        twice: Any = (None if part is None else part.repeat(2, axis=0) for part in stack[1:])
        stack = RowStack(stack.clients, *twice)
    return effect_stack(stack, outcome)._replace(w=np.ascontiguousarray(stack.w.T))


def _centring(means):
    """Matrix (p, p) that takes coefficients to those of features less their means (p,)."""
    matrix = np.eye(len(means))
    matrix[0] += means
    return matrix


def _shrunk(matrix, noise_std, has_level):
    """Mean information (p, p) with noise, shrunk to one that treats all features alike.

    What differs from that counts as far as it exceeds the noise (Ledoit and Wolf's idea). Without
    it, directions of which noise takes the information would have steps of any length.
    """
    p, first = len(matrix), int(has_level)
    typical = max(np.trace(matrix[first:, first:]) / max(p - first, 1), noise_std / np.sqrt(p))
    diagonal = np.full(p, typical)
    if has_level:
        diagonal[0] = max(matrix[0, 0], _LEAST_LEVEL)
    difference = matrix - np.diag(diagonal)
    # Entries off the diagonal have half of its variance each, and occur twice.
    by_noise = (p * (p + 1) / 2 - 1 - first) * noise_std**2
    share = max(0.0, 1 - by_noise / max(np.sum(difference**2), np.finfo(float).tiny))
    scale = np.sqrt(np.multiply.outer(diagonal, diagonal))
    values, vectors = np.linalg.eigh((np.diag(diagonal) + share * difference) / scale)
    return (vectors * np.maximum(values, _LEAST_DIRECTION)) @ vectors.T * scale


def budget_shares(n_rounds):
    """Shares of the budget (mu^2) of every round; they sum to 1."""
    late = n_rounds // 2
    early = n_rounds - late
    return [_FIRST_SHARE / early] * early + [(1 - _FIRST_SHARE) / late] * late


def _client_estimates(table, prior, outcome, released):
    """Every client's own posterior around what was released.

    A client's numbers are the same bits whoever else is in the table, or their last digits would
    tell: rows are not padded to those of others, and a client that is alone in its batch has a copy
    of itself beside it, as sums over the rows of one client are rounded otherwise.
    """
    m, p = table.n_clients, table.columns.shape[1]
    population, t = released.population, released.t
    coefficients, rows = np.tile(population, (m, 1, 1)), np.zeros((m, 1, p))
    for clients, at in client_batches(table.codes, m, CACHED_CELLS // p):
        both = at if len(at) > 1 else at.repeat(2, axis=0)
        offset = None if table.offset is None else table.offset[both]
        ones = np.ones(both.shape)
        stack = RowStack(clients, table.columns[both], table.y[both], ones, offset)
        view = client_view(effect_stack(stack, outcome), outcome, population, t)
        root = np.sqrt(view.total / (1 + t**2 * view.total))
        own = np.column_stack([t * view.effects, (root * view.centre).T])[: len(at)]
        # A client whose rows overflow keeps the population.
        own[~np.isfinite(own).all(axis=1)] = 0.0
        coefficients[clients, 0, 0] += own[:, 0]
        rows[clients, 0] = own[:, 1:]
    known = prior.known_covariance(1)
    ratio, covariance = np.zeros((p, p)), np.array([[t**2]]) if known is None else known
    ratio[0, 0] = t**2
    return GlmmEstimates(
        population[None],
        released.covariance,
        np.ones((1, p), dtype=bool),
        coefficients,
        RowPosterior(rows, ratio, 1.0, released.covariance, np.ones(p)),
        prior.with_values(population[:1], covariance),
        covariance,
        outcome,
        np.nan,  # the likelihood of the exact rows is not released
        0,
        converged=True,
        modes_found=True,
        separating=(),
    )


def private_link_report(params, n_clients, mechanism, seeded, caveats, names):
    """Report of all rounds; `names` are attributes that are released, and those that are not."""
    facts = {
        **mechanism.facts(),
        "mechanism": "Gaussian mechanism on the sum over clients of bounded messages, in each of "
        f"{params.n_rounds} rounds, rounded to a grid; noise_std is that of all rounds together",
        "accountant": "exact: rounds of Gaussian noise compose to one Gaussian release",
    }
    return private_report(
        facts,
        n_clients=n_clients,
        seeded=seeded,
        caveats=caveats,
        relation="replace_one",
        rounds=params.n_rounds,
        epsilon_under=mechanism.under_zero_out(_SENSITIVITY / 2),
        released=names[0],
        not_released=names[1],
        assumptions=(
            f"feature_bound = {params.feature_bound:.4g}, rows_cap = {params.rows_cap:.4g} and the "
            "start are the user's, not the data's; the classes are public, and both occur",
            "messages are clipped to norm 1, which is all that privacy rests on",
        ),
    )
