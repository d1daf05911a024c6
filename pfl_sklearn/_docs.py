"""Docstrings that share parameters: each text is written once and filled in.

A line of a docstring that is only ``%(name)s`` is replaced by the text of that name, with the
line's indentation. The result is an ordinary docstring, for ``help()`` as for the documentation.
"""

import re
import textwrap

# Parameters of estimators on rounds, in the order of their signatures.
ROUNDS = {
    "tol": """
        tol : float > 0, default=1e-3
            The loss is flat if it fell by less than this share of the loss of the best constant
            predictions while the number of rounds doubled. Used if ``n_rounds=None``, as the next
            two are.
        """,
    "validation_fraction": """
        validation_fraction : float in [0, 1), default=0.2
            Share of the rows that is held out, of every client as it has rows. 0: the loss is that
            of the training rows, and the models overfit small clients.
        """,
    "sampling": """
        client_fraction : float in (0, 1], default=1.0
            Probability q that a client takes part in a round. With ``sampling="fixed"``, the share
            of the clients that takes part.
        sampling : {"poisson", "fixed"}, default="poisson"
            "poisson" samples each client independently. "fixed" draws the same number of clients in
            every round, without replacement; it costs far more epsilon, because all other clients
            together know whether the last one takes part.
        """,
    "privacy": """
        epsilon : float in (0, inf], default=inf
            Privacy of the population model, in nats. The noise follows from it and from `delta`,
            `n_rounds` and `client_fraction`. Each call to ``fit`` or ``partial_fit`` spends it.
            Poisson samples protect a client's contribution ("zero_out"), samples of a fixed number
            its whole data ("replace_one").
        noise_multiplier : float or None, default=None
            Standard deviation of the noise on the sum of messages, divided by `clip_norm`. Give it
            instead of `epsilon`.
        delta : float in [0, 1), default=1e-5
            Delta of the guarantee; choose it below 1 / n_clients.
        clip_norm : float or None, default=None
            L2 norm that each client's message is clipped to. Choose it without looking at the data.
            It is required with noise. Local models are not clipped.
        clip_quantile : float in (0, 1) or None, default=None
            Quantile of the messages' norms that the clipping bound moves towards, starting at
            `clip_norm`. It is estimated from noisy counts, which take their share of the budget.
        ledger : PrivacyLedger or None, default=None
            File that records each fit before it reads any data, and that refuses a fit beyond its
            budget.
        """,
    "checkpoint": """
        checkpoint : path or None, default=None
            File that ``fit`` writes its state to. If the file exists, ``fit`` continues from it; it
            is removed when the fit ends. Parameters, rows and the code of your own modules, classes
            and functions have to be the same, with the constants, lists and dicts that it names, in
            the same version of Python. The file holds every client's model and the entropy of the
            noise, so protect it. Use one file for one fit.
        checkpoint_every : int, default=10
            Rounds between two writes.
        unseen : {"warn", "population", "error"}, default="warn"
            What to do for clients that ``fit`` did not see. "warn" and "population" use the
            population model; "warn" says so when they have at least half of the rows. "error"
            raises an error.
        n_jobs : int or None, default=None
            Workers for the blocks of clients of a round. On one machine, results are the same bits
            for any number. Processes send every client's model back and forth in each round, so
            they pay only with large batches; threads (``joblib.parallel_config("threading")``)
            about break even.
        random_state : int, RandomState instance or None, default=None
            Source of the order of rows, of sampling and of noise. None draws from the operating
            system. Anybody who knows a seed can subtract the noise, and the report says so.
        """,
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
            pattern = r"^( *)%\((\w+)\)s$"
            owner.__doc__ = re.sub(pattern, _replacement(texts), owner.__doc__, flags=re.M)
        return owner

    return fill


def _replacement(texts):
    """Function from a match to its text, indented as the match is."""

    def replace(match):
        text = textwrap.dedent(texts[match[2]]).strip("\n")
        return textwrap.indent(text.rstrip(), match[1])

    return replace
