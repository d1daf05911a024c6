"""Tuning constants of the private fits, and how each was chosen.

None of them depends on the data. Privacy rests on the clipping of messages and their noise alone;
of these numbers it needs only that the shares of the budget sum to 1. The others decide how much is
clipped, how much noise an entry has, and how the server reads what was released.

"By trial" means: chosen on simulated and public tables, no script kept. The tests in
`tests/linear_model/private/` (accuracy, coverage and spreads at given epsilon) now protect such a
choice; `benchmarks/private_classes.py` compares the fits of classes but chose no number.
"""

import numpy as np

# Rounds, by trial. Shares of the budget (mu^2) sum to 1.
ROUND_SHARES = (0.05, 0.1, 0.2, 0.65)  # linear; the first rounds only find scales, the last counts
FIRST_SHARE = 0.15  # of classes and counts: all rounds of the first half together
FIRST_SHARE_OF_SLOPES = 0.4  # the same if slopes vary, whose spreads take longer to come near
# Clients over the noise on their sum at which scales of messages were found. With more, clipping is
# the larger error, so scales grow: by a power, up to a limit.
USUAL_CLIENTS = 50.0
LINEAR_GROWTH, LARGEST_LINEAR_FACTOR = 0.25, 3.0
LINK_GROWTH, LARGEST_LINK_FACTOR = 0.5, 4.0

# Limits for refusals and warnings, by judgment.
TOO_NOISY = 0.5  # predicted noise on a variance between clients, over it: fits are refused
TYPICAL_SQUARE = 0.25  # of the information on a coefficient, for that prediction
MOSTLY_NOISE = 0.5  # share of a released number that is noise: the report warns
LOW_RETAINED = 0.6  # share of messages that clipping retains: the report warns below
# Coefficients so many prior sds from the start: the report warns.
FAR_INTERCEPT, FAR_SLOPE = 1.5, 3.0
LEAST_RELIABILITY = 0.5  # of a client's own intercept, over a typical one's: it warns below
MOST_NAMED = 10  # columns that a caveat names
TRUSTED = 4.0  # a released noise variance is used if it exceeds so many sds of its noise

# Limits within which no square overflows or rounds to 0: from the range of floats, no trial.
SMALLEST_BOUND = 1e-50  # feature_bound and target_bound of linear fits, and one over it
LEAST_NOISE = 1e-10  # noise variance over the squared target bound, or the inverse
LARGEST_ENTRY = 1e150  # of a linear row that can be squared
LARGEST_BOUND, LARGEST_CAP, LARGEST_RATE = 1e6, 10**6, 1e4  # of classes and counts
LARGEST_EFFECT = 1e3  # scale of standardized effects: with a tiny known noise they grow without end
LARGEST_FEATURE = 1e30  # times the bound: its fourth power, times anything public, is finite
ROUNDED_VARIANCE = 1e-14  # of a direction, over the largest: below it is rounding
EXPLAINED = 1e-8  # share of a column's length within a client that is rounding
NO_PIVOT = 1e-12  # share of a diagonal entry that is rounding
RIDGE = 1e-9  # of a regression on varying columns, which may be the same within a client
CELLS = 1 << 17  # rows times nodes at a time, which fit the processor's cache

# Linear fits, by trial. Coefficients are in target_bound / feature_bound.
COEFFICIENT_SD = 2.0  # prior of the population's
TYPICAL_SIZE = 1 / 4  # of coefficients, for the first guess of one release
PASSES = 3  # errors depend on the estimates, which depend on the errors
NEARLY_NO_NOISE = 1e-6  # times an untrusted noise variance: clients then follow their own rows
# First sds of residuals and intercepts, and of slopes, in target bounds.
START_SD, START_SLOPE = 1 / 3, 1 / 6
START_WITHIN, START_BETWEEN = 0.5, 2.0  # first squared scales of residuals, in squared bounds
CONSTANT = 2.0  # scale of the message's constant
INTERCEPT_WITHIN, INTERCEPT_BETWEEN = 1.5, 2.6  # scales of residuals, in their standard deviations
CAUTION = 0.5  # standard deviations of the noise that scales add to a variance
# Features are divided so that they have this norm in a typical message. Their mean squares, in
# squared feature bounds, have this prior mean and sd, and count between limits.
FEATURES, SQUARES, SQUARES_SD, LEAST_SQUARES, MOST_SQUARES = 0.5, 0.35, 1.0, 0.125, 4.0
# What errors of slopes add to residuals within clients and of clients: typical squared features, in
# squared feature bounds.
WITHIN_SQUARE, MEAN_SQUARE = 0.15, 0.25
RETAINED, RETAINED_SD = 0.9, 0.2  # prior of the share of messages that clipping retains
LEAST_RETAINED = 0.3  # lower limit of its estimate
SMALLEST_RATIO = 1 / 400  # of t^2 to sigma^2, behind the weights of clients
NODES = 4000  # for the posterior of t^2
EFFECT, FIRST_EFFECT = 2.6, 4.0  # scale of E[z] with three coefficients, and in the first round
INFORMATION = 1.4  # scale of A, per root of the number of coefficients
SLOPES_WITHIN = 2.0  # scale of residuals of a client's own fit, in standard deviations
LEAST_SQUARE = 0.05  # of A_kk, where noise leaves less
FASTEST_FALL = 1 / 30  # of a variance in a round, after which it could not come back

# Clients of classes and counts, by trial.
POINTS = 15  # of the quadrature over z
NEWTON_STEPS = 6  # as many for every client: more for some would depend on who else is there
LONGEST_STEP = 3.0  # in predictors, of Newton's method
# Limits to r E[z] and to the excess r^2 (E[z^2] - 1), times the factor of the scales.
LARGEST_MEAN_EFFECT, LARGEST_EXCESS = 3.0, 6.0
# Typical norms of the parts over the largest ones that rows within the bound can reach.
LINK_WITHIN, LINK_BETWEEN, LINK_BETWEEN_INFORMATION = 0.7, 1.6, 2.3
BETWEEN_SHARE = 0.25  # share of a squared row by which means of clients differ
EXCESS, SQUARE = 5.0, 8.0  # scales of the part for the variances, whose entries are about 1

# Server of classes and counts, by trial; where they start from comes first.
LOG_ODDS_SD = 3.0  # prior of the intercept about 0: reaches base rates of 1 in 400
# Width of rate_range in prior sds of the intercept, and the smallest such sd.
RANGE_SDS, LEAST_INTERCEPT_SD = 4.0, 0.5
# Counts scale information for a rate this share of the range below its top, a quarter of the way to
# the middle: noise on it is then half as large, and hardly more is clipped.
BELOW_TOP = 1 / 8
SLOPE_SD = 2.0  # prior of slopes, in predictors of a row at the feature bound
LONGEST_MOVE = 2 / 3  # of the population in a round, in standard deviations of the prior
SPREAD = 1.0  # scale of the half-Cauchy prior of t, and its start; over the root of d for slopes
# Scale of the prior of a slope's t, over its start. A narrow one holds spreads of slopes down, and
# too small spreads hold slopes near 0.
SLOPE_SPREAD = 3.0
LONGEST_LOG_MOVE = 0.5  # of log t in a round
LONGEST_FACTOR = 2.0  # of the information of a typical client in a round
LEAST_SPREAD = 0.05  # t, in its prior's scale; messages are divided by it
SPREADS = np.linspace(LEAST_SPREAD, 5.0, 2000)  # t, in the same scale
LEAST_OWN = 0.3  # of a client's information on t, over a typical one's: it is about 1
# Slope of the excess in T^2, over squares: .4 to 1.2, less for large spreads and clients of few
# rows. It decides how fast rounds converge.
RESPONSE = 0.8
# Excess lost to clipping, in simulations with factor 1; with factor f it is about .15 / f^3.
CLIPPED_EXCESS = 0.15
LEAST_INFORMATION = 0.3  # per client, which has at least a row or two
LEAST_WITHIN = 0.3  # information within clients, over its noise: some features have none
LEAST_SHARE = 0.5  # of information that stated errors count
LEAST_DIRECTION = 0.1  # information in a direction, over that of a typical one
# Variance of the noise that stated errors count, over its own: it also moves the points of rounds,
# the means of features and t. So that intervals cover .9 or more in simulations.
STATED = 2.5
