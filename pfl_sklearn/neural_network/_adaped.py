"""AdaPeD: personal nets near a global one in what they predict, at a distance that is learned."""

import math
from functools import partial
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._docs import fill_doc
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._base import BaseNeural, NeuralClassifierMixin
from pfl_sklearn.neural_network._docs import NEURAL
from pfl_sklearn.neural_network._pieces import Averaging


class Distillation(NamedTuple):
    """Settings of the steps: of psi, of the divergence, and of the global net's own loss.

    Personal nets start from the global one when their client first takes part in round
    `start_round` or later; None: they have their own start.
    """

    psi_init: float
    psi_min: float
    psi_rate: float
    from_global: bool
    global_loss: float
    start_round: int | None


def adaped(setup, settings):
    """The method."""
    engines = setup.engines
    averaging = Averaging(setup.n_expected, setup.divides_by_count)
    kind = engines.client.array_dtype

    def init():
        start = engines.client.start().astype(kind)
        server = {"global": engines.population.start(), "psi": np.array(settings.psi_init)}
        clients = {"personal": np.tile(start, (setup.n_clients, 1))}
        if settings.start_round is not None:
            clients["started"] = np.zeros(setup.n_clients, dtype=bool)
        return server, clients

    def server_update(server, total, t):
        moved = averaging.server_update(server, total, t)
        return {**moved, "psi": np.maximum(moved["psi"], settings.psi_min)}

    return Method(
        init,
        partial(adaped_update, setup, settings, averaging),
        server_update,
        averaging.shapes(**{"global": (engines.population.n_parameters,), "psi": ()}),
        record=lambda server: {"psi": float(server["psi"])},
    )


def adaped_update(setup, settings, averaging, server, t, batch, clients):
    """What the clients of a block changed, and their personal nets."""
    steps = partial(adaped_steps, setup, settings, averaging, server, t)
    return setup.engines.client.run(steps, batch, clients, setup.engines.population)


def adaped_steps(setup, settings, averaging, server, t, block):
    """Local steps of Algorithm 2; each part of a step uses the newest values."""
    (client, population), rate = setup.engines, setup.rates[t]
    kept, before = started(settings, server, t, block.clients), None
    personal = client.models(kept["personal"], block.n_clients)
    shared = population.models(server["global"], block.n_clients)
    psi = personal.values.new_full((block.n_clients,), float(server["psi"]))
    divergence = partial(population.divergence, from_first=settings.from_global)
    for X, y in block.steps():
        outputs, others = personal(X), shared(X)
        losses = client.losses(outputs, y)
        before = losses.detach() if before is None else before
        theirs = population.log_probabilities(others)
        gap = divergence(theirs.detach(), client.log_probabilities(outputs))
        personal.step(losses + gap / (2 * psi), rate)

        own = client.log_probabilities(personal.evaluate(X))
        pull = divergence(theirs, own) / (2 * psi)
        if settings.global_loss:
            pull = pull + settings.global_loss * population.losses(others, y)
        shared.step(pull, rate)

        gap = divergence(population.log_probabilities(shared.evaluate(X)), own)
        psi = psi - settings.psi_rate * (1 / (2 * psi) - gap / (2 * psi**2))
        psi = psi.clamp_min(settings.psi_min)
    change = psi.double().cpu().numpy() - float(server["psi"])
    message = averaging.message(**{"global": shared.change(), "psi": change})
    kept = {**kept, "personal": personal.array()}
    return Update(message, kept, np.asarray(before.cpu(), dtype=np.float64))


def started(settings, server, t, clients):
    """Arrays of a block's clients, of which some start from the global net now."""
    if settings.start_round is None or t < settings.start_round:
        return clients
    personal = clients["personal"].copy()
    personal[~clients["started"]] = server["global"]
    return {"personal": personal, "started": np.ones_like(clients["started"])}


@fill_doc(NEURAL)
class AdaPeDClassifier(NeuralClassifierMixin, BaseNeural):
    r"""Classification by AdaPeD: personal nets that learn from a global net's predictions.

    Every client has a net of its own, which follows its own rows and the predictions of a global
    net. The global net follows the predictions of the personal ones. How close they stay is learned
    as well:

    .. math:: \min_{\theta_{1:m}, \mu, \psi} \sum_i \Bigl( f_i(\theta_i) + \tfrac{1}{2} \log \psi
        + \frac{1}{2 \psi} \mathrm{KL}(p_\mu \| p_{\theta_i}) \Bigr)

    Parameters
    ----------
    %(recipe)s
    %(rounds)s
    psi_init : float > 0, default=4.0
        Where psi starts: the larger it is, the less a personal net is held to the global one.
    psi_min : float > 0, default=0.5
        Floor of psi.
    psi_learning_rate : float >= 0, default=0.05
        Step of psi.
    kd_direction : {"global_to_personal", "personal_to_global"}, default="global_to_personal"
        Which net's probabilities the divergence takes its mean over: the first one's.
    global_loss : float >= 0, default=0.0
        Weight of the clients' losses in the steps of the global net, which is otherwise moved by
        the personal nets' predictions alone.
    personal_start : {"own", "global"}, default="own"
        Where personal nets start: from the initial weights, or from the global net, when their
        client first takes part in round `personal_start_round` or later.
    personal_start_round : int or None, default=None
        First such round, counted from 0; None: three quarters of `n_rounds`.
    psi_clip_norm : float > 0, default=0.1
        Bound of a client's change of psi: `clip_norm` and it are the units of the two parts of a
        message, which is clipped to length 1 in these units.
    %(sampling)s
    %(privacy)s
    %(warm_start)s
    %(checkpoint)s

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Sorted class labels.
    %(net_attributes)s
    %(rounds_attributes)s

    See Also
    --------
    FedAvgClassifier : one global net, fine-tuned by every client.

    Notes
    -----
    This is Algorithm 2 of Ozkara et al. (2023). In each local step, with the newest values of all
    others, the personal net follows its loss plus
    :math:`\mathrm{KL}(p_\mu \| p_\theta) / (2 \psi)`, the client's copy of the global net follows
    the second term, and psi follows :math:`\log(\psi) / 2` plus the second term. Divergences are
    means over the rows of a batch. The listing has clients send the values before their last step;
    ours send those after it. `global_loss` and `personal_start` are not in the paper.

    With noise this is DP-AdaPeD in a form that can be accounted for: local steps are free of noise,
    the changes of the global net and of psi are clipped together, and their sum gets noise once a
    round. Personal nets are not protected, and need not be, because they stay with their clients.

    Memory: one vector of parameters for each client; a round needs six for each client of a block,
    and two messages for each sampled client.

    %(common_notes)s

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import AdaPeDClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = AdaPeDClassifier(random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """

    _own_steps = True

    _parameter_constraints = {
        **BaseNeural._parameter_constraints,
        "psi_init": [Interval(Real, 0, None, closed="neither")],
        "psi_min": [Interval(Real, 0, None, closed="neither")],
        "psi_learning_rate": [Interval(Real, 0, None, closed="left")],
        "kd_direction": [StrOptions({"global_to_personal", "personal_to_global"})],
        "global_loss": [Interval(Real, 0, None, closed="left")],
        "personal_start": [StrOptions({"own", "global"})],
        "personal_start_round": [Interval(Integral, 0, None, closed="left"), None],
        "psi_clip_norm": [Interval(Real, 0, None, closed="neither")],
    }

    def __init__(
        self,
        estimator=None,
        *,
        n_rounds=100,
        local_steps=10,
        psi_init=4.0,
        psi_min=0.5,
        psi_learning_rate=0.05,
        kd_direction="global_to_personal",
        global_loss=0.0,
        personal_start="own",
        personal_start_round=None,
        psi_clip_norm=0.1,
        client_fraction=1.0,
        sampling="poisson",
        epsilon=math.inf,
        noise_multiplier=None,
        delta=1e-5,
        clip_norm=None,
        clip_quantile=None,
        ledger=None,
        warm_start=False,
        checkpoint=None,
        checkpoint_every=10,
        unseen="warn",
        n_jobs=None,
        random_state=None,
    ):
        super().__init__(
            estimator,
            n_rounds=n_rounds,
            local_steps=local_steps,
            client_fraction=client_fraction,
            sampling=sampling,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            clip_norm=clip_norm,
            clip_quantile=clip_quantile,
            ledger=ledger,
            warm_start=warm_start,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            unseen=unseen,
            n_jobs=n_jobs,
            random_state=random_state,
        )
        self.psi_init = psi_init
        self.psi_min = psi_min
        self.psi_learning_rate = psi_learning_rate
        self.kd_direction = kd_direction
        self.global_loss = global_loss
        self.personal_start = personal_start
        self.personal_start_round = personal_start_round
        self.psi_clip_norm = psi_clip_norm

    def _method(self, setup):
        start_round = self.personal_start_round
        if start_round is None:
            start_round = 3 * self.n_rounds // 4
        settings = Distillation(
            self.psi_init,
            self.psi_min,
            self.psi_learning_rate,
            self.kd_direction == "global_to_personal",
            self.global_loss,
            start_round if self.personal_start == "global" else None,
        )
        return adaped(setup, settings)

    def _scales(self):
        if self.clip_norm is None:
            return None
        return {"global": 1.0, "psi": self.psi_clip_norm / self.clip_norm}

    def _personal_models(self, state):
        personal, begun = state.clients["personal"], state.clients.get("started")
        if begun is None or begun.all():
            return personal
        start = state.server["global"].astype(personal.dtype)
        return np.where(begun[:, None], personal, start)
