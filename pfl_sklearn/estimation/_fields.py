"""Parameters that the estimators of means, proportions and rates have in common."""

from numbers import Integral

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import POSITIVE, parameter
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
PUBLISH = parameter(
    default=None,
    ranges=[StrOptions({"clients"}), None],
    text="""
        "clients" or None
            What the fit releases. None: the population, while every client's own estimate stays
            exact. "clients": every client's estimate too, computed from noised values alone, so
            that the whole table may be published.
    """,
)
BOUNDS = parameter(
    default=None,
    ranges=["array-like", None],
    text="""
        (lower, upper) or None
            Smallest and largest value of a row, in units of `y`; values beyond them are cut. Needed
            with ``publish="clients"``. Choose them without looking at the data: their distance is
            what one row can add to a sum, and the noise grows with it.
    """,
)
GRID = parameter(
    default=None,
    ranges=[POSITIVE, None],
    text="""
        float or None
            Distance of the public values that rows are rounded to with ``publish="clients"``. None:
            the distance of the bounds over 65,536. A coarse grid moves means by up to half a step,
            which intervals do not include.
    """,
)
CLIENTS = parameter(
    default=None,
    ranges=["array-like", None],
    text="""
        array-like of client ids or None
            Public list of the clients to publish, those without rows included. With it, `epsilon`
            also hides that a row is there: its neighbours have one row more or less (the relation
            "add_remove"), the numbers of rows get noise as well, and rows of other clients are left
            out. None: the clients of the table, whose numbers of rows are public, and a neighbour
            has another value in one row ("replace_one").
    """,
)
TARGET = parameter(
    default="population",
    ranges=[StrOptions({"population", "table"})],
    text="""
        {"population", "table"}
            What published estimates and intervals are for: "population", the mean of all rows that
            a client could have; "table", the mean of the rows that are there.
    """,
)
ROWS_PER_PERSON = parameter(
    default=None,
    ranges=[Interval(Integral, 1, None, closed="left"), None],
    text="""
        int or None
            Number of rows (or events) that a person has at most, for the privacy report: a person
            has so many times `epsilon`. None: unknown.
    """,
)
