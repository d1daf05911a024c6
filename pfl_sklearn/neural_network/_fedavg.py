"""FedAvg: clients train the global network, and the server averages what they changed."""

import math
from functools import partial
from numbers import Integral, Real
from typing import Any

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import NOT_NEGATIVE, parameter, with_parameters
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import averaging_method, fine_tuning_phase, train
from pfl_sklearn.neural_network._engine._head import bayes_heads
from pfl_sklearn.neural_network._engine._targets import (
    LABEL_SHARE,
    LabelPriorMixin,
    NeuralRegressorMixin,
)


def fedavg_steps(setup, proximal, server, t, block):
    """Global networks of a block after their steps, nothing to keep, and losses (g,) before.

    The steps are pulled towards the global network by `proximal`.
    """
    models, losses = train(setup.engines.client, block, server["global"], setup.rates[t], proximal)
    return models, {}, losses


@with_parameters
class _FedAvg:
    r"""FedAvg: one global network and, if asked for, personal ones near it.

    In every round each sampled client takes gradient steps on its own rows, from the global
    network. The server adds the average of their changes to the global network.

    See Also
    --------
    LocalNet%(kind)s : networks without communication.

    Notes
    -----
    Algorithm 1 of McMahan et al. (2017), whose epochs and weights are `local_epochs` and
    ``weighting="samples"``. With `proximal` it is FedProx, whose local problem is solved by as many
    steps; the step :math:`\theta \leftarrow (\theta - \eta g + \eta
    \rho w) / (1 + \eta \rho)` is stable for every :math:`\rho`. With noise it is DP-FedAvg: each
    client's change is clipped, and the sum gets noise once. Fine-tuning reveals nothing to others,
    because its results stay with the client.

    Memory: one vector of parameters for each client with `fine_tune_steps`, none without; a round
    needs three for each client of a block, and two messages for each sampled client.

    References
    ----------
    McMahan, H. B., Moore, E., Ramage, D., Hampson, S. and Aguera y Arcas, B. (2017).
    Communication-efficient learning of deep networks from decentralized data. AISTATS.

    Li, T., Sahu, A. K., Zaheer, M., Sanjabi, M., Talwalkar, A. and Smith, V. (2020). Federated
    optimization in heterogeneous networks. MLSys.
    """

    fine_tune_steps: int = parameter(
        default=0,
        ranges=[Interval(Integral, 0, None, closed="left")],
        text="""
            int
                Gradient steps that every client takes on its own rows after the rounds, from the
                global network. With 0 all clients have the global network.
            """,
    )
    proximal: float = parameter(
        default=0.0,
        ranges=[Interval(Real, 0, math.inf, closed="both")],
        text="""
            float >= 0
                Weight of half the squared distance from the global network in a client's loss, by
                an implicit step. Above 0 this is FedProx.
            """,
    )

    def _method(self, setup):
        steps = partial(fedavg_steps, setup, self.proximal)
        return averaging_method(setup, steps, last_phase=self._last_phase(setup))

    def _last_phase(self, setup):
        # Without a phase no client has a vector of its own, which saves the memory of all of them.
        return fine_tuning_phase(setup, self.fine_tune_steps) if self.fine_tune_steps else None


@with_parameters
class FedAvgClassifier(LabelPriorMixin, _FedAvg, BaseNeural):
    r"""Classification by FedAvg: one global network and, if asked for, personal ones near it.

    Attributes
    ----------
    head_variances_ : ndarray of shape (n_clients,)
        Prior variances of the clients' last layers. Only with `head`.

    See Also
    --------
    LocalNetClassifier : networks without communication.
    AdaPeDClassifier : personal networks by distillation.

    Notes
    -----
    With `head` client i has the last layer (W, b) that minimizes

    .. math:: -\sum_j \log p(y_j \mid W h_j + b + o_i)
        + \frac{r}{2 v} \left( u_i^2 |W - W_0|^2 + |b - b_0|^2 \right)

    over its rows j. Here :math:`h_j` is what the last layer of the global network, :math:`(W_0,
    b_0)`, reads in evaluation mode, :math:`u_i` its root mean square, r the number of a class's
    parameters, and :math:`o_i` the log ratio of label frequencies under `label_prior`. So v is the
    prior variance of the change of a row's logit. "bayes" takes the v of largest marginal
    likelihood in Laplace's approximation, 0 or between 1/512 and 4096, from at most 128 random rows
    of each client:

    - Without noise all clients share the v of largest total.
    - With noise each client takes its own v, under a log-normal prior around 1 whose logarithm has
      standard deviation 1.5. It uses its own rows and the released network alone, so this costs no
      privacy.

    The global network was trained on the same rows; where it overfits them, the chosen v is too
    small. The module has to end with a ``torch.nn.Linear`` that gives the logits, or with a softmax
    after it for ``NLLLoss``. A client without rows in ``partial_fit`` keeps how its layer deviates
    from the global one. Memory: the parameters of a last layer for each client.

    References
    ----------
    McMahan, H. B., Moore, E., Ramage, D., Hampson, S. and Aguera y Arcas, B. (2017).
    Communication-efficient learning of deep networks from decentralized data. AISTATS.

    Li, T., Sahu, A. K., Zaheer, M., Sanjabi, M., Talwalkar, A. and Smith, V. (2020). Federated
    optimization in heterogeneous networks. MLSys.

    Rasmussen, C. E. and Williams, C. K. I. (2006). Gaussian processes for machine learning. MIT
    Press. Section 3.5.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import FedAvgClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = FedAvgClassifier(fine_tune_steps=50, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True

    A last layer for every client, and how far it may be from the global one:

    >>> X, y, groups = digits.data[::6], digits.target[::6], digits.groups[::6]
    >>> model = FedAvgClassifier(n_rounds=10, head="bayes", random_state=0)
    >>> model.fit(X, y, groups=groups).head_variances_[:2].round(1)
    array([2.3, 2.3])
    """

    _client_results = {"_heads": "head", "head_variances_": "head_variance"}

    head: Any = parameter(
        default=None,
        ranges=[StrOptions({"bayes"}), NOT_NEGATIVE, None],
        text="""
            None, "bayes" or float >= 0
                Let every client have a last layer of its own, around the global one; see the notes.
                This is the prior variance, and "bayes" chooses it. With 0 all clients have the
                global network, with a large one a layer that follows their own rows alone. Either
                this or `fine_tune_steps`.
            """,
    )
    label_prior_share: float | None = LABEL_SHARE

    def _last_phase(self, setup):
        if self.head is None:
            return super()._last_phase(setup)
        # With noise each client chooses its variance alone: only the released network ties it to
        # others.
        head, private = self.head, is_private(self)
        # One client's rows say little of the variance that all clients of the fit share.
        if head == "bayes" and setup.frozen and not private:
            if not hasattr(self, "head_variances_"):
                raise self._changed_since_fit()
            head = self.head_variances_[0]
        return bayes_heads(setup, head, private)

    @property
    def _needs_probabilities(self):
        return self.head is not None or super()._needs_probabilities

    def _check_parameters(self):
        if self.head is not None and self.fine_tune_steps:
            raise ValueError(
                f"got head={self.head!r} and fine_tune_steps={self.fine_tune_steps}; a client's "
                "net is either tuned or the global one with another last layer. Give one of them."
            )
        super()._check_parameters()


@with_parameters
class FedAvgRegressor(NeuralRegressorMixin, _FedAvg, BaseNeural):
    """Regression by FedAvg: one global network, and if asked for a fine-tuned one for each client.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.neural_network import FedAvgRegressor
    >>> rng = np.random.default_rng(0)
    >>> X, groups = rng.normal(size=(600, 3)), np.repeat(np.arange(20), 30)
    >>> y = np.maximum(X[:, 0], 0) + 0.1 * groups * X[:, 1]
    >>> model = FedAvgRegressor(fine_tune_steps=100, random_state=0).fit(X, y, groups=groups)
    >>> model.score(X, y, groups=groups) > 0.9
    True
    """
