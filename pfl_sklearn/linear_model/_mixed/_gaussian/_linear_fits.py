"""Which fit of a linear regression goes with a prior, a method and a solver."""

from pfl_sklearn.linear_model._mixed._gaussian._gaussian_prior import fit_gaussian_prior
from pfl_sklearn.linear_model._mixed._gaussian._laplace_prior import fit_laplace_prior
from pfl_sklearn.linear_model._mixed._gaussian._mixture_prior import fit_mixture_prior
from pfl_sklearn.linear_model._printed._adamix import check_noise_is_given, fit_clustered
from pfl_sklearn.linear_model._printed._gradient_descent import fit_by_gradient

_LIKELIHOOD = ("reml", "ml")
# (prior, method, solver): the fit. Mixtures are fitted by full likelihood, whatever the method.
LINEAR_FITS = {
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


def check_fit(prior, method, solver, noise_variance):
    """Raise ValueError if the prior has no such method or solver, or a variance is missing."""
    name = type(prior).__name__
    if (name, method, solver) in LINEAR_FITS:
        if method == "printed":
            check_noise_is_given(noise_variance)
        return
    pairs = [f"{key[1]}/{key[2]}" for key in LINEAR_FITS if key[0] == name]
    raise ValueError(
        f"method={method!r} with solver={solver!r} does not go with {name}; expected one of the "
        f"pairs {', '.join(pairs)}."
    )
