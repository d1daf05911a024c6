"""
Risk-adjusted hospital effects for a board
==========================================

Sixty hospitals, 12 to 400 patients each: which of them has too many deaths? Hospitals with old and
acute patients have more, whatever they do. The table is simulated, so the true effects are known.
"""

# %%
# Patients
# --------
# The effect of a hospital has a standard deviation of .3 on the log odds. Its patients' mean risk
# has one of .5.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import FunnelDisplay, PredictiveCheckDisplay, observed_expected
from pfl_sklearn.linear_model import PersonalizedLogisticRegression

rng = np.random.default_rng(0)
hospital = np.repeat(np.arange(60), np.geomspace(12, 400, 60).astype(int))
effect, mix = 0.3 * rng.normal(size=60), 0.5 * rng.normal(size=60)
patients = pd.DataFrame(
    {
        "hospital": hospital,
        "age": mix[hospital] + rng.normal(size=len(hospital)),
        "acute": (rng.random(len(hospital)) < 0.3 + 0.1 * mix[hospital]).astype(float),
    }
)
risk = -2 + 0.8 * patients["age"] + 0.7 * patients["acute"] + effect[hospital]
died = (rng.random(len(hospital)) < 1 / (1 + np.exp(-risk))).astype(int)

# %%
# Observed and expected
# ---------------------
# The features are the case mix. "ratio" divides the deaths by those expected of an average hospital
# with the same patients, and "predicted_ratio" takes out chance. Without adjustment, the ratio is
# mostly the case mix.
model = ClientColumn(PersonalizedLogisticRegression(random="intercept"), "hospital")
model.fit(patients, died)
table = observed_expected(model, patients, died)
table["crude"] = pd.Series(died).groupby(hospital).mean() / died.mean()
print(table.round(2).iloc[[0, 20, 40, 59]].T.to_string())
print(table[["crude", "ratio", "predicted_ratio"]].corrwith(pd.Series(effect)).round(2))

# %%
# The funnel
# ----------
# Small hospitals are far from 1 by chance. A hospital outside the outer limits has a name in the
# plot, and deserves a look: at its data first, at its patients next, and at its care last.
fig, axes = plt.subplots(1, 2, figsize=(8.3, 4.2), layout="constrained")
FunnelDisplay.from_estimator(model, patients, died, ax=axes[0])
check = PredictiveCheckDisplay.from_estimator(model, patients, died, ax=axes[1])

# %%
# For the board
# -------------
# Odds ratios of the case mix, and the hospitals whose posterior interval leaves out 1:
tests = model.contrast(np.eye(3)[1:]).iloc[:2]
odds_ratios = np.exp(tests[["estimate", "lower", "upper"]])
print(odds_ratios.rename_axis(columns="odds ratio").round(2))
outside = table.query("predicted_lower > 1 or predicted_upper < 1")
print(outside[["n_rows", "observed", "expected", "predicted_ratio"]].round(2).to_string())
