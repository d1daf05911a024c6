"""Privacy report of a selector: the sum of its candidates' promises, if the choice is free."""

import dataclasses
import math

from pfl_sklearn._object_graph import iter_reachable
from pfl_sklearn._unwrap import is_package_class
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._pipeline_report import report_of_fits
from pfl_sklearn.privacy._report import large_delta_warning

_WEIGHTS_ARE_LOCAL = (
    "each client computes its weights from its own rows, in folds that depend on nobody else's "
    "labels, and keeps them"
)
_RELEASED_CANDIDATES = "named_estimators_, as release() hands them out"


def unprotected_selector(reason, not_released, n_clients):
    """Report of a selector that protects nobody."""
    return PrivacyReport.unprotected(
        f"ClientSelector is not protected, because {reason}.",
        not_released=not_released,
        n_clients=n_clients,
    )


def selector_report(fitted, frozen, released, not_released, n_clients):
    """Report of a selector with a given prior, whose choice costs nothing.

    Its epsilon is the sum of the candidates' (basic composition). `frozen` are the names of
    candidates that were not fitted here; `released` are attributes that the promise covers,
    `not_released` those that stay with the clients.
    """
    reports = {}
    for name, candidate in fitted.items():
        reports[name], reason = _promise_of(name, candidate, name in frozen)
        if reason is not None:
            return unprotected_selector(reason, (*released, *not_released), n_clients)
    promises = {name: report for name, report in reports.items() if report is not None}
    base = PrivacyReport.of_known_population(released, not_released, n_clients)
    private = {name: promise for name, promise in promises.items() if promise.epsilon > 0}
    # Basic composition adds promises about the same neighbours, under the same trust.
    if len({(promise.unit, promise.relation, promise.trust) for promise in private.values()}) > 1:
        kinds = "; ".join(
            f"{name!r}: {promise.unit}, {promise.relation}, {promise.trust}"
            for name, promise in private.items()
        )
        reason = f"its candidates promise different things ({kinds}), which do not add up"
        return unprotected_selector(reason, (*released, *not_released), n_clients)
    delta = sum(promise.delta for promise in promises.values())
    total = base  # weights stay with the clients, so the choice releases nothing
    if private:
        total = dataclasses.replace(_sum_of_promises(private, delta), n_clients=n_clients)
    public = [name for name in reports if name not in promises]
    statements = _statements(base, promises, public, released, not_released)
    statements["warnings"] = _unique(statements["warnings"], large_delta_warning(delta, n_clients))
    return dataclasses.replace(total, **statements)


def _promise_of(name, fitted, frozen):
    """Report of a candidate (None: public), and the reason why it is unprotected, or None."""
    if frozen and not _holds_ours(fitted):
        return None, None
    try:
        report = report_of_fits(fitted)
    except ValueError:  # estimators of other packages have none
        report = None
    if report is None or math.isinf(report.epsilon):
        detail = "" if report is None else f": {report.warnings[-1].rstrip('.')}"
        how = "is frozen, but" if frozen else "is fitted to the rows of all clients, and"
        return report, f"candidate {name!r} {how} nothing protects it{detail}"
    # Each of the k (k + 3) / 2 + 1 fits in folds would spend it.
    if report.epsilon > 0 and not frozen:
        return report, (
            f"candidate {name!r} is fitted to several parts of the rows, and each fit costs "
            f"epsilon = {report.epsilon:.4g} ({report.relation}); fit it before, and give it in a "
            "FrozenEstimator"
        )
    return report, None


def _statements(base, promises, public, released, not_released):
    """Fields of the report that state assumptions, warnings, and what is released."""
    inside = [
        f"named_estimators_[{name!r}].{attribute}"
        for name, promise in promises.items()
        for attribute in promise.not_released
    ]
    labels = ["the class labels that occur are public"] if "classes_" in released else []
    were_public = [
        f"candidate {name!r} is public, or was released under a promise of its own"
        for name in public
    ]
    assumptions = [promise.assumptions for promise in promises.values() or [base]]
    return {
        "assumptions": _unique(*assumptions, [_WEIGHTS_ARE_LOCAL, *labels, *were_public]),
        "warnings": _unique(*(promise.warnings for promise in (base, *promises.values()))),
        "released": tuple(
            _RELEASED_CANDIDATES if name == "named_estimators_" else name for name in released
        ),
        "not_released": (*not_released, *inside),
    }


def _sum_of_promises(private, delta):
    """Report of the candidates that cost something, all of one unit, relation and trust."""
    # Noise, sensitivity and promises to single parties belong to one candidate each; they have no
    # sum.
    reports = list(private.values())
    rows = {report.rows_per_person for report in reports}
    promises = [
        f"{name!r}: epsilon = {report.epsilon:.4g} ({report.relation})"
        for name, report in private.items()
    ]
    return PrivacyReport(
        epsilon=sum(report.epsilon for report in reports),
        delta=delta,
        mechanism="candidates released before; " + _joined("mechanism", reports),
        unit=reports[0].unit,
        relation=reports[0].relation,
        trust=reports[0].trust,
        adversary=_joined("adversary", reports),
        accountant=f"sum of the candidates' promises ({', '.join(promises)}); weights cost nothing",
        sampling=_joined("sampling", reports),
        # The rate that amplifies least.
        sampling_rate=max(report.sampling_rate for report in reports),
        rounds=sum(report.rounds for report in reports),
        rows_per_person=rows.pop() if len(rows) == 1 else None,
        # A known seed undoes one promise, and with it their sum.
        noise_reproducible=any(report.noise_reproducible for report in reports),
    )


def _unique(*lists):
    """All texts of the lists, in order and without repetitions."""
    return tuple(dict.fromkeys(text for texts in lists for text in texts))


def _joined(field, reports):
    """Distinct texts of a field of reports in one line."""
    return "; ".join(_unique(getattr(report, field) for report in reports))


def _holds_ours(value):
    """Whether `value` contains an estimator of this package, or of a subclass, at any depth."""
    return any(
        is_package_class(part) or issubclass(type(part), ClientMixin)
        for part in iter_reachable(value)
    )
