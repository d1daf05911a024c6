"""What a fit says when its search stopped too early."""

from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._warnings import warn_caller


def warn_not_converged(estimator, found, prior=None):
    """Warn if the search of a fit ran out of iterations."""
    if found.converged:
        return
    advice = ["Raise max_iter", "bring the features to like scales"]
    if prior is None or "covariance_type" in prior.get_params(deep=False):
        advice += ["take a simpler covariance_type", "let fewer coefficients vary (random)"]
    warn_caller(
        f"{type(estimator).__name__} did not converge in {found.n_iter} iterations "
        f"(max_iter={estimator.max_iter}, tol={estimator.tol}). {', or '.join(advice)}.",
        ConvergenceWarning,
    )
