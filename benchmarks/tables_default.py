"""The default prior against a random intercept, on real tables, by cross-validation inside clients.

Both models see the same features, and the same rows are held out. The loss is the squared error or
the negative log-likelihood of a held-out row; the standard error of the difference is clustered by
client. `PFL_SKLEARN_DATA` names the folder with the tables.

    python benchmarks/tables_default.py
    python benchmarks/tables_default.py --tables sleepstudy radon_us
"""

import argparse
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior

FOLDS = 5


def read(name):
    return pd.read_csv(Path(os.environ["PFL_SKLEARN_DATA"]) / f"{name}.csv.gz")


def _columns(file, client, target, features):
    def table():
        frame = read(file).dropna(subset=[client, target, *features])
        X = pd.get_dummies(frame[features], drop_first=True, dtype=float)
        return X, frame[target].to_numpy(), frame[client].to_numpy()

    return table


def elections():
    frame = read("election_county_2000_2020").query("in_panel == 1")
    share = frame["votes_rep"] / (frame["votes_rep"] + frame["votes_dem"])
    return frame[["year"]].astype(float), share.to_numpy(), frame["fips"].to_numpy()


def radon():
    frame = read("radon_us")
    frame = frame.assign(log_uranium=np.log(frame["uranium_ppm"].clip(lower=0.1))).dropna(
        subset=["log_radon", "floor", "log_uranium"]
    )
    return frame[["floor", "log_uranium"]], frame["log_radon"].to_numpy(), frame["county_fips"]


def baseball():
    frame = read("baseball_batting_2000_2024").query("AB >= 50 and pitcher == 0")
    return frame[["year", "age"]].astype(float), (frame["H"] / frame["AB"]).to_numpy(), frame.player


TABLES = {
    "sleepstudy": (_columns("sleepstudy", "subject", "reaction", ["days"]), False),
    "radon": (radon, False),
    "hsb82": (_columns("hsb82", "school", "mAch", ["cses", "meanses"]), False),
    "chem97": (_columns("chem97", "school", "score", ["gcsecnt", "age"]), False),
    "elections": (elections, False),
    "baseball": (baseball, False),
    "parkinsons": (
        _columns(
            "parkinsons_telemonitoring",
            "subject",
            "total_UPDRS",
            ["test_time", "age", "sex", "NHR", "HNR", "RPDE", "DFA", "PPE"],
        ),
        False,
    ),
    "insteval": (
        _columns("insteval", "student", "y", ["service", "lectage", "studage"]),
        False,
    ),
    "heart": (
        _columns(
            "heart_disease_4hospitals", "hospital", "target", ["age", "sex", "thalach", "oldpeak"]
        ),
        True,
    ),
    "contraception": (
        _columns("contraception", "district", "use", ["livch", "age", "urban"]),
        True,
    ),
    "verbagg": (
        _columns("verbagg", "id", "r2", ["Anger", "Gender", "btype", "situ", "mode"]),
        True,
    ),
}


def losses(model, X, y, groups):
    """Loss (n,) of every row when it is held out."""
    found = np.empty(len(y))
    for train, test in ClientKFold(FOLDS, random_state=0).split(X, y, groups=groups):
        model.fit(X.iloc[train], y[train], groups=groups[train])
        if hasattr(model, "predict_proba"):
            chances = model.predict_proba(X.iloc[test], groups=groups[test])
            found[test] = -np.log(chances[np.arange(len(test)), y[test].astype(int)])
        else:
            found[test] = (model.predict(X.iloc[test], groups=groups[test]) - y[test]) ** 2
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| table | random intercept | uncentred | default | difference | 2 SE | s |")
    print("|---|---|---|---|---|---|---|")
    for name in options.tables:
        make, classes = TABLES[name]
        X, y, groups = make()
        groups = np.asarray(groups)
        if classes:
            y = pd.factorize(y, sort=True)[0]
        kind = PersonalizedLogisticRegression if classes else PersonalizedLinearRegression
        start = time.perf_counter()
        level = losses(kind(random="intercept"), X, y, groups)
        raw = losses(kind(GaussianPrior(covariance_type="diag", centered=False)), X, y, groups)
        default = losses(kind(), X, y, groups)
        apart = pd.Series(default - level).groupby(groups).sum().to_numpy()
        error = np.sqrt(np.sum((apart - apart.mean()) ** 2)) / len(y)
        print(
            f"| {name} | {level.mean():.5g} | {raw.mean():.5g} | {default.mean():.5g} | "
            f"{default.mean() - level.mean():+.3g} | {2 * error:.2g} | "
            f"{time.perf_counter() - start:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
