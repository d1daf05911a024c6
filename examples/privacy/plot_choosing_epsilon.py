"""
Choosing epsilon, and the cost of the search
============================================

How much accuracy does a smaller epsilon cost, and how much of the model should be local? The usual
way to find out is a grid search. But every fit of a grid search is another release, and the scores
that it compares are not private at all. This example runs the search anyway, computes its cost,
sets a budget that refuses it, and ends with a search that stays within a stated epsilon.

The table is scikit-learn's digits, distributed so that each of 150 clients has only three of the
ten digits. The unit of protection is one client's contribution with all its rows (zero-out), with a
delta of 1e-5, against anyone who sees the released models, including all other clients together.
"""

# %%
# A grid search over a private model
# ----------------------------------
# We search three values of epsilon and four of ``alpha``, stated as ``alpha * Q``, where Q = 150 is
# the number of clients: the ratio of the global step to the local ones. The clip norm and the step
# size were chosen beforehand. Pixels are already divided by 16, their largest possible value.
import tempfile
import textwrap
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from pfl_sklearn.datasets import load_digits_clients
from pfl_sklearn.inspection import PrivacyAccuracyDisplay
from pfl_sklearn.linear_model import PPSGDClassifier
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.privacy import (
    BudgetExceeded,
    PrivacyLedger,
    PrivacyWarning,
    SampledGaussian,
    events_epsilon,
    search_cost,
)

sklearn.set_config(enable_metadata_routing=True)
N_CLIENTS = 150
digits = load_digits_clients(N_CLIENTS, classes_per_client=3)
X, y, who = digits.data, digits.target, digits.groups

model = PPSGDClassifier(
    loss="squared_error",
    n_rounds=40,
    weighting="clients",
    learning_rate=0.1,
    clip_norm=1.0,
    epsilon=3.0,
)
search = GridSearchCV(
    model,
    {
        "epsilon": [1.0, 5.0, 25.0],
        "alpha": [alpha_q / N_CLIENTS for alpha_q in (0.0, 3.0, 100.0, np.inf)],
    },
    cv=ClientKFold(3, random_state=0),
    scoring=ClientScorer("accuracy"),
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    search.fit(X, y, groups=who)
for warning in caught:
    print(textwrap.fill(f"{warning.category.__name__}: {warning.message}", 90))

# %%
# The warning comes once, before the first fit, and states the number of fits. The curves show the
# score of one fit against its epsilon, computed on held-out rows without noise.
display = PrivacyAccuracyDisplay.from_search(search, line="alpha", score_name="held-out accuracy")
labels = [f"alpha Q = {q}" for q in ("0 (local)", "3", "100", "infinity (global)")]
display.ax_.legend(display.lines_, labels, frameon=False, fontsize="small")
display.ax_.set_title("Mean and standard deviation of three folds")
plt.show()

# %%
# The cost
# --------
# Together, the models of the search spend far more than any single one, including the chosen one.
# (Local fits, with ``alpha = 0``, release nothing and are free.) No epsilon covers the scores or
# the curves above. The grid has no fit without privacy, because it would make the total infinite.
cost = search_cost(search)
print("chosen:", {name: round(float(value), 4) for name, value in search.best_params_.items()})
print(f"epsilon of all {cost.n_fits} fits together: {cost.epsilon:.1f}")
print(f"the scores are protected: {cost.scores_protected}\n")
print("\n".join(str(cost).splitlines()[:8]))

# %%
# Which epsilon is acceptable does not depend on the table: decide that first. If you need such a
# curve, draw it for public or simulated clients.
#
# A budget
# --------
# A ledger is a file in which every fit records its cost before it reads any data, in any process,
# clone or search. It refuses fits that would exceed its budget. Here the budget is a total of 10,
# and the search stops. (With scikit-learn's default, ``error_score=np.nan``, it would continue
# without the refused fits. Local fits are recorded as well, at no cost.)
folder = tempfile.TemporaryDirectory()
ledger = PrivacyLedger(Path(folder.name) / "ledger.jsonl", budget=10.0, relation="zero_out")
limited = clone(search).set_params(estimator__ledger=ledger, error_score="raise")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", PrivacyWarning)  # the same as above
    try:
        limited.fit(X, y, groups=who)
    except BudgetExceeded as error:
        # without the path of the temporary file
        print(textwrap.fill(f"{type(error).__name__}: {str(error).split(' of /')[0]}", 90))
print(f"\nfits recorded: {len(ledger.entries)}, spent so far: epsilon = {ledger.total():.2f}")
folder.cleanup()

# %%
# A search within a budget
# ------------------------
# :class:`~pfl_sklearn.model_selection.PrivateSelectCV` draws a *random number* of trials, tries
# random candidates, scores them with noise, and releases the best model alone. That costs little
# more than a single fit (Papernot and Steinke, 2022). The total epsilon is fixed beforehand and
# determines the noise of the trials; epsilon itself is not searched.
#
# How good is that, for 150 clients with about nine rows? We compare it with local models, which
# cost no epsilon, and with one fit that spends the total on a guessed ``alpha``.
N_REPETITIONS = 5
candidates = {"alpha": [alpha_q / N_CLIENTS for alpha_q in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)]}
accuracy = ClientScorer("accuracy")
train, test = next(ClientKFold(4, random_state=1).split(X, groups=who))


def fit_and_score(estimator):
    """Held-out accuracy, and the fitted estimator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # seeds, for a page that stays the same
        fitted = clone(estimator).fit(X[train], y[train], groups=who[train])
    return accuracy(fitted, X[test], y[test], groups=who[test]), fitted


def selection(total, seed):
    return PrivateSelectCV(
        model,
        candidates,
        expected_trials=5,
        epsilon=total,
        scoring="accuracy",
        test_size=0.1,
        random_state=seed,
    )


results = []
for total in (3.0, 30.0):
    selected = [fit_and_score(selection(total, seed)) for seed in range(N_REPETITIONS)]
    scores = [score for score, _ in selected]
    noise = selected[0][1].trial_params_["noise_multiplier"]
    guess = clone(model).set_params(alpha=3.0 / N_CLIENTS, epsilon=total)
    guessed = [
        fit_and_score(guess.set_params(random_state=seed))[0] for seed in range(N_REPETITIONS)
    ]
    results.append(
        {
            "total epsilon": total,
            "epsilon of a trial": events_epsilon(
                [SampledGaussian(noise, model.n_rounds)], 1e-5, "zero_out"
            ),
            "selected": np.mean(scores),
            "sd of selected": np.std(scores),
            "guessed": np.mean(guessed),
            "local": fit_and_score(clone(model).set_params(alpha=0.0))[0],
        }
    )
print("held-out accuracy; unit: one client; relation: zero_out; delta = 1e-5")
print(pd.DataFrame(results).round(3).to_string(index=False))

# %%
# A selection has to hold out rows, add noise to the scores, and divide its epsilon among trials.
# With so few clients and rows, that costs more than it gains at small totals: local models, or a
# guess as good as this one, do better. Use a selection if you have no good guess and bad parameters
# do great harm, or if you have thousands of clients, which make all of this cheap.
#
# The cost of one selection:
print(search_cost(selected[-1][1]))
sklearn.set_config(enable_metadata_routing=False)
