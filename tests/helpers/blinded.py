"""Mechanisms that ignore what they get, and all that leaves a private fit.

With blinded mechanisms nothing of a client may reach the others: what leaves must be the same, bit
for bit, whatever the client's rows hold.
"""

import dataclasses
import re
import warnings

import numpy as np

from pfl_sklearn.privacy import (
    ClippedSum,
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    FrequencyMoments,
    GaussianMechanism,
    OneBit,
    SubsetSelection,
)
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps
from pfl_sklearn.privacy._mechanisms._running_sums import RunningSums
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum


def blind(monkeypatch):
    """Let every mechanism draw its noise around a constant.

    The noise of the discrete Gaussian cannot be drawn again, so that it releases the constant.
    """

    def ignore(cls, method, constant):
        original = getattr(cls, method)

        def blinded(self, messages, *args, **more):
            return original(self, constant(messages), *args, **more)

        monkeypatch.setattr(cls, method, blinded)

    ignore(GaussianMechanism, "privatize", np.zeros_like)
    monkeypatch.setattr(
        DiscreteGaussianMechanism,
        "privatize",
        lambda self, messages, rng: np.zeros(np.shape(messages)),
    )
    monkeypatch.setattr(
        DiscreteLaplaceMechanism,
        "privatize",
        lambda self, values, rng=None: np.zeros_like(values),
    )
    ignore(SubsetSelection, "privatize", np.zeros_like)
    ignore(OneBit, "privatize", lambda x: np.full(np.shape(x), 0.5))
    ignore(ClippedSum, "release", np.zeros_like)
    ignore(FrequencyMoments, "release", np.zeros_like)
    ignore(NoisySteps, "privatize", np.zeros_like)
    ignore(RunningSums, "privatize", np.zeros_like)
    ignore(
        SparseClippedSum, "release", lambda sent: sent._replace(values=np.zeros_like(sent.values))
    )


def what_leaves(fit, X, y, groups, client):
    """Everything that others than the client may see of ``fit(X, y, groups=groups)``, by name.

    That is the released model, models of some other clients, the predictions, intervals and rows of
    the summary of all of them, the report, and the warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit(X, y, groups=groups)
        others = groups != client
        found = {"released": model.release(), "report": (model.privacy_, str(model.privacy_))}
        for other in np.unique(groups[others])[:4]:
            found[f"model of {other}"] = model.for_client(other)
        for name in dir(model):
            known = name.startswith("population_") or name in ("prior_", "icc_", "noise_variance_")
            if known and hasattr(model, name):
                found[name] = getattr(model, name)
        for method in ("predict", "predict_proba", "decision_function"):
            if hasattr(model, method):
                own = getattr(model, method)
                found[f"{method} of others"] = own(X[others], groups=groups[others])
                found[f"{method} of strangers"] = own(X[others], groups=groups[others] + 1000)
        kept = np.unique(groups) != client
        if hasattr(model, "credible_interval"):
            lower, upper = model.credible_interval()
            found["intervals of others"] = lower[kept], upper[kept]
        if hasattr(model, "summary"):
            by_client = hasattr(model, "means_")
            found["summary"] = model.summary()[kept] if by_client else model.summary()
    found["warnings"] = sorted({str(warning.message) for warning in caught})
    return {path: value for name, value in found.items() for path, value in _leaves(name, value)}


def _leaves(name, value):
    """Pairs of a path and a value that can be compared, of nested values."""
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        value = {column: value[column].to_numpy() for column in value}
    elif dataclasses.is_dataclass(value) or hasattr(value, "get_params"):
        value = vars(value)
    elif hasattr(type(value), "state_dict"):  # modules and optimizers of torch
        value = dict(value.state_dict())
    elif hasattr(type(value), "detach"):  # its tensors
        value = value.numpy(force=True)
    elif type(value).__repr__ is object.__repr__:  # which shows an address
        value = vars(value) if hasattr(value, "__dict__") else value.__getstate__()
    if isinstance(value, dict):
        for inner, part in value.items():
            yield from _leaves(f"{name}.{inner}", part)
    elif isinstance(value, tuple | list):
        for position, part in enumerate(value):
            yield from _leaves(f"{name}[{position}]", part)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield name, (value.shape, value.tobytes())
    else:
        yield name, re.sub("0x[0-9a-f]+", "address", repr(value))
