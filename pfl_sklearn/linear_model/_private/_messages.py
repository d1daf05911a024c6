r"""Messages of private fits, and the noise, rounds and reports of their sums.

Nothing of a client reaches the server or another client but its message, which is one of

===================  ===================================  ==========  ===========
message              private fit                          rounds      sensitivity
===================  ===================================  ==========  ===========
moments              linear; variances between clients    1           that of
                     are given                                        the moments
`INTERCEPT_MESSAGE`  linear; the variance of a random     4           root of 2
                     intercept is estimated
`SLOPE_MESSAGE`      linear; the variances of all         4           root of 2
                     coefficients are
`LINK_MESSAGE`       two classes, or counts               `n_rounds`  2
===================  ===================================  ==========  ===========

In rounds the parts of a message are divided by public scales, joined, and clipped together to norm
1: privacy rests on that alone. The server adds up messages and draws noise once a round, of the
same standard deviation for every entry. So the noise on the mean of a part is this standard
deviation over the number of clients, times the scale of the part. Scales and weights come from
public or released numbers. They decide how much is clipped, and how much noise a part has.

A part that is the product of a matrix with itself is positive semi-definite whatever the rows are.
Inner products of messages of such parts are not negative, so replacing a client moves their sum by
at most the root of 2, instead of 2.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import from_triangle, triangle
from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.privacy import (
    ClippedSum,
    GaussianMechanism,
    RegressionMoments,
    gdp_epsilon,
)
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._report import private_report

VECTOR, MATRIX = False, True  # of a symmetric matrix its upper triangle is sent


class Message(NamedTuple):
    """A client's message in one of several rounds.

    A layout has two numbers for every part: its length, or the number of columns of its matrix, and
    the scale of its entries, which may be an array with a scale for each.
    """

    parts: dict  # name of each part, and whether it is a matrix
    sensitivity: float  # of the sum, if a client is replaced; it is 1 if a client sends nothing
    growth: float  # power with which scales grow with the number of clients
    largest_factor: float

    def pack(self, values, layout):
        """Messages (b, length) of b clients, from values (b, k) or (b, k, k) of every part."""
        scaled = []
        for value, is_matrix, (_, scale) in zip(values, self.parts.values(), layout, strict=True):
            scaled.append(triangle(value / scale) if is_matrix else value / scale)
        return np.concatenate(scaled, axis=1)

    def split(self, total, layout):
        """Values (k,) or (k, k) of every part of a noisy sum (length,)."""
        parts = np.split(total, np.cumsum(self.widths(layout))[:-1])
        rows = zip(parts, self.parts.values(), layout, strict=True)
        return [scale * (from_triangle(part, k) if m else part) for part, m, (k, scale) in rows]

    def widths(self, layout):
        """Numbers of entries that the parts take in a message."""
        columns = zip(self.parts.values(), layout, strict=True)
        return [k * (k + 1) // 2 if is_matrix else k for is_matrix, (k, _) in columns]

    def mechanism(self, params):
        """GaussianMechanism of all rounds together."""
        return GaussianMechanism(self.sensitivity, params.epsilon, params.delta)

    def factor(self, n_clients, params):
        """Factor of the scales: with more clients, clipping is the larger error than noise."""
        ratio = n_clients / self.mechanism(params).noise_std / tuned.USUAL_CLIENTS
        return float(np.clip(ratio**self.growth, 1.0, self.largest_factor))


# For a client with n rows and residuals r under the population, 1, xbar and rbar are the means of
# its rows, w its degrees of freedom n - 1 over their median, at most 1, and a the inverse variance
# of rbar over the largest of all clients. `InterceptServer` reads the parts as moments of a
# regression of residuals on features, within and between clients.
INTERCEPT_MESSAGE = Message(
    {
        # w sum_j (x_j - xbar, r_j - rbar) (x_j - xbar, r_j - rbar)' / (n - 1): slopes, sigma^2
        "within": MATRIX,
        # a (1, xbar, rbar) (1, xbar, rbar)': intercept, slopes, t^2; the 1 measures the clipping
        "between": MATRIX,
    },
    np.sqrt(2),
    tuned.LINEAR_GROWTH,
    tuned.LARGEST_LINEAR_FACTOR,
)

# For a client whose standardized effects z ~ N(0, I) have the posterior mean E[z] under the
# population of the round. A = D^1/2 X' V^-1 X D^1/2 is the information of its rows on coefficients
# in units of their standard deviations, with eigenvalues of at most 1, however many rows there are.
# `SlopeServer` reads the population from E[z] and A, the variances from the rest.
SLOPE_MESSAGE = Message(
    {
        "effects": MATRIX,  # (1, E[z]) (1, E[z])'; the 1 measures the clipping
        "information": MATRIX,  # A
        "squared information": MATRIX,  # squares of its entries
        "within": VECTOR,  # w |rows less the client's own least squares|^2 / (n - rank): sigma^2
    },
    np.sqrt(2),
    tuned.LINEAR_GROWTH,
    tuned.LARGEST_LINEAR_FACTOR,
)

# For a client whose effects z ~ N(0, I), of the intercept and maybe some slopes, have the moments
# E[z] and E[z^2], and whose rows have the scores s_j and curvatures v_j, averaged over z; see
# `_link_fit`. C (q, p) are the coefficients of all columns on the varying ones, t the standard
# deviations between clients, T = diag(t), A = I - (I + T Z'VZ T)^-1 the reliability of a client's
# own estimate, and r its standard deviation over t. `LinkServer` reads the first four parts as two
# regressions of scores on information, and the last as variances.
LINK_MESSAGE = Message(
    {
        "score within": VECTOR,  # sum_j s_j (x_j - C'z_j); 0 for what varies, so not sent for it
        "information within": MATRIX,  # sum_j v_j (x_j - C'z_j) (x_j - C'z_j)'
        "score between": VECTOR,  # C' r E[z]
        "information between": MATRIX,  # C' r A r C
        "variances": VECTOR,  # r^2 (E[z^2] - 1), the excess; then squares of r^2 A_kk
    },
    2.0,
    tuned.LINK_GROWTH,
    tuned.LARGEST_LINK_FACTOR,
)


def moments_message(n_features, has_intercept, params):
    """Message of second moments: of scaled rows, or of a client's rows, as RegressionMoments."""
    # Rows are scaled into their bounds first, so this message needs no clipping. Under add/remove
    # it includes the inverse of a client's number of rows, which is not public.
    return RegressionMoments(
        n_features,
        params.feature_bound,
        params.target_bound,
        has_intercept,
        params.relation,
        square=params.noise_variance is None,
        sizes=protects_sizes(params),
    )


def protects_sizes(params):
    """Whether numbers of clients and rows are protected, so that nothing may depend on them."""
    return params.unit == "client" and params.relation == "add_remove"


def clip_eigenvalues(matrix, least=0.0, largest=np.inf):
    """A released matrix with its noisy eigenvalues clipped to limits."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.clip(values, least, largest)) @ vectors.T


def gaussian_score(gram, cross, error):
    """Information (p, p) and score (p,) of coefficients b at 0, if cross ~ N(gram @ b, error)."""
    weighted = np.linalg.solve(error, gram)
    return gram.T @ weighted, weighted.T @ cross


def effect_scale(factor, n_random):
    """Smallest scale of E[z] in a `SLOPE_MESSAGE` message; the entries of all share one bound."""
    return tuned.EFFECT * factor * (n_random / 3) ** 0.25


class LinkShape(NamedTuple):
    """Public numbers behind a `LINK_MESSAGE` message of the columns 1, x_1, ..., x_d.

    Features are in a unit in which a row at their bound has the L2 norm of the root of d.
    """

    n_features: int
    max_rows_per_client: float  # rows beyond which a client's part within is scaled down
    curvature: float  # largest one of a row
    factor: float = 1.0  # of the scales
    n_varying: int = 1
    typical_curvature: float = 1.0  # of a row, over the largest one; scales information

    @property
    def n_fixed(self):
        """Features whose coefficients do not vary."""
        return self.n_features + 1 - self.n_varying

    @property
    def variance_scales(self):
        """Divisors (2,) of the excess of E[z^2], and of squares of the reliability."""
        return self.factor * np.sqrt(self.n_varying) * np.array([tuned.EXCESS, tuned.SQUARE])

    @property
    def scales(self):
        """Divisors of the parts: scores and information within, scores and information between."""
        q, n_fixed = self.n_varying, self.n_fixed
        norm = q + tuned.BETWEEN_SHARE * n_fixed  # squared, of the columns' coefficients C
        within = self.curvature * self.max_rows_per_client
        scales = (
            np.sqrt(within * max(n_fixed, 1)),
            # Spread over d directions, the Frobenius norm is the trace over the root of d.
            tuned.LINK_WITHIN * self.typical_curvature * within * np.sqrt(max(n_fixed, 1)),
            tuned.LINK_BETWEEN * np.sqrt(norm),
            tuned.LINK_BETWEEN_INFORMATION * norm / np.sqrt(q),
        )
        return tuple(self.factor * scale for scale in scales)

    @property
    def layout(self):
        """Layout of the message."""
        p, n_fixed, q = self.n_features + 1, self.n_fixed, self.n_varying
        lengths = n_fixed, n_fixed, p, p, 2 * q
        scales = *self.scales, np.repeat(self.variance_scales, q)
        return list(zip(lengths, scales, strict=True))


# Rounds -------------------------------------------------------------------------------------------


def budget_shares(n_rounds, n_varying):
    """Share of the budget (mu^2) of every round of classes and counts; they sum to 1."""
    # The first half of the rounds only has to come near the solution; the second half is averaged.
    first = tuned.FIRST_SHARE_OF_SLOPES if n_varying > 1 else tuned.FIRST_SHARE
    late = n_rounds // 2
    early = n_rounds - late
    return [first / early] * early + [(1 - first) / late] * late


def run_private_rounds(server, state, send, mechanism, shares, params, columns, what, assumed):
    """State after all rounds, and the report of them together.

    `server` has ``next_state(total, state, noise_std)``, the state after a round with this noisy
    sum of messages, and ``caveats(state, columns)``. ``send(state)`` yields clients and their
    messages (b, length). `mechanism` is that of all rounds together, `shares` are those of its
    budget (mu^2) per round. `columns` are names for caveats; `what` names the messages and
    `assumed` what the user guarantees, for the report.
    """
    rng, seeded = noise_generator(params.random_state)
    # No value is refused, as an error would reveal it. A message that is not finite counts as 0.
    with np.errstate(all="ignore"):
        for share in shares:
            # For Gaussian noise, 1 / noise_std^2 of the rounds add up to the total. Messages
            # have norm 1, so the multiplier is the noise's standard deviation; the mechanism's
            # sensitivity accounts for the replacement of a client.
            release = ClippedSum(1.0, mechanism.noise_std / np.sqrt(share))
            batches = list(send(state))
            messages = np.empty((sum(len(sent) for _, sent in batches), batches[0][1].shape[1]))
            for clients, sent in batches:  # batches are by numbers of rows, messages are by client
                messages[clients] = sent
            total = release.release(messages, release.start(), len(messages), rng).total
            state = server.next_state(total, state, release.noise_multiplier)
        caveats = server.caveats(state, columns)
    facts = {
        **mechanism.facts(),
        "mechanism": f"Gaussian mechanism on the {what}, in each of {len(shares)} rounds, rounded "
        "to a grid; noise_std is that of all rounds together",
        "accountant": "exact: rounds of Gaussian noise compose to one Gaussian release",
    }
    return state, private_report(
        facts,
        n_clients=len(messages),
        seeded=seeded,
        caveats=caveats,
        relation="replace_one",
        rounds=len(shares),
        # Without one client, the sum changes by the norm of its message.
        epsilon_under=mechanism.under_zero_out(1.0),
        assumptions=(
            assumed,
            "messages are clipped to norm 1; privacy rests on nothing else",
        ),
    )


def cut_features(features, bound):
    """Features (n, d) of classes and counts between -1e30 and 1e30 times the feature bound."""
    largest = tuned.LARGEST_FEATURE * bound
    return np.clip(features, -largest, largest)


# Reports ------------------------------------------------------------------------------------------


def moments_report(moments, mechanism, params, n_clients, n_units, seeded):
    """Report of one release of moments; `n_units` is the public or released number of units."""
    # Under add/remove the report gives no number of rows or clients.
    if params.relation == "replace_one":
        other, sensitivity = "zero_out", moments.add_remove_sensitivity
    else:
        other, sensitivity = "replace_one", moments.replace_one_sensitivity
    caveats: tuple[str, ...] = ()
    if params.delta > 1 / n_units:
        caveats = (
            f"delta = {params.delta:.3g} is above one over the number of {params.unit}s (about "
            f"{1 / n_units:.3g}), which allows publishing a {params.unit} outright; choose a "
            "smaller delta.",
        )
    facts = {
        **mechanism.facts(),
        "mechanism": "analytic Gaussian mechanism on the summed second moments of the "
        f"{params.unit}s, rounded to a grid",
    }
    report = private_report(
        facts,
        n_clients=1,  # a caveat of its own counts units
        seeded=seeded,
        caveats=caveats,
        epsilon_under=((other, gdp_epsilon(sensitivity / mechanism.noise_std, params.delta)),),
        assumptions=(
            f"{describe_bounds(params)} and known variances are the user's, not the data's",
            "noise and sensitivity are those of the moments in units of the bounds",
        ),
    )
    # Rows under add/remove: one client, and its number of rows is not stated.
    return set_unit_and_relation(report, params, None if protects_sizes(params) else n_clients)


def set_unit_and_relation(report, params, n_clients):
    """The report under the unit and relation of the user."""
    # Its first assumption says that numbers of rows and clients are public.
    first = 0 if params.relation == "replace_one" else 1
    return dataclasses.replace(
        report,
        unit=params.unit,
        relation=params.relation,
        n_clients=n_clients,
        assumptions=report.assumptions[first:],
    )


def describe_bounds(params):
    """The bounds of a linear fit, for reports."""
    return f"feature_bound = {params.feature_bound:.4g}, target_bound = {params.target_bound:.4g}"


def format_caveat(finding, *remedies):
    """A caveat with its remedies."""
    others = "".join(f", or {remedy}" for remedy in remedies[1:])
    return (
        f"{finding}; {remedies[0]} would help{others}, but a further fit spends its epsilon again."
    )


def variance_caveats(columns, variances, noise, *remedies):
    """Caveats, one or none, on variances (q,) of columns that are mostly noise (q,)."""
    noisy = np.atleast_1d(noise > tuned.MOSTLY_NOISE * variances)
    if not noisy.any():
        return []
    names = list_columns(columns, noisy)
    finding = f"noise is more than half of the released variance between clients of {names}"
    return [format_caveat(f"{finding}: the true variance may be 0", *remedies)]


def list_columns(columns, chosen):
    """Names of the chosen columns, or the first of them and the number of the others."""
    names = [name for name, is_chosen in zip(columns, chosen, strict=False) if is_chosen]
    more = f" and {len(names) - tuned.MOST_NAMED} more" if len(names) > tuned.MOST_NAMED else ""
    return ", ".join(names[: tuned.MOST_NAMED]) + more
