"""
Leave one election out: 3,111 counties
======================================

Did the Republican candidate for president get more votes than the Democrat? Every US county gives
one such answer in each of the six elections from 2000 to 2020. Here one election at a time is held
out and predicted from the other five: by the county's own share of wins (local), by the share of
all counties (pooled), or by shrinking the first towards the second (personalized).

The table comes with the package: :func:`~pfl_sklearn.datasets.load_county_elections`.
"""

# %%
# The table
# ---------
# Rows are county by year; the county is the client.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.model_selection import LeaveOneGroupOut

from pfl_sklearn.datasets import load_county_elections
from pfl_sklearn.estimation import BernoulliMean

YEARS = [2000, 2004, 2008, 2012, 2016, 2020]

frame = load_county_elections().frame
X, won, county, year = frame[["year"]], frame["rep_won"], frame["fips"], frame["year"]
print(f"{county.nunique():,} counties, {len(frame):,} rows")
wins = frame.groupby("fips")["rep_won"].sum().value_counts().sort_index()
print("counties by number of Republican wins, 0 to 6:", *wins.tolist())

# %%
# Six folds
# ---------
# scikit-learn's splitter holds out one year at a time; the counties are the ``groups`` of the
# estimator. The competitors are:
#
# - ``method="printed"``, equation 6 (ICLR) of Ozkara et al. (2023): the weight on the local share
#   is :math:`n / (\mu (1 - \mu) / s^2 - 1 + n)`, with mean and variance of the other shares;
# - ``method="printed_eq32"``, equation 32 (ICLR) of its appendix, where the -1 is missing;
# - ``method="moments"``, which first subtracts the sampling variance from :math:`s^2`;
# - ``method="ml"``, the default: beta-binomial maximum likelihood.
folds = list(LeaveOneGroupOut().split(X, won, groups=year))


def squared_errors(predict):
    """Mean squared error (6,) of ``predict(train, test)`` in every fold."""
    errors = [won.iloc[test] - predict(train, test) for train, test in folds]
    return np.array([np.mean(error**2) for error in errors])


def local(train, test):
    return county.iloc[test].map(won.iloc[train].groupby(county.iloc[train]).mean()).to_numpy()


def pooled(train, test):
    return np.full(len(test), won.iloc[train].mean())


def personalized(**parameters):
    def predict(train, test):
        model = BernoulliMean(**parameters)
        model.fit(X.iloc[train], won.iloc[train], groups=county.iloc[train])
        return model.predict_proba(X.iloc[test], groups=county.iloc[test])[:, 1]

    return predict


def best_weight(train, test):
    """Weight on the local share fitted to the held-out election itself."""
    pooled_share = pooled(train, test)
    deviation = local(train, test) - pooled_share
    weight = deviation @ (won.iloc[test] - pooled_share) / (deviation @ deviation)
    return pooled_share + weight * deviation


base = squared_errors(local)
competitors = {
    "eq. 6 (printed)": personalized(method="printed"),
    "eq. 32 (printed_eq32)": personalized(method="printed_eq32"),
    "moments": personalized(method="moments"),
    "ml (default)": personalized(),
    "pooled": pooled,
    "best weight in hindsight": best_weight,
}
gains = pd.DataFrame(
    {name: 100 * (1 - squared_errors(predict) / base) for name, predict in competitors.items()},
    index=pd.Index(YEARS, name="held out"),
)
print(f"mean squared error of the local shares: {base.mean():.5f}")
print("\n% lower squared error than local, by election held out")
print(gains.T.round(1).to_string())
print("\nmean over the folds")
print(gains.mean().round(1).to_string())

# %%
# Why the gain is small
# ---------------------
# The means over folds are +1.0 % for equation 6 (ICLR), -3.1 % for equation 32 (ICLR), +0.9 % for
# the corrected moments and +1.0 % for maximum likelihood. The paper reports +10.7 %, which we
# cannot reproduce: even the best weight, fitted to the held-out election itself, gains only 3.3 %
# (mean over folds), and no single weight towards the pooled share can do better.
#
# The gain is small because elections are not exchangeable. There is a trend: for 2008 and 2012, the
# best weight on the local share is above 1, and any shrinkage hurts.
shown = gains.drop(columns="pooled")
colors = ["#8c8c8c", "#c98a1b", "#2a7f3f", "#1f5fa8", "black"]
fig, ax = plt.subplots(figsize=(7, 5), layout="constrained")
at = np.arange(len(YEARS))
for k, (name, color) in enumerate(zip(shown, colors, strict=True)):
    hindsight = name.startswith("best")
    ax.plot(
        at + 0.13 * (k - 2),
        shown[name],
        "_" if hindsight else "o",
        color=color,
        ms=14 if hindsight else 6,
        mew=2 if hindsight else 1,
        label=f"{name}: mean {shown[name].mean():+.1f} %",
    )
ax.axhline(0, color="black", lw=0.8)
ax.set(
    xticks=at,
    xticklabels=YEARS,
    xlabel="election held out",
    ylabel="% lower squared error than local",
    title="Leave one election out",
)
ax.spines[["top", "right"]].set_visible(False)
fig.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
plt.show()

# %%
# With privacy
# ------------
# Now counties report under local differential privacy. Every county sends a random subset of the
# possible numbers of wins, which contains the true number more often than by chance (subset
# selection), and the fit pools only these messages. The county itself still uses its exact share.
# ``mechanism="auto"`` picks this mechanism because all counties have five elections.
train, test = folds[0]
private = BernoulliMean(epsilon=1.0).fit(X.iloc[train], won.iloc[train], groups=county.iloc[train])
print(private.privacy_)

# %%
# Epsilon is the cost of *one* fit, for one county with its five elections. Six folds are six fits
# on overlapping data, so publishing all of them would cost six times as much.
epsilons = [0.5, 1, 2, 4]
N_REPETITIONS = 6
private_gains = np.array(
    [
        [
            np.mean(100 * (1 - squared_errors(personalized(epsilon=epsilon)) / base))
            for _ in range(N_REPETITIONS)
        ]
        for epsilon in epsilons
    ]
)
print("mean over the folds of the gain over local, in %")
print("(epsilon: of one fit, delta = 0; unit: one county; relation: its five elections replaced")
print(" by any other; adversary: everybody who sees the messages, the server included)")
for epsilon, values in zip(epsilons, private_gains, strict=True):
    print(
        f"epsilon {epsilon:<4} {values.mean():+5.1f}  ({values.min():+.1f} to {values.max():+.1f})"
    )
print(f"no privacy   {gains['ml (default)'].mean():+5.1f}")

# %%
# From an epsilon of 2 on, three thousand counties lose nothing to privacy. At 0.5, the messages are
# too noisy to estimate how far to shrink, and some results are worse than no shrinkage.
