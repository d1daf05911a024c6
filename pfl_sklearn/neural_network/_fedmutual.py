"""Networks that teach each other: federated mutual learning, and QuPeD at full precision.

The weights of labels and divergences are fixed; in AdaPeD they adapt.
"""

from functools import partial

from pfl_sklearn._parameters import FROM_0_TO_1, parameter, with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import as_float64, averaging_method, divergence
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin


def mutual_steps(
    setup,
    server,
    t,
    block,
    *,
    personal_loss,
    personal_pull,
    global_loss,
    global_pull,
    both_teach=False,
):
    """Global networks of a block after their steps, what clients keep, and personal losses.

    Each network weighs its loss on labels and its pull, the divergence from the other. With
    `both_teach` the global network takes the personal one's predictions for the truth; otherwise
    its own in both divergences.
    """
    engine, rate, first = setup.engines.client, setup.rates[t], None
    shared = engine.models(server["global"], block.n_clients)
    personal = engine.models(block.personal, block.n_clients)
    for X, y in block.steps():
        outputs, others = block.read(engine, personal(X)), shared(X)
        losses = personal.losses(outputs, y)
        shared_log_p = engine.log_probabilities(block.read(engine, others))
        # Detached: this step moves the personal network alone, and the next one the global one.
        kl = divergence(shared_log_p.detach(), engine.log_probabilities(outputs))
        personal.step(personal_loss * losses + personal_pull * kl, rate)
        first = losses.detach() if first is None else first

        # Of the personal network after its step, and without a graph.
        personal_log_p = engine.log_probabilities(block.read(engine, personal.evaluate(X)))
        kl = divergence(shared_log_p, personal_log_p, from_first=not both_teach)
        # QuPeD's global network follows no labels; an infinite loss with a weight of 0 would be
        # NaN.
        loss = global_pull * kl
        if global_loss:
            loss = loss + global_loss * shared.losses(others, y)
        if global_loss or global_pull:  # else not even weight decay
            shared.step(loss, rate)
    return shared, {"personal": personal.array()}, as_float64(first)


@with_parameters
class FedMutualClassifier(NeuralClassifierMixin, BaseNeural):
    r"""Classification by federated mutual learning: personal and global networks teach each other.

    Each follows the labels and the predictions of the other.

    See Also
    --------
    AdaPeDClassifier : distillation with a weight that adapts.

    Notes
    -----
    Algorithm 1 of Shen et al. (2020). Of each batch a sampled client takes a step on :math:`\alpha
    f(\theta) + (1 - \alpha) \, \mathrm{KL}(p_w \| p_\theta)` with its own network, and then one on
    :math:`\beta f(w) + (1 - \beta) \, \mathrm{KL}(p_\theta \| p_w)` with its copy w of the global
    network, at the new :math:`\theta`. Divergences are means over the rows of a batch, without a
    temperature. A client that never took part has the global network, and one that comes later
    starts from it. Noise is on the global network alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs four for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Shen, T., Zhang, J., Jia, X., Zhang, F., Huang, G., Zhou, P., Kuang, K., Wu, F. and Wu, C.
    (2020). Federated mutual learning. arXiv 2006.16765.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import FedMutualClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = FedMutualClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """

    personal_loss: float = parameter(
        default=0.75,
        ranges=[FROM_0_TO_1],
        text=r"""
            float in [0, 1]
                Weight of the labels in the loss of a client's own network, :math:`\alpha`; the rest
                is that of the divergence from the global network's predictions. With 1 every client
                trains alone. AdaPeD's paper has 0.25, with which networks learn slowly.
            """,
    )
    global_loss: float = parameter(
        default=0.75,
        ranges=[FROM_0_TO_1],
        text=r"""
            float in [0, 1]
                The same for a client's copy of the global network, :math:`\beta`, which follows the
                own network's predictions. With 1 the global network is that of FedAvg.
            """,
    )
    _needs_probabilities = True
    _clients_keep = "net"

    def _method(self, setup):
        steps = partial(
            mutual_steps,
            setup,
            personal_loss=self.personal_loss,
            personal_pull=1 - self.personal_loss,
            global_loss=self.global_loss,
            global_pull=1 - self.global_loss,
            both_teach=True,
        )
        return averaging_method(setup, steps)


@with_parameters
class QuPeDClassifier(NeuralClassifierMixin, BaseNeural):
    r"""Classification by QuPeD: distillation with a fixed weight.

    Personal networks and the global one follow each other's predictions.

    See Also
    --------
    AdaPeDClassifier : the same with a weight that adapts.

    Notes
    -----
    Algorithm 2 of Ozkara et al. (2021) at full precision, which is how the paper on AdaPeD compares
    it. Of each batch a sampled client takes a step on :math:`(1 - \lambda) f(\theta) + \lambda \,
    \mathrm{KL}(p_w \| p_\theta)` with its own network, and then one on :math:`\lambda \,
    \mathrm{KL}(p_w \| p_\theta)` with its copy w of the global network, at the new :math:`\theta`.
    Divergences are means over the rows of a batch, without a temperature. A client that never took
    part has the global network, and one that comes later starts from it. Noise is on the global
    network alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs four for each client of a
    block, and two messages for each sampled client.

    References
    ----------
    Ozkara, K., Singh, N., Data, D. and Diggavi, S. (2021). QuPeD: Quantized personalization via
    distillation with applications to federated learning. NeurIPS.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import QuPeDClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = QuPeDClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """

    distillation: float = parameter(
        default=0.25,
        ranges=[FROM_0_TO_1],
        text=r"""
            float in [0, 1]
                Weight of the divergence from the global network's predictions in a client's loss,
                :math:`\lambda`. With 0 every client trains alone, and the global network stays as
                it is.
            """,
    )
    _needs_probabilities = True
    _clients_keep = "net"

    def _method(self, setup):
        share = self.distillation
        steps = partial(
            mutual_steps,
            setup,
            personal_loss=1 - share,
            personal_pull=share,
            global_loss=0.0,
            global_pull=share,
        )
        return averaging_method(setup, steps)
