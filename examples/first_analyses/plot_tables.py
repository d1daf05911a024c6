"""
Tables with clients: from a table to one patient's model
========================================================

Speech of 42 people with Parkinson's disease was recorded at home for half a year. How severe are
the symptoms (total UPDRS, from 7 to 55 here), given the voice and the day? And what should we
predict for a patient with recordings but without any assessment?

Patients are the *clients*. The two questions need two kinds of cross-validation: new visits of
known patients, and new patients. The table comes with the package:
:func:`~pfl_sklearn.datasets.load_parkinsons`. A second table, radon in homes, shows probabilities.
"""

# %%
# Load and look
# -------------
# A visit has about six recordings with one score. If rows of one visit were in both training and
# test sets, they would leak the target, so each visit becomes one row, the mean of its recordings.
# Patients were assessed three times; the authors of the table interpolated the scores between.
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
ax.set(xlabel="day", ylabel="total UPDRS", title="42 patients")
plt.show()


# %%
# Candidates
# ----------
# :class:`~pfl_sklearn.compose.ClientColumn` takes the patient's id from the table and passes it to
# the estimator, so that all of scikit-learn's tools work unchanged. The other models drop this
# column.
#
# The stack needs no settings. For known patients, it combines boosted trees without and with the
# patient by a personalized linear regression; for new patients, it uses what predicts best for
# held-out patients.
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
    "trees, patient as category": with_patient(ClientAsFeature(trees, unseen="population")),
    "personalized linear": with_patient(PersonalizedLinearRegression(unseen="population")),
    "stack": with_patient(stack),
}

# %%
# Cross-validate, twice
# ---------------------
# :class:`~pfl_sklearn.model_selection.ClientKFold` splits the visits of every patient;
# scikit-learn's ``GroupKFold`` holds out whole patients.
SPLITTERS = {
    "known patients": ClientKFold(2, client_column="subject", random_state=0),
    "new patients": GroupKFold(2, shuffle=True, random_state=0),
}


def rmse_by_splitter(model):
    """Root mean squared errors in UPDRS points, by splitter."""
    errors = {}
    for name, splitter in SPLITTERS.items():
        folds = list(splitter.split(X, y, groups=X["subject"]))
        scores = cross_validate(model, X, y, cv=folds, scoring="neg_mean_squared_error")
        errors[name] = np.sqrt(-scores["test_score"].mean())
    return errors


errors = pd.DataFrame({name: rmse_by_splitter(model) for name, model in models.items()}).T
print(errors.round(2).to_string())

# %%
# Known patients differ mainly in their intercepts: models without the patient have errors of
# several points. The stack has the smallest error. For new patients, no model is much better than
# the mean: the voices of other patients are not informative. A good model for known patients can be
# worse than the mean for new ones, since trees recognize patients by their age and voice. The stack
# detects this on held-out patients and predicts new patients by something simple.
fig, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
errors.plot.barh(ax=ax, color=["tab:blue", "lightgray"], width=0.75)
ax.invert_yaxis()
ax.set(xlabel="root mean squared error (UPDRS points)", title="Known and new patients")
plt.show()

# %%
# The parts of the stack
# ----------------------
# ``losses_`` holds the out-of-fold mean squared errors of each part alone, of their average
# ("mixture") and of the personalized regression on all of them ("stack").
model = stack.fit(X.drop(columns="subject"), y, groups=X["subject"])
print((model.losses_**0.5).round(2).to_string(na_rep=""))

# %%
# ``weights_`` holds the weights of the average, for known and for new patients.
print(model.weights_.round(2).to_string())

# %%
# One patient's model
# -------------------
# It contains no other patient's coefficients and takes rows without ids. (Trees store averages over
# all patients' visits. Nothing here is private, and ``release()`` is refused.)
patient = 1
rows = X["subject"] == patient
predicted = model.for_client(patient).predict(X[rows].drop(columns="subject"))
print(f"patient {patient}: {rows.sum()} visits; predicted {predicted[:3].round(1)}, ", end="")
print(f"score {y[rows].to_numpy()[:3].round(1)}")

# %%
# A mixture for each patient
# --------------------------
# :class:`~pfl_sklearn.compose.ClientSelector` weights candidates by the patient's out-of-fold
# errors, shrunk towards weights for all patients. The mean error of these mixtures is "selector".
selector = ClientSelector(
    [
        ("trees", trees),
        ("personal", PersonalizedLinearRegression(unseen="population")),
        ("recognizing", ClientAsFeature(trees, unseen="population", random_state=0)),
    ],
    cv=3,
    random_state=0,
)
selector.fit(X.drop(columns="subject"), y, groups=X["subject"])
print((selector.losses_**0.5).round(2).to_string(na_rep=""))
print(selector.summary().round(2).head(5).to_string())

# %%
# Probabilities
# -------------
# Radon above 4 pCi/L should be reduced. Which homes without a measurement are above? The table has
# 12,124 homes in 386 counties of nine states, and two features: the floor and the uranium in the
# soil.
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
    probability = model.predict_proba(features.iloc[test], groups=county.iloc[test])[:, 1]
    loss = log_loss(above.iloc[test], probability)
    CalibrationDisplay.from_predictions(
        above.iloc[test], probability, n_bins=10, strategy="quantile", name=name, ax=ax
    )
    print(f"{name}: log-loss {loss:.3f}")
ax.set(xlabel="predicted probability", ylabel="share of homes above 4 pCi/L")
ax.set_title("Held-out homes")
plt.show()

# %%
# Most points are near the line: of homes with a predicted probability of 60 %, about 60 % are
# above 4 pCi/L. The stack has these weights:
print(model.weights_["known"].round(2).to_string())
