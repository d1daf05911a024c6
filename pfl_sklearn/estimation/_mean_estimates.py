"""Parts that all fits of client means share: their result, and their reading of rows."""

import math
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_array

from pfl_sklearn._client_means import OWN_ESTIMATES
from pfl_sklearn._clients import segment_sums
from pfl_sklearn._float_range import check_float_range
from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import ClientIntervals, blend
from pfl_sklearn.estimation._mean_releases import release_of
from pfl_sklearn.estimation._variance_components import client_means

PUBLIC_OF_MEANS = ("population_mean_", "population_mean_std_", "prior_", "noise_variance_", "icc_")
PRIVATE_OF_MEANS = (*OWN_ESTIMATES, "log_likelihood_")


class PopulationOfMeans(NamedTuple):
    """Fitted prior of the means, with its moments for each output; arrays are (d,)."""

    prior: Any
    mean: Floats
    mean_variance: Floats  # of `mean`
    between: Floats
    noise: Floats


class FittedMeans(NamedTuple):
    """Fitted population, and estimates of its clients' means."""

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
        population, share = self.population, averages.share
        mean_variance, plug_in = population.mean_variance, np.sqrt(self.variances)
        blended = blend(share, averages.mean_variance, mean_variance)
        return self._replace(
            population=population._replace(mean_variance=blended),
            variances=blend(share, averages.variances, self.variances),
            new_variance=blend(share, averages.new_variance, population.between + mean_variance),
            intervals=ClientIntervals(averages.mixture, share, self.means, plug_in),
        )

    def attributes(self, table, one_output):
        """Fitted attributes by name; arrays lose the axis of outputs where `y` has none."""
        flat = (lambda values: values[..., 0][()]) if one_output else (lambda values: values)
        # A variance that all outputs share is a number, however many outputs there are.
        number = one_output or self.shared
        population, noise = self.population, self.population.noise
        icc = _intraclass_correlation(population.between, noise)
        new_variance = self.new_variance
        if new_variance is None:  # as far from the estimated population mean as clients are
            new_variance = np.diag(population.prior.moments()[1]) + population.mean_variance
        attributes = {
            "n_samples_per_client_": table.n_rows,
            "means_": flat(self.means),
            "stds_": flat(np.sqrt(self.variances)),
            "local_means_": flat(table.means),
            "shrinkage_": flat(1 - self.own),
            "prior_": population.prior,
            "noise_variance_": float(noise[0]) if number else noise.copy(),
            "population_mean_": flat(population.mean),
            "population_mean_std_": flat(np.sqrt(population.mean_variance)),
            "_new_client_std": flat(np.sqrt(new_variance)),
            "icc_": float(icc[0]) if number else icc,
            "log_likelihood_": self.log_likelihood,
        }
        optional = {"responsibilities_": self.responsibilities, "_intervals": self.intervals}
        return attributes | {name: each for name, each in optional.items() if each is not None}


def value_per_output(name, value, d, least=-math.inf):
    """Parameter that is a number or of shape (d,), as an array (d,) of at least `least`."""
    values = np.asarray(value, dtype=float)
    if values.shape not in ((), (1,), (d,)) or not (np.isfinite(values) & (values >= least)).all():
        wanted = "finite" if least < 0 else "finite and non-negative"
        raise ValueError(f"{name} must be {wanted}, a number or of shape ({d},); got {value!r}.")
    return np.broadcast_to(values, (d,)).copy()


def known_noise(noise_variance, d):
    """Noise variance that the user gave as an array (d,); None if it is to be estimated."""
    if noise_variance is None:
        return None
    return value_per_output("noise_variance", noise_variance, d, least=0.0)


def _intraclass_correlation(between, noise):
    """Share (d,) of a row's variance that lies between clients; 0 if the row has no variance."""
    total = between + noise
    # An infinite variance between clients leaves no share for the rows.
    finite = (total != 0) & ~np.isinf(total)
    return np.divide(between, total, out=np.isinf(total).astype(float), where=finite)


def check_targets(estimator, y):
    """Validated observations (n,) or (n, d)."""
    estimator._require_targets(y)
    with np.errstate(over="ignore", invalid="ignore"):  # scikit-learn sums everything first
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y", ensure_min_samples=0)
    if release_of(estimator) is None:  # a refusal would reveal a client's values
        check_float_range("y", y.ravel())
    return y


def bounded_means(rows, params):
    """Clients' means for a release, and its centre (d,).

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
