"""Parameters that the estimators of means, proportions and rates have in common."""

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import parameter
from pfl_sklearn._variance_averaging import UNCERTAINTIES

UNCERTAINTY = parameter(
    default="full",
    ranges=[StrOptions(UNCERTAINTIES)],
    text="""
        {"full", "plug_in"}
            Whether `stds_`, `population_mean_std_` and intervals include that the parameters of the
            prior were estimated. "plug_in" takes the estimates as known, which makes intervals of
            few clients too short. "full" applies to Gaussian, beta and gamma priors without a
            release; private fits of proportions and rates always include it.
    """,
)
PARTICIPANTS = parameter(
    default=None,
    ranges=["array-like", None],
    text="""
        array-like of client ids or None
            Clients from which the population is estimated, at least two; None: all. The others send
            nothing; they receive the population and combine it with their own rows. Choose
            participants without looking at the data, because who takes part is public. Ids that the
            table lacks are ignored.
    """,
)
