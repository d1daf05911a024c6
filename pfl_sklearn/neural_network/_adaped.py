"""AdaPeD: personal networks near a global one in what they predict, by a learned distance."""

from functools import partial
from numbers import Integral
from typing import Any

import numpy as np

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, parameter, with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.rows import CatchingUp
from pfl_sklearn.neural_network._base import BaseNeural, backend
from pfl_sklearn.neural_network._engine._averaging import as_float64, divergence
from pfl_sklearn.neural_network._engine._distillation import (
    DistillationSettings,
    broadcast_arrays,
    pending_steps,
    personal_step,
    train_missed_rounds,
)
from pfl_sklearn.neural_network._engine._targets import LABEL_SHARE, LabelPriorMixin
from pfl_sklearn.neural_network._printed._dp_adaped import (
    check_noise_in_steps,
    check_noisy_engine,
    noisy_steps,
    steps_through_noise,
)

_PERSONAL_START = 3 / 4  # of the rounds, after which personal networks start from the global one
_FIRST_PERSONAL_START = 10  # first such round where nobody knows how many there will be
_MOST_MISSED = 5  # rounds that clients make up for at most


def adaped(setup, settings):
    """AdaPeD as a method: the server has the global network and psi, clients have their own."""
    engines, kind = setup.engines, setup.engines.client.array_dtype

    def init():
        start = engines.client.start().astype(kind)
        server = {"global": engines.population.start(), "psi": np.array(settings.psi_init)}
        clients = {"personal": np.tile(start, (setup.n_clients, 1))}
        if settings.start_round is not None:
            clients["started"] = np.zeros(setup.n_clients, dtype=bool)
        if settings.catching_up is not None:
            # A client that comes late received what the server has now, not what it started with.
            latest = server if setup.before is None else setup.before.server
            clients |= broadcast_arrays(latest, engines.population, setup.n_clients)
        return server, clients

    def server_update(server, total, t):
        averaged = setup.average_into_server(server, total)
        # Every client's psi is above the floor, but noise on their sum may push it below.
        return {**averaged, "psi": np.maximum(averaged["psi"], settings.psi_min)}

    return Method(
        init,
        partial(engines.update, partial(adaped_steps, setup, settings)),
        server_update,
        setup.shapes(**{"global": (engines.population.n_parameters,), "psi": ()}),
        None if settings.catching_up is None else pending_steps(setup, settings),
        record=lambda server: {"psi": float(server["psi"])},
    )


def adaped_steps(setup, settings, server, t, block):
    """Local steps of Algorithm 2 (ICLR); each part of a step uses the newest values."""
    (client, population), shared_rate = setup.engines.pair, settings.global_rates[t]
    # The schedule puts the batches of missed rounds before those of this one.
    *missed, block = block.rounds(setup.local_work[0])
    clients, first_losses = train_missed_rounds(setup, settings, t, missed, block.clients), None
    clients = start_personal(settings, server, t, clients)
    personal = client.models(clients["personal"], block.n_clients)
    shared = population.models(server["global"], block.n_clients)
    nets, psi = (personal, shared), personal.values.new_full((len(block.X),), float(server["psi"]))
    kl_divergence = partial(divergence, from_first=settings.from_global)
    move_shared, noisy = shared.step, lambda slopes: slopes
    if setup.noisy_steps is not None:
        move_shared, noisy = steps_through_noise(setup.noisy_steps, shared, block)
    for X, y in block.steps():
        losses, others, shared_log_p = personal_step(setup, settings, t, block, nets, psi, X, y)
        first_losses = losses if first_losses is None else first_losses

        # Of the personal network after its step: Algorithm 2 (ICLR) uses the newest values of all
        # others.
        personal_log_p = client.log_probabilities(block.read(client, personal.evaluate(X)))
        pull = kl_divergence(shared_log_p, personal_log_p) / (2 * psi)
        if settings.global_loss:
            pull = pull + settings.global_loss * shared.losses(others, y)
        move_shared(pull, shared_rate)

        others = block.read(population, shared.evaluate(X))
        kl = kl_divergence(population.log_probabilities(others), personal_log_p)
        # The derivative of log(psi) / 2 + kl / (2 psi).
        psi = psi - settings.psi_rate * noisy(1 / (2 * psi) - kl / (2 * psi**2))
        # Once per step, as printed. A projection never widens the distance between two neighbouring
        # fits.
        psi = psi.clamp_min(settings.psi_min)
    change = psi.double().cpu().numpy() - float(server["psi"])
    message = setup.message(**{"global": shared.change(), "psi": change})
    clients = {**clients, "personal": personal.array()}
    if settings.catching_up is not None:
        clients |= broadcast_arrays(server, population, block.n_clients)
    # What clients keep goes on to later calls, whose labels give other offsets.
    clients.pop("offset", None)
    return Update(message, clients, as_float64(first_losses))


def start_personal(settings, server, t, clients):
    """Arrays of a block's clients, of which some start from the global network now."""
    if settings.start_round is None or t < settings.start_round:
        return clients
    personal = clients["personal"].copy()
    personal[~clients["started"]] = server["global"]
    return {**clients, "personal": personal, "started": np.ones_like(clients["started"])}


@with_parameters
class AdaPeDClassifier(LabelPriorMixin, BaseNeural):
    r"""Classification by AdaPeD: personal networks that learn from a global network's predictions.

    Every client has a network of its own, which follows its own rows and the predictions of a
    global network. The global network follows the predictions of the personal ones. How close they
    stay is learned as well:

    .. math:: \min_{\theta_{1:m}, \mu, \psi} \sum_i \Bigl( f_i(\theta_i) + \tfrac{1}{2} \log \psi
        + \frac{1}{2 \psi} \mathrm{KL}(p_\mu \| p_{\theta_i}) \Bigr)

    See Also
    --------
    FedAvgClassifier : one global network, fine-tuned by every client.

    Notes
    -----
    Algorithm 2 (ICLR) of Ozkara et al. (2023). In each local step, with the newest values of all
    others, the personal network follows its loss plus :math:`\mathrm{KL}(p_\mu \| p_\theta) / (2
    \psi)`, the client's copy of the global network follows the second term, and psi follows
    :math:`\log(\psi) / 2` plus the second term; ``history_["psi"]`` has the server's psi after each
    round. Divergences are means over the rows of a batch. We deviate from the listing:

    - Clients send the values after their last step, not before it. The factor of 5 on psi's
      gradient in some experiments (Appendix K.1) is left out.
    - `global_loss` and `personal_start` are not in the paper; the printed algorithm is
      ``global_loss=0, personal_start="own", psi_min=0.5``. With few rows a client and few rounds
      its global network learns too late to help.
    - psi cannot fall below its start unless `psi_min` says so: at the paper's floor of 0.5 the
      divergence weighs as much as the rows, and personal networks swing from round to round.

    `train_unsampled` is Algorithm 7 (ICLR): in a round without it, a client takes `local_steps`
    steps of its personal network alone, against the global network and psi of its last round (or of
    its arrival), at that round's learning rate. It does so when it is sampled next; what is pending
    after the last round is done on a copy. Of missed rounds in a row the latest count, up to the
    cap. With ``personal_start="global"`` they count once the client took part in round
    `personal_start_round` or a later one. Calls of ``partial_fit`` without rows of a client are
    rounds that it missed.

    With noise this is DP-AdaPeD. By default local steps are free of noise, the changes of the
    global network and of psi are clipped together, and their sum gets noise once a round.
    ``noise="per_step"`` is the printed algorithm: each gradient of the global network is clipped to
    `clip_norm`, each of psi to `psi_clip_norm`, and gets noise of `noise_multiplier` times its
    bound. The printed epsilon does not hold, because the gradients of later steps may undo the
    noise of earlier ones. Ours counts the noise of the last of the :math:`\tau` local steps alone:
    a round with the client is Gaussian DP with :math:`\mu = 2 \sqrt 2 \tau / z` under replacement
    of its whole data, against the server as well. Sampling lowers delta alone, because a client
    that takes no part adds no noise. Momentum is refused there.

    Personal networks are not protected, because they stay with their clients. A client's message is
    clipped to the same bound however they are trained, so `train_unsampled` costs no privacy.

    Memory: one vector of parameters for each client; another one while some clients are to start
    from the global network; two more with `train_unsampled`. A round needs six or seven for each
    client of a block, and two messages for each sampled client.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import AdaPeDClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = AdaPeDClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """

    _own_steps = True
    _needs_probabilities = True
    _clients_keep = "net"

    label_prior_share: float | None = LABEL_SHARE
    psi_init: float = parameter(
        default=4.0,
        ranges=[POSITIVE],
        text="""
            float > 0
                Where psi starts: the larger it is, the less a personal network is held to the
                global one.
            """,
    )
    psi_min: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float > 0 or None
                Floor of psi, at most `psi_init`. None: the present `psi_init`. The paper has 0.5.
            """,
    )
    psi_learning_rate: float = parameter(
        default=0.05,
        ranges=[NOT_NEGATIVE],
        text="""
            float >= 0
                Step of psi.
            """,
    )
    kd_direction: str = parameter(
        default="global_to_personal",
        ranges=[StrOptions({"global_to_personal", "personal_to_global"})],
        text="""
            {"global_to_personal", "personal_to_global"}
                Which network's probabilities the divergence takes its mean over: the first one's.
            """,
    )
    global_loss: float = parameter(
        default=1.0,
        ranges=[NOT_NEGATIVE],
        text="""
            float >= 0
                Weight of the clients' losses in the steps of the global network, which is otherwise
                moved by the personal networks' predictions alone.
            """,
    )
    personal_start: str | None = parameter(
        default=None,
        ranges=[StrOptions({"own", "global"}), None],
        text="""
            {"own", "global"} or None
                Where personal networks start: from the initial weights, or from the global network
                when their client first takes part in round `personal_start_round` or later. None:
                "global", but "own" with noise or a `global_estimator`.
            """,
    )
    personal_start_round: int | None = parameter(
        default=None,
        ranges=[Interval(Integral, 0, None, closed="left"), None],
        text="""
            int or None
                First such round, counted from 0 and below `n_rounds`. None: three quarters of
                `n_rounds`, or 10 with ``n_rounds=None``.
            """,
    )
    train_unsampled: bool | int = parameter(
        default=False,
        ranges=["boolean", AT_LEAST_ONE],
        text="""
            bool or int >= 1
                Let personal networks go on in rounds that their client is not sampled in. Of
                consecutive such rounds at most this many count; True stands for 5.
            """,
    )
    global_estimator: Any = parameter(
        default=None,
        ranges="no_validation",
        text="""
            skorch net or None
                Recipe of a global network of another kind; its ``batch_size`` is ignored. None:
                that of `estimator`.
            """,
    )
    noise: str = parameter(
        default="per_round",
        ranges=[StrOptions({"per_round", "per_step"})],
        text="""
            {"per_round", "per_step"}
                Where noise goes. "per_round": on the sum of the clients' clipped changes.
                "per_step": on every clipped gradient of the global network and of psi, as printed;
                each client adds it itself. `noise_multiplier` is then that of a single step, at
                least ``local_steps * sqrt(2)`` times that of "per_round" for the same epsilon, and
                `epsilon` protects a client's whole data ("replace_one").
            """,
    )
    psi_clip_norm: float = parameter(
        default=0.1,
        ranges=[POSITIVE],
        text="""
            float > 0
                Bound of a client's change of psi, or of its gradient, in units of which a message
                is clipped to length 1: `clip_norm` for the network, this for psi. With noise in
                steps, each part is clipped by itself.
            """,
    )

    @property
    def _noisy_steps(self):
        return noisy_steps(self) if self.noise == "per_step" else None

    def _check_parameters(self):
        super()._check_parameters()
        self._check_start()
        if self.local_epochs is not None and (self.train_unsampled or self._noisy_steps):
            # The noise in steps is certified for a public number of them, and numbers of rows would
            # set it; the number of steps says to which missed round a batch belongs.
            option = "noise='per_step'" if self._noisy_steps else "train_unsampled"
            raise ValueError(
                f"got local_epochs={self.local_epochs} with {option}, which needs the same number "
                "of steps of every client; give local_steps and local_epochs=None."
            )
        if self.global_estimator is not None:
            self._check_global()
        if self.noise == "per_step":
            check_noise_in_steps(self)

    def _check_start(self):
        """Raise ValueError if psi or the personal networks cannot start as asked for."""
        if self.psi_init < self._psi_floor:
            raise ValueError(
                f"psi_init={self.psi_init!r} is below psi_min={self.psi_min!r}, the floor of psi; "
                "raise one or lower the other."
            )
        start, last = self.personal_start_round, self._last_round(0)
        if not self._starts_from_global:
            return
        # Where the data end the rounds, nobody knows now how many there will be.
        late = start is not None and start >= last and not self._ends_when_flat
        if late and not self.warm_start:
            raise ValueError(
                f"personal_start_round={start} is not below n_rounds={last}, so no personal net "
                "would ever start; lower it, or give warm_start=True if more rounds are to follow."
            )

    def _check_global(self):
        """Raise ValueError if the global network's recipe cannot be followed."""
        if self.personal_start == "global":
            raise ValueError(
                "got personal_start='global' with a global_estimator: personal networks cannot "
                "start from a network of another recipe. Give personal_start='own' or None."
            )
        if self.global_estimator.device != self._recipe().device:
            raise ValueError(
                f"global_estimator has device={self.global_estimator.device!r} and estimator "
                f"{self._recipe().device!r}; give both the same."
            )
        # They follow each other's predictions, so an output has to be of one class in both.
        listed = [getattr(net, "classes", None) for net in (self._recipe(), self.global_estimator)]
        if repr(listed[0]) != repr(listed[1]):
            raise ValueError(
                f"global_estimator has classes={listed[1]!r} and estimator {listed[0]!r}; give "
                "both the same."
            )

    def _check_goes_on(self, earlier):
        super()._check_goes_on(earlier)
        had_none = earlier.layout.client is earlier.layout.population
        has_none = self.global_estimator is None
        if had_none != has_none:
            raise ValueError(
                f"the rounds before had {'no' if had_none else 'a'} global_estimator, and these "
                f"would have {'none' if has_none else 'one'}; fit anew."
            )

    def _method(self, setup):
        rates = setup.rates
        if self.global_estimator is not None:
            rates = backend().recipe.learning_rates(self.global_estimator, len(rates) - 1)
        if setup.noisy_steps is not None:
            check_noisy_engine(setup.engines.population, rates)
        settings = DistillationSettings(
            self.psi_init,
            self._psi_floor,
            self.psi_learning_rate,
            self.kd_direction == "global_to_personal",
            self.global_loss,
            self._start_round,
            rates,
            self._catching_up(setup),
        )
        return adaped(setup, settings)

    @property
    def _psi_floor(self):
        return self.psi_init if self.psi_min is None else self.psi_min

    @property
    def _starts_from_global(self):
        if self.personal_start is not None:
            return self.personal_start == "global"
        return self.global_estimator is None and not is_private(self)

    @property
    def _start_round(self):
        """First round in which personal networks start from the global one, or None."""
        if not self._starts_from_global:
            return None
        if self.personal_start_round is not None:
            return self.personal_start_round
        if self._ends_when_flat:
            return _FIRST_PERSONAL_START
        return int(_PERSONAL_START * self._last_round(0))

    def _catching_up(self, setup):
        """Schedule of rows that has those of missed rounds, or None."""
        # A client alone takes the rounds that it would have made up for one by one.
        if not self.train_unsampled or setup.frozen:
            return None
        plain, most = super()._schedule(setup), self._most_missed
        if self._start_round is not None:
            return CatchingUp(plain, most, since=self._start_round)
        # Rounds before a client came, or the option was turned on, are none that it missed.
        return CatchingUp(plain, most, joined=0 if setup.before is None else setup.before.round)

    @property
    def _most_missed(self):
        """Rounds in a row that a client makes up for, at most."""
        most = self.train_unsampled
        # True is an integer to Python, and would count one missed round.
        return _MOST_MISSED if most and isinstance(most, bool | np.bool_) else int(most)

    def _rounds_of_a_client(self, n_rounds):
        taken = super()._rounds_of_a_client(n_rounds)
        return min(taken * (1 + self._most_missed), n_rounds)

    def _schedule(self, setup):
        return self._catching_up(setup) or super()._schedule(setup)

    def _recipes(self):
        recipes = super()._recipes()
        if self.global_estimator is not None:
            recipes["global_estimator"] = self.global_estimator
        return recipes

    def _scales(self):
        if self.clip_norm is None or self._noisy_steps is not None:
            return None
        # Parts are divided by these: a change of psi by psi_clip_norm counts as one of the network
        # by clip_norm.
        return {"global": 1.0, "psi": self.psi_clip_norm / self.clip_norm}

    def _fewest_rounds(self, rows):
        fewest = super()._fewest_rounds(rows)
        # A third as many rounds as before the start have to follow, as in a fit of known length.
        start = 0 if self._start_round is None else self._start_round
        return max(fewest, start / _PERSONAL_START)
