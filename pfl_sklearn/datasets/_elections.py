"""County presidential elections, 2000 to 2020."""

import pandas as pd
from sklearn.utils import Bunch

from pfl_sklearn.datasets._public import PublicTable, find_table

_COLUMNS = ("fips", "state", "county", "year", "rep_won", "in_panel")
_ELECTIONS = PublicTable(
    file="election_county_2000_2020.csv.gz",
    sha256="8aebc4b9ddb9ef9481f2db9a681b392a897716f8782305ac4c4caff465d3912a",
    contents=f"a table with the columns {', '.join(_COLUMNS)}",
    source="it can be made from the County Presidential Election Returns of the MIT Election Data "
    "and Science Lab (doi:10.7910/DVN/VOQCHQ)",
)


def load_county_elections(data_home=None):
    """Load the winner of each US county in the presidential elections of 2000 to 2020.

    The table does not ship with the package.

    Parameters
    ----------
    data_home : str or path, default=None
        Folder with ``election_county_2000_2020.csv.gz``. None: the environment variable
        ``PFL_SKLEARN_DATA``.

    Returns
    -------
    Bunch
        - ``frame``: DataFrame of 18,666 rows with ``fips`` (county code, a string), ``state``,
          ``county``, ``year`` and ``rep_won`` (1 if the Republican got more votes than the
          Democrat) of the 3,111 counties outside Alaska with all six elections;
        - ``data``: DataFrame with ``year``;
        - ``target``: ndarray of shape (18666,), ``rep_won``;
        - ``groups``: ndarray of shape (18666,), ``fips``.

    Raises
    ------
    FileNotFoundError
        If the table does not exist.
    ValueError
        If the table lacks a column.

    Notes
    -----
    The source is the County Presidential Election Returns 2000-2020 of the MIT Election Data and
    Science Lab (Harvard Dataverse, doi:10.7910/DVN/VOQCHQ). A table with another checksum is loaded
    with a warning.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_county_elections
    >>> load_county_elections("/nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: no election_county_2000_2020.csv.gz in /nowhere: ...
    """
    path = find_table(_ELECTIONS, data_home)
    frame = pd.read_csv(path, dtype={"fips": str})
    missing = [name for name in _COLUMNS if name not in frame]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}.")
    frame = frame.loc[frame["in_panel"] == 1, list(_COLUMNS[:-1])].reset_index(drop=True)
    return Bunch(
        frame=frame,
        data=frame[["year"]],
        target=frame["rep_won"].to_numpy(),
        groups=frame["fips"].to_numpy(dtype=object),
    )
