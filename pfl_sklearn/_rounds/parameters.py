"""Parameters of every estimator on rounds."""

from numbers import Integral, Real
from os import PathLike
from typing import Any

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import (
    AT_LEAST_ONE,
    BELOW_ONE,
    BETWEEN_0_AND_1,
    NOT_NEGATIVE,
    POSITIVE,
    UNSEEN,
    PrivateFit,
    parameter,
    with_parameters,
)


@with_parameters
class RoundsParameters(PrivateFit):
    """Rounds, samples of clients, how fits run, and privacy, which comes last."""

    n_rounds: int | None = parameter(
        default=100,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int or None
                Rounds of communication. None: ``fit`` goes on until the loss of held-out rows is
                flat, and returns the models with the lowest loss; with noise, 100 rounds.
            """,
    )
    tol: float = parameter(
        default=1e-3,
        ranges=[POSITIVE],
        text="""
            float > 0
                The loss is flat if it fell by less than this share of that of the best constant
                while the rounds doubled. Used with ``n_rounds=None``, as the next two are.
            """,
    )
    max_rounds: int = parameter(
        default=1000,
        ranges=[AT_LEAST_ONE],
        text="""
            int
                Rounds after which ``fit`` ends with a ``ConvergenceWarning`` if the loss is not
                flat.
            """,
    )
    validation_fraction: float = parameter(
        default=0.2,
        ranges=[BELOW_ONE],
        text="""
            float in [0, 1)
                Share of every client's rows that is held out. 0: the loss is that of the training
                rows, and the models overfit small clients.
            """,
    )
    client_fraction: float = parameter(
        default=1.0,
        ranges=[Interval(Real, 0, 1, closed="right")],
        text="""
            float in (0, 1]
                Probability q that a client takes part in a round; with ``sampling="fixed"``, the
                share of the clients that does.
            """,
    )
    sampling: str = parameter(
        default="poisson",
        ranges=[StrOptions({"poisson", "fixed"})],
        text="""
            {"poisson", "fixed"}
                "poisson" samples each client independently. "fixed" draws the same number in every
                round; it costs far more epsilon, because all other clients together know whether
                the last one takes part.
            """,
    )
    drop_fraction: float = parameter(
        default=0.0,
        ranges=[BELOW_ONE],
        text="""
            float in [0, 1)
                Probability that a sampled client fails in a round, independently of all others.
                With noise, noise and epsilon are those of all that were sampled: an upper bound.
            """,
    )
    warm_start: bool = parameter(
        default=False,
        ranges=["boolean"],
        text="""
            bool
                Let ``fit`` continue to `n_rounds` rounds in all, with the noise multiplier that it
                had unless another is given.
            """,
    )
    checkpoint: Any = parameter(
        default=None,
        ranges=[str, PathLike, None],
        text="""
            path or None
                File that ``fit`` writes its state to, continues from if it exists, and removes at
                the end. Parameters, rows, the version of Python and the code of your own modules
                have to be the same. The file holds every client's model and the entropy of the
                noise, so protect it. Use one file for one fit.
            """,
    )
    checkpoint_every: int = parameter(
        default=10,
        ranges=[AT_LEAST_ONE],
        text="""
            int
                Rounds between two writes.
            """,
    )
    unseen: str = UNSEEN
    n_jobs: int | None = parameter(
        default=None,
        ranges=[Integral, None],
        text="""
            int or None
                Workers for the blocks of clients of a round; results are the same bits for any
                number. Other processes get the rows once a fit, and in each round the models of the
                sampled clients, so they pay where a client's steps take longer than a copy of its
                model, as with convolutions. Rounds on sparse `X` stay in this process.
            """,
    )
    random_state = parameter(
        also="It is also the source of the order of rows and of the samples of clients.",
    )
    epsilon = parameter(
        also="""
            It is that of the population model. The noise follows from it and from `delta`,
            `n_rounds` and `client_fraction`. Each call to ``fit`` or ``partial_fit`` spends it.
            Poisson samples protect a client's contribution ("zero_out"), samples of a fixed number
            its whole data ("replace_one").
            """,
    )
    noise_multiplier: float | None = parameter(
        default=None,
        ranges=[NOT_NEGATIVE, None],
        text="""
            float or None
                Standard deviation of the noise on the sum of messages, divided by `clip_norm`. Give
                it instead of `epsilon`.
            """,
    )
    delta = parameter()
    clip_norm: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float or None
                L2 norm that each client's message is clipped to. Choose it without looking at the
                data. It is required with noise. Local models are not clipped.
            """,
    )
    clip_quantile: float | None = parameter(
        default=None,
        ranges=[BETWEEN_0_AND_1, None],
        text="""
            float in (0, 1) or None
                Quantile of the messages' norms that the clipping bound moves towards, starting at
                `clip_norm`. It is estimated from noisy counts, which take their share of the
                budget.
            """,
    )
    ledger = parameter()
