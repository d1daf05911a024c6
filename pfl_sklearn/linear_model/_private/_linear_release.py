"""Linear regressions whose population comes from noisy sums of bounded moments.

With known variances there is one release; `_private_variances` has the rounds that estimate them.

A first pass over the rows reduces them twice: clipped messages for the release, and exact rotated
rows for the posterior of their own client. Nothing after it reads a row. Clients share the release
and nothing else. Columns are in the order of the prior.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._clients import encode_clients
from pfl_sklearn._parallel import map_batches
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._design import column_names, resolve_design
from pfl_sklearn.linear_model._mixed._gaussian._closed_form import fit_without_pooling
from pfl_sklearn.linear_model._mixed._reduction import (
    MixedModelEstimates,
    RotatedTable,
    column_facts,
    original_rows,
    rotate,
    row_batches,
    row_parts,
    sum_of_clients,
)
from pfl_sklearn.linear_model._private._linear_population import (
    LARGEST_ENTRY,
    PublicSizes,
    ReleasedPopulation,
    client_posteriors,
    estimate_population,
)
from pfl_sklearn.linear_model._private._linear_slopes import check_slopes, released_slopes
from pfl_sklearn.linear_model._private._linear_variances import (
    ROUND_SHARES,
    released_state,
    round_caveats,
)
from pfl_sklearn.linear_model._private._rounds import rounds_report
from pfl_sklearn.privacy import GaussianMechanism, PrivacyReport, RegressionMoments, gdp_epsilon
from pfl_sklearn.privacy._mechanisms._noise import noise_generator
from pfl_sklearn.privacy._report import private_report
from pfl_sklearn.privacy._spending import UNPROTECTED, gaussian_events

_UNTRUSTED_NOISE = (
    "The released noise variance is lost in the privacy noise, so every client keeps its own "
    "regression. Give noise_variance, tighter bounds or a larger epsilon."
)
_SMALLEST_BOUND = 1e-50  # squared ratios of smaller bounds overflow
_LEAST_NOISE = 1e-10  # noise variance over the squared target bound, or the inverse


class PrivateTable(NamedTuple):
    """What a private fit keeps of the rows of m clients."""

    shape: RegressionMoments  # of the messages
    total: np.ndarray | None  # (length,), sum of clipped messages; None if rows need not be read
    exact: RotatedTable  # of which a client's part goes into its own posterior alone

    @property
    def sizes(self):
        """Rows (m,) of every client."""
        return self.exact.sizes


def check_release_parameters(prior, options, sample_weight):
    """Raise ValueError if the parameters allow no private fit; no data is touched."""
    if type(prior).__name__ != "GaussianPrior":
        raise ValueError(
            f"prior={prior!r} does not go with a finite epsilon; expected a GaussianPrior."
        )
    for name, what in (("feature_bound", "L2 norm of a row of X"), ("target_bound", "absolute y")):
        if getattr(options, name) is None:
            raise ValueError(
                f"{name} must be given when epsilon is finite: a bound on the {what}. Rows beyond "
                "it are scaled down. Choose it without looking at the data."
            )
        if not _SMALLEST_BOUND <= getattr(options, name) <= 1 / _SMALLEST_BOUND:
            raise ValueError(
                f"{name} must lie between {_SMALLEST_BOUND:g} and {1 / _SMALLEST_BOUND:g}; got "
                f"{getattr(options, name)!r}. Rescale the data."
            )
    if options.delta == 0:  # no scale of Gaussian noise gives pure differential privacy
        raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")
    if sample_weight is not None:
        raise ValueError(
            "sample_weight is not supported when epsilon is finite: its effect on the sensitivity "
            "is undefined."
        )


class PublicNumbers(NamedTuple):
    """What decides on a private fit besides its parameters; a RotatedTable has it, too."""

    n_columns: int
    n_random: int
    random_intercept: bool
    sizes: np.ndarray  # (m,), rows of every client; empty if they are not public

    @property
    def n_clients(self):
        """Number m of clients."""
        return len(self.sizes)


def check_public_numbers(params, prior, X, groups):
    """Raise ValueError if too little is known for a private fit; no value of a row is read.

    Ids of clients are, unless their number is protected.
    """
    shape = np.shape(X)
    if len(shape) != 2:
        return  # the check of the data says so
    if not shape[1]:  # bounds and scales of messages are those of features
        raise ValueError(
            f"a private {type(params).__name__} needs features; got X of shape {shape}. Take "
            "GaussianMean for clients' means alone."
        )
    design = resolve_design(params.random, shape[1], params.fit_intercept, column_names(X))
    codes = np.zeros(0 if private_sizes(params) else shape[0], dtype=np.intp)
    if groups is not None and len(codes):
        codes = encode_clients(groups, shape[0]).codes
    check_numbers(params, prior, design, np.bincount(codes))


def check_numbers(params, prior, design, sizes):
    """Raise ValueError if too little is known; sizes (m,) are empty where they are protected."""
    intercept = design.fit_intercept and design.random[0] == 0
    numbers = PublicNumbers(len(design.names), len(design.random), intercept, sizes)
    mean, covariance, _ = _known(numbers, prior, params)
    if _asks_for_variances(prior, numbers.n_clients, params):
        _check_estimable(numbers, prior, params)
    else:
        _check_known(numbers, mean, covariance, params)


def regression_events(prior, params):
    """Accounting events of a fit.

    They must not depend on the data, so we do not know the number of features. The ratio of the two
    sensitivities is largest for one feature under add/remove, and always the same under
    replacement. A release under replacement takes numbers of clients or rows as public, so without
    a unit it protects what the unit contributes.
    """
    if math.isinf(params.epsilon):
        return UNPROTECTED
    if prior.mean is not None:  # a known population: nothing is released
        return ()
    moments = shape_of_messages(1, params.fit_intercept, params)
    # Without a unit: it is gone, or only what it contributes is, where its number is public.
    without = "add_remove" if params.relation == "add_remove" else "zero_out"
    return gaussian_events(
        params.epsilon,
        params.delta,
        replace_one=moments.replace_one_sensitivity / moments.sensitivity,
        **{without: moments.add_remove_sensitivity / moments.sensitivity},
    )


def private_sizes(params):
    """Whether the number of clients is protected: nothing may then depend on it."""
    return params.unit == "client" and params.relation == "add_remove"


def shape_of_messages(n_features, has_intercept, options):
    """Shape of the message of a client or a row."""
    return RegressionMoments(
        n_features,
        options.feature_bound,
        options.target_bound,
        has_intercept,
        options.relation,
        square=options.noise_variance is None,
        sizes=private_sizes(options),
    )


def private_table(design, features, rows, prior, options):
    """PrivateTable of features (n, d); `rows` holds targets and clients.

    No value is refused, as an error would reveal it. A message is clipped whatever it is made of;
    among the exact rows those that are too large to be squared count as absent.
    """
    shape = shape_of_messages(features.shape[1], design.fit_intercept, options)
    original, total = original_rows(design, features, rows.y, None), None
    if sends_messages(prior, len(rows.clients.ids), options):
        total = _sum_of_messages(original, rows.clients, shape, design, options.unit)
    original = original._replace(too_large=LARGEST_ENTRY)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = rotate(original, rows.clients, column_facts(design), keep=True)
    return PrivateTable(shape, total, exact)


def _sum_of_messages(original, clients, shape, design, unit):
    """Sum (length,) of the clipped messages of clients, or of rows."""
    intercept = column_facts(design)[1]
    batches = row_batches(clients, len(design.names) + 2)
    clip = partial(_clip_batch, original=original, shape=shape, intercept=intercept, unit=unit)
    messages = map_batches(clip, batches, 1)
    parts = [(members, part) for (members, _), part in zip(batches, messages, strict=True)]
    return sum_of_clients(parts, len(clients.ids))


def _clip_batch(clients, numbers, original, shape, intercept, unit):
    """Messages (b, length) of a batch of clients whose rows have the given numbers (b, n)."""
    n, messages = numbers.shape[1], 0.0
    # A client's message is the mean over its rows, so its bound does not grow with their number.
    share = 1 / n if unit == "client" else 1.0
    for part in row_parts(numbers, shape.n_features + 2):
        values = original.values(numbers[:, part])
        features, targets = values[..., :-2], values[..., -2]
        if intercept is not None:
            features = np.delete(features, intercept, axis=-1)
        shares = np.full(targets.shape, share)
        # The parts of a client share its inverse number of rows, 1 / n.
        inverse = targets.shape[1] / n / n
        messages = messages + shape.total(features, targets, shares, inverse)
    return messages


def fit_private(table, prior, options, released_names, kept_names):
    """ReleasedPopulation from one release, and the clients' posteriors around it.

    Parameters
    ----------
    table : PrivateTable
    prior : GaussianPrior
        Its unknown variances are estimated, if there are several clients.
    options : FitParameters
        `method`, `solver` and their parameters have no effect.
    released_names, kept_names : tuples of str
        Fitted attributes that are released, and those that are not.

    Returns
    -------
    MixedModelEstimates, PrivacyReport
    """
    exact, names = table.exact, (released_names, kept_names)
    mean, covariance, alone = _known(exact, prior, options)
    if mean is not None:
        released = ReleasedPopulation(mean, np.zeros_like(covariance), options.noise_variance, True)
        report = _report_of_nothing(exact.n_clients, options, names)
    elif _asks_for_variances(prior, exact.n_clients, options):
        released, covariance, report = _released_variances(exact, options, names)
    else:
        released, report = _released_population(table, covariance, options, names)
    if not released.trusted:
        warn_caller(_UNTRUSTED_NOISE, UserWarning)
    alone = alone and mean is None
    return _private_estimates(exact, prior, covariance, options, released, alone), report


def _known(table, prior, options):
    """Mean and covariance of the prior, None if unknown, and whether a client is alone."""
    mean, covariance = prior.known_mean(table.n_random), prior.known_covariance(table.n_random)
    # That a client is alone may be said only where the number of clients is public.
    alone = table.n_clients == 1 and not private_sizes(options)
    if covariance is not None and alone and np.isinf(covariance).any():
        covariance = None
    return mean, covariance, alone


def _asks_for_variances(prior, n_clients, options):
    """Whether the variance between clients is to be estimated; it depends on public numbers."""
    # The prior of a fit of a single client has a covariance of NaN.
    return prior.covariance is None and n_clients > 1 and not private_sizes(options)


def sends_messages(prior, n_clients, options):
    """Whether a fit releases one sum of clipped messages, and not rounds of sums or nothing."""
    return prior.mean is None and not _asks_for_variances(prior, n_clients, options)


def _level_only(table):
    """Whether the intercept alone varies."""
    return table.n_random == 1 and table.random_intercept


def _check_estimable(table, prior, options):
    """Raise ValueError if a private fit cannot estimate the variances between clients."""
    all_vary = table.n_random == table.n_columns and prior.covariance_type == "diag"
    level_only = _level_only(table)
    if not (level_only or all_vary) or options.unit == "row" or prior.mean is not None:
        raise ValueError(
            "with a finite epsilon and several clients, either the prior needs a finite "
            "covariance, as GaussianPrior(covariance=...), or its variances are estimated: that "
            "takes unit='client', no known mean, and random='intercept', or random='all' with "
            "covariance_type='diag'."
        )
    noise, square = options.noise_variance, options.target_bound**2
    if noise is not None and not _LEAST_NOISE * square <= noise <= square / _LEAST_NOISE:
        raise ValueError(
            f"noise_variance must lie between {_LEAST_NOISE * square:.4g} and "
            f"{square / _LEAST_NOISE:.4g} for target_bound={options.target_bound!r}; got {noise!r}."
        )
    if not level_only:
        check_slopes(table, options)
        return
    if options.noise_variance is None and not (table.sizes > 1).any():
        raise ValueError(
            "noise_variance must be given when every client has one row: it is not told apart from "
            "the variance between clients."
        )


def _check_known(table, mean, covariance, options):
    """Raise ValueError if too little, or too much, is known about the population."""
    protected = private_sizes(options)
    if (protected or table.n_clients > 1) and (covariance is None or np.isinf(covariance).any()):
        when = "relation='add_remove'" if protected else "several clients"
        raise ValueError(
            f"with {when} and a finite epsilon the prior needs a finite covariance, as "
            f"GaussianPrior(covariance=...); got {covariance}."
        )
    several_rows = table.n_clients > 1 and options.unit == "row"
    if several_rows and options.relation == "add_remove" and mean is None:
        raise ValueError(
            "unit='row' with relation='add_remove' is for one client; with several, the standard "
            "errors of the population need their numbers of rows, which only "
            "relation='replace_one' takes as public."
        )
    everything = covariance is not None and options.noise_variance is not None
    if mean is not None and not (everything and table.n_random == table.n_columns):
        raise ValueError(
            "a prior with a known mean goes with a finite epsilon only if nothing has to be "
            "released: give its covariance and noise_variance too, with random='all', or no mean."
        )


def _released_population(table, covariance, options, names):
    """Fitted population and privacy report."""
    exact, shape = table.exact, table.shape
    sizes = _public_sizes(exact.sizes, options)
    # One mechanism for all moments at once: two would have to share the epsilon.
    rng, seeded = noise_generator(options.random_state)
    mechanism = GaussianMechanism(shape.sensitivity, options.epsilon, options.delta)
    noisy = shape.split(mechanism.privatize(table.total, rng), mechanism.noise_std)
    between = np.zeros((exact.n_columns,) * 2)
    if covariance is not None:
        between[: exact.n_random, : exact.n_random] = covariance
    order = _message_order(exact)
    between = between[np.ix_(order, order)]
    population = estimate_population(noisy, shape, sizes, between, options.noise_variance)
    report = _release_report(
        exact.n_clients, shape, mechanism, options, sizes, noisy, seeded, names
    )
    back = np.argsort(order)
    mean, covariance = population.mean[back], population.covariance[np.ix_(back, back)]
    return population._replace(mean=mean, covariance=covariance), report


def _released_variances(exact, options, names):
    """Fitted population, covariance between clients (q, q), and privacy report."""
    fit = released_state if _level_only(exact) else released_slopes
    state, mechanism, seeded = fit(exact, options)
    population = ReleasedPopulation(state.population, state.covariance, state.noise, True)
    report = rounds_report(
        mechanism,
        "summed moments of the clients within and between them",
        len(ROUND_SHARES),
        f"{_bounds_of(options)} are the user's, not the data's",
        names,
        moved=1.0,
        n_clients=exact.n_clients,
        seeded=seeded,
        caveats=round_caveats(state, exact.names[: exact.n_random]),
    )
    return population, np.diag(np.atleast_1d(state.between)), report


def _message_order(table):
    """Positions (p,) of the columns, with the intercept (if there is one) first."""
    every = np.arange(table.n_columns)
    if table.intercept is None:
        return every
    return np.concatenate([[table.intercept], np.delete(every, table.intercept)])


def _public_sizes(counts, options):
    """Public facts about the numbers of rows (m,) of the clients."""
    public = options.relation == "replace_one"
    if options.unit == "client":
        if not public:
            return PublicSizes(math.inf, None, None)
        return PublicSizes(len(counts), 1 / len(counts), float(np.mean(1 / counts)))
    n_rows = int(counts.sum())
    share = float(np.sum(counts**2) / n_rows**2)
    return PublicSizes(n_rows if public else math.inf, share, 1.0)


def _private_estimates(table, prior, covariance, options, released, alone):
    """Estimates of the population and of the clients.

    A client that is `alone` keeps its own regression, as there is no other to borrow from.
    """
    q = table.n_random
    if covariance is None:
        covariance = np.full((q, q), np.nan)
    if alone:
        local = fit_without_pooling(table, prior, options, covariance)
        coefficients, posterior = local.coefficients, local.posterior
    else:
        coefficients, posterior = client_posteriors(table, released, covariance)
    return MixedModelEstimates(
        released.mean,
        released.covariance,
        coefficients,
        posterior,
        prior.with_values(released.mean[:q], covariance),
        covariance,
        released.noise,
        math.nan,  # the likelihood of the exact rows is not released
        1,
        True,
    )


def _release_report(n_clients, moments, mechanism, options, sizes, noisy, seeded, names):
    """Report of one release; under add/remove it states no number of rows or clients."""
    public = options.relation == "replace_one"
    n_units = sizes.largest if public else max(noisy.weight, 1.0)
    other = "zero_out" if public else "replace_one"
    moved = moments.add_remove_sensitivity if public else moments.replace_one_sensitivity
    report = private_report(
        {
            **mechanism.facts(),
            "mechanism": "analytic Gaussian mechanism on the summed second moments of the "
            f"{options.unit}s, rounded to a grid",
        },
        n_clients=1,
        seeded=seeded,
        caveats=_delta_caveats(options, n_units),
        unit=options.unit,
        relation=options.relation,
        epsilon_under=((other, gdp_epsilon(moved / mechanism.noise_std, options.delta)),),
        released=names[0],
        not_released=names[1],
        assumptions=(
            f"{_bounds_of(options)} and known variances are the user's, not the data's",
            "noise and sensitivity are those of the moments in units of the bounds",
        ),
    )
    # Rows under add/remove: one client, and its number of rows is not stated.
    n_clients = n_clients if public or options.unit == "row" else None
    return _with_public_numbers(report, public, n_clients=n_clients)


def _bounds_of(options):
    """The bounds, in words."""
    return f"feature_bound = {options.feature_bound:.4g}, target_bound = {options.target_bound:.4g}"


def _report_of_nothing(n_clients, options, names):
    """Report of a fit whose population is known, under the unit and relation of the user."""
    public = options.relation == "replace_one"
    n_clients = n_clients if public else None
    report = PrivacyReport.of_known_population(names[0], names[1], n_clients)
    return _with_public_numbers(report, public, unit=options.unit, relation=options.relation)


def _with_public_numbers(report, public, **changes):
    """The changed report; its first assumption says that numbers of rows and clients are public."""
    assumptions = report.assumptions[0 if public else 1 :]
    return dataclasses.replace(report, assumptions=assumptions, **changes)


def _delta_caveats(options, n_units):
    """Caveat on a delta that would allow publishing a unit."""
    if options.delta <= 1 / n_units:
        return ()
    return (
        f"delta = {options.delta:.3g} is above one over the number of {options.unit}s (about "
        f"{1 / n_units:.3g}), which allows publishing a {options.unit} outright; choose a smaller "
        "delta.",
    )
