"""Noise in every local step of AdaPeD: DP-AdaPeD of Ozkara et al. (2023, ICLR), as printed.

The printed epsilon does not hold; ours is that of :class:`NoisySteps`. For the same epsilon,
noise on the sums of rounds (``noise="per_round"``) can be ``local_steps * sqrt(2)`` times smaller.
"""

from functools import partial

import numpy as np

from pfl_sklearn.neural_network._base import backend
from pfl_sklearn.privacy._mechanisms._printed._noisy_steps import NoisySteps

_GLOBAL, _PSI = 0, 1  # parts of the model that steps through noise move


def noisy_steps(model):
    """Mechanism of the local steps of a model, or None."""
    # Without a bound no gradient is clipped, and there is nothing that noise could cover.
    if model.clip_norm is None:
        return None
    return NoisySteps((model.clip_norm, model.psi_clip_norm), model.local_steps)


def check_noise_in_steps(model):
    """Raise ValueError if parameters or networks do not go with noise in steps."""
    if model.clip_quantile is not None:
        raise ValueError(
            f"got clip_quantile={model.clip_quantile!r} with noise='per_step', whose gradients "
            "are clipped to clip_norm in every step; give clip_quantile=None."
        )
    if model.clip_norm is not None:
        backend().checks.check_options(model.global_estimator or model._recipe(), "plain steps")


def check_noisy_engine(engine, rates):
    """Raise ValueError if noise on gradients does not cover all that a network sends."""
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


def steps_through_noise(mechanism, shared, block):
    """How global networks of a block step, from losses, and what becomes of slopes (g,) of psi."""
    generators = mechanism.generators(block.seeds)

    def noisy(part, slopes):
        # Clipping and the grid of the noise are certified in double precision.
        exact = slopes.detach().cpu().double().numpy()
        return slopes.new_tensor(mechanism.privatize(exact, part, generators))

    move_shared = partial(shared.step_through, partial(noisy, _GLOBAL))
    return move_shared, lambda slopes: noisy(_PSI, slopes[:, None])[:, 0]
