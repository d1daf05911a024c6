"""
Batting averages, season by season
==================================

Every season adds one batting average to a player's record. What will the next one be? A player's
own mean is a poor guess after two seasons, and the mean of all players ignores his record.
``CollaborativeMean`` follows all players and lets each learn from those with similar averages.

The table ``baseball_batting_2000_2024.csv.gz`` (Lahman's database, CC BY-SA 3.0) is read from the
folder in ``PFL_SKLEARN_DATA``. Without it, the example simulates players; all output and titles say
so.
"""

# %%
# A stream of seasons
# -------------------
# The table has one row per player and season with at least 100 at-bats.
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.inspection import StreamDisplay
from pfl_sklearn.online import CollaborativeMean

file = Path(os.environ.get("PFL_SKLEARN_DATA", "")) / "baseball_batting_2000_2024.csv.gz"


def simulated_seasons(n_players=600):
    """Players with careers of one to fifteen seasons, whose abilities differ."""
    rng = np.random.default_rng(0)
    ability, debut = rng.normal(0.255, 0.022, n_players), rng.integers(1990, 2025, n_players)
    seasons = [
        (f"player {i}", year, rng.binomial(350, ability[i]) / 350)
        for i in range(n_players)
        for year in range(debut[i], min(debut[i] + rng.geometric(0.2), 2025))
        if year >= 2000
    ]
    return pd.DataFrame(seasons, columns=["player", "year", "average"])


if file.is_file():
    records = pd.read_csv(file).query("AB >= 100")
    seasons = records.assign(average=records["H"] / records["AB"])[["player", "year", "average"]]
    SOURCE = "seasons of 2000 to 2024"
else:
    seasons, SOURCE = simulated_seasons(), "SIMULATED PLAYERS"
seasons = seasons.sort_values("year", kind="stable")
print(f"data: {SOURCE}; {len(seasons)} seasons of {seasons['player'].nunique()} players")

# %%
# Predicting the next season
# --------------------------
# Every year, each model first predicts the averages of the players that it has seen before, and
# then receives them. With privacy, an average in [.1, .4] gets noise before any other player
# receives it. Epsilon protects one season of one player against all others together.
bounds = {"bounds": (0.1, 0.4), "horizon": 25}
streams = {
    "collaborative": CollaborativeMean(),
    "collaborative, epsilon = 8": CollaborativeMean(epsilon=8.0, **bounds),
    "collaborative, epsilon = 2": CollaborativeMean(epsilon=2.0, **bounds),
}
errors = []
for year, table in seasons.groupby("year"):
    for name, stream in streams.items():
        if hasattr(stream, "clients_"):
            known = table[table["player"].isin(stream.clients_)]
            row = {"year": year, "n": len(known)}
            predicted = stream.predict(known[["year"]], groups=known["player"])
            row[name] = np.mean((predicted - known["average"]) ** 2)
            if name == "collaborative":
                local = pd.Series(stream.local_means_, stream.clients_)[known["player"]]
                row["local"] = np.mean((local.to_numpy() - known["average"]) ** 2)
                row["pooled"] = np.mean((stream.population_mean_ - known["average"]) ** 2)
            errors.append(row)
        stream.partial_fit(table[["year"]], table["average"], groups=table["player"])
errors = pd.DataFrame(errors).groupby("year").first()

# %%
# Root mean squared errors of all predictions ("local" is the player's own mean, "pooled" the mean
# of all players):
mean_squares = errors.drop(columns="n").mul(errors["n"], axis=0).sum() / errors["n"].sum()
print(np.sqrt(mean_squares).round(4).to_string())
print(streams["collaborative, epsilon = 8"].privacy_)

# %%
# With an epsilon of 8 or 2, most of the gain over a player's own mean is lost: half of the players
# have four seasons or fewer, too few to average out the noise.

# %%
# Over time
# ---------
# The figure shows the error to date, relative to that of each player's own mean.
to_date = errors.drop(columns="n").mul(errors["n"], axis=0).cumsum()
relative = np.sqrt(to_date.div(to_date["local"], axis=0)).iloc[2:]
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name in ["local", "pooled", *streams]:
    ax.plot(relative.index, relative[name], label=name, color="0.6" if name == "local" else None)
ax.set(xlabel="season", ylabel="error to date, relative to local", title=SOURCE)
ax.legend(frameon=False, fontsize="small")
plt.show()

# %%
# Three players
# -------------
# These are the players with the longest records. Their own means take many seasons to stabilize.
longest = seasons["player"].value_counts().index[:3]
StreamDisplay.from_estimator(
    CollaborativeMean(),
    seasons[["year"]],
    seasons["average"],
    groups=seasons["player"],
    clients=longest,
)
plt.show()
