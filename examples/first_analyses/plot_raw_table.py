"""
A raw table: strings, missing values and hospitals
==================================================

Which patients have heart disease? Four hospitals kept records, with strings among the numbers and
with many missing values. Patients of one hospital are more alike than those of two, so hospitals
are the *clients*. :class:`~pfl_sklearn.compose.TableEncoder` encodes the table as numbers and keeps
the names of its columns.
"""

# %%
# Load and look
# -------------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline

from pfl_sklearn import ClientColumn, PersonalizedLogisticRegression
from pfl_sklearn.compose import TableEncoder
from pfl_sklearn.datasets import load_heart_disease

patients = load_heart_disease().frame
pain = {1: "typical", 2: "atypical", 3: "other", 4: "none"}
columns = ["hospital", "age", "sex", "trestbps", "thalach", "oldpeak", "slope", "ca"]
table = patients[columns].assign(pain=patients["cp"].map(pain))
print(table.isna().mean().round(2))

# %%
# From the table to a model
# -------------------------
# ``TableEncoder`` encodes the kind of pain, imputes medians for missing values and adds indicators
# of them. The intercept varies by hospital; all other coefficients are common.
model = ClientColumn(
    make_pipeline(TableEncoder(), PersonalizedLogisticRegression(random="intercept")),
    column="hospital",
)
folds = StratifiedKFold(5, shuffle=True, random_state=0)
complete = ["age", "sex", "trestbps", "thalach", "oldpeak"]
for name, rows in (("complete numbers", table[["hospital", *complete]]), ("all columns", table)):
    scores = cross_val_score(model, rows, patients["target"], cv=folds, scoring="neg_log_loss")
    print(f"log-loss with {name}: {-scores.mean():.3f}")

# %%
# Coefficients
# ------------
# The odds of heart disease are several times as high for patients without chest pain, who were sent
# for other reasons. They are lower if *slope*, from an ECG during exercise, is missing. The table
# does not say whether such a missing value depends on the patient or on the doctor.
fixed = model.fit(table, patients["target"]).summary().loc["fixed"]
pain = fixed.loc[["sex", "pain_none", "pain_other", "pain_typical"]]
coefficients = pd.concat([pain, fixed.filter(like="_missing", axis="index")])
figure, axes = plt.subplots(figsize=(6, 3))
positions = np.arange(len(coefficients))
errors = 1.96 * coefficients["std_error"]
axes.errorbar(coefficients["estimate"], positions, xerr=errors, fmt="o")
axes.axvline(0, color="grey", linewidth=0.8)
axes.set_yticks(positions, coefficients.index)
axes.set_xlabel("log odds ratio, with 95 % interval")
figure.tight_layout()
plt.show()
print(coefficients.dropna(axis=1, how="all").round(2))
