"""Step sizes of PPSGD's common and personal models, for linear models and for neural networks."""

from typing import NamedTuple

AUTO_RATIO = 30.0  # of the global step to the local ones


class StepSizes(NamedTuple):
    """Step sizes of both models on average gradients.

    `population` multiplies the average gradient over the clients expected in a round, `local` a
    client's average gradient over its own rows, if it has the average number of rows.
    """

    population: float
    local: float


def alpha_of(alpha: float | str, n_expected: float) -> float:
    """Number that `alpha` stands for, with so many clients expected in a round."""
    return AUTO_RATIO / n_expected if alpha == "auto" else float(alpha)


def step_sizes(alpha: float, learning_rate: float, n_expected: float) -> StepSizes:
    """Step sizes of the two models; `learning_rate` is the larger of them.

    With ``a = alpha * n_expected`` they are (a, 1) for a <= 1 and (1, 1 / a) beyond, in units of
    `learning_rate`. In the paper's symbols they are alpha eta and eta / (q N).
    """
    ratio = alpha * n_expected
    return StepSizes(min(ratio, 1.0) * learning_rate, learning_rate / max(ratio, 1.0))
