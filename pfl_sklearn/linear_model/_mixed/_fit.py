"""Choice of the fit of a linear model: by prior, method and solver, in the open or privately."""

import math
from functools import partial

from pfl_sklearn.linear_model._mixed._gaussian_prior import fit_gaussian_prior
from pfl_sklearn.linear_model._mixed._identified import warn_of_what_is_open
from pfl_sklearn.linear_model._mixed._laplace_prior import fit_laplace_prior
from pfl_sklearn.linear_model._mixed._mixture_prior import fit_mixture_prior
from pfl_sklearn.linear_model._mixed._printed import fit_by_gradient, fit_clustered
from pfl_sklearn.linear_model._mixed._private_release import check_release_parameters, fit_private
from pfl_sklearn.privacy import PrivacyReport

_LIKELIHOOD = ("reml", "ml")
# (prior, method, solver): the fit. Mixtures are fitted by full likelihood, whatever the method.
FITS = {
    **{
        ("GaussianPrior", method, solver): fit_gaussian_prior
        for method in _LIKELIHOOD
        for solver in ("auto", "spectral", "quasi_newton")
    },
    **{("GaussianPrior", method, "gd"): fit_by_gradient for method in _LIKELIHOOD},
    **{("LaplacePrior", method, "auto"): fit_laplace_prior for method in _LIKELIHOOD},
    **{("GaussianMixturePrior", method, "auto"): fit_mixture_prior for method in _LIKELIHOOD},
    **{("DiscretePrior", method, "auto"): fit_mixture_prior for method in _LIKELIHOOD},
    ("GaussianMixturePrior", "printed", "auto"): fit_clustered,
    ("DiscretePrior", "printed", "auto"): fit_clustered,
}


def find_fit(prior, method, solver):
    """Function from a table, a prior and options to estimates.

    Raises ValueError if the prior has no such method or solver.
    """
    name = type(prior).__name__
    if (name, method, solver) in FITS:
        return FITS[name, method, solver]
    pairs = [f"{key[1]}/{key[2]}" for key in FITS if key[0] == name]
    raise ValueError(
        f"method={method!r} with solver={solver!r} does not go with {name}; expected one of the "
        f"pairs {', '.join(pairs)}."
    )


def fit_with_report(fit, prior, release, sample_weight, names):
    """Function from a table, a prior and options to estimates and a privacy report.

    Parameters
    ----------
    fit : callable
        Gives the estimates without privacy.
    prior : prior
    release : ReleaseParameters
    sample_weight : array-like or None
    names : pair of tuples of str
        Fitted attributes that a private fit releases, and those that it does not.

    Raises
    ------
    ValueError
        If `epsilon` is finite and the parameters allow no private fit.
    """
    if math.isfinite(release.epsilon):
        check_release_parameters(prior, release, sample_weight)
        return partial(fit_private, release=release, names=names)
    return partial(_fit_openly, fit, names)


def _fit_openly(fit, names, table, prior, options):
    """Estimates, and a report which says that nothing protects them."""
    estimates = fit(table, prior, options)
    warn_of_what_is_open(table, estimates, options)
    report = PrivacyReport.unprotected(
        "epsilon=inf was asked for.",
        not_released=(*names[0], *names[1]),
        n_clients=table.n_clients,
    )
    return estimates, report
