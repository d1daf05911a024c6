"""What a choice among candidates promises: what they do, if it costs nothing itself."""

import dataclasses
import math
from typing import NamedTuple

from pfl_sklearn.compose._frozen_estimators import holds_ours
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._pipeline_report import report_of_fits
from pfl_sklearn.privacy._report import large_delta

_OWN = (
    "each client computes its weights from its own rows, in folds that depend on nobody else's "
    "labels, and keeps them"
)
_HANDED = "named_estimators_, as release() hands them out"


class Candidate(NamedTuple):
    """A fitted candidate: its report (None: public), and why it is not protected, if so."""

    name: str
    report: PrivacyReport | None
    reason: str | None

    @classmethod
    def of(cls, name, fitted, frozen):
        """Read what a fitted candidate promises; it was fitted here unless it is frozen."""
        if frozen and not holds_ours(fitted):
            return cls(name, None, None)
        try:
            report = report_of_fits(fitted)
        except ValueError:  # it has none, as estimators of other packages
            report = None
        if report is None or math.isinf(report.epsilon):
            why = "" if report is None else f": {report.warnings[-1].rstrip('.')}"
            how = "is frozen, but" if frozen else "is fitted to the rows of all clients, and"
            return cls(name, report, f"candidate {name!r} {how} nothing protects it{why}")
        # Each of the k (k + 3) / 2 + 1 fits in folds would spend it.
        if report.epsilon > 0 and not frozen:
            return cls(
                name,
                report,
                f"candidate {name!r} is fitted to several parts of the rows, and each fit costs "
                f"epsilon = {report.epsilon:.4g}; fit it before, and give it in a FrozenEstimator",
            )
        return cls(name, report, None)


def unprotected(reason, not_released, n_clients):
    """Report of a selector that protects nobody."""
    return PrivacyReport.unprotected(
        f"ClientSelector is not protected, because {reason}.",
        not_released=not_released,
        n_clients=n_clients,
    )


def selector_report(candidates, released, own, n_clients):
    """Report of a selector with a given prior.

    Its epsilon is the sum of the candidates' (basic composition), since weights cost nothing.

    Parameters
    ----------
    candidates : list of Candidate
    released, own : tuple of str
        Attributes that the promise covers, and that stay with the clients.
    n_clients : int

    Returns
    -------
    PrivacyReport
    """
    for each in candidates:
        if each.reason is not None:
            return unprotected(each.reason, (*released, *own), n_clients)
    report = PrivacyReport.of_known_population(released, own, n_clients)
    public = [
        f"candidate {each.name!r} is public, or was released under a promise of its own"
        for each in candidates
        if each.report is None
    ]
    kept_inside = [
        f"named_estimators_[{each.name!r}].{name}"
        for each in candidates
        for name in (each.report.not_released if each.report else ())
    ]
    labels = ["the class labels that occur are public"] if "classes_" in released else []
    with_reports = [each.report for each in candidates if each.report is not None]
    delta = sum(each.delta for each in with_reports)
    assumptions = [each.assumptions for each in with_reports or [report]]
    warnings = [each.warnings for each in (report, *with_reports)]
    statements = {
        "assumptions": _once(*assumptions, [_OWN, *labels, *public]),
        "warnings": _once(*warnings, large_delta(delta, n_clients)),
        "released": tuple(_HANDED if name == "named_estimators_" else name for name in released),
        "not_released": (*own, *kept_inside),
    }
    private = [each for each in candidates if each.report is not None and each.report.epsilon > 0]
    if not private:  # weights stay with the clients, so the choice releases nothing either
        return dataclasses.replace(report, **statements)
    # Basic composition adds promises about the same neighbours, under the same trust.
    promised = {(each.report.unit, each.report.relation, each.report.trust) for each in private}
    if len(promised) > 1:
        kinds = "; ".join(
            f"{each.name!r}: {each.report.unit}, {each.report.relation}, {each.report.trust}"
            for each in private
        )
        why = f"its candidates promise different things ({kinds}), which do not add up"
        return unprotected(why, (*released, *own), n_clients)
    return dataclasses.replace(_sum_of_promises(private, delta), **statements, n_clients=n_clients)


def _sum_of_promises(private, delta):
    """Report of the candidates that cost something, all of one unit, relation and trust.

    Noise, sensitivity and promises to single parties are each candidate's own: they have no sum.
    """
    reports = [each.report for each in private]
    promises = [f"{each.name!r}: epsilon = {each.report.epsilon:.4g}" for each in private]
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
