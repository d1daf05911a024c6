"""
Private means of many agents, online
====================================

At every step, each of 200 agents receives a value. The agents' means are 1/5, 2/5 or 4/5, and
nobody knows which agents share a mean. This is the simulation of Yakimenka et al. (2024), whose
noise protects every value against a single other agent. The default of ``CollaborativeMean``
protects it against all of them together, with far less noise.
"""

# %%
# The agents
# ----------
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.inspection import StreamDisplay
from pfl_sklearn.online import CollaborativeMean

n_agents, n_steps = 200, 2000
rng = np.random.default_rng(0)
labels = rng.integers(0, 3, n_agents)
means = np.array([0.2, 0.4, 0.8])[labels]
half = math.sqrt(3) / 2  # a standard deviation of 1/2
y = means + rng.uniform(-half, half, (n_steps, n_agents))
X = np.zeros((y.size, 1))
agent = np.tile(np.arange(n_agents), n_steps)

# %%
# Methods
# -------
# Epsilon is 1, over up to 30,000 steps. The printed scheme knows the range of each agent's class,
# of width sqrt(3); ours knows only the range of all classes together, which is wider.
printed = {agent: (mean - half, mean + half) for agent, mean in enumerate(means)}
private = {"epsilon": 1.0, "horizon": 30_000, "noise_variance": 0.25}
methods = {
    "PM-I, test (printed)": CollaborativeMean(
        mechanism="pm1", accounting="printed", decision="test", bounds=printed, **private
    ),
    "PM-II, test (printed)": CollaborativeMean(
        mechanism="pm2", accounting="printed", decision="test", bounds=printed, **private
    ),
    "default": CollaborativeMean(bounds=(0.2 - half, 0.8 + half), **private),
    "default, no horizon": CollaborativeMean(
        bounds=(0.2 - half, 0.8 + half), **{**private, "horizon": None}
    ),
}

# %%
# Errors over time
# ----------------
# The expected error of an agent alone is the variance of a value divided by the number of its
# values. No method can do better than with all data public and the classes known.
times = np.unique(np.geomspace(5, n_steps, 30).round().astype(int))
errors = {}
for name, model in methods.items():
    previous, errors[name] = 0, []
    for time in times:
        rows = slice(previous * n_agents, time * n_agents)
        model.partial_fit(X[rows], y.ravel()[rows], groups=agent[rows])
        errors[name].append(np.mean((model.means_ - means) ** 2))
        previous = time
errors = pd.DataFrame(errors, index=times)
sizes = np.bincount(labels)
ideal = 3 * 0.25 / n_agents / times

fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
ax.plot(times, 0.25 / times, color="0.5", label="alone (expected)")
for name, values in errors.items():
    ax.plot(times, values, label=name, ls="--" if "printed" in name else "-")
ax.plot(times, ideal, color="k", ls=":", label="all data public (expected)")
ax.set(xscale="log", yscale="log", xlabel="steps", ylabel="mean squared error")
ax.legend(frameon=False, fontsize="small")
plt.show()
print(
    (errors.T / (0.25 / times)).T.loc[[t for t in times if t > 40]].round(2).iloc[::3].to_string()
)

# %%
# Epsilon against one agent and against all
# -----------------------------------------
# The printed scheme was run with an epsilon of 1. Against all other agents together it is 15.6.
for name in ("PM-I, test (printed)", "default"):
    report = methods[name].privacy_
    print(
        f"{name}: one value (replace_one), delta = {report.delta:.0e},\n    epsilon = "
        f"{report.epsilon_per_recipient:.3g} against one agent, {report.epsilon:.3g} against all"
    )

# %%
# One agent at a time
# -------------------
# At first an agent relies on its own mean, later on its class.
display = StreamDisplay.from_estimator(
    CollaborativeMean(bounds=(0.2 - half, 0.8 + half), **private),
    X,
    y.ravel(),
    groups=agent,
    truth=means,
    kind="estimates",
    clients=[int(np.flatnonzero(labels == k)[0]) for k in range(3)],
)
plt.show()
