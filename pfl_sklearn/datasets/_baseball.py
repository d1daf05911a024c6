"""Batting records of 18 players in 1970, the classic example of shrinkage."""

import pandas as pd
from sklearn.utils import Bunch

# Player, hits in the first 45 at-bats, at-bats and hits in the rest of the season.
_PLAYERS = [
    ("Roberto Clemente", 18, 367, 127),
    ("Frank Robinson", 17, 426, 127),
    ("Frank Howard", 16, 521, 144),
    ("Jay Johnstone", 15, 275, 61),
    ("Ken Berry", 14, 418, 114),
    ("Jim Spencer", 14, 466, 126),
    ("Don Kessinger", 13, 586, 155),
    ("Luis Alvarado", 12, 138, 29),
    ("Ron Santo", 11, 510, 137),
    ("Ron Swoboda", 11, 200, 46),
    ("Del Unser", 10, 277, 73),
    ("Walt Williams", 10, 270, 69),
    ("George Scott", 10, 435, 132),
    ("Rico Petrocelli", 10, 538, 142),
    ("Ellie Rodriguez", 10, 186, 42),
    ("Bert Campaneris", 9, 558, 159),
    ("Thurman Munson", 8, 408, 129),
    ("Max Alvis", 7, 70, 14),
]


def load_baseball():
    """Load the batting records of Efron and Morris (1975): 18 players of 1970.

    The players' first 45 at-bats are the data; the rest of their season is (nearly) the truth.

    Returns
    -------
    Bunch
        - ``frame``: DataFrame of shape (18, 4), indexed by player: ``at_bats`` (45), ``hits``,
          ``remaining_at_bats``, ``remaining_hits``;
        - ``successes``, ``trials``: ndarrays of shape (18,), hits and at-bats of the start of the
          season;
        - ``groups``: ndarray of shape (18,), players;
        - ``season_average``: Series of shape (18,), indexed by player: batting average in the
          rest of the season.

    References
    ----------
    Efron, B. and Morris, C. (1975). Data analysis using Stein's estimator and its
    generalizations. JASA, 70, 311-319.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_baseball
    >>> baseball = load_baseball()
    >>> baseball.frame.loc["Roberto Clemente", "hits"]
    np.int64(18)
    """
    names = ["player", "hits", "remaining_at_bats", "remaining_hits"]
    frame = pd.DataFrame(_PLAYERS, columns=names).set_index("player")
    frame.insert(0, "at_bats", 45)
    return Bunch(
        frame=frame,
        successes=frame["hits"].to_numpy(),
        trials=frame["at_bats"].to_numpy(),
        groups=frame.index.to_numpy(),
        season_average=frame["remaining_hits"] / frame["remaining_at_bats"],
    )
