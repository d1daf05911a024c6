"""QuPeD without quantization: distillation with a fixed weight."""

from functools import partial
from numbers import Real

from pfl_sklearn._compat import Interval
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._mutual import Weights, mutual_steps
from pfl_sklearn.neural_network._pieces import averaged, own_or_global
from pfl_sklearn.neural_network._targets import NeuralClassifierMixin


@with_parameters
class _QuPeD(BaseNeural):
    r"""QuPeD without quantization: distillation with a fixed weight.

    Own nets and the global one follow each other's predictions.

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
    AdaPeDClassifier : the same with a weight that adapts.

    Notes
    -----
    Algorithm 2 of Ozkara et al. (2021) at full precision, which is how the paper on AdaPeD
    compares it. Of each batch a sampled client takes a step on :math:`(1 - \lambda) f(\theta)
    + \lambda \, \mathrm{KL}(p_w \| p_\theta)` with its own net, and then one on
    :math:`\lambda \, \mathrm{KL}(p_w \| p_\theta)` with its copy w of the global net, at
    the new :math:`\theta`. Divergences are means over the rows of a batch, without a
    temperature. Own nets start as the global one does. A client that never took part has the
    global net, and one that comes later starts from it. Noise is added to the global net alone,
    as in FedAvg.

    Memory: one vector of parameters for each client; a round needs four for each client of a
    block, and two messages for each sampled client.

    %(common_notes)s

    References
    ----------
    Ozkara, K., Singh, N., Data, D. and Diggavi, S. (2021). QuPeD: Quantized personalization via
    distillation with applications to federated learning. NeurIPS.
    """

    distillation: float = parameter(
        default=0.25,
        ranges=[Interval(Real, 0, 1, closed="both")],
        text=r"""
            float in [0, 1]
                Weight of the divergence from the global net's predictions in a client's loss,
                :math:`\lambda`. With 0 every client trains alone, and the global net stays as it
                is.
            """,
    )
    _distils = True

    def _method(self, setup):
        share = self.distillation
        weights = Weights(own_loss=1 - share, own_pull=share, global_loss=0.0, global_pull=share)
        return averaged(setup, partial(mutual_steps, setup, weights), personal=True)

    _nets = staticmethod(own_or_global)


@with_parameters
class QuPeDClassifier(NeuralClassifierMixin, _QuPeD):
    r"""Classification by QuPeD: distillation with a fixed weight.

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
