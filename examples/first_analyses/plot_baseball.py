"""
Shrinkage with and without privacy: 18 baseball players
=======================================================

After the first 45 at-bats of a season, what will a player hit in the rest of it? Efron and Morris
asked this about 18 players of 1970. Every player is a client with 45 trials. There are three
answers: his own average so far (local), one average for all (pooled), and the local average shrunk
towards the pooled one (personalized).

The rest of the season shows which is best. The second half of the example asks how much of the gain
remains when differential privacy protects every player's record.
"""

# %%
# Local, pooled, personalized
# ---------------------------
# :class:`~pfl_sklearn.estimation.BernoulliMean` takes tables of counts through ``fit_counts``.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.datasets import load_baseball
from pfl_sklearn.estimation import BernoulliMean
from pfl_sklearn.inspection import ShrinkageDisplay

baseball = load_baseball()
hits, at_bats, players = baseball.successes, baseball.trials, baseball.groups

model = BernoulliMean().fit_counts(hits, at_bats, groups=players)
later = baseball.season_average[model.clients_].to_numpy()  # in the order of the fitted clients


def squared_error(estimates):
    """Sum over players of squared differences from the average in the rest of the season."""
    return float(np.sum((estimates - later) ** 2))


errors = pd.Series(
    {
        "local": squared_error(model.local_means_),
        "pooled": squared_error(np.full(len(later), hits.sum() / at_bats.sum())),
        "personalized": squared_error(model.means_),
    },
    name="sum of squared errors",
)
print(errors.round(4).to_string())
print(f"shrinkage: {model.shrinkage_[0]:.2f} of the way to the population mean")

# %%
# Local averages are by far the worst: 45 at-bats are few, and most of the spread between the
# players is luck. Personalized estimates are slightly better than one average for all. The two are
# close because these players hardly differ.
#
# Rings are the local averages, dots the personalized ones with their 95 % intervals, and crosses
# the averages in the rest of the season. One of the 18 crosses lies outside its interval. The
# intervals are for a player's probability of a hit. They include the uncertainty about a population
# of which only 18 players are known, but not the luck in the rest of the season.
display = ShrinkageDisplay.from_estimator(model, truth=later, xlabel="batting average")
display.ax_.set_title("18 players: first 45 at-bats and rest of the season")
plt.show()

lower, upper = model.credible_interval(0.95)
luck = np.sqrt(later * (1 - later) / baseball.frame.loc[model.clients_, "remaining_at_bats"])
print(
    f"crosses outside their interval: {np.sum((later < lower) | (later > upper))} of {len(later)}"
)
print(f"sampling standard deviation of a later average: {luck.median():.3f}")

# %%
# With privacy
# ------------
# Now the fit pools only a differentially private release of the players' records. Each player still
# combines the pooled result with his own exact record. The report states what epsilon means: here
# the unit is one player with all his at-bats.
#
# With ``trust="local"``, every player randomizes his own report (delta is 0). With
# ``trust="central"``, a trusted server adds Gaussian noise to the histogram of hits. That needs a
# delta, and .01 is already generous for 18 players.
DELTA = 0.01
releases = {"local": {"trust": "local"}, "central": {"trust": "central", "delta": DELTA}}
for release in releases.values():
    private = BernoulliMean(epsilon=1.0, **release).fit_counts(hits, at_bats, groups=players)
    print(private.privacy_, end="\n\n")

# %%
# The noise differs between fits, so we repeat each epsilon.
epsilons = [0.5, 1, 2, 4, 8]
N_REPETITIONS = 50


def private_errors(epsilon, release):
    """Squared errors of repeated private fits."""
    fits = [
        BernoulliMean(epsilon=epsilon, **release).fit_counts(hits, at_bats, groups=players)
        for _ in range(N_REPETITIONS)
    ]
    return [squared_error(fit.means_) for fit in fits]


squares = {
    name: np.array([private_errors(epsilon, release) for epsilon in epsilons])
    for name, release in releases.items()
}
table = pd.DataFrame({f"{name} trust": error.mean(axis=1) for name, error in squares.items()})
table.index = pd.Index(epsilons, name="epsilon")
print("mean sum of squared errors")
print("(unit: one player; relation: one player's whole record replaced by any other;")
print(" local trust: delta = 0, adversary: all who see the reports, the server included;")
print(f" central trust: delta = {DELTA}, adversary: all but the trusted server)")
print(table.round(4).to_string())

# %%
# Eighteen clients are too few for privacy. At an epsilon of 1, most of the gain from pooling is
# lost under either kind of trust, and repeated fits differ widely. Errors come close to those
# without privacy only at an epsilon of 8, but odds of 3,000 to 1 protect nobody.
colors = {"local": "#1f5fa8", "central": "#c1440e"}
fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
for name, error in squares.items():
    low, high = np.quantile(error, [0.1, 0.9], axis=1)
    ax.fill_between(epsilons, low, high, color=colors[name], alpha=0.15, lw=0)
    ax.plot(epsilons, error.mean(axis=1), "o-", color=colors[name], label=f"private, {name} trust")
for (name, value), style in zip(errors.items(), ["--", ":", "-"], strict=True):
    ax.axhline(value, color="#555555", lw=1, ls=style, label=f"{name}, no privacy")
ax.set(
    xscale="log",
    xticks=epsilons,
    xticklabels=epsilons,
    xlabel="epsilon for one player (replace one)",
    ylabel="sum of squared errors",
    ylim=(0, 0.09),
    title=f"18 players are too few: mean and middle 80 % of {N_REPETITIONS} fits",
)
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small", loc="lower left", ncols=2)
plt.show()

# %%
# How many clients are enough?
# ----------------------------
# All clients share the noise of a release, so its cost falls with their number. We simulate leagues
# of several sizes from a beta population, fitted to the 18 players by moments. Errors are now those
# of the true probabilities, relative to the errors of the local averages.
population = BernoulliMean(method="moments").fit_counts(hits, at_bats).prior_
league_sizes = [18, 50, 150, 500, 1500, 5000]


def relative_error(n_players, release, seed):
    """Squared error of private estimates relative to local ones, in a simulated league."""
    rng = np.random.default_rng(seed)
    probability = rng.beta(population.alpha, population.beta, n_players)
    league = rng.binomial(45, probability)
    private = BernoulliMean(epsilon=1.0, **release).fit_counts(league, np.full(n_players, 45))
    local = np.sum((private.local_means_ - probability) ** 2)
    return np.sum((private.means_ - probability) ** 2) / local


fig, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name in releases:
    release = {"trust": name, "delta": 0.0 if name == "local" else 1e-5}
    ratio = [
        np.mean([relative_error(size, release, seed) for seed in range(8)]) for size in league_sizes
    ]
    ax.plot(league_sizes, ratio, "o-", color=colors[name], label=f"private, {name} trust")
mean, between = population.moments()
within = (mean * (1 - mean) - between) / 45
ax.axhline(
    between / (between + within), color="#555555", lw=1, label="population known, no privacy"
)
ax.axhline(1, color="#555555", lw=1, ls="--", label="local")
ax.set(
    xscale="log",
    xticks=league_sizes,
    xticklabels=[f"{size:,}" for size in league_sizes],
    ylim=(0, 1.1),
    xlabel="players in a simulated league",
    ylabel="squared error relative to local averages",
    title="Epsilon = 1 for one player (replace one; delta 0 local, 1e-5 central)",
)
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small", loc="center right")
plt.show()

# %%
# With a trusted server, 500 players get nearly all of the gain at an epsilon of 1. If every player
# randomizes his own report, even 5,000 players do not.
