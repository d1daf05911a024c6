"""
A table as it comes: words, gaps and hospitals
==============================================

Which patients have a heart disease? Four hospitals kept records, with words among the numbers and
with many gaps. Patients of one hospital are more alike than those of two: hospitals are the
*clients*. :class:`~pfl_sklearn.compose.TableEncoder` makes numbers of the table and keeps its
names.
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
# One step encodes the kind of pain, fills the gaps with medians and marks them. ``random`` names
# columns of the table: a hospital has its own level, and everything else is common.
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
# What it says
# ------------
# The odds of a disease are several times as high for patients without chest pain, who were sent
# for other reasons, and lower where *slope*, of an ECG under exercise, is missing. Whether such a
# gap is a sign of the patient or of the doctor, the table does not say.
fitted = model.fit(table, patients["target"])
found = fitted.summary().loc["fixed"].loc[["sex", "pain_none", "pain_other", "pain_typical"]]
missing = fitted.summary().loc["fixed"].filter(like="_missing", axis="index")
found = pd.concat([found, missing])
figure, axes = plt.subplots(figsize=(6, 3))
positions = np.arange(len(found))
axes.errorbar(found["estimate"], positions, xerr=1.96 * found["std_error"], fmt="o")
axes.axvline(0, color="grey", linewidth=0.8)
axes.set_yticks(positions, found.index)
axes.set_xlabel("log odds ratio, with 95 % intervals")
figure.tight_layout()
plt.show()
print(found.round(2))
