r"""What leaves a client in a private fit, and the noise, the rounds and the report of it.

Nothing of a client reaches the server or another client but its message, which is one of

=============  =====================================  ==========  ===========
message        private fit                            rounds      sensitivity
=============  =====================================  ==========  ===========
moments        linear; variances between clients are  1           that of
               given                                              the moments
`LEVEL`        linear; the variance of a random       4           root of 2
               intercept is estimated
`SLOPES`       linear; the variances of all           4           root of 2
               coefficients are
`LINK`         two classes, or counts                 `n_rounds`  2
=============  =====================================  ==========  ===========

In rounds the parts below are divided by public scales, joined, and clipped together to norm 1: that
alone bounds what a client can change. The server adds up messages and draws noise once a round, of
the same standard deviation for every entry of the message. So the noise on a part is that over the
number of clients, times the scale of the part. Scales and weights come from public or released
numbers; they decide how much is clipped and how much noise a part has, not the privacy.

A part that is the product of a matrix with itself is positive semi-definite whatever the rows are,
and stays so when it is scaled down. Inner products of messages of such parts are not negative, so a
client that is replaced moves their sum by at most the root of 2, and not by 2.
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

    A layout has, for every part, its length, or the number of columns of its matrix, and the scale
    of its entries: a number, or one of each.
    """

    parts: dict  # name of each part, and whether it is a matrix
    sensitivity: float  # of the sum, if one client is replaced; it is 1 if a client sends nothing
    growth: float  # power with which scales grow with the number of clients
    largest_factor: float

    def packed(self, values, layout):
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
        """Factor of the scales: the more clients, the less is clipped, and the more is noise."""
        more = n_clients / self.mechanism(params).noise_std / tuned.USUAL_CLIENTS
        return float(np.clip(more**self.growth, 1.0, self.largest_factor))


# Of a client with n rows, the means 1, xbar, rbar of them (r is what the population leaves of the
# target), the degrees of freedom n - 1 over their median as its weight w, at most 1, and the
# inverse variance of rbar as a, over the largest of all. `LevelServer` reads both as moments of a
# regression, of the residuals on the features within and between clients.
LEVEL = Message(
    {
        # w sum_j (x_j - xbar, r_j - rbar) (x_j - xbar, r_j - rbar)' / (n - 1): slopes, sigma^2
        "within": MATRIX,
        # a (1, xbar, rbar) (1, xbar, rbar)': level, slopes, t^2; the 1 tells what clipping kept
        "between": MATRIX,
    },
    np.sqrt(2),
    tuned.LINEAR_GROWTH,
    tuned.LARGEST_LINEAR_FACTOR,
)

# Of a client whose standardized effects z ~ N(0, I) have the posterior mean E[z] under the
# population of the round, and whose rows have the information A = D^1/2 X' V^-1 X D^1/2 on the
# coefficients in units of their standard deviations: its eigenvalues are at most 1, however many
# rows there are. `SlopeServer` reads the population from E[z] and A, the variances from the rest.
SLOPES = Message(
    {
        "effects": MATRIX,  # (1, E[z]) (1, E[z])'; the 1 tells what clipping kept
        "information": MATRIX,  # A
        "squared information": MATRIX,  # squares of its entries
        "within": VECTOR,  # w |rows less the client's own least squares|^2 / (n - rank): sigma^2
    },
    np.sqrt(2),
    tuned.LINEAR_GROWTH,
    tuned.LARGEST_LINEAR_FACTOR,
)

# Of a client whose effects z ~ N(0, I) of the level and maybe some slopes have E[z] and E[z^2],
# with scores s_j and curvatures v_j of its rows averaged over z; `_link_fit` says how. C (q, p) are
# the coefficients of all columns on the varying ones, A = I - (I + T Z'VZ T)^-1, T the standard
# deviations t between clients, and r the unit of a client's own estimate over t. `LinkServer` reads
# the first four as two regressions of scores on information, and the last as variances. Cuts, and
# what centres columns, are in `_link_fit.client_messages`.
LINK = Message(
    {
        "score within": VECTOR,  # sum_j s_j (x_j - C'z_j); 0 for what varies, so not sent for it
        "information within": MATRIX,  # sum_j v_j (x_j - C'z_j) (x_j - C'z_j)'
        "score between": VECTOR,  # C' r E[z]
        "information between": MATRIX,  # C' r A r C
        "variances": VECTOR,  # r^2 (E[z^2] - 1), the gaps; then squares of r^2 A_kk
    },
    2.0,
    tuned.LINK_GROWTH,
    tuned.LARGEST_LINK_FACTOR,
)


def moments_message(n_features, has_intercept, params):
    """Message of second moments: of scaled rows, or of a client's rows, as RegressionMoments.

    Rows are scaled into their bounds before their moments are taken, so this message is bounded by
    itself. Under add/remove it has the inverse of a client's number of rows, which is not public.
    """
    return RegressionMoments(
        n_features,
        params.feature_bound,
        params.target_bound,
        has_intercept,
        params.relation,
        square=params.noise_variance is None,
        sizes=sizes_are_private(params),
    )


def sizes_are_private(params):
    """Whether numbers of clients and rows are protected: nothing may then depend on them."""
    return params.unit == "client" and params.relation == "add_remove"


def with_eigenvalues(matrix, least=0.0, largest=np.inf):
    """A released matrix whose eigenvalues, which noise has moved, are cut to limits."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.clip(values, least, largest)) @ vectors.T


def evidence(gram, cross, error):
    """Information (p, p) on coefficients and score (p,), if cross ~ N(gram @ them, error)."""
    weighted = np.linalg.solve(error, gram)
    return gram.T @ weighted, weighted.T @ cross


def effect_scale(factor, n_random):
    """Smallest scale of E[z] in a `SLOPES` message; the entries of all share one bound."""
    return tuned.EFFECT * factor * (n_random / 3) ** 0.25


class LinkShape(NamedTuple):
    """Public numbers behind a `LINK` message of the columns 1, x_1, ..., x_d.

    Features are in a unit in which a row at their bound has the L2 norm of the root of d.
    """

    n_features: int
    max_rows_per_client: float  # rows of a client, beyond which its within part is scaled down
    curvature: float  # largest one of a row
    factor: float = 1.0  # of the scales
    n_varying: int = 1
    usual: float = 1.0  # curvature of a row that information is scaled for, over the largest one

    @property
    def n_fixed(self):
        """Features whose coefficients do not vary."""
        return self.n_features + 1 - self.n_varying

    @property
    def variance_scales(self):
        """Divisors (2,) of gaps and squares."""
        return self.factor * np.sqrt(self.n_varying) * np.array([tuned.GAP, tuned.SQUARE])

    @property
    def scales(self):
        """Divisors of the parts: scores and information within, scores and information between."""
        q, n_fixed = self.n_varying, self.n_fixed
        whole = q + tuned.APART * n_fixed  # of the columns' coefficients C, squared
        within = self.curvature * self.max_rows_per_client
        scales = (
            np.sqrt(within * max(n_fixed, 1)),
            # Spread over d directions, the Frobenius norm is the trace over the root of d.
            tuned.LINK_WITHIN * self.usual * within * np.sqrt(max(n_fixed, 1)),
            tuned.LINK_BETWEEN * np.sqrt(whole),
            tuned.LINK_BETWEEN_INFORMATION * whole / np.sqrt(q),
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


def link_shares(n_rounds, n_varying):
    """Shares of the budget (mu^2) of every round of classes and counts; they sum to 1.

    The first half only has to come near; the second half is averaged.
    """
    first = tuned.FIRST_SHARE_OF_SLOPES if n_varying > 1 else tuned.FIRST_SHARE
    late = n_rounds // 2
    early = n_rounds - late
    return [first / early] * early + [(1 - first) / late] * late


def run_rounds(server, state, send, mechanism, shares, params, columns, what, assumed):
    """State after all rounds, and the report of them together.

    Parameters
    ----------
    server : object
        Has ``next_state(total, state, noise_std)``, the state after a round with this noisy sum of
        messages, and ``caveats(state, columns)``.
    state : object
        What is public before the first round.
    send : callable
        Clients and their messages in a round with this state, batch by batch.
    mechanism : GaussianMechanism
        Of all rounds together.
    shares : sequence of float
        Of the budget (mu^2), for every round; they sum to 1.
    params : estimator
    columns : list of str
        Names of the columns, for caveats.
    what : str
        Words for what is summed.
    assumed : str
        What the user stated.
    """
    rng, seeded = noise_generator(params.random_state)
    # No value is refused: an error would reveal it. A message that is not finite counts as 0.
    with np.errstate(all="ignore"):
        for share in shares:
            # Rounds of Gaussian noise add up in 1 / noise_std^2 to the mechanism of all of them.
            # Messages have norm 1, so the multiplier is the noise's standard deviation. That one
            # client may be replaced is in the sensitivity of the mechanism.
            one = ClippedSum(1.0, mechanism.noise_std / np.sqrt(share))
            sent = list(send(state))
            messages = np.empty((sum(len(part) for _, part in sent), sent[0][1].shape[1]))
            for clients, part in sent:  # batches are by numbers of rows, messages are by client
                messages[clients] = part
            total = one.release(messages, one.start(), len(messages), rng).total
            state = server.next_state(total, state, one.noise_multiplier)
        caveats = server.caveats(state, columns)
    described = {
        **mechanism.facts(),
        "mechanism": f"Gaussian mechanism on the {what}, in each of {len(shares)} rounds, rounded "
        "to a grid; noise_std is that of all rounds together",
        "accountant": "exact: rounds of Gaussian noise compose to one Gaussian release",
    }
    return state, private_report(
        described,
        n_clients=len(messages),
        seeded=seeded,
        caveats=caveats,
        relation="replace_one",
        rounds=len(shares),
        # A client that sends nothing moves the sum by the norm of its message.
        epsilon_under=mechanism.under_zero_out(1.0),
        assumptions=(
            assumed,
            "messages are clipped to norm 1, which is all that privacy rests on",
        ),
    )


def cut_features(features, bound):
    """Features (n, d) of classes and counts between -1e30 and 1e30 times the feature bound."""
    largest = tuned.LARGEST_FEATURE * bound
    return np.clip(features, -largest, largest)


# Reports ------------------------------------------------------------------------------------------


def report_of_moments(moments, mechanism, params, n_clients, n_units, seeded):
    """Report of one release of moments; under add/remove it states no number of rows or clients.

    `n_units` is the number of clients or rows, public or released.
    """
    if params.relation == "replace_one":
        other, moved = "zero_out", moments.add_remove_sensitivity
    else:
        other, moved = "replace_one", moments.replace_one_sensitivity
    caveats: tuple[str, ...] = ()
    if params.delta > 1 / n_units:
        caveats = (
            f"delta = {params.delta:.3g} is above one over the number of {params.unit}s (about "
            f"{1 / n_units:.3g}), which allows publishing a {params.unit} outright; choose a "
            "smaller delta.",
        )
    described = {
        **mechanism.facts(),
        "mechanism": "analytic Gaussian mechanism on the summed second moments of the "
        f"{params.unit}s, rounded to a grid",
    }
    report = private_report(
        described,
        n_clients=1,  # a caveat of its own counts units
        seeded=seeded,
        caveats=caveats,
        epsilon_under=((other, gdp_epsilon(moved / mechanism.noise_std, params.delta)),),
        assumptions=(
            f"{bounds_in_words(params)} and known variances are the user's, not the data's",
            "noise and sensitivity are those of the moments in units of the bounds",
        ),
    )
    # Rows under add/remove: one client, and its number of rows is not stated.
    return of_public_numbers(report, params, None if sizes_are_private(params) else n_clients)


def of_public_numbers(report, params, n_clients):
    """The report under the unit and relation of the user.

    Its first assumption says that numbers of rows and clients are public.
    """
    first = 0 if params.relation == "replace_one" else 1
    return dataclasses.replace(
        report,
        unit=params.unit,
        relation=params.relation,
        n_clients=n_clients,
        assumptions=report.assumptions[first:],
    )


def bounds_in_words(params):
    """The bounds of a linear fit, in words."""
    return f"feature_bound = {params.feature_bound:.4g}, target_bound = {params.target_bound:.4g}"


def caveat(what, *remedies):
    """A caveat, and what would help: the first of the remedies, or another."""
    others = "".join(f", or {remedy}" for remedy in remedies[1:])
    return f"{what}; {remedies[0]} would help{others}, but a further fit spends its epsilon again."


def hidden_variances(columns, variances, noise, *remedies):
    """Caveats, one or none, on variances (q,) of columns that noise (q,) hides."""
    lost = np.atleast_1d(noise > tuned.MOSTLY_NOISE * variances)
    if not lost.any():
        return []
    which = ", ".join(name for name, each in zip(columns, lost, strict=False) if each)
    hidden = f"noise has more than half of the released variance between clients of {which}"
    return [caveat(f"{hidden}: it may be none at all", *remedies)]


def listed(columns, chosen):
    """The first of the chosen columns' names, and how many more there are."""
    found = [name for name, each in zip(columns, chosen, strict=False) if each]
    more = f" and {len(found) - tuned.MOST_NAMED} more" if len(found) > tuned.MOST_NAMED else ""
    return ", ".join(found[: tuned.MOST_NAMED]) + more
