"""What clients send: flattened in one place, clipped once jointly, noised once as a sum."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfl_sklearn._rounds.rows import Arrays
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum, Released


@dataclass(frozen=True)
class JointSum:
    """Release of messages that are dicts of arrays: one clip and one noise for all parts together.

    Parameters
    ----------
    mechanism : ClippedSum
        From vectors (k, p), one for each client, to their noisy sum.
    shapes : dict of str to tuple
        Shape of each part of one client's message.
    scales : dict of str to float, default=None
        Bound of each part, in its units: positive and finite. Parts are divided by it before they
        are clipped, and their sum is multiplied by it again; the mechanism's own bound is in the
        scaled units.
    """

    mechanism: ClippedSum
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
        return self.mechanism.start()

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
        if isinstance(self.mechanism, ClippedSum) and self.mechanism.clip_norm is None:
            # Nothing is clipped or noised, so that parts need not be put together.
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

    def finish(self, server: Arrays, n_rounds: int, plan: Any) -> Arrays:
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
    return [own.shape for own in part] if isinstance(part, list) else [part.shape[1:]]


def _sum(part, shape):
    """Sum over clients, in their order and in double precision."""
    if not isinstance(part, list):
        return part.sum(axis=0, dtype=np.float64)
    total = np.zeros(shape)
    for own in part:
        total += own
    return total
