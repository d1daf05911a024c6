"""Streams of agents of three classes, and promises for them."""

import math

import numpy as np

LABELS = np.random.default_rng(0).integers(0, 3, 200)
WIDTH = math.sqrt(3)
PRIVATE = {"epsilon": 1.0, "bounds": (0.0, WIDTH), "horizon": 30_000, "random_state": 0}
PRINTED = {**PRIVATE, "accounting": "printed", "noise_variance": 0.25, "decision": "oracle"}


def stream(n_steps, labels=LABELS, seed=0, middle=WIDTH / 2):
    """Rows of the paper's three classes in the order of time, and the agents' means."""
    rng = np.random.default_rng(seed)
    means = np.array([-0.2, 0.0, 0.4])[labels] + middle
    y = means + rng.uniform(-0.5, 0.5, (n_steps, len(labels)))
    groups = np.tile(np.arange(len(labels)), n_steps)
    return np.zeros((len(groups), 1)), y.ravel(), groups, means
