"""
Local or global learning: privacy noise decides
===============================================

The linear models of many clients have 95 coefficients in common and differ a little in five others.
A global model learns fast, because it uses all rows, but its gradients are pooled, so privacy adds
noise to them. Local models learn slowly, without noise. With enough noise and enough rows they win:
Figure 1a of the paper behind PPSGD (Bietti et al., 2022) shows this, with all shares of global
learning in between.

That figure takes 1,000 clients and 1,000 rounds, or eight gigabytes of rows. We simulate 200
clients and 300 rounds, with a coarser grid. The noise is smaller by the same factor of five, so
that the average over clients has the same noise. :ref:`papers` has the whole figure.
"""

# %%
# The setting
# -----------
# In every round, all clients take part, with ten fresh rows each. There is one pass and no
# intercept. Messages are the clients' average gradients, clipped to a norm of 10. ``alpha * Q`` is
# the ratio of the global step to the local ones, where Q is the number of clients in a round: 0 is
# local learning and infinity global learning. The paper's noise multipliers are 0, 10 and 100.
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.datasets import make_ppsgd_regression
from pfl_sklearn.linear_model import PPSGDRegressor
from pfl_sklearn.privacy import PrivacyWarning
from pfl_sklearn.theory import linear_excess_risk

N_CLIENTS, BATCH, AT_ONCE, N_ROUNDS = 200, 10, 25, 300
SCALE = N_CLIENTS / 1000
ALPHA_Q = [0, 0.1, 1, np.inf]
SIGMA = [0, 10, 100]
STEPS = [0.2, 0.7, 1.2]

clients = make_ppsgd_regression(N_CLIENTS, 1, random_state=0)
who = np.repeat(np.arange(N_CLIENTS), AT_ONCE * BATCH)


def fresh_rows(rng):
    """Rows of all clients for AT_ONCE rounds."""
    X = rng.normal(size=(len(who), 100)) * np.sqrt(clients.feature_variance)
    return X, np.einsum("nd,nd->n", X, clients.coef[who]) + 0.01 * rng.normal(size=len(who))


models = {
    (alpha_q, sigma, step): PPSGDRegressor(
        alpha=alpha_q / N_CLIENTS,
        learning_rate=step,
        batch_size=BATCH,
        weighting="clients",
        fit_intercept=False,
        shuffle=False,
        clip_norm=10.0,
        noise_multiplier=sigma * SCALE,
        n_rounds=AT_ONCE,  # per call of partial_fit, with or without noise
        random_state=0,
    )
    for alpha_q in ALPHA_Q
    for sigma in SIGMA
    for step in STEPS
    if sigma == 0 or alpha_q > 0  # local learning releases nothing: noise makes no difference
}

# %%
# All models see the same rows, 25 rounds at a time: each ``partial_fit`` is one pass over new rows.
# The excess risk has a closed form, :math:`\frac1N \sum_i \| w + \theta_i - \theta_i^*
# \|^2_\Sigma`.
rng = np.random.default_rng(1)
risks = {}
for _ in range(0, N_ROUNDS, AT_ONCE):
    X, y = fresh_rows(rng)
    for key, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # seeds, for a page that stays the same
            model.partial_fit(X, y, groups=who)
        risk = linear_excess_risk(model.coef_, clients.coef, clients.feature_variance)
        risks[(*key, model.n_rounds_)] = risk

# %%
# The figure
# ----------
# As in the paper, the curves show the step size with the smallest risk at each number of rounds.
table = pd.Series(risks).rename_axis(["alpha Q", "sigma", "step", "rounds"])
best = table.groupby(["sigma", "alpha Q", "rounds"]).min().unstack("rounds")
local = best.loc[(0, 0.0)]
fig, axes = plt.subplots(1, 3, figsize=(8.3, 3.8), layout="constrained", sharey=True)
colors = plt.colormaps["viridis"](np.linspace(0, 0.85, len(ALPHA_Q)))
for ax, sigma in zip(axes, SIGMA, strict=True):
    for alpha_q, color in zip(ALPHA_Q, colors, strict=True):
        line = local if alpha_q == 0 else best.loc[(sigma, alpha_q)]
        style = "--" if alpha_q in (0, np.inf) else "-"
        name = {0: "0 (local)", np.inf: "infinity (global)"}.get(alpha_q, f"{alpha_q:g}")
        ax.plot(line.index, line, style, color=color, label=f"alpha Q = {name}")
    ax.set(yscale="log", xlabel="rounds", title=f"sigma = {sigma}")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("excess risk")
axes[0].legend(frameon=False, fontsize="small")
fig.suptitle(f"{N_CLIENTS} clients, noise scaled accordingly; best of three step sizes")
plt.show()

# %%
# Where local learning wins
# -------------------------
for sigma in SIGMA[1:]:
    for alpha_q in ALPHA_Q[1:]:
        other = best.loc[(sigma, alpha_q)]
        behind = local.index[local >= other]
        last = behind[-1] if len(behind) else 0
        outcome = f"local learning wins after {last} to {last + AT_ONCE} rounds"
        if last == N_ROUNDS:
            outcome = f"local learning is behind for at least {N_ROUNDS} rounds"
        print(f"sigma = {sigma}, alpha Q = {alpha_q:g}: {outcome}")

# %%
# The full figure
# ---------------
# With 1,000 clients and the paper's eleven step sizes, local learning overtakes ``alpha * Q = 1``
# at sigma = 10 after 180 to 220 rounds, over ten seeds, and the global model after 160 to 170. The
# paper says "after about 200 iterations" for the larger noise.
#
# Without noise, the global model is always ahead. It stops at 5.0e-6, the part of the excess risk
# that comes from differences between clients. In the paper, small alphas also win in later
# iterations without noise. Here they do not within 1,000 rounds, with a label noise of 0.01 (the
# paper does not state its value).
