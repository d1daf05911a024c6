"""Ditto: personal networks that are pulled towards the global one."""

import math
from functools import partial
from numbers import Real

from pfl_sklearn._compat import Interval
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import averaging_method, train
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin


def ditto_steps(setup, proximal, server, t, block):
    """Global networks of a block after their steps, what clients keep, and personal losses."""
    engine, rate, start = setup.engines.client, setup.rates[t], server["global"]
    # The global network first, without a pull: it is FedAvg's, whatever the personal one does.
    shared, _ = train(engine, block, start, rate)
    # Towards the network that the server sent, as in Algorithm 1 of Li et al., not what the client
    # made of it.
    personal, losses = train(
        engine, block, block.personal, rate, proximal, personal=True, towards=start
    )
    return shared, {"personal": personal.array()}, losses


@with_parameters
class _Ditto:
    r"""Ditto: personal networks that are pulled towards the global one.

    The global network is that of FedAvg. Every client also trains a network of its own.

    See Also
    --------
    FedAvg%(kind)s : one global network, fine-tuned by every client.

    Notes
    -----
    Algorithm 1 of Li et al. (2021), with a number of steps in place of epochs, and with equal
    weights. In every round a sampled client takes the steps of FedAvg from the global network w and
    sends what they changed; then it takes as many on its own network v, on the same batches:
    :math:`v \leftarrow (v - \eta g + \eta \lambda w) / (1 + \eta \lambda)`, with `proximal` as
    :math:`\lambda`. The paper steps explicitly, which diverges for :math:`\eta \lambda > 2`.
    Personal networks start as the global one does and go on from round to round. A client that
    never took part has the global network, and one that comes later starts from it. Noise is added
    to the global network alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs six for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Li, T., Hu, S., Beirami, A. and Smith, V. (2021). Ditto: fair and robust federated learning
    through personalization. ICML.
    """

    proximal: float = parameter(
        default=0.2,
        ranges=[Interval(Real, 0, math.inf, closed="both")],
        text="""
            float >= 0
                Weight of half the squared distance between a client's network and the global one,
                by an implicit step. With 0 every client trains alone; with few rows of many classes
                1 is better.
            """,
    )

    _clients_keep = "net"

    def _method(self, setup):
        return averaging_method(setup, partial(ditto_steps, setup, self.proximal))


@with_parameters
class DittoClassifier(NeuralClassifierMixin, _Ditto, BaseNeural):
    r"""Classification by Ditto: a network for each client, pulled towards the global one.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import DittoClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = DittoClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class DittoRegressor(NeuralRegressorMixin, _Ditto, BaseNeural):
    """Regression by Ditto: a network for each client, pulled towards the global one."""
