"""What a fit says when its search stopped too early."""

from sklearn.exceptions import ConvergenceWarning

from pfl_sklearn._warnings import warn_caller


def warn_not_converged(estimator, found):
    """Warn if the search of a fit ran out of iterations."""
    if not found.converged:
        warn_caller(
            f"{type(estimator).__name__} did not converge in {found.n_iter} iterations "
            f"(max_iter={estimator.max_iter}, tol={estimator.tol}). Raise max_iter, let fewer "
            "coefficients vary by client (random), or take a simpler covariance_type.",
            ConvergenceWarning,
        )
