"""
A league table, and what ranks cannot tell
==========================================

Eighteen baseball players had 45 times at bat each early in the season of 1970 (Efron and Morris,
1975). Who is the best? The rest of the season, with hundreds of times, is close to the truth, so we
can see what a league table of 45 times is worth.
"""

# %%
# Ranks with intervals
# --------------------
# ``BernoulliMean`` shrinks the players' averages, and ``ranks`` draws from their posteriors. The
# intervals hold almost any place.
import matplotlib.pyplot as plt
import numpy as np

from pfl_sklearn.datasets import load_baseball
from pfl_sklearn.estimation import BernoulliMean

players = load_baseball()
model = BernoulliMean()
model.fit_counts(players.successes, players.trials, groups=players.groups)
table = model.ranks().rename(columns={"estimate": "shrunken"})
table["average"] = model.summary()["local_mean"]
season = dict(zip(players.groups, players.season_average, strict=True))
table["season"] = [season[player] for player in table.index]
table["season_rank"] = table["season"].rank(ascending=False).astype(int)
print(table.round(3).iloc[[0, 1, 2, -2, -1]].to_string())

# %%
# The true ranks
# --------------
# The first in the table was the first of the season, too. The second of the season, Munson, is last
# but one in the table.
inside = (table["lower"] <= table["season_rank"]) & (table["season_rank"] <= table["upper"])
print(f"{inside.sum()} of 18 true ranks are inside their intervals of 95 %")
print(f"rank correlation: {table['rank'].corr(table['season_rank']):.2f}")
at = np.arange(len(table))[::-1]
fig, ax = plt.subplots(figsize=(7, 5), layout="constrained")
ax.hlines(at, table["lower"], table["upper"], color="#1f5fa8", lw=3, alpha=0.35, label="95 %")
ax.plot(table["rank"], at, "o", color="#1f5fa8", label="mean rank")
ax.plot(table["season_rank"], at, "x", color="#2a7f3f", label="rank in the season")
ax.set_yticks(at, table.index)
ax.set_xticks([1, 6, 12, 18])
ax.set_xlabel("rank (1: most hits)")
ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)

# %%
# A better question
# -----------------
# "Is this player above .270?" has an answer that is not relative to the others, and its probability
# says how sure it is.
above = model.exceedance(0.270).sort_values(ascending=False)
print(above.round(2).iloc[[0, 1, 2, -1]])
right = np.mean((above > 0.5) == (table["season"].reindex(above.index) > 0.270))
print(f"{right:.2f} of the players are on the side that is more probable")
