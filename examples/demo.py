"""The main job in one go: batting averages of 18 baseball players.

Load a table, compare local, pooled and personalized models by cross-validation inside clients, fit
privately, read the privacy report, see the plot.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import sklearn
from sklearn.dummy import DummyClassifier
from sklearn.model_selection import cross_validate

from pfl_sklearn import BernoulliMean
from pfl_sklearn.datasets import expand_counts, load_baseball
from pfl_sklearn.inspection import ShrinkageDisplay
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import BetaPrior


def compare(baseball):
    """Table of the models: cross-validated log loss, and squared error against the season."""
    y, player = expand_counts(baseball.successes, baseball.trials, baseball.groups)
    X = np.zeros((len(y), 1))
    personalized = BernoulliMean().fit(X, y, groups=player)
    everybody = np.zeros((18, 1))
    models = {
        "local": BernoulliMean(BetaPrior(alpha=1e-2, beta=1e-2)),
        "pooled": DummyClassifier(strategy="prior"),
        "personalized": BernoulliMean(),
    }
    averages = {
        "local": baseball.successes / baseball.trials,
        "pooled": y.mean(),
        "personalized": personalized.predict_proba(everybody, groups=baseball.groups)[:, 1],
    }
    rows = {}
    with sklearn.config_context(enable_metadata_routing=True):
        for name, model in models.items():
            scores = cross_validate(
                model,
                X,
                y,
                params={"groups": player},
                cv=ClientKFold(5, random_state=0),
                scoring=ClientScorer("neg_log_loss"),
            )
            rows[name] = {
                "log loss of held-out at-bats": -scores["test_score"].mean(),
                "squared error against the season": squared_error(averages[name], baseball),
            }
    return pd.DataFrame(rows).T, personalized


def squared_error(averages, baseball):
    """Sum over the players, in the order of the table."""
    return np.sum((averages - baseball.season_average) ** 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("output/baseball.png"))
    path = parser.parse_args().output
    baseball = load_baseball()
    table, model = compare(baseball)
    print("18 players, 45 at-bats each, to predict the rest of the 1970 season\n")
    print(table.round(4).to_string(), "\n")

    private = BernoulliMean(epsilon=1.0).fit_counts(
        baseball.successes, baseball.trials, groups=baseball.groups
    )
    averages = private.predict_proba(np.zeros((18, 1)), groups=baseball.groups)[:, 1]
    error = squared_error(averages, baseball)
    print("The same with every player's 45 at-bats protected; the noise is new in every run.")
    print(f"Squared error against the season: {error:.4f}\n")
    print(private.privacy_, "\n")

    display = ShrinkageDisplay.from_estimator(
        model, truth=baseball.season_average, xlabel="batting average"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    display.figure_.savefig(path, dpi=120)
    print(f"Picture written to {path}")


if __name__ == "__main__":
    main()
