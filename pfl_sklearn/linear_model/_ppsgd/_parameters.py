"""Parameters of the steps of PPSGD and of the model, and what they mean."""

import math
from numbers import Real

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, POSITIVE, parameter, with_parameters

_OF_THE_SOLUTION = r"""
            float or None
                :math:`\|z^*\|_\alpha` of the solution and :math:`\sigma_{tot,\alpha}`, for
                "theory".
            """


@with_parameters
class StepParameters:
    """What clients and the server do in a round of PPSGD, and by how much."""

    alpha: float | str = parameter(
        default="auto",
        ranges=[Interval(Real, 0, math.inf, closed="both"), StrOptions({"auto"})],
        text="""
            float in [0, inf] or "auto"
                How much is learned globally: 0 fits local models only, inf a global model only.
                Both models take equal steps at ``alpha * n_clients * client_fraction == 1``; "auto"
                makes the global step 30 times a local one, so that this product is 30. The notes
                say what the paper's figures and its authors' code call alpha.
            """,
    )
    learning_rate: float | str = parameter(
        default="auto",
        ranges=[POSITIVE, StrOptions({"auto", "theory"})],
        text="""
            float, "theory" or "auto"
                Learning rate, on an average gradient, of the model that takes the larger step;
                `alpha` sets the ratio. Without noise, "auto" looks at the data: features are
                centred and scaled inside (sparse ones only scaled), w starts at the best constant,
                and the step is the inverse curvature of an average round. Clients whose batches are
                too steep for it take smaller local steps. Given `clip_norm`, features stay as they
                are. "theory" is the step of Theorems 4.5 and 5.2 for `smoothness`, and for
                `solution_norm` and `gradient_std` if they are given. With noise and without
                `clip_norm`, the number is how far w may move in a round, and "auto" sets it from
                public numbers alone; see the notes. With noise and `clip_norm`, "auto" is refused.
            """,
    )
    batch_size: int | None = parameter(
        default=10,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int or None
                Rows of a client in a round, at most all it has. None uses all rows. A client's rows
                are used in turn, so none is used twice before all others were used once.
            """,
    )
    weighting: str = parameter(
        default="samples",
        ranges=[StrOptions({"samples", "clients"})],
        text="""
            {"samples", "clients"}
                Which average loss is minimized: over rows (Algorithm 2, messages are sums over a
                batch) or over clients (Algorithm 3, messages are means over a batch).
            """,
    )
    average: bool = parameter(
        default=False,
        ranges=["boolean"],
        text="""
            bool
                Return the average of the iterates over rounds, which the theorems are about,
                instead of the last iterate.
            """,
    )
    fit_intercept: bool = parameter(
        default=True,
        ranges=["boolean"],
        text="""
            bool
                Add a column of ones. Its gradient is clipped together with the others.
            """,
    )
    shuffle: bool = parameter(
        default=True,
        ranges=["boolean"],
        text="""
            bool
                Put each client's rows in random order first. Otherwise they are used as they come.
            """,
    )
    smoothness: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float or None
                Bound L on the curvature of a row's loss in both models together, for "theory". For
                the squared loss it is twice the largest squared norm of a row of `X`, intercept
                included.
            """,
    )
    solution_norm: float | None = parameter(
        default=None, ranges=[POSITIVE, None], text=_OF_THE_SOLUTION
    )
    gradient_std: float | None = parameter(
        default=None, ranges=[POSITIVE, None], text=_OF_THE_SOLUTION
    )
