"""AdaPeD: personal nets near a global one in what they predict, at a distance that is learned."""

import math
from functools import partial
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._docs import fill_doc
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn.neural_network._base import BaseNeural, Engines, backend
from pfl_sklearn.neural_network._docs import NEURAL
from pfl_sklearn.neural_network._pieces import Averaging, NoisyGradients
from pfl_sklearn.neural_network._targets import LABEL_PRIOR, NeuralClassifierMixin
from pfl_sklearn.privacy._mechanisms._noisy_steps import NoisySteps

_START = 3 / 4  # of the rounds, after which personal nets start from the global one
_GLOBAL, _PSI = 0, 1  # parts of the model that steps through noise move


class Distillation(NamedTuple):
    """Settings of the steps: of psi, of the divergence, and of the global net's own loss.

    Personal nets start from the global one when their client first takes part in round
    `start_round` or later; None: they have their own start. `global_rates` are the learning rates
    of the global net by round.
    """

    psi_init: float
    psi_min: float
    psi_rate: float
    from_global: bool
    global_loss: float
    start_round: int | None
    global_rates: np.ndarray


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
    shared_rate = settings.global_rates[t]
    kept, before = started(settings, server, t, block.clients), None
    personal = client.models(kept["personal"], block.n_clients)
    shared = population.models(server["global"], block.n_clients)
    psi = personal.values.new_full((block.n_clients,), float(server["psi"]))
    divergence = partial(population.divergence, from_first=settings.from_global)
    move_shared, noisy = _steps_of(setup.noisy_steps, shared, block)
    for X, y in block.steps():
        outputs, others = block.read(client, personal(X)), shared(X)
        losses = personal.losses(outputs, y)
        before = losses.detach() if before is None else before
        theirs = population.log_probabilities(block.read(population, others))
        gap = divergence(theirs.detach(), client.log_probabilities(outputs))
        personal.step(losses + gap / (2 * psi), rate)

        own = client.log_probabilities(block.read(client, personal.evaluate(X)))
        pull = divergence(theirs, own) / (2 * psi)
        if settings.global_loss:
            pull = pull + settings.global_loss * shared.losses(others, y)
        move_shared(pull, shared_rate)

        others = block.read(population, shared.evaluate(X))
        gap = divergence(population.log_probabilities(others), own)
        psi = psi - settings.psi_rate * noisy(1 / (2 * psi) - gap / (2 * psi**2))
        psi = psi.clamp_min(settings.psi_min)
    change = psi.double().cpu().numpy() - float(server["psi"])
    message = averaging.message(**{"global": shared.change(), "psi": change})
    kept = {**kept, "personal": personal.array()}
    kept.pop("offset", None)
    return Update(message, kept, np.asarray(before.cpu(), dtype=np.float64))


def _steps_of(noisy_steps, shared, block):
    """How the global nets of a block step, from losses, and what becomes of slopes (g,) of psi."""
    if noisy_steps is None:
        return shared.step, lambda slopes: slopes
    gradients = NoisyGradients(noisy_steps, block.seeds)
    move_shared = partial(shared.step_through, partial(gradients, _GLOBAL))
    return move_shared, lambda slopes: gradients(_PSI, slopes[:, None])[:, 0]


def check_steps(engine, rates):
    """Raise ValueError if noise on gradients does not cover all that a net sends."""
    if engine.moving:
        raise ValueError(
            f"training moves {', '.join(engine.moving)} of the net without a gradient, so "
            "noise='per_step' does not protect it; use noise='per_round', or a module without it."
        )
    if engine.array_dtype.itemsize < 4:
        raise ValueError(
            f"the net computes in {engine.array_dtype}, whose rounding is too coarse for "
            "noise='per_step'; use single or double precision."
        )
    decay = np.abs(rates).max() * engine.optimizer.weight_decay
    if not decay <= 2:
        raise ValueError(
            f"lr times weight_decay of the net is {decay:.4g}, which blows up differences; "
            "noise='per_step' is certified up to 2."
        )


def started(settings, server, t, clients):
    """Arrays of a block's clients, of which some start from the global net now."""
    if settings.start_round is None or t < settings.start_round:
        return clients
    personal = clients["personal"].copy()
    personal[~clients["started"]] = server["global"]
    return {**clients, "personal": personal, "started": np.ones_like(clients["started"])}


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
    %(tol)s
    %(max_rounds)s
    %(validation_fraction)s
    %(steps)s
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
        First such round, counted from 0; None: three quarters of `n_rounds`. With
        ``n_rounds=None`` it has to be given; the rounds then go on for a third as many at least.
    global_estimator : skorch net or None, default=None
        Recipe of a global net of another kind, which clients can afford less or share more easily.
        Its ``batch_size`` does not count. None: that of `estimator`.
    noise : {"per_round", "per_step"}, default="per_round"
        Where noise goes. "per_round": on the sum of the clients' changes, which are clipped.
        "per_step": on every gradient of the global net and of psi, which are clipped instead; each
        client adds it itself. This is the algorithm as printed. `noise_multiplier` is then that of
        a single step, and has to be at least ``local_steps * sqrt(2)`` times that of "per_round"
        to spend as little; `epsilon` protects a client's whole data ("replace_one") under either
        kind of sampling.
    psi_clip_norm : float > 0, default=0.1
        Bound of a client's change of psi, or of its gradient: `clip_norm` and it are the units of
        the two parts of a message. With noise on sums, the message is clipped to length 1 in these
        units. With noise in steps, each part is clipped by itself, and gets noise in its own units.
    %(label_prior)s
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

    With noise this is DP-AdaPeD. By default it has a form that can be accounted for as a whole:
    local steps are free of noise, the changes of the global net and of psi are clipped together,
    and their sum gets noise once a round. ``noise="per_step"`` is the printed algorithm, in which
    :math:`\mu \leftarrow \mu - \eta_2 (h / \max(|h| / C_1, 1) + \nu_1)` and
    :math:`\psi \leftarrow \psi - \eta_3 (k / \max(|k| / C_2, 1) + \nu_2)` with `clip_norm`
    :math:`C_1`, `psi_clip_norm` :math:`C_2` and standard deviations :math:`z C_1` and
    :math:`z C_2`, z being `noise_multiplier`. Its epsilon is not the printed one, which does not
    hold: the gradients of later steps may undo the noise of earlier ones. Ours counts the noise of
    the last of the :math:`\tau` local steps alone. Given all earlier noise, other data of a client
    move each part of its message by at most :math:`2 \tau` bounds of a step, since weight decay and
    the floor of psi never widen a gap. So a round with the client is Gaussian DP with
    :math:`\mu = 2 \sqrt 2 \tau / z` under replacement of its whole data. That holds against the
    server as well; sampling lowers delta alone, because a client that takes no part adds no noise.
    Momentum would add up gradients, and is refused there.

    Personal nets are not protected, and need not be, because they stay with their clients.

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
    _needs_probabilities = True

    _parameter_constraints = {
        **BaseNeural._parameter_constraints,
        **LABEL_PRIOR,
        "psi_init": [Interval(Real, 0, None, closed="neither")],
        "psi_min": [Interval(Real, 0, None, closed="neither")],
        "psi_learning_rate": [Interval(Real, 0, None, closed="left")],
        "kd_direction": [StrOptions({"global_to_personal", "personal_to_global"})],
        "global_loss": [Interval(Real, 0, None, closed="left")],
        "personal_start": [StrOptions({"own", "global"})],
        "personal_start_round": [Interval(Integral, 0, None, closed="left"), None],
        "global_estimator": "no_validation",
        "noise": [StrOptions({"per_round", "per_step"})],
        "psi_clip_norm": [Interval(Real, 0, None, closed="neither")],
    }

    def __init__(
        self,
        estimator=None,
        *,
        n_rounds=100,
        tol=1e-3,
        max_rounds=1000,
        validation_fraction=0.2,
        local_steps=10,
        label_prior=None,
        psi_init=4.0,
        psi_min=0.5,
        psi_learning_rate=0.05,
        kd_direction="global_to_personal",
        global_loss=0.0,
        personal_start="own",
        personal_start_round=None,
        global_estimator=None,
        noise="per_round",
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
            tol=tol,
            max_rounds=max_rounds,
            validation_fraction=validation_fraction,
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
        self.label_prior = label_prior
        self.psi_init = psi_init
        self.psi_min = psi_min
        self.psi_learning_rate = psi_learning_rate
        self.kd_direction = kd_direction
        self.global_loss = global_loss
        self.personal_start = personal_start
        self.personal_start_round = personal_start_round
        self.global_estimator = global_estimator
        self.noise = noise
        self.psi_clip_norm = psi_clip_norm

    @property
    def _noisy_steps(self):
        if self.noise == "per_round" or self.clip_norm is None:
            return None
        return NoisySteps((self.clip_norm, self.psi_clip_norm), self.local_steps)

    def _check_parameters(self):
        super()._check_parameters()
        if self.global_estimator is not None:
            self._check_global()
        start = self.personal_start == "global" and self.personal_start_round is None
        if start and self._ends_when_flat:
            raise ValueError(
                "got personal_start='global' and personal_start_round=None with n_rounds=None: "
                "nobody knows when three quarters of the rounds are over. Give "
                "personal_start_round, or n_rounds."
            )
        if self.noise == "per_round":
            return
        if self.clip_quantile is not None:
            raise ValueError(
                f"got clip_quantile={self.clip_quantile!r} with noise='per_step', whose gradients "
                "are clipped to clip_norm in every step; give clip_quantile=None."
            )
        if self._noisy_steps is not None:
            _, recipes = backend()
            recipes.check_plain_steps(self.global_estimator or self._recipe())

    def _check_global(self):
        """Raise ValueError if the global net's recipe cannot be followed."""
        if self.personal_start == "global":
            raise ValueError(
                "got personal_start='global' with a global_estimator: personal nets cannot start "
                "from a net of another recipe. Give personal_start='own'."
            )
        self._check_recipe(self.global_estimator, "global_estimator")
        if self.global_estimator.device != self._recipe().device:
            raise ValueError(
                f"global_estimator has device={self.global_estimator.device!r} and estimator "
                f"{self._recipe().device!r}; give both the same."
            )

    def _method(self, setup):
        if setup.noisy_steps is not None:
            check_steps(setup.engines.population, self._global_rates(setup))
        start_round = self.personal_start_round
        if start_round is None:
            start_round = int(_START * self._last_round(0))
        settings = Distillation(
            self.psi_init,
            self.psi_min,
            self.psi_learning_rate,
            self.kd_direction == "global_to_personal",
            self.global_loss,
            start_round if self.personal_start == "global" else None,
            self._global_rates(setup),
        )
        return adaped(setup, settings)

    def _global_rates(self, setup):
        if self.global_estimator is None:
            return setup.rates
        _, recipes = backend()
        return recipes.learning_rates(self.global_estimator, len(setup.rates) - 1)

    def _make_engines(self, table, earlier, order, batch_size):
        if self.global_estimator is None:
            return super()._make_engines(table, earlier, order, batch_size)
        _, recipes = backend()
        pair = self._recipe(), self.global_estimator
        looks = not is_private(self) and all(map(recipes.has_units, pair))
        seeds = np.random.default_rng(order).integers(1 << 63, size=2).tolist()
        before = (None, None) if earlier is None else earlier.layout
        return Engines(
            *(
                self._make_engine(recipe, table, old, seed, batch_size, looks)
                for recipe, old, seed in zip(pair, before, seeds, strict=True)
            )
        )

    def _scales(self):
        if self.clip_norm is None or self._noisy_steps is not None:
            return None
        return {"global": 1.0, "psi": self.psi_clip_norm / self.clip_norm}

    @staticmethod
    def _nets(server, clients):
        personal, begun = clients["personal"], clients.get("started")
        if begun is None or begun.all():
            return personal
        start = server["global"].astype(personal.dtype)
        return np.where(begun[:, None], personal, start)

    def _fewest_rounds(self, rows):
        fewest = super()._fewest_rounds(rows)
        if self.personal_start == "own":
            return fewest
        return max(fewest, self.personal_start_round / _START)
