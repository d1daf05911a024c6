"""Held-out errors with further groupings of the rows, beside models without them.

MovieLens and the lecture ratings on the three splits inside clients of tables.py; new counties of
known states, whose state is a grouping or is left out; and simulated columns of many levels,
against one-hot columns. `PFL_SKLEARN_DATA` names the folder with the tables.

    python benchmarks/groupings.py
    python benchmarks/groupings.py radon elections many_levels
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from tables import FEW_SPLITS, splits_of

from pfl_sklearn import ClientColumn, PersonalizedLinearRegression

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.helpers import public_tasks  # noqa: E402

DRAWS = 5  # of counties, and of simulated tables
NEW = 0.25  # share of the counties that a model does not see


def read(name, **params):
    return pd.read_csv(Path(os.environ["PFL_SKLEARN_DATA"]) / f"{name}.csv.gz", **params)


def rmse(model, train, test, target):
    """Root mean squared error of a model of clients on test rows."""
    model = ClientColumn(model, "client").fit(train, target[train.index])
    return np.sqrt(np.mean((model.predict(test) - target[test.index]) ** 2))


def report(name, errors, others, bar):
    """Print one line: mean errors with the grouping and without, their ratio, CPU seconds."""
    with_it, without = np.mean(errors, axis=0), np.mean(others, axis=0)
    ratios = "; ".join(f"{with_it[0] / each:.4f}" for each in np.atleast_1d(without))
    shown = "; ".join(f"{each:.4f}" for each in np.atleast_1d(without))
    print(
        f"| {name} | {with_it[0]:.4f} | {shown} | {ratios} | {with_it[1]:.1f} | {bar} |", flush=True
    )


def timed(model, *rows):
    began = time.process_time()
    return rmse(model, *rows), time.process_time() - began


def known_clients(name, task, column, values, bar):
    """Rows of known clients: the grouping `column` against none."""
    X = task.X.reset_index(drop=True).assign(client=pd.factorize(task.groups, sort=True)[0])
    grouped, errors, others = X.assign(**{column: values}), [], []
    model = PersonalizedLinearRegression(groupings=[column], unseen="population")
    for train, test in splits_of("inside", X["client"].to_numpy())[:FEW_SPLITS]:
        errors.append(timed(model, grouped.iloc[train], grouped.iloc[test], task.y))
        others.append(rmse(PersonalizedLinearRegression(), X.iloc[train], X.iloc[test], task.y))
    report(name, errors, others, bar)


def movielens():
    home = Path(os.environ["PFL_SKLEARN_DATA"])
    movies = read("movielens_small_ratings")["movie"].to_numpy()
    known_clients("MovieLens, movie", public_tasks.movielens(home), "movie", movies, "<= .828")


def lectures():
    home = Path(os.environ["PFL_SKLEARN_DATA"])
    students = read("insteval")["student"].to_numpy()
    known_clients(
        "lecture ratings, student", public_tasks.insteval(home), "student", students, "<= 1.193"
    )


def new_counties(name, X, y, states, bar):
    """Rows of counties that the model does not see, in states that it does."""
    errors, others = [], []
    for seed in range(DRAWS):
        counties = np.random.default_rng(seed).permutation(np.unique(X["client"]))
        new = np.isin(X["client"], counties[: round(NEW * len(counties))])
        new_rows = X[new & np.isin(states, states[~new])]
        model = PersonalizedLinearRegression(unseen="population")
        others.append(rmse(model, X[~new], new_rows, y))
        model.set_params(groupings=["state"])
        grouped = X.assign(state=states)
        errors.append(timed(model, grouped[~new], grouped.loc[new_rows.index], y))
    report(f"{name}, new counties of known states", errors, others, bar)


def radon():
    task = public_tasks.radon(Path(os.environ["PFL_SKLEARN_DATA"]))
    states = read("radon_us").query("uranium_ppm > 0")["state"].to_numpy()
    X = task.X.reset_index(drop=True).assign(client=task.groups)
    new_counties("radon", X, task.y, states, "<= .95")


def elections():
    table = read("election_county_2000_2020").query("in_panel == 1").reset_index(drop=True)
    share = table["votes_rep"] / (table["votes_rep"] + table["votes_dem"])
    X = table[["year"]].astype(float).assign(client=table["fips"])
    new_counties("elections", X, share.to_numpy(), table["state"].to_numpy(), "<= .90")


def many_levels():
    """A simulated column of many levels: as a grouping, as one-hot columns, and left out."""
    for n_levels, n_rows, sd, bar in ((51, 35, 1.8, "<= 1.02; -"), (2000, 3, 0.7, "< 1; < 1")):
        errors, others = [], []
        for seed in range(DRAWS):
            rng = np.random.default_rng(seed)
            level = np.tile(np.arange(n_levels), 2 * n_rows)  # half of the rows to test
            client, x = rng.integers(0, 40, len(level)), rng.normal(size=len(level))
            y = 0.5 * x + rng.normal(size=40)[client] + sd * rng.normal(size=n_levels)[level]
            y += rng.normal(size=len(y))
            plain = pd.DataFrame({"x": x, "client": client})
            grouped = plain.assign(level=[f"level {each}" for each in level])
            one_hot = pd.concat([plain, pd.get_dummies(grouped["level"], dtype=float)], axis=1)
            model, half = PersonalizedLinearRegression(random="intercept"), len(y) // 2
            errors.append(timed(model, grouped[:half], grouped[half:], y))
            others.append([rmse(model, each[:half], each[half:], y) for each in (one_hot, plain)])
        report(f"{n_levels:,} levels of {n_rows} rows", errors, others, bar)


TABLES = {each.__name__: each for each in (movielens, lectures, radon, elections, many_levels)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=list(TABLES))
    warnings.simplefilter("ignore")
    print("| rows | with the grouping | one-hot, without | ratio | CPU s of a fit | bar |")
    print("|---|---|---|---|---|---|")
    for name in parser.parse_args().tables:
        TABLES[name]()
