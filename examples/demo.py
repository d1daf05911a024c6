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
    pooled = y.mean()
    models = {
        # A prior of no weight, of overwhelming weight, and one that is estimated.
        "local": BernoulliMean(BetaPrior(alpha=1e-2, beta=1e-2)),
        "pooled": BernoulliMean(BetaPrior(alpha=1e6 * pooled, beta=1e6 * (1 - pooled))),
        "personalized": BernoulliMean(),
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
            fitted = model.fit(X, y, groups=player)
            season = baseball.season_average[fitted.clients_]
            rows[name] = {
                "log loss of held-out at-bats": -scores["test_score"].mean(),
                "squared error against the season": np.sum((fitted.means_ - season) ** 2),
            }
    return pd.DataFrame(rows).T, fitted, season


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("output/baseball.png"))
    path = parser.parse_args().output
    baseball = load_baseball()
    table, model, season = compare(baseball)
    print("18 players, 45 at-bats each, to predict the rest of the 1970 season\n")
    print(table.round(4).to_string(), "\n")

    private = BernoulliMean(epsilon=1.0).fit_counts(
        baseball.successes, baseball.trials, groups=baseball.groups
    )
    error = np.sum((private.means_ - season) ** 2)
    print("The same with every player's 45 at-bats protected; the noise is new in every run.")
    print(f"Squared error against the season: {error:.4f}\n")
    print(private.privacy_, "\n")

    display = ShrinkageDisplay.from_estimator(model, truth=season, xlabel="batting average")
    path.parent.mkdir(parents=True, exist_ok=True)
    display.figure_.savefig(path, dpi=120)
    print(f"Picture written to {path}")


if __name__ == "__main__":
    main()
