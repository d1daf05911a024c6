"""Federated mutual learning: own nets and the global one teach each other."""

from functools import partial
from numbers import Real

from pfl_sklearn._compat import Interval
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._mutual import Weights, mutual_steps
from pfl_sklearn.neural_network._pieces import averaged, own_or_global
from pfl_sklearn.neural_network._targets import NeuralClassifierMixin


@with_parameters
class _FedMutual(BaseNeural):
    r"""Federated mutual learning: own nets and the global one teach each other.

    Each follows the labels and the predictions of the other.

    Parameters
    ----------
    %(parameters)s

    Attributes
    ----------
    %(classes)s
    %(net_attributes)s
    %(rounds_attributes)s

    See Also
    --------
    AdaPeDClassifier : distillation with a weight that adapts.

    Notes
    -----
    Algorithm 1 of Shen et al. (2020). Of each batch a sampled client takes a step on
    :math:`\alpha f(\theta) + (1 - \alpha) \, \mathrm{KL}(p_w \| p_\theta)` with its own
    net, and then one on :math:`\beta f(w) + (1 - \beta) \, \mathrm{KL}(p_\theta \| p_w)`
    with its copy w of the global net, at the new :math:`\theta`. Divergences are means over
    the rows of a batch, without a temperature. Own nets start as the global one does. A client
    that never took part has the global net, and one that comes later starts from it. With noise
    it is on the global net alone, as in FedAvg.

    Memory: one vector of parameters for each client; a round needs four for each client of a
    block, and two messages for each sampled client.

    %(common_notes)s

    References
    ----------
    Shen, T., Zhang, J., Jia, X., Zhang, F., Huang, G., Zhou, P., Kuang, K., Wu, F. and Wu, C.
    (2020). Federated mutual learning. arXiv 2006.16765.
    """

    personal_loss: float = parameter(
        default=0.25,
        ranges=[Interval(Real, 0, 1, closed="both")],
        text=r"""
            float in [0, 1]
                Weight of the labels in the loss of a client's own net, :math:`\alpha`; the rest is
                that of the divergence from the global net's predictions. With 1 every client trains
                alone.
            """,
    )
    global_loss: float = parameter(
        default=0.25,
        ranges=[Interval(Real, 0, 1, closed="both")],
        text=r"""
            float in [0, 1]
                The same for a client's copy of the global net, :math:`\beta`, which follows the own
                net's predictions. With 1 the global net is that of FedAvg.
            """,
    )
    _distils = True

    def _method(self, setup):
        weights = Weights(
            own_loss=self.personal_loss,
            own_pull=1 - self.personal_loss,
            global_loss=self.global_loss,
            global_pull=1 - self.global_loss,
            both_teach=True,
        )
        return averaged(setup, partial(mutual_steps, setup, weights), personal=True)

    _nets = staticmethod(own_or_global)


@with_parameters
class FedMutualClassifier(NeuralClassifierMixin, _FedMutual):
    r"""Classification by federated mutual learning: own nets and the global one teach each other.

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
