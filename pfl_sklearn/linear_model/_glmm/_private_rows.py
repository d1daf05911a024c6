"""Finite values of a private fit, cut to public ranges, and errors that name none of them.

A refusal is an output, too: if a finite value of one client caused it, or its text held one, that
would be a release without noise.
"""

from contextlib import contextmanager

import numpy as np

LARGEST_FEATURE = 1e30  # times the bound: its fourth power, times anything public, is finite
_NO_NUMBER = "could not convert"  # numpy's words, which the value follows


def cut_features(features, bound):
    """Features (n, d) between -1e30 and 1e30 times the feature bound."""
    return np.clip(features, -LARGEST_FEATURE * bound, LARGEST_FEATURE * bound)


@contextmanager
def checking(private):
    """Let checks warn of no value, and if the fit is private leave values out of their errors."""
    try:
        # scikit-learn sums a table to see whether it is finite; sums may overflow either way.
        with np.errstate(all="ignore"):
            yield
    except ValueError as error:
        text = str(error)
        if not private or _NO_NUMBER not in text:
            raise
        # `from None`: a traceback shows the errors before it.
        where = text.split(_NO_NUMBER)[0].rstrip(": ") or "a column does not hold numbers"
        raise ValueError(f"{where}; expected finite numbers.") from None
