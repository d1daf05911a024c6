"""Parameters of local and server steps that all neural estimators have, and what they mean."""

import math
from typing import Any, ClassVar

import numpy as np

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._rounds.privacy import is_private, relation_of_rounds
from pfl_sklearn._rounds.rows import Reshuffled

_FEWEST_ROUNDS = 30  # rounds before the loss may count as flat: AdaPeD's global network lags behind
_FEWEST_OWN_ROUNDS = 10  # of them that a client takes part in


@with_parameters
class TrainingParameters:
    """The recipe of a network, how long clients train it in a round, and the server's step."""

    _equal_clients = ""  # why clients count equally, if they have to
    _further_rates: ClassVar[tuple[str, ...]] = ()  # parameters by which the rounds may diverge
    _plain_server = ""  # why the server takes no steps by an optimizer, if it does not

    estimator: Any = parameter(
        kw_only=False,
        default=None,
        ranges="no_validation",
        text="""
            skorch net or None
                Recipe of the network: a ``skorch.NeuralNetClassifier`` (or ``NeuralNetRegressor``)
                that was not initialized. Its module, criterion, optimizer, ``lr``, ``batch_size``
                (-1: all rows), ``device``, ``predict_nonlinearity`` and ``classes`` are used, and
                two callbacks: an ``LRScheduler`` is stepped once a round, ``GradientNormClipping``
                clips every local gradient. Other options have to keep their defaults. Search it as
                ``estimator__lr`` or ``estimator__module__hidden``. None: a :class:`MLP` of 64
                hidden units.
            """,
    )
    local_steps: int = parameter(
        default=10,
        ranges=[AT_LEAST_ONE],
        text="""
            int >= 1
                Gradient steps of a sampled client in a round, on batches of ``batch_size`` rows of
                the network, or all its rows if it has fewer. Every round starts without momentum.
            """,
    )
    local_epochs: int | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int >= 1 or None
                Passes of a sampled client over its own rows in a round, in place of `local_steps`,
                which has to keep its default: E n / b steps, rounded up, on n rows in batches of b.
                A client's batches of a round are in memory together.
            """,
    )
    weighting: str = parameter(
        default="clients",
        ranges=[StrOptions({"clients", "samples"})],
        text="""
            {"clients", "samples"}
                How the server weighs what clients send: equally, or by their numbers of rows over
                the mean, before messages are clipped. With noise "samples" needs
                ``sampling="poisson"``, and this mean is taken for a public constant.
            """,
    )
    server_optimizer: Any = parameter(
        default=None,
        ranges=[callable, None],
        text="""
            callable or None
                Optimizer of the server: a class of ``torch.optim``, or a ``functools.partial`` of
                one. In each round it takes one step along minus the clients' average change.
                ``partial(torch.optim.SGD, lr=1.0, momentum=0.9)`` is FedAvgM, and
                ``partial(torch.optim.Adam, lr=0.01, eps=1e-3)`` is FedAdam. Its state carries over
                from round to round. None: the server adds the average change.
            """,
    )

    def _check_training(self):
        """Raise ValueError for parameters that exclude each other, or that the method refuses."""
        default = self._fields_of_parameters["local_steps"].default  # type: ignore[attr-defined]
        if self.local_epochs is not None and self.local_steps != default:
            raise ValueError(
                f"got local_epochs={self.local_epochs} and local_steps={self.local_steps}; a round "
                f"has either passes or steps. Leave local_steps={default}, or local_epochs=None."
            )
        self._server_step()
        if self.weighting == "samples":
            self._check_weighting()

    def _check_weighting(self):
        """Raise ValueError if clients cannot count by their numbers of rows."""
        if self._equal_clients:
            raise ValueError(
                "weighting='samples' is not for "
                f"{type(self).__name__}, {self._equal_clients}; give weighting='clients'."
            )
        label_prior = getattr(self, "label_prior", None)
        if label_prior is not None:
            raise ValueError(
                f"got weighting='samples' with label_prior={label_prior!r}, which takes out "
                "label frequencies of clients that count equally; give weighting='clients'."
            )
        communicates = self._communicates  # type: ignore[attr-defined]
        if communicates and is_private(self) and relation_of_rounds(self) != "zero_out":
            # Weights are divided by their mean, and noise in steps is multiplied by them.
            raise ValueError(
                "weighting='samples' with noise takes the clients' numbers of rows for public, but "
                "the noise is to protect a client's whole data; give sampling='poisson' with "
                "noise on sums, which protects a contribution, or weighting='clients'."
            )

    def _server_step(self):
        """How the server steps along an average change; None if it adds the change."""
        if self.server_optimizer is None:
            return None
        if self._plain_server:
            raise ValueError(
                f"server_optimizer has to be None in {type(self).__name__}, {self._plain_server}."
            )
        # Not at the top: it needs torch.
        from pfl_sklearn.neural_network._engine._models import server_step

        return server_step(self.server_optimizer)

    def _rate_advice(self, net, rate):
        """Sentence to give if the rounds diverge; it names the learning rates."""
        rates = [f"the learning rate of the net (lr={rate:.4g})"]
        rates += [f"{name}={getattr(self, name):.4g}" for name in self._further_rates]
        if self.server_optimizer is not None:
            rates.append("that of server_optimizer")
        # The default network has units only where it brings features to a scale by itself.
        scaled = getattr(net.module_, "input_units", None) is not None
        scale = "" if scaled else ", or scale the features"
        return f"lower {' or '.join(rates)}{scale}."

    def _weights(self, n_rows):
        """How much clients with so many rows now count; None if equally."""
        if self.weighting == "clients" or not self._communicates:  # type: ignore[attr-defined]
            return None
        # With mean 1, so that the clip norm and the expected number of clients keep their meaning.
        return n_rows / n_rows[n_rows > 0].mean()

    @property
    def _local_work(self):
        """Steps of a client in a round, and passes over its rows: one of them is 0."""
        return (self.local_steps, 0) if self.local_epochs is None else (0, self.local_epochs)

    @property
    def _batch_size(self):
        """Rows of a batch; None for all rows of a client."""
        size = self._recipe().batch_size  # type: ignore[attr-defined]  # BaseNeural's
        return None if size == -1 else size

    def _fewest_rounds(self, rows):
        """Rounds before which no loss counts as flat."""
        sizes = np.diff(rows.offsets)
        # A client with fewer rows than a batch takes all of them in each step.
        batch_sizes = np.minimum(sizes, self._batch_size or sizes)
        a_pass = np.mean(sizes / batch_sizes / self._batches.batches_of(sizes))
        share = self._participation  # type: ignore[attr-defined]  # BaseRounds'
        return max(_FEWEST_ROUNDS, max(a_pass, _FEWEST_OWN_ROUNDS) / share)

    def _schedule(self, setup):
        """Schedule by which clients take batches of their rows."""
        return self._batches

    @property
    def _batches(self):
        """Batches that a client takes in a round, as their schedule."""
        return Reshuffled(self._batch_size, *self._local_work)

    def _rounds_of_a_pass(self, clients):
        """Rounds in which every row is expected to be used once."""
        # The largest client sets the number; smaller ones go over their rows several times
        # meanwhile.
        most, size = np.bincount(clients.codes).max(), self._batch_size
        n_batches = -(-most // size) if size else 1
        share = self._participation  # type: ignore[attr-defined]  # BaseRounds'
        return math.ceil(n_batches / (self._batches.batches_of(most) * share))
