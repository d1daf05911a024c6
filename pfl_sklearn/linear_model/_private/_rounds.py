"""What private fits in rounds share: mechanisms, scales for many clients, and the report."""

import numpy as np

from pfl_sklearn.privacy import ClippedSum
from pfl_sklearn.privacy._report import private_report

# Clients over the noise on their sum at which scales of messages were found. With more, clipping
# is the larger error, so scales grow.
_USUAL_CLIENTS = 50.0


def round_mechanisms(mechanism, shares):
    """A ClippedSum for every round; `shares` (of mu^2) sum to 1.

    Rounds of Gaussian noise add up in 1 / noise_std^2 to the GaussianMechanism of all of them.
    """
    return [ClippedSum(1.0, mechanism.noise_std / np.sqrt(share)) for share in shares]


def scale_factor(n_clients, noise_std, power, largest):
    """Factor of the scales of messages, from 1 to the largest."""
    return float(np.clip((n_clients / noise_std / _USUAL_CLIENTS) ** power, 1.0, largest))


def rounds_report(mechanism, messages, n_rounds, assumed, names, *, moved, **facts):
    """Report of all rounds together.

    Parameters
    ----------
    mechanism : GaussianMechanism
        Of all rounds together.
    messages : str
        Words for what is summed.
    n_rounds : int
    assumed : str
        What the user stated.
    names : pair of tuples of str
        Attributes that are released, and those that are not.
    moved : float
        Sensitivity if a client sends nothing.
    **facts
        Number of clients, whether noise has a seed, and caveats.
    """
    described = {
        **mechanism.facts(),
        "mechanism": f"Gaussian mechanism on the {messages}, in each of {n_rounds} rounds, rounded "
        "to a grid; noise_std is that of all rounds together",
        "accountant": "exact: rounds of Gaussian noise compose to one Gaussian release",
    }
    return private_report(
        described,
        relation="replace_one",
        rounds=n_rounds,
        epsilon_under=mechanism.under_zero_out(moved),
        released=names[0],
        not_released=names[1],
        assumptions=(
            assumed,
            "messages are clipped to norm 1, which is all that privacy rests on",
        ),
        **facts,
    )
