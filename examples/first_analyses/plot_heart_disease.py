"""
Heart disease in four hospitals
===============================

Patients were examined for coronary heart disease in Cleveland, Budapest, Switzerland (Basel and
Zurich) and Long Beach. Given age, sex, symptoms and an exercise test, who is ill? The hospitals are
the clients, and they are very different: a third of the patients in Budapest are ill, and nine in
ten of those in Switzerland.

One logistic regression for all ignores that. One for every hospital has too little data:
Switzerland has eight healthy patients. In between, coefficients vary by hospital around those of a
population of hospitals. Four hospitals are few to estimate a population, so this is a hard case.

The table comes with the package: :func:`~pfl_sklearn.datasets.load_heart_disease`.
"""

# %%
# The table
# ---------
# Cholesterol, fasting blood sugar and three more columns are omitted, because some hospitals hardly
# recorded them (a cholesterol of 0 in all Swiss rows means that it is missing). So are patients
# with missing values in the other columns. Numbers are scaled by constants, so that a coefficient
# is about the effect of one standard deviation.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut

from pfl_sklearn.datasets import load_heart_disease
from pfl_sklearn.inspection import CoefficientDisplay
from pfl_sklearn.linear_model import PersonalizedLogisticRegression
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior

PLACES = {"hungarian": "Budapest", "va": "Long Beach"}
COLUMNS = ["age", "sex", "cp", "trestbps", "restecg", "thalach", "exang", "oldpeak"]

table = load_heart_disease(complete=False).frame.dropna(subset=COLUMNS)
table = table[table["trestbps"] > 0].reset_index(drop=True)
ill = table["target"].to_numpy()
hospital = table["hospital"].replace(PLACES).str.title()
X = pd.DataFrame(
    {
        "age": (table["age"] - 54) / 9,
        "blood pressure": (table["trestbps"] - 132) / 18,
        "heart rate": (table["thalach"] - 138) / 26,
        "ST depression": (table["oldpeak"] - 0.9) / 1.1,
        "male": table["sex"] - 0.75,
        "exercise angina": table["exang"] - 0.4,
        "typical angina": 1.0 * (table["cp"] == 1),
        "atypical angina": 1.0 * (table["cp"] == 2),
        "other pain": 1.0 * (table["cp"] == 3),
        "ST-T abnormal": 1.0 * (table["restecg"] == 1),
        "hypertrophy": 1.0 * (table["restecg"] == 2),
    }
)
print(table.groupby(hospital)["target"].agg(patients="size", ill="sum", share="mean").round(2))

# %%
# Which coefficients vary?
# ------------------------
# Here all coefficients may vary, each with its own variance.
all_random = PersonalizedLogisticRegression(random="all")
all_random.fit(X, ill, groups=hospital)
print("standard deviation of coefficients between hospitals")
print(all_random.summary().loc["between", "sd"].round(2).to_string())

# %%
# The intercept varies most, followed by the effects of two kinds of chest pain. Most other
# variances are estimated as 0. With four hospitals, that does not prove that these effects are the
# same everywhere, but there is no sign of a difference.
#
# The plot shows a smaller model, in which the intercept and two effects vary. Switzerland's
# intercept differs from all others; the effects differ by less than their intervals. The band of
# the population's intercept is wide, because it is a mean of four.
random = ["intercept", "ST depression", "heart rate"]
smaller = PersonalizedLogisticRegression(GaussianPrior(covariance_type="diag"), random=random)
smaller.fit(X, ill, groups=hospital)
display = CoefficientDisplay.from_estimator(smaller, feature=random)
display.figure_.suptitle("Log odds of heart disease")
plt.show()

# %%
# Held-out patients
# -----------------
# We use five folds within every hospital, stratified by outcome, and two shuffles. Local models are
# scikit-learn's logistic regressions for each hospital. One is maximum likelihood, which fails if
# the classes are separable. The other has the default ridge penalty, which shrinks coefficients
# towards 0, whereas personalized models shrink them towards the population.


class Local:
    """A scikit-learn model for every hospital."""

    def __init__(self, C):
        self.C = C

    def fit(self, X, y, groups):
        self.models = {
            name: LogisticRegression(C=self.C, max_iter=5000).fit(
                X[groups == name], y[groups == name]
            )
            for name in groups.unique()
        }
        return self

    def predict_proba(self, X, groups):
        probability = np.empty((len(X), 2))
        for name, model in self.models.items():
            rows = (groups == name).to_numpy()
            probability[rows] = model.predict_proba(X[rows])
        return probability


competitors = {
    "local": Local(np.inf),
    "local, ridge": Local(1.0),
    "pooled": PersonalizedLogisticRegression(GaussianPrior(covariance=0.0)),
    "random intercept": PersonalizedLogisticRegression(random="intercept"),
    "all random, one variance": PersonalizedLogisticRegression(
        GaussianPrior(covariance_type="spherical")
    ),
    "all random, many variances": all_random,
}


def test_losses(model, splits):
    """Log loss of each patient when held out, and whether the predicted class is correct."""
    probability = np.empty(len(X))
    for train, test in splits:
        model.fit(X.iloc[train], ill[train], groups=hospital.iloc[train])
        rows = {"X": X.iloc[test], "groups": hospital.iloc[test]}
        probability[test] = model.predict_proba(**rows)[:, 1]
    with np.errstate(divide="ignore"):  # separable classes: a probability of exactly 0
        loss = -np.log(np.where(ill == 1, probability, 1 - probability))
    return pd.DataFrame({"log loss": loss, "accuracy": (probability > 0.5) == ill})


shuffles = [
    list(ClientKFold(5, stratify=True, random_state=seed).split(X, ill, groups=hospital))
    for seed in range(2)
]
losses = {
    name: sum(test_losses(model, splits).astype(float) for splits in shuffles) / len(shuffles)
    for name, model in competitors.items()
}
print("held-out patients, mean of 2 times 5 folds")
print(pd.DataFrame({name: rows.mean() for name, rows in losses.items()}).T.round(3).to_string())
by_hospital = pd.DataFrame(
    {name: rows["log loss"].groupby(hospital).mean() for name, rows in losses.items()}
)
print("\nlog loss by hospital")
print(by_hospital.T.round(3).to_string())

# %%
# A random intercept with common effects does as well as any model with more random effects. The
# pooled model is about as good in the other three hospitals, but it is wrong about Switzerland.
# Local models without a penalty do worst everywhere; their loss in Switzerland is infinite and has
# no mark. With scikit-learn's penalty they come close, because these hospitals are large enough:
# the smallest has about ten patients per coefficient.
colors = ["#8c8c8c", "#8c8c8c", "#c1440e", "#1f5fa8", "#1f5fa8", "#1f5fa8"]
marks = ["o", "s", "o", "o", "s", "^"]
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
at = np.arange(len(by_hospital))
for k, (name, color, mark) in enumerate(zip(by_hospital, colors, marks, strict=True)):
    offset = 0.13 * (k - 2.5)
    ax.plot(by_hospital[name], at + offset, mark, color=color, ms=5, label=name)
for line in at[:-1] + 0.5:
    ax.axhline(line, color="#dddddd", lw=0.8)
counts = hospital.value_counts()
ax.set(
    yticks=at,
    yticklabels=[f"{name}\n({counts[name]})" for name in by_hospital.index],
    ylim=(len(at) - 0.5, -0.5),
    xlabel="log loss of held-out patients (nats)",
    title="Four hospitals, six models",
)
ax.spines[["top", "right"]].set_visible(False)
fig.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
plt.show()

# %%
# A fifth hospital
# ----------------
# What if a patient comes from a new hospital? We hold out each hospital in turn. A new client gets
# the population's model. Its intercept is unknown, so probabilities are averages over its
# distribution, which makes them less extreme than those at the typical intercept
# (``integrate=False``). That helps on average, but the pooled model is slightly better still, since
# only three hospitals have to represent a population.
#
# With ``unseen="population"``, ``predict_proba`` expects new clients and does not warn.
mixed = PersonalizedLogisticRegression(random="intercept", unseen="population")
pooled = competitors["pooled"].set_params(unseen="population")
new = {}
for train, test in LeaveOneGroupOut().split(X, ill, groups=hospital):
    known, rows = hospital.iloc[train], {"X": X.iloc[test], "groups": hospital.iloc[test]}
    pooled.fit(X.iloc[train], ill[train], groups=known)
    mixed.fit(X.iloc[train], ill[train], groups=known)
    probabilities = {
        "share of ill patients elsewhere": np.full(len(test), ill[train].mean()),
        "pooled": pooled.predict_proba(**rows)[:, 1],
        "random intercept, typical": mixed.predict_proba(**rows, integrate=False)[:, 1],
        "random intercept, averaged": mixed.predict_proba(**rows)[:, 1],
    }
    new[hospital.iloc[test[0]]] = {
        name: -np.mean(np.log(np.where(ill[test] == 1, p, 1 - p)))
        for name, p in probabilities.items()
    }
new = pd.DataFrame(new)
print("log loss for a new hospital")
print(new.assign(mean=new.mean(axis=1)).round(3).to_string())

# %%
# References
# ----------
# Detrano, R. et al. (1989). International application of a new probability algorithm for the
# diagnosis of coronary artery disease. American Journal of Cardiology, 64, 304-310. The
# investigators are A. Janosi (Budapest), W. Steinbrunn (Zurich), M. Pfisterer (Basel) and R.
# Detrano (Long Beach and Cleveland).
