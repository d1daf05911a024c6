"""Per-FedAvg: a global network from which one step leads to every client."""

from functools import partial
from typing import ClassVar

import numpy as np

from pfl_sklearn._parameters import AT_LEAST_ONE, POSITIVE, parameter, with_parameters
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.rows import Reshuffled
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.neural_network._base import BaseNeural, backend
from pfl_sklearn.neural_network._engine._averaging import (
    as_float64,
    averaging_method,
    fine_tuning_phase,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def perfedavg_steps(setup, meta_rate, server, t, block):
    """Global networks of a block after their steps, nothing to keep, and losses (g,) before."""
    models, first = setup.engines.client.models(server["global"], block.n_clients), None
    if setup.base_rate:  # both rates follow a scheduler
        meta_rate = meta_rate * setup.rates[t] / setup.base_rate
    batches = block.steps()
    # One iterator twice: batches come in pairs, one to adapt to and one to judge by. A last one
    # without another, which passes over the rows may leave, is not used.
    for (X, y), (other, target) in zip(batches, batches, strict=False):
        start, outputs = models.copies(), models(X)
        first = models.losses(outputs, y).detach() if first is None else first
        models.learn(outputs, y, setup.rates[t])
        adapted = models.copies()
        models.learn(models(other), target, meta_rate)
        for values, here, there in zip(models.tensors, start, adapted, strict=True):
            # The second step counts from where the first one began, not from where it led.
            values.add_(here - there)
    return models, {}, as_float64(first)


@with_parameters
class _PerFedAvg:
    r"""Per-FedAvg: a global network from which one step leads to every client.

    It is trained for what it becomes after a gradient step on the rows of a client.

    See Also
    --------
    FedAvg%(kind)s : the same without looking ahead.

    Notes
    -----
    Algorithm 1 of Fallah et al. (2020) in its first-order form, which leaves out the Hessian. In
    each of `local_steps` steps a sampled client adapts its copy w on one batch, :math:`u = w -
    \alpha \nabla f(w)`, and moves it along the gradient at u on the next batch: :math:`w \leftarrow
    w - \beta \nabla f(u)`. The two batches have no row in common only if a client has at least
    twice ``batch_size`` rows; one with at most ``batch_size`` rows adapts to and measures on the
    same ones, so give small clients small batches. With `local_epochs` the batches are those of
    twice as many passes; an odd last one is not used. Weight decay is part of both gradients, and
    momentum is refused. After the rounds every client adapts the global network on its own training
    rows (the authors' code uses labelled test rows). With ``n_rounds=None`` the loss is that of the
    global network before it adapts. Noise is added to the global network alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs five for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Fallah, A., Mokhtari, A. and Ozdaglar, A. (2020). Personalized federated learning with
    theoretical guarantees: a model-agnostic meta-learning approach. NeurIPS.
    """

    meta_learning_rate: float = parameter(
        default=0.1,
        ranges=[POSITIVE],
        text=r"""
            float > 0
                Learning rate of the global network, :math:`\beta`, which follows an ``LRScheduler``
                as ``lr`` does. The ``lr`` of the network is that of a client's adaptation,
                :math:`\alpha`. Without the Hessian a large ``lr`` may diverge: the AdaPeD paper
                uses :math:`\alpha = 0.0001` with :math:`\beta = 0.1`.
            """,
    )
    adapt_steps: int = parameter(
        default=1,
        ranges=[AT_LEAST_ONE],
        text="""
            int >= 1
                Gradient steps with which every client adapts the global network to its own rows
                after the rounds. The paper has one, after which clients with few classes each may
                be worse off than alone.
            """,
    )
    _own_steps = True
    _further_rates: ClassVar[tuple[str, ...]] = ("meta_learning_rate",)

    def _check_for_method(self, recipe):
        backend().checks.check_options(recipe, "no momentum")

    def _method(self, setup):
        n_single = int(np.sum(setup.n_rows == 1))
        # A warning with noise would tell how many rows clients have.
        if n_single and not is_private(self):
            warn_caller(
                f"{n_single} of {setup.n_clients} clients have one row, on which they adapt the "
                "net and measure what that did; PerFedAvg needs two rows of a client to tell a net "
                "that adapts well from one that repeats its rows.",
                UserWarning,
            )
        steps = partial(perfedavg_steps, setup, self.meta_learning_rate)
        return averaging_method(setup, steps, last_phase=fine_tuning_phase(setup, self.adapt_steps))

    @property
    def _batches(self):
        n_steps, n_passes = self._local_work  # type: ignore[attr-defined]  # BaseNeural's
        return Reshuffled(self._batch_size, 2 * n_steps, 2 * n_passes)  # type: ignore[attr-defined]


@with_parameters
class PerFedAvgClassifier(NeuralClassifierMixin, _PerFedAvg, BaseNeural):
    r"""Classification by Per-FedAvg: a global network that adapts in one step.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import PerFedAvgClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = PerFedAvgClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class PerFedAvgRegressor(NeuralRegressorMixin, _PerFedAvg, BaseNeural):
    """Regression by Per-FedAvg: a global network that adapts in one step."""
