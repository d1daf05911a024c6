"""What a choice among candidates promises: what they do, if it costs nothing itself."""

import dataclasses
import math

from pfl_sklearn._object_graph import iter_reachable
from pfl_sklearn._unwrap import is_ours
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._pipeline_report import report_of_fits
from pfl_sklearn.privacy._report import large_delta

_OWN = (
    "each client computes its weights from its own rows, in folds that depend on nobody else's "
    "labels, and keeps them"
)
_HANDED = "named_estimators_, as release() hands them out"


def unprotected(reason, not_released, n_clients):
    """Report of a selector that protects nobody."""
    return PrivacyReport.unprotected(
        f"ClientSelector is not protected, because {reason}.",
        not_released=not_released,
        n_clients=n_clients,
    )


def selector_report(fitted, frozen, released, own, n_clients):
    """Report of a selector with a given prior.

    Its epsilon is the sum of the candidates' (basic composition), since weights cost nothing.

    Parameters
    ----------
    fitted : dict of str to estimator
        Candidates by name.
    frozen : set of str
        Names of those that were not fitted here.
    released, own : tuple of str
        Attributes that the promise covers, and that stay with the clients.
    n_clients : int

    Returns
    -------
    PrivacyReport
    """
    reports = {}
    for name, each in fitted.items():
        reports[name], reason = _promise_of(name, each, name in frozen)
        if reason is not None:
            return unprotected(reason, (*released, *own), n_clients)
    report = PrivacyReport.of_known_population(released, own, n_clients)
    statements = _statements(report, reports, released, own, n_clients)
    private = {
        name: each for name, each in reports.items() if each is not None and each.epsilon > 0
    }
    if not private:  # weights stay with the clients, so the choice releases nothing either
        return dataclasses.replace(report, **statements)
    # Basic composition adds promises about the same neighbours, under the same trust.
    if len({(each.unit, each.relation, each.trust) for each in private.values()}) > 1:
        kinds = "; ".join(
            f"{name!r}: {each.unit}, {each.relation}, {each.trust}"
            for name, each in private.items()
        )
        why = f"its candidates promise different things ({kinds}), which do not add up"
        return unprotected(why, (*released, *own), n_clients)
    delta = sum(each.delta for each in reports.values() if each is not None)
    return dataclasses.replace(_sum_of_promises(private, delta), **statements, n_clients=n_clients)


def _promise_of(name, fitted, frozen):
    """Report of a fitted candidate (None: public), and why it is not protected, if so.

    It was fitted here unless it is frozen.
    """
    if frozen and not _holds_ours(fitted):
        return None, None
    try:
        report = report_of_fits(fitted)
    except ValueError:  # it has none, as estimators of other packages
        report = None
    if report is None or math.isinf(report.epsilon):
        why = "" if report is None else f": {report.warnings[-1].rstrip('.')}"
        how = "is frozen, but" if frozen else "is fitted to the rows of all clients, and"
        return report, f"candidate {name!r} {how} nothing protects it{why}"
    # Each of the k (k + 3) / 2 + 1 fits in folds would spend it.
    if report.epsilon > 0 and not frozen:
        return report, (
            f"candidate {name!r} is fitted to several parts of the rows, and each fit costs "
            f"epsilon = {report.epsilon:.4g}; fit it before, and give it in a FrozenEstimator"
        )
    return report, None


def _statements(report, reports, released, own, n_clients):
    """Fields of the report that say what is assumed, what is released and what is not."""
    promised = {name: each for name, each in reports.items() if each is not None}
    public = [
        f"candidate {name!r} is public, or was released under a promise of its own"
        for name in reports
        if name not in promised
    ]
    kept_inside = [
        f"named_estimators_[{name!r}].{attribute}"
        for name, each in promised.items()
        for attribute in each.not_released
    ]
    labels = ["the class labels that occur are public"] if "classes_" in released else []
    assumptions = [each.assumptions for each in promised.values() or [report]]
    warnings = [each.warnings for each in (report, *promised.values())]
    delta = sum(each.delta for each in promised.values())
    return {
        "assumptions": _once(*assumptions, [_OWN, *labels, *public]),
        "warnings": _once(*warnings, large_delta(delta, n_clients)),
        "released": tuple(_HANDED if name == "named_estimators_" else name for name in released),
        "not_released": (*own, *kept_inside),
    }


def _sum_of_promises(private, delta):
    """Report of the candidates that cost something, all of one unit, relation and trust.

    Noise, sensitivity and promises to single parties are each candidate's own: they have no sum.
    """
    reports = list(private.values())
    promises = [f"{name!r}: epsilon = {each.epsilon:.4g}" for name, each in private.items()]
    return PrivacyReport(
        epsilon=sum(each.epsilon for each in reports),
        delta=delta,
        mechanism="candidates released before; " + _unique(each.mechanism for each in reports),
        unit=reports[0].unit,
        relation=reports[0].relation,
        trust=reports[0].trust,
        adversary=_unique(each.adversary for each in reports),
        accountant=f"sum of the candidates' promises ({', '.join(promises)}); weights cost nothing",
        sampling=_unique(each.sampling for each in reports),
        # The rate that amplifies least.
        sampling_rate=max(each.sampling_rate for each in reports),
        rounds=sum(each.rounds for each in reports),
        # A seed that somebody knows undoes one promise, and so their sum.
        noise_reproducible=any(each.noise_reproducible for each in reports),
    )


def _once(*lists):
    """All texts of the lists, in order and without repetitions."""
    return tuple(dict.fromkeys(text for texts in lists for text in texts))


def _unique(texts):
    """Distinct texts in one line."""
    return "; ".join(dict.fromkeys(texts))


def _holds_ours(value):
    """Whether `value` contains an estimator of this package, or of a subclass, at any depth."""
    return any(
        is_ours(each) or issubclass(type(each), ClientMixin) for each in iter_reachable(value)
    )
