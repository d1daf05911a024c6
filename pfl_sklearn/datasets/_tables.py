"""Real tables of grouped rows that ship with the package."""

from importlib.resources import as_file, files
from typing import Any

import numpy as np
import pandas as pd
from sklearn.utils import Bunch

_ATTRIBUTES = [
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
]  # fmt: skip


def read_shipped_table(name: str, **options: Any) -> pd.DataFrame:
    """Shipped table as a DataFrame."""
    # Also from a zipped package, whose files have no paths of their own.
    with as_file(files("pfl_sklearn.datasets") / "data" / f"{name}.csv.gz") as path:
        return pd.read_csv(path, **options)


def load_baseball() -> Bunch:
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
    frame = read_shipped_table("baseball", index_col="player")
    # Efron and Morris chose players with exactly 45 at-bats on one day of the season.
    frame.insert(0, "at_bats", 45)
    return Bunch(
        frame=frame,
        successes=frame["hits"].to_numpy(),
        trials=frame["at_bats"].to_numpy(),
        groups=frame.index.to_numpy(),
        # Without the first 45 at-bats, whose luck is in the estimates.
        season_average=frame["remaining_hits"] / frame["remaining_at_bats"],
    )


def load_radon(state: str | None = None) -> Bunch:
    """Load the radon levels of homes in US counties, with the floor and the county's uranium.

    Radon is a radioactive gas from the soil. Levels are higher in basements, and in counties whose
    soil has more uranium. Many counties have few homes.

    Parameters
    ----------
    state : str or None, default=None
        One of "AZ", "IN", "MA", "MN", "MO", "ND", "PA", "R5" (tribal lands of the Midwest). None:
        all of them.

    Returns
    -------
    Bunch
        - ``frame``: DataFrame of 12,124 rows (919 of Minnesota): ``state``, ``county``,
          ``county_fips``, ``floor`` (0 for a basement, else 1), ``log_uranium`` (of the county,
          logarithm of ppm) and ``log_radon`` (logarithm of pCi/L; a level of 0 counts as 0.1);
        - ``data``: DataFrame with ``floor`` and ``log_uranium``;
        - ``target``: ndarray of shape (n_rows,), ``log_radon``;
        - ``groups``: ndarray of shape (n_rows,), ``county_fips``, of 463 counties (85).

    Raises
    ------
    ValueError
        If there is no such state.

    Notes
    -----
    The State Residential Radon Survey of the US Environmental Protection Agency; public domain.
    653 homes are left out: 287 without a floor, 384 in counties whose uranium is 0 or not given.

    References
    ----------
    Gelman, A. and Hill, J. (2007). Data analysis using regression and multilevel/hierarchical
    models. Cambridge University Press.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_radon
    >>> load_radon("MN").data.shape
    (919, 2)
    """
    frame = read_shipped_table("radon")
    # A uranium of 0 has no logarithm, and 9 is the survey's code for an unknown floor.
    frame = frame[(frame["uranium_ppm"] > 0) & (frame["floor"] < 9)]
    states = sorted(frame["state"].unique())
    if state is not None:
        if state not in states:
            raise ValueError(f"state must be one of {', '.join(states)}, or None; got {state!r}.")
        frame = frame[frame["state"] == state]
    # Homes measured on higher floors count as those on the first.
    frame = frame.assign(
        floor=(frame["floor"] > 0).astype(int), log_uranium=np.log(frame["uranium_ppm"])
    )
    columns = ["state", "county", "county_fips", "floor", "log_uranium", "log_radon"]
    return _table_bunch(frame[columns], ["floor", "log_uranium"], "log_radon", "county_fips")


def load_heart_disease(*, complete: bool = True) -> Bunch:
    """Load the patients of four hospitals, with and without coronary heart disease.

    Parameters
    ----------
    complete : bool, default=True
        Keep the 740 patients whose attributes in ``data`` are all known. Otherwise 920, with NaN.

    Returns
    -------
    Bunch
        - ``frame``: DataFrame with ``hospital``, the 13 attributes of the source, ``num`` (0 to 4)
          and ``target``;
        - ``data``: DataFrame of ten attributes: ``age`` in years, ``sex`` (1 for men), ``cp`` (kind
          of chest pain, 1 to 4), ``trestbps`` (blood pressure at rest, mm Hg), ``chol``
          (cholesterol, mg/dl; 0 where it was not measured), ``fbs`` (fasting blood sugar above 120
          mg/dl), ``restecg`` (electrocardiogram at rest, 0 to 2), ``thalach`` (highest heart rate),
          ``exang`` (angina by exercise) and ``oldpeak`` (ST depression by exercise);
        - ``target``: ndarray of shape (n_rows,), 1 for a narrowed vessel (``num`` above 0);
        - ``groups``: ndarray of shape (n_rows,): "cleveland", "hungarian" (Budapest), "switzerland"
          (Zurich and Basel) or "va" (Long Beach).

    Notes
    -----
    The four processed files of the UCI repository (doi:10.24432/C52P4X), CC BY 4.0. Investigators:
    A. Janosi (Budapest), W. Steinbrunn (Zurich), M. Pfisterer (Basel), R. Detrano (Long Beach and
    Cleveland).

    References
    ----------
    Detrano, R. et al. (1989). International application of a new probability algorithm for the
    diagnosis of coronary artery disease. American Journal of Cardiology, 64, 304-310.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_heart_disease
    >>> load_heart_disease().data.shape
    (740, 10)
    """
    # The column says which rows have no NaN in `data`.
    frame = read_shipped_table("heart_disease").drop(columns="flamby")
    if complete:
        frame = frame.dropna(subset=_ATTRIBUTES)
    return _table_bunch(frame, _ATTRIBUTES, "target", "hospital")


def load_parkinsons() -> Bunch:
    """Load the voice recordings of 42 people with Parkinson's disease, over six months.

    Each recording has a score of the disease (UPDRS, interpolated between three visits of a
    doctor) and 16 measures of the voice.

    Returns
    -------
    Bunch
        - ``frame``: DataFrame of 5,875 rows with ``subject``, ``age``, ``sex`` (1 for women),
          ``test_time`` (days since the start), ``motor_UPDRS``, ``total_UPDRS`` and the measures of
          the voice;
        - ``data``: DataFrame of 19 columns, without the subject and the scores;
        - ``target``: ndarray of shape (5875,), ``total_UPDRS`` (0 to 176);
        - ``groups``: ndarray of shape (5875,), ``subject``.

    Notes
    -----
    Parkinsons Telemonitoring of the UCI repository (doi:10.24432/C5ZS3N), CC BY 4.0.

    References
    ----------
    Tsanas, A., Little, M., McSharry, P. and Ramig, L. (2010). Accurate telemonitoring of
    Parkinson's disease progression by noninvasive speech tests. IEEE Transactions on Biomedical
    Engineering, 57, 884-893.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_parkinsons
    >>> load_parkinsons().data.shape
    (5875, 19)
    """
    frame = read_shipped_table("parkinsons")
    # The motor score is a part of the total one, and would give the target away as a feature.
    features = frame.columns.drop(["subject", "motor_UPDRS", "total_UPDRS"]).tolist()
    return _table_bunch(frame, features, "total_UPDRS", "subject")


def load_county_elections() -> Bunch:
    """Load the winner of each US county in the presidential elections of 2000 to 2020.

    Returns
    -------
    Bunch
        - ``frame``: DataFrame of 18,666 rows with ``fips`` (county code, a string), ``state``,
          ``county``, ``year``, ``votes_dem``, ``votes_rep`` and ``rep_won`` (1 if the Republican
          got more votes than the Democrat) of the 3,111 counties outside Alaska with all six
          elections;
        - ``data``: DataFrame with ``year``;
        - ``target``: ndarray of shape (18666,), ``rep_won``;
        - ``groups``: ndarray of shape (18666,), ``fips``.

    Notes
    -----
    The source is the County Presidential Election Returns 2000-2020 of the MIT Election Data and
    Science Lab (Harvard Dataverse, doi:10.7910/DVN/VOQCHQ), CC0 as the deposit is
    commonly cited, with votes added up over modes of voting.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_county_elections
    >>> load_county_elections().frame["fips"].nunique()
    3111
    """
    # Codes begin with zeros in Alabama to Connecticut.
    frame = read_shipped_table("county_elections", dtype={"fips": str})
    columns = ["fips", "state", "county", "year", "votes_dem", "votes_rep", "rep_won"]
    # Alaska reports by districts, and a few counties lack an election or were renamed.
    frame = frame.loc[frame["in_panel"] == 1, columns]
    return _table_bunch(frame, ["year"], "rep_won", "fips")


def _table_bunch(frame, features, target, group):
    # Ids as objects: pandas' own arrays of strings are not NumPy's.
    frame = frame.reset_index(drop=True)
    return Bunch(
        frame=frame,
        data=frame[features],
        target=frame[target].to_numpy(),
        groups=np.asarray(frame[group], dtype=object if frame[group].dtype.kind in "OT" else None),
    )
