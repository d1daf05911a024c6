"""Privacy report of a selection."""

import dataclasses
import math

from pfl_sklearn._nesting import innermost_estimator
from pfl_sklearn.privacy import PrivacyReport, privacy_of, selection_epsilon

_CHOSEN = ("best_params_", "best_score_")
_OTHER_TRIALS = "the other trials, their scores, their number and so the running time"


def selection_report(select, plan, model):
    """Report of a planned selection, from that of the model that it releases."""
    trial = _report_of(model)
    if math.isinf(plan.total) or math.isinf(trial.epsilon):
        asked = "epsilon=inf was asked for the selection."
        return PrivacyReport.unprotected(
            asked if math.isinf(plan.total) else " ".join(trial.warnings),
            not_released=(*trial.released, *trial.not_released, *_CHOSEN),
            n_clients=trial.n_clients,
        )
    return dataclasses.replace(
        trial,
        epsilon=float(select.epsilon) if plan.total > 0 else 0.0,
        delta=float(select.delta),
        unit=plan.unit,
        relation=plan.relation,
        mechanism=f"best of a random number of trials ({select.distribution}, "
        f"{select.expected_trials:g} expected), of each: {trial.mechanism}",
        accountant="Renyi differential privacy of the selection (Papernot and Steinke, 2022)",
        epsilon_under=_under_other(select, plan),
        released=(*trial.released, *_CHOSEN),
        not_released=(*trial.not_released, _OTHER_TRIALS),
        assumptions=(
            *trial.assumptions,
            "what the trials draw from is the user's, not the data's",
            _assumed_of_scores(plan),
        ),
        noise_reproducible=select.random_state is not None,
    )


def _report_of(model):
    """Privacy report of one trial; without any there is no privacy."""
    if not hasattr(innermost_estimator(model), "privacy_"):
        return PrivacyReport.unprotected(f"{type(model).__name__} has no privacy.")
    return privacy_of(model)


def _under_other(select, plan):
    """Epsilon under the other relation, if it is finite."""
    other = "add_remove" if plan.relation == "replace_one" else "replace_one"
    epsilon = selection_epsilon(
        plan.events,
        expected_trials=select.expected_trials,
        distribution=select.distribution,
        delta=select.delta,
        relation=other,
    )
    return ((other, epsilon),) if math.isfinite(epsilon) else ()


def _assumed_of_scores(plan):
    if plan.mechanism is None:
        return "holdout is public"
    low, high = plan.score_range
    return (
        f"score_range = ({low:.4g}, {high:.4g}) is the user's, and the number of clients whose "
        f"scores are averaged is public; noise of sd {plan.mechanism.noise_std:.4g} times the "
        "width of the range on their sum"
    )
