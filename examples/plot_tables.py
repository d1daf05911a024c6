"""
Tables with clients: from the table to one patient's model
==========================================================

Speech of 42 people with Parkinson's disease was recorded at home for half a year. How severe are
the symptoms (total UPDRS, from 7 to 55 here), given the voice and the day? And: what should we
expect of a patient of whom we have recordings, but no assessment at all?

Patients are the *clients*. Two questions, two ways to cross-validate: new visits of known patients,
and new patients. The table comes with the package:
:func:`~pfl_sklearn.datasets.load_parkinsons`. A second one, radon in homes, shows probabilities.
"""

# %%
# Load and look
# -------------
# A visit has about six recordings with one assessment. Rows of a visit in training and test would
# give away what is asked for, so each visit becomes one row: the mean of its recordings. The
# assessments were made three times; the values between were interpolated by those who published the
# table.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.calibration import CalibrationDisplay
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientColumn,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.datasets import load_parkinsons, load_radon
from pfl_sklearn.model_selection import ClientKFold, ClientShuffleSplit

recordings = load_parkinsons().frame
day = recordings["test_time"].round().rename("day")
visits = recordings.groupby([recordings["subject"], day]).mean()
visits = visits.reset_index()
X = visits[["subject", "day", "age", "sex", "Shimmer", "NHR", "HNR", "RPDE", "DFA", "PPE"]]
y = visits["total_UPDRS"]
print(f"{len(visits)} visits of {X['subject'].nunique()} patients")

fig, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for _, rows in visits.groupby("subject"):
    ax.plot(rows["day"], rows["total_UPDRS"], color="tab:blue", alpha=0.5, linewidth=1)
ax.set(xlabel="day", ylabel="total UPDRS", title="42 patients: levels differ, and so do courses")
plt.show()


# %%
# Candidates
# ----------
# :class:`~pfl_sklearn.compose.ClientColumn` takes the patient out of the table and hands it to the
# estimator, so that everything works in scikit-learn's tools as it is. Without it, the patient's
# column is dropped.
#
# The stack needs no settings: boosted trees without and with the patient, under a personalized
# linear regression for known patients, and for new ones whatever does best on patients left out.
def with_patient(model):
    return ClientColumn(model, column="subject")


def without_patient(*steps):
    drop = FunctionTransformer(lambda table: table.drop(columns="subject"))
    return make_pipeline(drop, *steps)


trees = HistGradientBoostingRegressor(random_state=0)
stack = PersonalizedStackingRegressor(unseen="population", random_state=0)
models = {
    "mean": without_patient(DummyRegressor()),
    "ridge": without_patient(StandardScaler(), RidgeCV(np.logspace(-2, 4, 13))),
    "trees": without_patient(trees),
    "trees, patient a category": with_patient(ClientAsFeature(trees, unseen="population")),
    "personalized linear": with_patient(PersonalizedLinearRegression(unseen="population")),
    "stack": with_patient(stack),
}

# %%
# Cross-validate, twice
# ---------------------
# :class:`~pfl_sklearn.model_selection.ClientKFold` splits the visits of every patient;
# scikit-learn's ``GroupKFold`` holds out whole patients.
SPLITTERS = {
    "known patients": ClientKFold(3, client_column="subject", random_state=0),
    "new patients": GroupKFold(3, shuffle=True, random_state=0),
}


def errors_of(model):
    """Root mean squared errors in UPDRS points, by splitter."""
    found = {}
    for name, splitter in SPLITTERS.items():
        folds = list(splitter.split(X, y, groups=X["subject"]))
        scores = cross_validate(model, X, y, cv=folds, scoring="neg_mean_squared_error")
        found[name] = np.sqrt(-scores["test_score"].mean())
    return found


errors = pd.DataFrame({name: errors_of(model) for name, model in models.items()}).T
print(errors.round(2).to_string())

# %%
# For known patients, what is special about each of them is nearly everything: models without the
# patient are off by several points. The stack is the most exact. For new patients none does much
# better than the mean of all: voices of other patients say little. A model that is good for known
# patients can be worse than the mean for new ones, since trees recognize patients by their age and
# voice. The stack has seen this on patients left out, and answers with something simple.
fig, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
errors.plot.barh(ax=ax, color=["tab:blue", "lightgray"], width=0.75)
ax.invert_yaxis()
ax.set(xlabel="root mean squared error (UPDRS points)", title="Known and new patients")
plt.show()

# %%
# What is in the stack
# --------------------
# ``losses_`` are mean squared errors out of fold, of all parts alone, of their average ("mixture")
# and of the personalized regression of them all ("stack").
model = stack.fit(X.drop(columns="subject"), y, groups=X["subject"])
print((model.losses_**0.5).round(2).to_string(na_rep=""))

# %%
# ``weights_`` says what is averaged: for known patients what does best together, for new ones
# something simple.
print(model.weights_.round(2).to_string())

# %%
# One patient's model
# -------------------
# It holds no other patient's coefficients, and takes rows without ids. (Trees keep averages over
# all patients' visits. Nothing here is private, and ``release()`` refuses.)
patient = 1
alone = model.for_client(patient)
own = X["subject"] == patient
predicted = alone.predict(X[own].drop(columns="subject"))
print(f"patient {patient}: {own.sum()} visits; predicted {predicted[:3].round(1)}, ", end="")
print(f"assessed {y[own].to_numpy()[:3].round(1)}")

# %%
# Each patient's own mixture
# --------------------------
# :class:`~pfl_sklearn.compose.ClientSelector` lets every patient weigh candidates by its own
# out-of-fold errors, shrunk to what suits all. The mean error of its mixtures is "selector".
selector = ClientSelector(
    [
        ("trees", trees),
        ("personal", PersonalizedLinearRegression(unseen="population")),
        ("recognizing", ClientAsFeature(trees, unseen="population", random_state=0)),
    ],
    random_state=0,
)
selector.fit(X.drop(columns="subject"), y, groups=X["subject"])
print((selector.losses_**0.5).round(2).to_string(na_rep=""))
print(selector.summary().round(2).head(5).to_string())

# %%
# Probabilities
# -------------
# Above 4 pCi/L the radon in a home should be reduced. Where is it above, in the homes that were not
# measured? There are 12,124 homes in the table, from 386 counties of nine states; two features, the
# floor and the uranium of the soil.
homes = load_radon().frame
features, county = homes[["floor", "log_uranium"]], homes["county_fips"]
above = homes["log_radon"] > np.log(4)
splitter = ClientShuffleSplit(1, test_size=0.2, random_state=0)
((train, test),) = splitter.split(features, groups=county)
candidates = {
    "personalized logistic": PersonalizedLogisticRegression(unseen="population"),
    "stack": PersonalizedStackingClassifier(unseen="population", random_state=0),
}
fig, ax = plt.subplots(figsize=(5.2, 5), layout="constrained")
for name, model in candidates.items():
    model.fit(features.iloc[train], above.iloc[train], groups=county.iloc[train])
    chances = model.predict_proba(features.iloc[test], groups=county.iloc[test])[:, 1]
    loss = log_loss(above.iloc[test], chances)
    CalibrationDisplay.from_predictions(
        above.iloc[test], chances, n_bins=10, strategy="quantile", name=name, ax=ax
    )
    print(f"{name}: log-loss {loss:.3f}")
ax.set(xlabel="predicted probability", ylabel="share of homes above 4 pCi/L")
ax.set_title("Homes that the models have not seen")
plt.show()

# %%
# Points near the line: among homes with a predicted chance of 60 %, about 60 % are above.
print(model.weights_["known"].round(2).to_string())
