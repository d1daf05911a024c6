"""Acceptance of agents one by one, as in Algorithm 1 of Yakimenka et al. (2024).

The test accepts whom it does not reject: while noise is large that is nearly everybody, and worse
than working alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtri

from pfl_sklearn.online._decisions import Decision


class _Acceptance(Decision):
    """Agents that are accepted, weighted by their precision."""

    alike: Any  # own means and pairs to whether a recipient takes a sender for its class (s, r)

    def _estimate(self, own_means, messages):
        blocks = [self._pooled(own_means, messages.pairs(block)) for block in messages.blocks()]
        return np.concatenate(blocks, axis=1)

    def _pooled(self, own_means, pairs):
        """Means and variances of some recipients, each with those that it accepts."""
        r = pairs.recipients
        # An agent knows its own mean exactly and does not count what it sent.
        accepted = self.alike(own_means, pairs) & (pairs.senders != r)
        precision = np.where(accepted, 1 / pairs.variances, 0.0)
        total = 1 / own_means.variances[r] + precision.sum(axis=0)
        mean = (
            own_means.means[r] / own_means.variances[r] + (precision * pairs.means).sum(axis=0)
        ) / total
        return mean, 1 / total

    def _class_of(self, own_means, messages, block):
        pairs = messages.pairs(block)
        alike = self.alike(own_means, pairs)
        sender, recipient = np.nonzero(alike)
        senders = np.broadcast_to(pairs.senders, alike.shape)[sender, recipient]
        return np.stack([block[recipient], senders])


class TestDecision(_Acceptance):
    """Agents whose means a test does not tell apart.

    The test's level is .05 / ln(t + 1) after t rows, or one minus the given confidence.
    """

    def __init__(self, confidence):
        self.confidence = confidence

    def alike(self, own_means, pairs):
        r = pairs.recipients
        # The paper's level falls with t, so that errors become rare while the test gains power.
        level = (
            0.05 / np.log1p(own_means.rows[r]) if self.confidence is None else 1 - self.confidence
        )
        distance = np.abs(own_means.means[r] - pairs.means)
        # Without messages a sender has an infinite variance: it is accepted with weight 0.
        return distance < ndtri(1 - level / 2) * np.sqrt(own_means.variances[r] + pairs.variances)


class OracleDecision(_Acceptance):
    """Agents to whom the user gave the same label."""

    def __init__(self, labels):
        self.labels = labels

    def alike(self, own_means, pairs):
        return self.labels[pairs.senders] == self.labels[pairs.recipients]
