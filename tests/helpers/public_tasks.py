"""Eleven prediction tasks on the public tables: numeric features, targets and clients."""

from typing import NamedTuple

import numpy as np
import pandas as pd

_VOICE = ["age", "sex", "test_time"]  # and the 16 voice measures, from "Jitter(pct)" on


class PublicTask(NamedTuple):
    """Features (n, d) as a data frame, responses or 0/1 labels and clients (n,).

    Where there are any, also the times of the rows (n,), and as a series the levels (n,) of a
    second id, crossed with the clients or above them.
    """

    X: pd.DataFrame
    y: np.ndarray
    groups: np.ndarray
    time: np.ndarray | None = None
    second: pd.Series | None = None


def chem97(home):
    """A-level chemistry scores by school, from the pupil's GCSE average, age and sex."""
    table = pd.read_csv(home / "chem97.csv.gz")
    X = table[["gcsescore", "age"]].assign(female=table["gender"] == "F")
    return _task(X, table["score"], table["school"], table["lea"])


def parkinsons(home):
    """Total UPDRS by patient, from age, sex, time and 16 voice measures."""
    table = pd.read_csv(home / "parkinsons_telemonitoring.csv.gz")
    X = pd.concat([table[_VOICE], table.loc[:, "Jitter(pct)":]], axis=1)
    task = _task(X, table["total_UPDRS"], table["subject"])
    return task._replace(time=table["test_time"].to_numpy())


def movielens(home):
    """Ratings by user, from the film's 20 genres and its year."""
    table = pd.read_csv(home / "movielens_small_ratings.csv.gz")
    films = pd.read_csv(home / "movielens_small_movies.csv.gz", index_col="movie")
    films["year"] = films["year"].fillna(films["year"].median())
    X = films.drop(columns="title").loc[table["movie"]]
    return _task(X, table["rating"], table["user"], table["movie"])


def insteval(home):
    """Ratings by lecturer, from the terms of student and lecture, service, and department."""
    table = pd.read_csv(home / "insteval.csv.gz")
    X = pd.get_dummies(table[["studage", "lectage", "service", "dept"]], columns=["dept"])
    return _task(X, table["y"], table["lecturer"], table["student"])


def radon(home):
    """Log radon by county of the US, from the floor and the county's log uranium."""
    table = pd.read_csv(home / "radon_us.csv.gz")
    table = table[table["uranium_ppm"] > 0]
    X = pd.get_dummies(table[["floor"]], columns=["floor"])
    X["log_uranium"] = np.log(table["uranium_ppm"])
    return _task(X, table["log_radon"], table["county_fips"], table["state"])


def landmine(home):
    """Mines by field, from nine features of a radar image."""
    table = np.load(home / "landmine_29.npz")
    return _task(pd.DataFrame(table["X"]), table["y"], table["field"])


def movielens_liked(home):
    """Whether a rating is 4 or better."""
    task = movielens(home)
    return task._replace(y=(task.y >= 4).astype(int))


def insteval_liked(home):
    """Whether a rating is 4 or better."""
    task = insteval(home)
    return task._replace(y=(task.y >= 4).astype(int))


def contraception(home):
    """Use of contraception by district, from age, its square, children and town."""
    table = pd.read_csv(home / "contraception.csv.gz")
    X = pd.get_dummies(table[["age", "livch"]], columns=["livch"])
    X = X.assign(square=table["age"] ** 2, urban=table["urban"] == "Y")
    return _task(X, table["use"] == "Y", table["district"])


def verbagg(home):
    """Verbal aggression by person, from anger, sex, and the kind of item."""
    table = pd.read_csv(home / "verbagg.csv.gz")
    X = pd.get_dummies(table[["Anger", "Gender", "btype", "situ", "mode"]])
    return _task(X, table["r2"] == "Y", table["id"], table["item"])


def heart(home):
    """Heart disease by hospital, from 13 attributes, with indicators of those that are missing."""
    table = pd.read_csv(home / "heart_disease_4hospitals.csv.gz")
    X = table.loc[:, "age":"thal"]
    X["chol"] = X["chol"].replace(0, np.nan)
    numbers = X[["age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca"]]
    factors = pd.get_dummies(
        X[["cp", "restecg", "slope", "thal"]].astype("category"), dummy_na=True
    )
    missing = numbers.isna().loc[:, numbers.isna().any()].add_suffix("_missing")
    X = pd.concat([numbers.fillna(numbers.median()), missing, factors], axis=1)
    return _task(X.loc[:, X.nunique() > 1], table["target"], table["hospital"])


REGRESSION = [chem97, parkinsons, movielens, insteval, radon]
CLASSIFICATION = [landmine, movielens_liked, insteval_liked, contraception, verbagg, heart]


def _task(X, y, groups, second=None):
    X, y = X.astype(float).set_axis(X.columns.astype(str), axis=1), np.asarray(y)
    y = y.astype(float if np.unique(y).size > 2 else int)
    return PublicTask(X, y, np.asarray(groups), second=second)
