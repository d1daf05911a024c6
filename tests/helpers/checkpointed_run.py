"""A private fit with a ledger and a checkpoint; as a script it is slow enough to be killed."""

import sys
import time
import warnings
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from pfl_sklearn import PPSGDRegressor
from pfl_sklearn._rounds import checkpoint as _checkpoint
from pfl_sklearn.privacy import PrivacyLedger

ROOT = Path(__file__).parents[2]
PRIVATE = {"noise_multiplier": 1.0, "clip_norm": 1.0, "learning_rate": 0.1}


def table(sparse=False, seed=0):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(12), rng.integers(1, 9, 12))
    X = rng.normal(size=(len(groups), 4)) * (rng.random((len(groups), 4)) < 0.6)
    return csr_array(X) if sparse else X, X.sum(axis=1) + rng.normal(size=len(groups)), groups


def checkpointed_run(folder):
    X, y, groups = table()
    model = PPSGDRegressor(
        n_rounds=100,
        client_fraction=0.5,
        random_state=3,
        ledger=PrivacyLedger(f"{folder}/ledger.jsonl"),
        checkpoint=f"{folder}/run.npz",
        checkpoint_every=2,
        **PRIVATE,
    )
    return model.fit(X, y, groups=groups)


def slow_down():
    """Let every round take at least 0.05 s."""
    observe = _checkpoint.Checkpoint.observe

    def slowly(checkpoint, state):
        time.sleep(0.05)
        return observe(checkpoint, state)

    _checkpoint.Checkpoint.observe = slowly


if __name__ == "__main__":
    slow_down()
    warnings.simplefilter("ignore")
    checkpointed_run(sys.argv[1])
