r"""Private random-intercept models of unknown variances, from a few rounds of noisy moments.

One release of second moments would have noise in proportion to the squared bound on the target,
which hides the variances. So there are four rounds: each sends moments of what is left of the
target after the population of the round before, in units of the standard deviations that round
found. A client with the mean 1, xbar, rbar of its rows sends

    within   w sum_j (x_j - xbar, r_j - rbar) (x_j - xbar, r_j - rbar)' / (n - 1),
    between  a (1, xbar, rbar) (1, xbar, rbar)',

every entry over a public scale, with w = min(1, (n - 1) / its median) and a = 1 / (1 + sigma^2 /
(t^2 n)) from public numbers of rows n. Both together are clipped to norm 1, once: that alone bounds
what a client can change. The matrices are positive semi-definite whatever the rows, and stay so
when they are scaled down, so their inner products are not negative, and a client that is replaced
moves the sum by at most the root of 2.

The recipe was found by trials on simulated and public tables; none of its constants looks at data.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import from_triangle, triangle
from pfl_sklearn.linear_model._private._rounds import round_mechanisms, scale_factor
from pfl_sklearn.privacy import GaussianMechanism
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

_SENSITIVITY = np.sqrt(2)  # of the sum, if a client is replaced; 1 if it sends nothing
# Shares of the budget (mu^2). The first rounds only find scales, and the last one counts.
ROUND_SHARES = (0.05, 0.1, 0.2, 0.65)
# Entries are divided by these: in units of 1, and of standard deviations.
CONSTANT, _WITHIN, _BETWEEN = 2.0, 1.5, 2.6
# Features are divided so that they have this norm in a typical message. Their mean squares, in
# squared feature bounds, have this prior mean and standard deviation, and count between limits.
_FEATURES, _SQUARES, _SQUARES_SD, _LEAST_SQUARES, _MOST_SQUARES = 0.5, 0.35, 1.0, 0.125, 4.0
_CAUTION = 0.5  # standard deviations of the noise that scales of residuals add to a variance
_GROWTH, _LARGEST_FACTOR = 0.25, 3.0  # of scales with many clients: a power, and a limit
# What errors of slopes add to residuals within clients and of clients: typical squared features,
# in squared feature bounds.
_WITHIN_SQUARE, _MEAN_SQUARE = 0.15, 0.25
_START_SD = 1 / 3  # of residuals, and between clients, in target bounds
_COEFFICIENT_SD = 2.0  # prior, in target_bound / feature_bound, as for known variances
_KEPT, _KEPT_SD = 0.9, 0.2  # prior of the share of messages that clipping keeps
_LEAST_KEPT = 0.3
_SMALLEST_RATIO = 1 / 400  # of t^2 to sigma^2, behind the weights of clients
_PASSES = 3  # errors depend on the variances, which depend on the coefficients
_NODES = 4000  # for the posterior of t^2
# The report warns from this noise over a released variance, and below this share of messages.
_LOST, _LOW_SHARE = 0.5, 0.6


class RoundState(NamedTuple):
    """What is public before a round: estimates, and squared scales of residuals."""

    population: np.ndarray  # (p,), the intercept first
    covariance: np.ndarray  # (p, p), of its error
    between: float  # t^2
    noise: float  # sigma^2
    noise_error: float  # standard deviation of the privacy noise on sigma^2
    between_noise: float  # and of that on t^2
    most_kept: float  # share of messages that clipping kept in the round before, at most
    within_scale: float  # of residuals about their client's mean
    between_scale: float  # of clients' mean residuals
    feature_scales: np.ndarray  # (2,), squared, of features about their means, and of the means


class ClientRows(NamedTuple):
    """Rows of a batch of b clients."""

    clients: np.ndarray  # (b,)
    centred: np.ndarray  # (b, k, d + 1), features and target about their means, rotated
    means: np.ndarray  # (b, d + 1)


class Moments(NamedTuple):
    """Released mean moments of q columns and the residual, in the units of the data."""

    gram: np.ndarray  # (q, q), of the columns
    cross: np.ndarray  # (q,), with the residual
    square: float  # of the residual
    units: np.ndarray  # (q + 1,), of a message's columns
    noise_std: float  # of a diagonal entry, in these units; off the diagonal over sqrt(2)
    features: float  # sum of the mean squares of features
    features_noise: float  # standard deviation of the noise on it

    @property
    def square_noise(self):
        """Standard deviation of the noise on the squared residual."""
        return self.noise_std * self.units[-1] ** 2

    def evidence(self, step, variance):
        """Information (q, q) on a step of the coefficients, and score (q,).

        The cross moments less gram times `step` have the noise of both, and sampling errors with
        covariance `variance` times gram.
        """
        columns = self.units[:-1]
        lengths = self.units[-1] ** 2 + np.sum((step * columns) ** 2)
        # In units of the columns, or bounds of 1e50 would be singular.
        both = np.column_stack([self.gram, self.cross]) / columns[:, None]
        error = variance * both[:, :-1] / columns
        error[np.diag_indices(len(columns))] += lengths * self.noise_std**2 / 2
        both = self.gram @ (np.linalg.solve(error, both) / columns[:, None])
        return both[:, :-1], both[:, -1]

    def residual_square(self, step, covariance):
        """Mean squared residual after a step whose error has a covariance (q, q)."""
        # Coefficients that follow the noise leave less than the true ones do: the trace.
        fitted = 2 * step @ self.cross - step @ self.gram @ step
        return self.square - fitted + np.trace(covariance @ self.gram)


class Server(NamedTuple):
    """Public numbers behind the rounds."""

    feature_bound: float
    target_bound: float
    n_features: int
    sizes: np.ndarray  # (m,), rows of every client
    known_noise: float | None  # sigma^2
    factor: float  # of the scales

    @property
    def prior_variances(self):
        """Prior variances (p,) of the coefficients."""
        unit = np.append(1.0, np.full(self.n_features, 1 / self.feature_bound))
        return (_COEFFICIENT_SD * self.target_bound * unit) ** 2

    @property
    def within_weights(self):
        """Weights (m,) of variances within clients: degrees of freedom over their median, cut."""
        return row_weights(self.sizes - 1)

    def between_weights(self, state):
        """Weights (m,) of clients' means: inverse variances, over the largest of them."""
        ratio = state.noise / max(state.between, _SMALLEST_RATIO * state.noise)
        weights = 1 / (1 + ratio / self.sizes)
        return weights / weights.max()

    def units(self, state):
        """Units of the columns and the residual within (d + 1,) and between clients (d + 2,)."""
        within, between = np.outer(
            np.sqrt(self.factor * state.feature_scales), np.ones(self.n_features)
        )
        return (
            np.append(within, np.sqrt(state.within_scale)),
            np.concatenate([[CONSTANT], between, [np.sqrt(state.between_scale)]]),
        )

    def begin(self):
        """The RoundState of the first round."""
        prior, start = self.prior_variances, (_START_SD * self.target_bound) ** 2
        noise = start if self.known_noise is None else self.known_noise
        scales = 0.5 * self.target_bound**2, 2.0 * self.target_bound**2
        features = self._feature_scales([0.0, 0.0], [np.inf, np.inf])
        return RoundState(
            np.zeros(len(prior)), np.diag(prior), start, noise, 0.0, 0.0, 1.0, *scales, features
        )

    def next_state(self, total, state, noise_std):
        """The RoundState after a round with this noisy sum of messages."""
        within, between, most_kept = self._moments(total, state, noise_std)
        step, after = np.zeros(len(state.population)), state
        for _ in range(_PASSES):
            step, covariance = self._step(within, between, step, state, after)
            after = self._variances(within, between, step, covariance, state)
        scales = self._scales(after, covariance, between.square_noise, state)
        return after._replace(
            population=state.population + step,
            covariance=covariance,
            most_kept=most_kept,
            within_scale=scales[0],
            between_scale=scales[1],
            feature_scales=self._feature_scales(
                [within.features, between.features], [within.features_noise, between.features_noise]
            ),
        )

    def _moments(self, total, state, noise_std):
        """Moments within and between clients of a noisy sum, and the most that clipping kept."""
        p = self.n_features + 1
        end, weights = p * (p + 1) // 2, self.between_weights(state).sum()
        within, between = from_triangle(total[:end], p), from_triangle(total[end:], p + 1)
        kept, most_kept = kept_shares(between[0, 0], noise_std, weights)
        units = self.units(state)
        # Without a client of two rows the part within is noise, and nothing uses it.
        whole = kept * max(self.within_weights.sum(), 1.0)
        return (
            _mean_moments(within / whole, units[0], noise_std / whole),
            _mean_moments(between / (kept * weights), units[1], noise_std / (kept * weights), True),
            most_kept,
        )

    def _step(self, within, between, step, before, state):
        """Step of the coefficients (p,) to their posterior mean, and its covariance (p, p).

        Weights are those of the state `before`; errors are those at the variances of `state`.
        """
        prior = 1 / self.prior_variances
        weights = self.between_weights(before)
        # Means of clients have the variance t^2 + sigma^2 / n.
        variances = state.between + state.noise / self.sizes
        share = np.sum(weights**2 * variances) / weights.sum() ** 2
        information, score = between.evidence(step, share)
        information = information + np.diag(prior)
        score = score - prior * before.population
        weights = self.within_weights
        if self.n_features and weights.any():
            share = np.sum(weights**2 / np.maximum(self.sizes - 1, 1)) / weights.sum() ** 2
            own, own_score = within.evidence(step[1:], share * state.noise)
            information[1:, 1:] += own
            score[1:] += own_score
        sds = np.sqrt(self.prior_variances)
        unit = np.multiply.outer(sds, sds)
        covariance = np.linalg.inv(information * unit) * unit
        return covariance @ score, covariance

    def _variances(self, within, between, step, covariance, state):
        """The state with the variances that are left after a step of the coefficients."""
        noise, error = self.known_noise, 0.0
        if noise is None:
            error = within.square_noise
            found = within.residual_square(step[1:], covariance[1:, 1:])
            # Shrinking too little does less harm than too much, so noise must not make it 0.
            noise = float(min(max(found, error), self.target_bound**2))
        weights = self.between_weights(state)
        share = np.sum(weights / self.sizes) / weights.sum()
        found = between.residual_square(step, covariance) - share * noise
        sampling = 2 / len(weights) * (max(found, 0.0) + share * noise) ** 2
        release = np.hypot(between.square_noise, share * error)
        mean = posterior_mean(found, np.sqrt(release**2 + sampling), noise)
        return state._replace(
            between=min(mean, self.target_bound**2),
            noise=noise,
            noise_error=error,
            between_noise=release,
        )

    def _feature_scales(self, squares, noise):
        """Squared scales (2,) of features, from sums of mean squares within and between clients.

        `noise` (2,) has the standard deviations of what is on them.
        """
        bound = self.feature_bound**2
        trust = 1 / (1 + (np.divide(noise, bound) / _SQUARES_SD) ** 2)
        squares = trust * np.divide(squares, bound) + (1 - trust) * _SQUARES
        scales = bound / _FEATURES * np.clip(squares, _LEAST_SQUARES, _MOST_SQUARES)
        # Within, d features share their variance: a matrix that is spread over d directions has
        # the norm of its trace over the root of d.
        return scales / [max(self.n_features, 1) ** 0.5, 1.0]

    def _scales(self, state, covariance, between_noise, before):
        """Squared scales of residuals in the next round, within and between clients."""
        slopes = np.trace(covariance[1:, 1:]) * self.feature_bound**2
        within = state.noise + _CAUTION * state.noise_error + _WITHIN_SQUARE * slopes
        share = np.sum(self.between_weights(before) / self.sizes)
        share /= self.between_weights(before).sum()
        between = state.between + share * state.noise + _CAUTION * between_noise
        between += covariance[0, 0] + _MEAN_SQUARE * slopes
        # The noise falls with the scale: a scale never grows back.
        return (
            min((_WITHIN * self.factor) ** 2 * within, before.within_scale),
            min((_BETWEEN * self.factor) ** 2 * between, before.between_scale),
        )


def _mean_moments(matrix, units, noise_std, has_constant=False):
    """Moments of a noisy matrix (q + 1, q + 1); that of a constant column is known to be 1."""
    matrix = matrix * np.multiply.outer(units, units)
    if has_constant:
        matrix[0, 0] = 1.0
    columns, first = np.multiply.outer(units[:-1], units[:-1]), int(has_constant)
    features = np.trace(matrix[first:-1, first:-1])
    noise = noise_std * np.linalg.norm(units[first:-1] ** 2)
    values, vectors = np.linalg.eigh(matrix[:-1, :-1] / columns)
    gram = (vectors * np.maximum(values, 0.0)) @ vectors.T * columns
    square = float(matrix[-1, -1])
    return Moments(gram, matrix[:-1, -1], square, units, noise_std, float(features), float(noise))


def row_weights(freedom):
    """Weights (m,) of clients' variances: degrees of freedom over their median, cut at 1."""
    several = freedom[freedom > 0]
    if not len(several):
        return np.zeros(len(freedom))
    return np.clip(freedom / np.median(several), 0.0, 1.0)


def kept_shares(found, noise_std, weight):
    """Share of messages that clipping keeps, pulled to what is usual, and the most it may be.

    `found` is the sum over the squared constant, with noise; clipped messages count less in it.
    """
    found, noise = (each * CONSTANT**2 / weight for each in (found, noise_std))
    kept = np.average([found, _KEPT], weights=[noise**-2, _KEPT_SD**-2])
    return float(np.clip(kept, _LEAST_KEPT, 1.0)), float(found + noise)


def posterior_mean(found, std, noise):
    """Posterior mean of t^2, of which `found` is a normal estimate.

    The prior of t^2 / (t^2 + sigma^2) is Beta(1, 1/2): flat near 0, with a long tail for t.
    """
    # Nodes are equally spaced in the angle whose squared sine the ratio is.
    ratio = np.sin((np.arange(_NODES) + 0.5) * np.pi / 2 / _NODES) ** 2
    squares = noise * ratio / (1 - ratio)
    logs = 0.5 * np.log(ratio) - 0.5 * ((found - squares) / std) ** 2
    shares = np.exp(logs - logs.max())
    return float(shares @ squares / shares.sum())


def client_rows(table):
    """ClientRows of all batches of a RotatedTable whose intercept alone varies."""
    batches = []
    for clients, rows in table.batches:
        # As they lie in memory, so that no bit depends on the number of clients in the batch.
        rows = np.ascontiguousarray(rows)
        ones, values = rows[..., -1:], rows[..., 1:-1]
        # Rows that are too large to be squared are absent, and so perhaps all of a client.
        weight = np.maximum(np.sum(ones**2, axis=1), 1.0)
        means = np.sum(values * ones, axis=1) / weight
        batches.append(ClientRows(clients, values - ones * means[:, None], means))
    return batches


def client_messages(rows, state, server):
    """Messages (b, length) of a batch of clients, before they are clipped.

    Both parts are products of a matrix with itself, so that they are positive semi-definite up to
    rounding, whatever the rows are.
    """
    slopes, (within, between) = state.population[1:], server.units(state)
    sizes = server.sizes[rows.clients]
    weights = server.within_weights[rows.clients] / np.maximum(sizes - 1, 1)
    own = _with_residuals(rows.centred, slopes) * np.sqrt(weights)[:, None, None] / within
    means = _with_residuals(rows.means, slopes)
    means[:, -1] -= state.population[0]
    means = np.column_stack([np.ones(len(means)), means]) / between
    means *= np.sqrt(server.between_weights(state)[rows.clients])[:, None]
    return np.concatenate(
        [triangle(own.swapaxes(1, 2) @ own), triangle(means[:, :, None] * means[:, None, :])],
        axis=1,
    )


def _with_residuals(values, slopes):
    """Features and residuals (..., d + 1) of features and targets."""
    residuals = values[..., -1] - np.sum(values[..., :-1] * slopes, axis=-1)
    return np.concatenate([values[..., :-1], residuals[..., None]], axis=-1)


def released_state(table, options):
    """The RoundState after all rounds, their mechanism together, and whether noise has a seed.

    Parameters
    ----------
    table : RotatedTable
        Its intercept alone varies, and is the first column.
    options : FitParameters
    """
    mechanism = release_mechanism(options)
    server = Server(
        options.feature_bound,
        options.target_bound,
        table.n_columns - 1,
        table.sizes,
        options.noise_variance,
        largest_scales(table.n_clients, mechanism),
    )
    rng, seeded = noise_generator(options.random_state)
    with np.errstate(over="ignore", invalid="ignore"):
        batches = client_rows(table)
    clients = [rows.clients for rows in batches]
    state = after_rounds(server, batches, clients, client_messages, mechanism, rng)
    return state, mechanism, seeded


def release_mechanism(options):
    """GaussianMechanism of all rounds together."""
    return GaussianMechanism(_SENSITIVITY, options.epsilon, options.delta)


def largest_scales(n_clients, mechanism):
    """Factor of the scales: the more clients, the less is clipped."""
    return scale_factor(n_clients, mechanism.noise_std, _GROWTH, _LARGEST_FACTOR)


def after_rounds(server, batches, clients, send, mechanism, rng):
    """State of a server after all rounds; ``send(batch, state, server)`` gives messages (b, k).

    `clients` are those of the batches.
    """
    state, m = server.begin(), len(server.sizes)
    # No value is refused: an error would reveal it. A message that is not finite counts as 0.
    with np.errstate(all="ignore"):
        for one in round_mechanisms(mechanism, ROUND_SHARES):
            sent = [send(batch, state, server) for batch in batches]
            messages = np.empty((m, sent[0].shape[1]))
            for members, part in zip(clients, sent, strict=True):
                messages[members] = part
            total = one.release(messages, one.start(), m, rng).total
            state = server.next_state(total, state, one.noise_multiplier)
    return state


def round_caveats(state, names):
    """What the released numbers themselves make doubtful; `names` are those of what varies."""
    again, found = "but a further fit spends its epsilon again.", []
    if state.noise_error > _LOST * state.noise:
        found.append(
            "the released variances are mostly noise, so clients are shrunk by a guess; a smaller "
            f"target_bound would help, or noise_variance, {again}"
        )
    lost = np.atleast_1d(state.between_noise > _LOST * state.between)
    if lost.any():
        which = ", ".join(name for name, each in zip(names, lost, strict=True) if each)
        found.append(
            f"noise has more than half of the released variance between clients of {which}: it "
            "may be none at all; a smaller target_bound would help, or a GaussianPrior with a "
            f"covariance, {again}"
        )
    if state.most_kept < _LOW_SHARE:
        found.append(
            f"clipping kept less than {_LOW_SHARE} of the messages, so variances may be too small; "
            f"a larger feature_bound or target_bound would help, {again}"
        )
    return tuple(found)
