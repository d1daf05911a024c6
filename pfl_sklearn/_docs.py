"""Docstrings that share parameters: each text is written once and filled in.

A line of a docstring that is only ``%(name)s`` is replaced by the text of that name, with the
line's indentation. The result is an ordinary docstring, for ``help()`` as for the documentation.
"""

import re
import textwrap

# Attributes of estimators on rounds.
ROUNDS = {
    "rounds_attributes": """
        clients_ : ndarray of shape (n_clients,)
            Sorted client ids.
        n_samples_per_client_ : ndarray of shape (n_clients,)
            Rows of each client: those of ``fit``, and of all calls to ``partial_fit`` since.
        n_rounds_ : int
            Rounds that led to the models.
        noise_multiplier_ : float
            Noise multiplier of the last call; 0 without noise.
        history_ : dict of ndarrays, one value per round
            "n_clients" that took part, their mean "loss" before the round, the share that was
            "clipped", and the bound "clip_norm". These values are exact, hence not protected. The
            loss is NaN where nobody took part, and infinite where it overflowed.
        privacy_ : PrivacyReport
            What the fit promises, and what it does not.
        n_features_in_ : int
            Number of features.
        feature_names_in_ : ndarray of shape (d,)
            Their names, if `X` was a data frame.
        """,
}


def fill_doc(texts):
    """Decorator that fills the texts of a dict into the docstring of a class or function.

    Raises
    ------
    KeyError
        If the docstring asks for a text that `texts` lacks.
    """

    def fill(owner):
        if owner.__doc__:  # None under python -OO
            owner.__doc__ = filled(owner.__doc__, texts)
        return owner

    return fill


def filled(docstring, texts):
    """A docstring in which each line that is only ``%(name)s`` is the text of that name, indented.

    Raises
    ------
    KeyError
        If the docstring asks for a text that `texts` lacks.
    """

    def replacement(match):
        text = textwrap.dedent(texts[match[2]]).strip("\n")
        return textwrap.indent(text.rstrip(), match[1])

    return re.sub(r"^( *)%\((\w+)\)s$", replacement, docstring, flags=re.M)
