"""Parts that all fits of client means share: result, checks, report and table of clients."""

import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_array

from pfl_sklearn._clients import EncodedClients, match_clients, segment_sums
from pfl_sklearn._compat import num_samples
from pfl_sklearn._float_range import check_float_range
from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import ClientIntervals
from pfl_sklearn.base import FitRows
from pfl_sklearn.estimation._variance_components import client_means
from pfl_sklearn.privacy import (
    DiscreteGaussianMechanism,
    GaussianMechanism,
    PrivacyReport,
    PureEvent,
)
from pfl_sklearn.privacy._mechanisms._discrete_gaussian import check_opendp
from pfl_sklearn.privacy._report import private_report
from pfl_sklearn.privacy._spending import gaussian_events

PUBLIC_OF_MEANS = ("population_mean_", "population_mean_std_", "prior_", "noise_variance_", "icc_")
OWN_ESTIMATES = (
    "means_",
    "stds_",
    "shrinkage_",
    "local_means_",
    "clients_",
    "n_samples_per_client_",
)
PRIVATE_OF_MEANS = (*OWN_ESTIMATES, "log_likelihood_")


class PopulationOfMeans(NamedTuple):
    """A prior with its values, and its moments by output; arrays are (d,)."""

    prior: Any
    mean: Floats
    mean_variance: Floats  # of `mean`
    between: Floats
    noise: Floats


class FittedMeans(NamedTuple):
    """A fitted population and its clients."""

    population: PopulationOfMeans
    means: Floats  # (m, d)
    variances: Floats  # (m, d), of `means`
    own: Floats  # (m, d), weights on the clients' own means
    log_likelihood: float = math.nan  # NaN after a release: nobody saw the rows of all clients
    shared: bool = False  # `between` and `noise` are one number for all outputs
    responsibilities: Floats | None = None  # (m, k)
    new_variance: Floats | None = None  # (d,), of a new client's mean; None: from the others
    intervals: ClientIntervals | None = None  # None: normal, from `variances`

    def with_averages(self, averages):
        """The same estimates, with errors that are averaged over the variances."""
        mean_variance, between = self.population.mean_variance, self.population.between
        blended = averages.blended("mean_variance", mean_variance)
        plug_in = np.sqrt(self.variances)
        return self._replace(
            population=self.population._replace(mean_variance=blended),
            variances=averages.blended("variances", self.variances),
            new_variance=averages.blended("new_variance", between + mean_variance),
            intervals=ClientIntervals(averages.mixture, averages.share, self.means, plug_in),
        )


def value_per_output(name, value, d, least=-math.inf):
    """A parameter that is a number or of shape (d,), as an array (d,); at least `least`, or 0."""
    values = np.asarray(value, dtype=float)
    if values.shape not in ((), (1,), (d,)) or not (np.isfinite(values) & (values >= least)).all():
        wanted = "finite" if least < 0 else "finite and non-negative"
        raise ValueError(f"{name} must be {wanted}, a number or of shape ({d},); got {value!r}.")
    return np.broadcast_to(values, (d,)).copy()


def known_noise(noise_variance, d):
    """The given noise variance as an array (d,), or None."""
    if noise_variance is None:
        return None
    return value_per_output("noise_variance", noise_variance, d, least=0.0)


def intraclass_correlation(between, noise):
    """Share (d,) of a row's variance that lies between clients; 0 if the row has no variance."""
    total = between + noise
    # An infinite variance between clients leaves no share for the rows.
    finite = (total != 0) & ~np.isinf(total)
    return np.divide(between, total, out=np.isinf(total).astype(float), where=finite)


def releases(params):
    """Whether clients release their means, privately or quantized."""
    return math.isfinite(params.epsilon) or params.mechanism == "quantizer"


def taking_part(participants, ids):
    """Which clients (m,) send something: those named by `participants`, or all for None.

    Ids that the table lacks are passed over, as a fold may lack clients.
    """
    if participants is None:
        return np.ones(len(ids), dtype=bool)
    if isinstance(participants, Set | Mapping):  # NumPy makes one object of them
        participants = list(participants)
    codes = match_clients(participants, num_samples(participants), ids, "participants")
    sends = np.zeros(len(ids), dtype=bool)
    sends[codes[codes >= 0]] = True
    if sends.sum() < 2:  # a single one shows no spread between clients
        raise ValueError(
            f"participants must name at least two clients of the table; got {sends.sum()} of "
            f"{len(ids)}. Give ids as in groups=, or participants=None for all clients."
        )
    return sends


def rows_of(rows, sends):
    """The rows of the clients that send something."""
    if sends.all():
        return rows
    ids, codes = rows.clients
    sent = sends[codes]
    clients = EncodedClients(ids[sends], (np.cumsum(sends) - 1)[codes[sent]])
    return FitRows(rows.y[sent], clients, None if rows.weights is None else rows.weights[sent])


def participation(n_participants, n_clients):
    """What a report assumes where only some clients take part."""
    if n_participants == n_clients:
        return ()
    return (
        f"{n_participants} of {n_clients} clients take part in the fit, a public choice made "
        "without the data; the others send nothing for it",
    )


def check_release(params, sample_weight):
    """Refuse combinations of privacy parameters that no prior supports."""
    private = math.isfinite(params.epsilon)
    if params.mechanism == "quantizer":
        _check_quantizer(params)
    if private and params.clip_norm is None:
        raise ValueError(
            "clip_norm must be given when epsilon is finite: the L2 radius of a ball around "
            "center that holds the client means. Choose it without looking at the data."
        )
    if private and params.delta == 0:  # no Gaussian noise satisfies pure differential privacy
        raise ValueError("delta must be above 0 for the Gaussian mechanism; got 0.")
    if private and params.mechanism == "discrete_gaussian":
        _check_discrete(params)
    if releases(params) and sample_weight is not None:
        raise ValueError(
            "sample_weight is not supported when means are released (finite epsilon or "
            "quantizer): its effect on the sensitivity is not defined."
        )


def check_targets(estimator, y):
    """Observations (n,) or (n, d)."""
    if y is None:
        raise ValueError(
            f"{type(estimator).__name__} requires y to be passed, but the target y is None."
        )
    with np.errstate(over="ignore", invalid="ignore"):  # scikit-learn sums everything first
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y", ensure_min_samples=0)
    if not releases(estimator):  # a refusal would reveal a client's values
        check_float_range("y", y.ravel())
    return y


def bounded_means(rows, params):
    """Statistics of the clients for a release, and its centre (d,).

    No arithmetic is shared between clients.
    """
    centre = value_per_output("center", params.center, rows.y.shape[1])
    ids, codes = rows.clients
    with np.errstate(over="ignore", invalid="ignore"):
        table = client_means(rows.y, codes, len(ids), centre=centre)
    overflows = ~np.isfinite(table.means)
    if overflows.any():  # of the sums. A mean of NaN would count as 0, one of 1e308 is clipped.
        means = segment_sums(rows.y / table.n_rows[codes][:, None], codes, len(ids))
        table = table._replace(means=np.where(overflows, means, table.means))
    return table, centre


def open_report(n_clients, private, facts=None):
    """Report of a fit without protection; `facts` are those of a quantizer."""
    reason = "a quantizer saves communication and protects nobody."
    return PrivacyReport.unprotected(
        "epsilon=inf was asked for." if facts is None else reason,
        **(facts or {}),
        not_released=PUBLIC_OF_MEANS + private,
        n_clients=n_clients,
    )


def local_mechanism(params, sensitivity, width):
    """Mechanism of clients that trust nobody with their messages of `width` coordinates."""
    promise = params.epsilon, params.delta
    if params.mechanism == "discrete_gaussian":
        return DiscreteGaussianMechanism(width, sensitivity, *promise, params.n_bits)
    return GaussianMechanism(sensitivity, *promise, "local")


def release_events(params, zero_out=None):
    """Accounting events of one release of means; `zero_out` is as in ``gaussian_events``."""
    if params.mechanism == "discrete_gaussian":
        # Its exact loss is not that of a Gaussian, so fits compose by their epsilon and delta.
        return (PureEvent(params.epsilon, params.delta, "replace_one"),)
    return gaussian_events(params.epsilon, params.delta, zero_out=zero_out)


def noisy_report(params, facts, private, *, assumptions=(), **entries):
    """Report of a private fit; `entries` are passed to ``private_report``."""
    if params.mechanism == "discrete_gaussian":
        entries["arithmetic"] = (
            "opendp draws the noise exactly, from entropy of the operating system"
        )
    return private_report(
        facts,
        released=PUBLIC_OF_MEANS,
        not_released=private,
        seeded=params._noise_seed is not None,
        assumptions=(
            f"clip_norm = {params.clip_norm:.4g}, center and known variances are the user's, not "
            "the data's",
            *assumptions,
            "noise and sensitivity are in units of the bounds",
        ),
        **entries,
    )


def _check_discrete(params):
    """Refuse what cannot be drawn, or not in `n_bits` even for a message of one coordinate."""
    if params.trust != "local":
        raise ValueError(
            f"mechanism='discrete_gaussian' needs trust='local'; got trust={params.trust!r}. Use "
            "mechanism='gaussian' for central trust."
        )
    check_opendp()
    local_mechanism(params, 2.0, 1)  # more coordinates need more bits: this is the least


def _check_quantizer(params):
    """Refuse a promise that rounding cannot keep, and ask for what it needs."""
    if math.isfinite(params.epsilon):
        raise ValueError(
            f"mechanism='quantizer' claims no privacy and cannot go with epsilon="
            f"{params.epsilon!r}; use epsilon=inf, or mechanism='gaussian'."
        )
    for name in ("n_bits", "clip_norm", "noise_variance"):
        if getattr(params, name) is None:
            raise ValueError(f"{name} must be given for mechanism='quantizer'; got None.")
