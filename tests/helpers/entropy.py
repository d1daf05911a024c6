"""The same draws in every run where package and tests ask the system for random numbers.

A private fit without a seed takes its noise from the system. A test of such a fit that fails once
in a thousand runs makes one suite of many red for no reason. So every test, and every fixture that
tests share, starts from a seed of its own: its name.
`PFL_SKLEARN_DRAWS=7 make test` takes other draws, the same ones for the same number.
"""

import os
import random
import zlib
from types import SimpleNamespace

import numpy as np

_SYSTEM = random.Random()
_DRAWS = os.environ.get("PFL_SKLEARN_DRAWS", "0")


def replace_system_entropy():
    """Let NumPy and the discrete mechanism draw from seeds, in this process, from now on."""
    from pfl_sklearn.privacy._mechanisms import _discrete_laplace

    np.random.bit_generator.randbits = _SYSTEM.getrandbits
    _discrete_laplace.os = SimpleNamespace(urandom=_SYSTEM.randbytes)


def start_from(name):
    """The state before, after which all draws go on from `name`."""
    before = _SYSTEM.getstate(), np.random.get_state()
    seed = zlib.crc32(f"{_DRAWS} {name}".encode())
    _SYSTEM.seed(seed)
    np.random.seed(seed)
    return before


def go_on_from(before):
    """Draw as if nothing had been drawn since `start_from`."""
    _SYSTEM.setstate(before[0])
    np.random.set_state(before[1])
