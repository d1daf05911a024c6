"""Private rounds: the mechanism of a round, the events of a fit, and the privacy report.

Clients' messages are flattened in one place and clipped once jointly; their sum gets noise once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pfl_sklearn._rounds.rows import Arrays
from pfl_sklearn.privacy import (
    FrequencyMoments,
    GaussianEvent,
    PrivacyReport,
    SampledGaussian,
    calibrate_rounds,
    events_epsilon,
    gdp_mu,
)
from pfl_sklearn.privacy._accounting._calibration import approximate_mu
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum, Released
from pfl_sklearn.privacy._report import VALID_TABLES, private_report, without_guarantee

if TYPE_CHECKING:
    from pfl_sklearn._rounds.run import Progress

_STOPPED = (
    "a callback ended the rounds early, or would have at other scores: unless it looked at public "
    "data alone, the number of rounds reveals what the scores without noise were"
)
# A sum over all clients before the rounds; replacing a client moves it as far as zeroing one out.
LABEL_SUMS = FrequencyMoments()
# A sample of fixed size cannot lose a client: only replacing one has an accountant.
_RELATION_OF_SAMPLING = {"poisson": "zero_out", "fixed": "replace_one"}
_LABEL_SUM = "the sum of all clients' label frequencies and their squared length"
_OTHER_RELATION = {"zero_out": "replace_one", "replace_one": "zero_out"}
_ROUNDING_OF_EPSILON = 1e-6  # relative: calibrated noise may miss epsilon by less
_SECRET_NUMBER = (
    "nobody but the server learns how many clients take part in a round: the number is in no "
    "release, and neither messages nor the time of a round may show it to other clients"
)


def relation_of_rounds(model: Any) -> str:
    """Neighbouring relation that the rounds are accounted under."""
    return _RELATION_OF_SAMPLING[_accounted(model)[0]]


def is_private(model: Any) -> bool:
    """Whether noise is asked for."""
    return math.isfinite(model.epsilon) or bool(model.noise_multiplier)


def normalizes(model: Any) -> bool:
    """Whether clients' messages are scaled to length one: with noise, and no bound to clip to."""
    return model._normalizes_messages and is_private(model) and model.clip_norm is None


def check_noise_parameters(model: Any) -> None:
    """Raise ValueError if privacy parameters contradict one another."""
    if math.isfinite(model.epsilon) and model.noise_multiplier is not None:
        raise ValueError(
            f"got both epsilon={model.epsilon!r} and noise_multiplier={model.noise_multiplier!r}; "
            "give one of them, as the other follows from it."
        )
    if model.clip_quantile is not None and model.clip_norm is None:
        raise ValueError(
            f"got clip_quantile={model.clip_quantile!r} without clip_norm; give clip_norm, the "
            "bound of the first round."
        )
    if not (is_private(model) and model._communicates):
        return  # nothing is clipped or noised, since nothing leaves a client
    if model.clip_norm is None and not normalizes(model):
        raise ValueError(
            "got clip_norm=None with noise (a finite epsilon, or noise_multiplier); give the L2 "
            "norm that a client's message is clipped to. Choose it without looking at the data."
        )
    if model.delta == 0:
        raise ValueError("got delta=0; Gaussian noise needs delta above 0.")


def fit_events(model: Any, n_rounds: int, earlier: Progress | None = None, spent: Any = ()) -> Any:
    """Accounting events of `n_rounds` rounds, and of a sum of label frequencies before them.

    () if nothing is released, None without noise. They follow from the parameters alone, and from
    what the `earlier` rounds released. The noise is that of the rounds `spent`, if there are any.
    """
    before = (label_event(model),) if model._releases_labels(earlier) else ()
    rounds = round_events(model, n_rounds, rounds_of(spent), *before)
    return None if rounds is None else (*before, *rounds)


def label_event(model: Any) -> GaussianEvent:
    """Accounting event of the sum of label frequencies.

    Its share is one of squared Gaussian-DP parameters, which add up. Where no epsilon is given, it
    is a share of what the sum and `n_rounds` rounds spend together, in the limit of many rounds.
    """
    share = model._label_share
    if model.noise_multiplier is None:  # epsilon is given: the rounds get what is left of it
        mu = math.sqrt(share) * gdp_mu(model.epsilon, model.delta)
    elif not model._communicates:  # the sum is the only release
        mu = 1 / model.noise_multiplier
    else:  # the rounds' noise is given: the sum comes on top, in proportion to its share
        (rounds,) = round_events(model, model._last_round(0))
        mu = math.sqrt(share / (1 - share)) * approximate_mu(rounds, relation_of_rounds(model))
    return GaussianEvent(None, mu, mu_zero_out=mu)


def label_noise_std(event: Any) -> float:
    """Standard deviation of the noise on the sum of label frequencies."""
    return LABEL_SUMS.sensitivity / event.mu_replace_one


def round_events(model: Any, n_rounds: int, spent: Any = (), besides: Any = None) -> Any:
    """Accounting events of `n_rounds` rounds; () if they release nothing, None without noise.

    They follow from the parameters alone. The noise is that of the rounds `spent`, if there are
    any. Where clients add it in their steps, it is stated for what all steps of a round add up to.
    The event `besides` takes a part of epsilon.
    """
    if not is_private(model):
        return None
    if not model._communicates or n_rounds == 0:
        return ()
    sampling, largest_norm = _accounted(model)
    if model.noise_multiplier is not None:
        z = model.noise_multiplier / largest_norm
    elif spent:  # missing rounds of a fit that was planned as a whole
        z = spent[-1].noise_multiplier
    else:
        z = calibrate_rounds(
            model.epsilon,
            model.delta,
            n_rounds=n_rounds,
            rate=model.client_fraction,
            sampling=sampling,
            besides=besides,
        )
    return (SampledGaussian(float(z), n_rounds, model.client_fraction, sampling),)


def rounds_of(spent: Iterable[Any] | None) -> tuple[SampledGaussian, ...]:
    """Events of rounds, among those `spent`."""
    return tuple(event for event in spent or () if isinstance(event, SampledGaussian))


def _accounted(model):
    """Sampling that the accountant assumes, and the length of a message in bounds, at most.

    Clients that add noise themselves add none in rounds that they miss, so the messages show who
    takes part. Poisson sampling then hides nobody.
    """
    steps = model._noisy_steps
    return (model.sampling, 1.0) if steps is None else ("fixed", steps.largest_norm)


def round_mechanism(model: Any, events: Sequence[Any] | None) -> Any:
    """Mechanism of a round; None if nothing is clipped, and so nothing noised."""
    if model.clip_norm is None and not normalizes(model):
        return None
    rounds = rounds_of(events)
    z = rounds[-1].noise_multiplier if rounds else 0.0
    if (steps := model._noisy_steps) is not None:
        return dataclasses.replace(steps, noise_multiplier=z * steps.largest_norm)
    if model.clip_norm is None:
        return ClippedSum(1.0, z, normalize=True)
    quantile = model.clip_quantile if model._communicates else None  # an unused bound stays
    return ClippedSum(model.clip_norm, z, quantile)


@dataclasses.dataclass(frozen=True)
class JointSum:
    """Release of messages that are dicts of arrays: one clip and one noise for all parts together.

    `mechanism` maps vectors (k, p), one for each client, to their noisy sum; None: the exact sum.
    `shapes` are those of the parts of one client's message, by name. `scales` are bounds of the
    parts, each in its own units, positive and finite: a part is divided by its bound before it is
    clipped, and the sum is multiplied by it again. The mechanism's bound is in scaled units.
    """

    mechanism: ClippedSum | None
    shapes: dict[str, tuple[int, ...]]
    scales: dict[str, float] | None = None

    def __post_init__(self) -> None:
        scales = self.scales or {}
        if self.scales is not None and scales.keys() != self.shapes.keys():
            raise ValueError(
                f"scales names the parts {sorted(scales)}; a message has {sorted(self.shapes)}."
            )
        for name, scale in scales.items():
            if not 0 < scale < math.inf:
                raise ValueError(f"scales[{name!r}] must be positive and finite; got {scale!r}.")

    def start(self) -> float:
        """Clipping bound of the first round."""
        return math.inf if self.mechanism is None else self.mechanism.start()

    def before_update(self, server: Arrays, blocks: Any, t: int, rng: Any) -> Arrays:
        """Server's state that the clients of `blocks` are to see in round t."""
        return server

    def release(self, messages: Any, bound: float, n_expected: float, rng: Any) -> Released:
        """Release of a round; its total is a dict of arrays of the shapes of one message."""
        for name, shape in self.shapes.items():
            # A longer message than stated would be split into the wrong parts.
            if any(sent != shape for sent in _shapes_of(messages[name])):
                raise ValueError(
                    f"the part {name!r} of a message has shape {_shapes_of(messages[name])[0]}; "
                    f"the method states {shape}."
                )
        if not self.shapes:  # nothing is sent
            return Released({}, bound, 0.0)
        if self.mechanism is None:  # so that parts need not be put together
            return Released(
                {name: _sum(messages[name], shape) for name, shape in self.shapes.items()},
                bound,
                0.0,
            )
        flat = self._flatten(messages)
        released = self.mechanism.release(flat, bound, n_expected, rng)
        return released._replace(total=self._split(released.total))

    def after_update(self, server: Arrays, t: int, rng: Any) -> Arrays:
        """Server's state after round t, as anybody may see it."""
        return server

    def finish(self, server: Arrays, n_rounds: int, rng: Any) -> Arrays:
        """Server's state after the last round."""
        return server

    def _flatten(self, messages):
        """Vectors (k, p) of all parts; a single part that is not scaled stays as it is."""
        if self.scales is None and len(self.shapes) == 1:
            return np.asarray(messages[next(iter(self.shapes))])
        parts = []
        for name, shape in self.shapes.items():
            part = np.asarray(messages[name]).reshape(len(messages[name]), math.prod(shape))
            parts.append(part if self.scales is None else part / self.scales[name])
        return np.concatenate(parts, axis=1)

    def _split(self, total):
        """Parts of a sum of vectors."""
        if self.scales is None and len(self.shapes) == 1:
            return {next(iter(self.shapes)): total}
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
        parts = zip(self.shapes.items(), np.split(total, ends), strict=True)
        scales = self.scales or dict.fromkeys(self.shapes, 1.0)
        return {name: part.reshape(shape) * scales[name] for (name, shape), part in parts}


def _shapes_of(part):
    """Shapes of what clients sent, of an array (k, ...) or of a list of k arrays."""
    return [message.shape for message in part] if isinstance(part, list) else [part.shape[1:]]


def _sum(part, shape):
    """Sum over clients, in their order and in double precision."""
    if not isinstance(part, list):
        return part.sum(axis=0, dtype=np.float64)
    total = np.zeros(shape)
    for message in part:
        total += message
    return total


def rounds_report(model: Any, progress: Progress) -> PrivacyReport:
    """Privacy report of all rounds so far."""
    released, private = model._released_names, model._kept_names
    if getattr(model, "_skl_callbacks", []):
        private = (*private, "what callbacks recorded, such as scores")
    n_clients, spent = len(progress.clients), progress.spent
    if spent is None:
        earlier = "Rounds before these had no noise."
        return PrivacyReport.unprotected(
            earlier if is_private(model) else "epsilon=inf was asked for.",
            not_released=(*released, *private),
            n_clients=n_clients,
        )
    if not spent:
        report = dataclasses.replace(
            PrivacyReport.of_known_population(released, private, n_clients),
            mechanism="nothing is released: no round of a global model was run",
            assumptions=("the number of clients is public", VALID_TABLES, *model._assumptions),
        )
        return without_guarantee(report, _STOPPED) if progress.stopped else report
    relation, rounds = relation_of_rounds(model), rounds_of(spent)
    other = _OTHER_RELATION[relation]
    epsilon, other_epsilon = (
        events_epsilon(spent, model.delta, name) for name in (relation, other)
    )
    # Poisson sampling protects only while the number of clients in a round is secret.
    secret = any(event.sampling == "poisson" and event.rate < 1 for event in rounds)
    report = private_report(
        {**_release_fields(model, spent, relation), "epsilon": epsilon},
        n_clients=n_clients,
        seeded=bool(progress.seeded),
        seeded_part=seeded_rounds_text(progress),
        caveats=_round_caveats(model, epsilon, spent),
        rounds=sum(event.n_rounds for event in rounds),
        epsilon_under=((other, other_epsilon),),
        epsilon_outsiders=_outsiders_epsilon(model, relation, spent),
        released=released if rounds == spent else ("label_prior_", *released),
        not_released=private,
        assumptions=(
            "the number of rounds is public, and the numbers of clients and rows that sums are "
            "divided by are constants",
            *((_SECRET_NUMBER,) if secret else ()),
            "clip_norm, learning_rate and the other parameters are the user's, not the data's",
            *model._assumptions,
            "joint differential privacy: what a client computes from the released models and its "
            "own rows protects the other clients, not itself",
        ),
    )
    return without_guarantee(report, _STOPPED) if progress.stopped else report


def seeded_rounds_text(progress):
    """Text that names the rounds whose noise has a seed; empty if these are all rounds."""
    n_rounds = progress.state.round
    if progress.seeded == ((0, n_rounds),):
        return ""
    parts = " and ".join(_range_text(first, end) for first, end in progress.seeded)
    return f" for rounds {parts}, of {n_rounds} rounds counted from 0"


def _range_text(first, end):
    """Text for a range of rounds; if it is empty, for the sums that were released before one."""
    if first == end:
        return f"before {first}"
    return str(first) if end == first + 1 else f"{first} to {end - 1}"


def _release_fields(model, spent, relation):
    """Facts about all releases for the privacy report."""
    rounds = rounds_of(spent)
    labels = [label_noise_std(event) for event in spent if event not in rounds]
    if not rounds:
        return {
            "mechanism": f"Gaussian noise on {_LABEL_SUM}, rounded to a grid",
            "delta": model.delta,
            "relation": relation,
            "noise_std": labels[0],
            "sensitivity": LABEL_SUMS.sensitivity,
            "trust": "central",
            "accountant": "exact (Gaussian differential privacy)",
        }
    facts = round_mechanism(model, rounds[-1:]).facts(rounds[-1], model.delta, relation)
    for std in labels:
        facts["mechanism"] = (
            f"before the rounds, Gaussian noise of sd {std:.4g} on {_LABEL_SUM}, of L2 sensitivity "
            f"{LABEL_SUMS.sensitivity:.4g}; then {facts['mechanism']}"
        )
    return facts


def epsilon_by_round(spent: Any, delta: float, relation: str, rounds: Iterable[int]) -> list[float]:
    """Epsilon of the first k rounds of those `spent`, for every k of `rounds`."""
    return [events_epsilon(_first_rounds(spent, k), delta, relation) for k in rounds]


def _first_rounds(spent, k):
    """Events of the first k rounds, and of what was released before one of them."""
    if k >= sum(event.n_rounds for event in rounds_of(spent)):
        return spent  # with what was released after them
    first = []
    for event in spent:
        if k > 0 and not rounds_of([event]):
            first.append(event)
        elif k > 0:
            first.append(dataclasses.replace(event, n_rounds=min(int(k), event.n_rounds)))
            k -= first[-1].n_rounds
    return first


def _outsiders_epsilon(model, relation, spent):
    """Epsilon against all but the clients; None if it is the same.

    Clients of a fixed-size sample know that they take part, which outsiders do not.
    """
    if model._noisy_steps is not None:  # every message is seen
        return None
    if all(event.sampling == "poisson" or event.rate == 1 for event in rounds_of(spent)):
        return None
    return events_epsilon(spent, model.delta, relation, adversary="outsiders")


def _round_caveats(model, epsilon, spent):
    """Warnings of a report of rounds."""
    caveats = []
    if epsilon > model.epsilon * (1 + _ROUNDING_OF_EPSILON):
        caveats.append(
            f"epsilon = {model.epsilon:.4g} was asked for each fit; with the rounds before, the "
            f"total is {epsilon:.4g} ({relation_of_rounds(model)})."
        )
    rounds = rounds_of(spent)
    taking_part = sum(event.n_rounds * event.rate for event in rounds)
    # Delta may then be spent on revealing all that such a client sends.
    if rounds and taking_part <= model.delta:
        caveats.append(
            f"A client takes part in {taking_part:.3g} rounds on average, which is at most delta: "
            "clients are protected only because they rarely take part, and those that do are not "
            "protected at all."
        )
    return tuple(caveats)
