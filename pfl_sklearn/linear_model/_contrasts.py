"""Tests of combinations of the population's coefficients, with degrees of freedom."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
from pandas import DataFrame, Series
from scipy.special import stdtr, stdtrit
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._client_tables import SummaryTable, class_quantity
from pfl_sklearn._compat import check_sample_weight
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import check_level
from pfl_sklearn.linear_model._mixed._groupings._information import grouped_information
from pfl_sklearn.linear_model._mixed._normal_rows._degrees_of_freedom import (
    JointTest,
    variance_information,
)
from pfl_sklearn.linear_model._mixed._normal_rows._robust_errors import (
    cluster_systems,
    robust_errors,
)

_METHODS = ("auto", "satterthwaite", "kenward_roger", "averaged", "normal")
_ERRORS = ("model", "robust", "CR0")
_COLUMNS = ("estimate", "std_error", "statistic", "df", "p_value", "lower", "upper")
JOINT = "joint F"  # label of the test of all rows
_MOST_ROWS = 5000  # of a cluster, whose covariance then has 200 MB
_LARGEST_SCORE = 0.01  # standard deviations of a score, which is 0 at the estimates
_INDEPENDENT = 1e-10  # smallest singular value of combinations of length 1


class _Tests(NamedTuple):
    """Errors and degrees of freedom of combinations L (k, p), and a test of all of them."""

    variances: Floats
    dfs: Floats
    joint: JointTest | None


class ContrastMixin:
    """Mixin of the mixed models: tests of combinations of population coefficients."""

    def contrast(
        self: Any,
        weights: Any,
        *,
        df: str = "auto",
        errors: str = "model",
        X: TableLike = None,
        y: TableLike = None,
        groups: TableLike = None,
        sample_weight: TableLike = None,
        level: float = 0.95,
        feature_names: Sequence[str] | None = None,
    ) -> DataFrame:
        """Estimates and tests of combinations of the population's coefficients.

        Parameters
        ----------
        weights : dict, DataFrame or array-like of shape (p,) or (k, p)
            Weights of the coefficients: a dict of names and numbers (``{"treated": 1, "placebo":
            -1}``), a dict of labels and such dicts for several combinations, a DataFrame with the
            combinations as rows, or an array in the order of the fixed part of :meth:`summary`.
            "intercept" is the intercept, and with K > 2 classes a name is "class: term". Names that
            are left out have the weight 0.
        df : {"auto", "satterthwaite", "kenward_roger", "averaged", "normal"}, default="auto"
            Degrees of freedom, for which estimated variances need more than a normal test:

            - "satterthwaite": plug-in errors, and t tests with the degrees of freedom of
              Satterthwaite, by the observed information on the variances;
            - "kenward_roger": their larger errors, and degrees of freedom by the expected
              information (needs ``method="reml"``);
            - "averaged": errors of :attr:`population_covariance_`, which are averaged over the
              variances, and normal tests;
            - "normal": plug-in errors and normal tests;
            - "auto": "satterthwaite" for linear models that were fitted by likelihood, and
              "averaged" for all others: classes and counts, groupings of more than 500 effects or
              with given variances, releases, and other priors.
        errors : {"model", "robust", "CR0"}, default="model"
            "robust": errors of a linear model that hold whatever the covariance of a client's rows
            is (heteroscedastic, autocorrelated, heavy-tailed), from the residuals of clients: CR2,
            with the degrees of freedom of Bell and McCaffrey; NaN where one client alone decides.
            "CR0": the plain sandwich, which is too small with few clients. Both need the rows of
            ``fit``, and no `df`. Clusters are the clients, or with `groupings` the levels that all
            others are nested in.
        X, y, groups, sample_weight : rows of ``fit``, and their weights if it had any
            For robust errors, as models keep no rows. With weights, CR2 adjusts residuals times the
            roots of these.
        level : float in (0, 1), default=0.95
            Coverage of the intervals.
        feature_names : array-like of str, shape (d,), default=None
            As for :meth:`summary`.

        Returns
        -------
        DataFrame
            Indexed by the combinations, with columns estimate, std_error, statistic (estimate over
            std_error), df (infinite for normal tests), p_value (two-sided), lower and upper.
            Several combinations with `errors` of the model get one more row, "joint F": the F test
            (chi-square over its degrees of freedom, if `df` is infinite) of the hypothesis that all
            of them are 0, with the degrees of freedom of its denominator. Those of its numerator,
            ``attrs["numerator_df"]``, are the number of linearly independent combinations.

        Raises
        ------
        ValueError
            For names that are no coefficients, weights that are all 0, combinations that the rows
            of ``fit`` do not determine, methods that the fit does not go with, and if degrees of
            freedom are asked of a released model or that of one client. With robust errors for
            models that are not linear, for crossed groupings (which have no independent clusters),
            clusters of more than 5,000 rows, and rows that are not those of ``fit``.

        References
        ----------
        Bell, R. M. and McCaffrey, D. F. (2002). Bias reduction in standard errors for linear
        regression with multi-stage samples. Survey Methodology. Kenward, M. G. and Roger, J. H.
        (1997). Small sample inference for fixed effects from restricted maximum likelihood.
        Biometrics. Pustejovsky, J. E. and Tipton, E. (2018). Small-sample methods for
        cluster-robust variance estimation and hypothesis testing in fixed effects models. Journal
        of Business and Economic Statistics. Kuznetsova, A., Brockhoff, P. B. and Christensen,
        R. H. B. (2017). lmerTest package: tests in linear mixed effects models. Journal of
        Statistical Software.

        Examples
        --------
        >>> from pfl_sklearn.datasets import load_county_elections
        >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
        >>> votes = load_county_elections().frame.query("state == 'IA'")
        >>> share = 100 * votes["votes_rep"] / (votes["votes_rep"] + votes["votes_dem"])
        >>> model = PersonalizedLinearRegression(random="intercept")
        >>> model = model.fit(votes[["year"]], share, groups=votes["fips"])
        >>> model.contrast({"year": 4})[["estimate", "std_error", "df"]].round(2)
                estimate  std_error     df
        4 year      2.64       0.13  494.0
        """
        check_is_fitted(self)
        check_level(level)
        if df not in _METHODS:
            raise ValueError(f"df must be one of {', '.join(_METHODS)}; got {df!r}.")
        if errors not in _ERRORS:
            raise ValueError(f"errors must be one of {', '.join(_ERRORS)}; got {errors!r}.")
        names, coefficients = self._population_terms(self._named_design(feature_names))
        labels, L = _combinations(weights, names)
        self._check_estimable(labels, L)
        estimates = L @ coefficients
        fit_rows = X, y, groups, sample_weight
        if errors != "model":
            tests = self._robust_tests_of(L, estimates, errors, df, fit_rows)
        elif any(values is not None for values in fit_rows):
            raise ValueError(
                "X, y, groups and sample_weight are for robust errors; got errors='model'."
            )
        else:
            tests = self._tests_of(L, estimates, df)
        rows = _rows(estimates, np.sqrt(tests.variances), tests.dfs, level)
        if len(L) > 1 and tests.joint is not None:
            joint = tests.joint
            rows.append((np.nan, np.nan, joint.statistic, joint.df, joint.p_value, *[np.nan] * 2))
            labels = [*labels, JOINT]
        table = SummaryTable(rows, columns=list(_COLUMNS), index=labels)
        table.columns.name = class_quantity(self, "log odds")
        if tests.joint is not None:
            table.attrs["numerator_df"] = tests.joint.numerator_df
        return table

    def _add_tests(self: Any, table, p):
        """Add tests of the p fixed effects, which come first, to a summary."""
        at = np.flatnonzero(~self._errors.is_open)
        tested = self.contrast(np.eye(p)[at])[: len(at)] if len(at) else DataFrame(columns=_COLUMNS)
        for name in ("std_error", "statistic", "df", "p_value"):
            values = np.full(len(table), np.nan)
            values[at] = tested[name]
            table[name] = values

    def _check_estimable(self: Any, labels, L):
        """Raise ValueError for combinations that the rows of fit do not determine."""
        p = len(self._design.names)
        inside = self._estimable_rows(L.reshape(-1, p)).reshape(len(L), -1).all(axis=1)
        if not inside.all():
            space = self._row_space
            raise ValueError(
                f"the rows of fit do not determine {labels[int(np.argmin(inside))]!r}, because in "
                f"all of them {space.texts(np.arange(len(space.errors)))}."
            )

    def _tests_of(self: Any, L, estimates, method):
        """_Tests of combinations L (k, p)."""
        reason: str = self._no_degrees_of_freedom()
        basis, of_basis = _independent(L, estimates)
        if method in ("auto", "satterthwaite") and self._residual_df() is not None:
            return self._exact_tests_of(L, basis, of_basis)
        if method == "auto":
            method = "averaged" if reason else "satterthwaite"
        if method in ("averaged", "normal"):
            covariance = self._errors.estimable_covariance(method == "averaged")
            if not np.isfinite(L @ covariance @ L.T).all():
                raise ValueError(
                    "contrast needs errors of the population, which a fit with "
                    f"{self._parameter_text()} does not have."
                )
            joint = _joint_test(basis @ covariance @ basis.T, of_basis, np.inf)
            return _Tests(_variances(L, covariance), np.full(len(L), np.inf), joint)
        if reason:
            raise ValueError(f"df={method!r} {reason}; expected df='averaged' or df='normal'.")
        if method == "kenward_roger" and getattr(self, "_levels", ()):
            raise ValueError(
                "df='kenward_roger' is for a single grouping of the rows; with groupings take "
                "'satterthwaite'."
            )
        information, order = self._variance_information(), self._design.order
        L, basis = L[:, order], basis[:, order]
        if method == "satterthwaite":
            joint = information.joint_satterthwaite(basis, of_basis)
            return _Tests(information.variances(L), information.satterthwaite(L), joint)
        if self.method != "reml":
            raise ValueError(f"df='kenward_roger' needs method='reml'; got {self.method!r}.")
        adjusted = information.kenward_roger()
        joint = adjusted.test(basis, of_basis)
        return _Tests(adjusted.variances(L), adjusted.degrees_of_freedom(L), joint)

    def _residual_df(self: Any):
        """Residual degrees of freedom of one client's least squares; None for other fits."""
        is_one = self.privacy_.n_clients == 1 and hasattr(self, "noise_variance_")
        if not is_one or math.isfinite(self.epsilon) or self.noise_variance is not None:
            return None
        if self.method != "reml" or not hasattr(self, "clients_"):
            return None
        lost = 0 if self._row_space is None else len(self._row_space.errors)
        df = int(self.n_samples_per_client_.sum()) - len(self._design.names) + lost
        return df if df > 0 else None

    def _exact_tests_of(self: Any, L, basis, of_basis):
        """_Tests of one client's least squares, which are exact."""
        df, covariance = self._residual_df(), self._errors.estimable_covariance(averaged=False)
        joint = _joint_test(basis @ covariance @ basis.T, of_basis, float(df))
        return _Tests(_variances(L, covariance), np.full(len(L), float(df)), joint)

    def _robust_tests_of(self: Any, L, estimates, errors, df, rows):
        """_Tests of combinations L (k, p) by the residuals of the rows of fit."""
        name = f"errors={errors!r}"
        if df != "auto":
            raise ValueError(f"{name} has degrees of freedom of its own; got df={df!r}.")
        if reason := self._no_degrees_of_freedom(robust=True):
            raise ValueError(f"{name} {reason}.")
        if any(values is None for values in rows[:3]):
            raise ValueError(f"{name} needs X, y and groups, the rows of fit; got None among them.")
        systems = systems_of_fit(self, name, *rows)
        found = robust_errors(systems, L, errors != "CR0", *_independent(L, estimates))
        return _Tests(found.variances, found.dfs, found.joint)

    def _no_degrees_of_freedom(self: Any, robust=False):
        """Why a fit has normal tests alone, or no robust ones; "" if it has others."""
        if not hasattr(self, "noise_variance_"):
            return "is for linear models: classes and counts have normal tests"
        if len(getattr(self, "clients_", ())) != self.privacy_.n_clients:
            return "needs the fit of all clients, not a model of release() or for_client()"
        if self._shape is None or math.isfinite(self.epsilon):
            return "needs variances that were estimated by likelihood, of several clients"
        if getattr(self, "_levels", ()):
            if robust or self._component_variances.profile is not None:
                return ""
            if any(self._component_variances.known):
                return "needs estimated variances of clients and groupings"
            return "needs at most 500 effects of groupings"
        posterior = getattr(self._posterior, "plug_in", self._posterior)
        return "" if hasattr(posterior, "rows") else "needs clients that share a population"

    def _variance_information(self: Any):
        """VarianceInformation of the fit, with columns in the order of the posterior."""
        if getattr(self, "_levels", ()):
            posterior = getattr(self._posterior, "plug_in", self._posterior)
            return grouped_information(self._component_variances, posterior.population.back)
        shape, free_noise = self._shape
        design, posterior = self._design, getattr(self._posterior, "plug_in", self._posterior)
        deviations = design.vectors(
            self.coef_ - self.population_coef_, self.intercept_ - self.population_intercept_
        )
        steps = None if shape is None else self._covariance_directions(posterior.noise)
        n_rows = int(self.n_samples_per_client_.sum())
        return variance_information(
            posterior,
            deviations[:, design.random],
            steps,
            free_noise,
            n_rows,
            self.method == "reml",
        )


def systems_of_fit(model: Any, name: str, X: Any, y: Any, groups: Any, weights: Any) -> Any:
    """ClusterSystems of the rows of the fit of a linear model; ValueError for other rows.

    `name` is what needs them.
    """
    _, x, codes, levels = model._row_predictions(X, groups)
    y = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"))
    check_consistent_length(x, y)
    residuals = y - x @ model._design.vectors(model.population_coef_, model.population_intercept_)
    groupings = [codes, *(levels or [])]
    if weights is not None:
        weights = check_sample_weight(weights, x, dtype=np.float64, ensure_non_negative=True)
        used = weights > 0
        groupings, root = [each[used] for each in groupings], np.sqrt(weights[used])
        x, residuals = x[used] * root[:, None], residuals[used] * root
    codes, systems = groupings[0], None
    counts = np.bincount(codes[codes >= 0], minlength=len(model.clients_))
    if (codes >= 0).all() and np.array_equal(counts, model.n_samples_per_client_):
        names, covariances = ["client"], [model._between]
        for each in getattr(model, "_levels", ()):
            names.append(each.name)
            covariances.append(each.embedded_covariance(model._design))
        effects = list(zip(groupings, covariances, strict=True))
        effects = _outermost_last(effects, names, name)
        systems = cluster_systems(x, residuals, model.noise_variance_, effects)
    if systems is None or systems.largest_score > _LARGEST_SCORE:
        raise ValueError(
            f"{name} needs the X, y, groups and sample_weight of fit, which had "
            f"{model.n_samples_per_client_.sum()} rows of {len(model.clients_)} clients; the "
            f"{len(x)} rows that were given have other estimates."
        )
    return systems


def _outermost_last(effects, names, name):
    """Groupings, the one last whose levels hold those of all others; ValueError without one."""
    at = int(np.argmin([codes.max() for codes, _ in effects]))
    outer = effects[at][0]
    if (outer < 0).any():
        raise ValueError(f"{name} needs a level of {names[at]!r} in every row.")
    for other, (codes, _) in zip(names, effects, strict=True):
        pairs = np.unique(np.column_stack([codes, outer])[codes >= 0], axis=0)
        if len(np.unique(pairs[:, 0])) < len(pairs):
            raise ValueError(
                f"{name} needs independent clusters, but levels of {other!r} are in several levels "
                f"of {names[at]!r}: crossed groupings have none."
            )
    largest = int(np.bincount(outer).max())
    if len(effects) > 1 and largest > _MOST_ROWS:
        raise ValueError(
            f"{name} takes clusters of up to {_MOST_ROWS} rows; one of {names[at]!r} has {largest}."
        )
    return [*effects[:at], *effects[at + 1 :], effects[at]]


def _combinations(weights, names):
    """Labels and weights (k, p) of combinations of the named coefficients."""
    labels = None
    if isinstance(weights, Series):
        weights = weights.to_dict()
    if hasattr(weights, "columns"):  # a data frame
        frame = nw.from_native(weights, eager_only=True)
        rows = [dict(zip(frame.columns, row, strict=True)) for row in frame.rows()]
        labels = list(weights.index) if isinstance(weights, DataFrame) else None
        L = np.array([_vector(row, names) for row in rows]).reshape(len(rows), len(names))
    elif isinstance(weights, Mapping):
        are_rows = [isinstance(value, Mapping) for value in weights.values()]
        has_labels = bool(are_rows) and all(are_rows)
        rows = list(weights.values()) if has_labels else [dict(weights)]
        labels = list(weights) if has_labels else None
        L = np.array([_vector(row, names) for row in rows])
    else:
        L = _array(weights, names)
    is_open = ~(np.isfinite(L).all(axis=1) & L.any(axis=1))
    if not len(L) or is_open.any():
        raise ValueError(f"weights must be finite, and not all 0; got {weights!r}.")
    labels = [_text(row, names) for row in L] if labels is None else labels
    if JOINT in labels:
        raise ValueError(f"{JOINT!r} is the label of the joint test; give the combination another.")
    return labels, L


def _array(weights, names):
    """Weights (k, p) in the order of the names."""
    try:
        L = np.atleast_2d(np.asarray(weights, dtype=float))
    except (TypeError, ValueError):
        L = np.empty((0, 0, 0))
    if L.ndim != 2 or L.shape[1] != len(names):
        raise ValueError(
            "weights must be a dict of names and numbers, or numbers with "
            f"{len(names)} columns, one for each of {names[:20]}; got {weights!r}."
        )
    return L


def _vector(row, names):
    """Weights (p,) by name."""
    if len(set(names)) < len(names):
        raise ValueError(f"names of coefficients must differ to be weighted; got {names[:20]}.")
    for name, value in row.items():
        if name not in names:
            raise ValueError(f"{name!r} is no coefficient; expected names among {names[:20]}.")
        if not isinstance(value, Real):
            raise ValueError(f"the weight of {name!r} must be a number; got {value!r}.")
    return [float(row.get(name, 0.0)) for name in names]


def _text(row, names):
    """Text of a combination: "treated - placebo"."""
    text = ""
    for weight, name in zip(row, names, strict=True):
        if weight == 0:
            continue
        term = name if abs(weight) == 1 else f"{abs(weight):g} {name}"
        sign = "-" if weight < 0 else "+"
        text += f" {sign} {term}" if text else ("-" if weight < 0 else "") + term
    return text


def _rows(estimates, errors, dfs, level):
    """Values of the columns of a table, row by row."""
    # Of a known population nothing is to be tested.
    statistics = np.divide(estimates, errors, out=np.full(len(errors), np.nan), where=errors > 0)
    p_values = 2 * stdtr(dfs, -np.abs(statistics))
    half = stdtrit(dfs, 0.5 + level / 2) * errors
    columns = (estimates, errors, statistics, dfs, p_values, estimates - half, estimates + half)
    return list(zip(*columns, strict=True))


def _variances(L, covariance):
    """Variances (k,) of combinations, which rounding may leave a little below 0."""
    return np.maximum(np.sum((L @ covariance) * L, axis=1), 0.0)


def _joint_test(covariance, estimates, df):
    """JointTest of estimates (k,) with this covariance (k, k)."""
    size = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    if not (size > 0).all():
        return JointTest(np.nan, len(size), df)
    scaled = estimates / size
    solved = np.linalg.lstsq(covariance / np.outer(size, size), scaled, rcond=1e-14)[0]
    return JointTest(float(scaled @ solved / len(size)), len(size), df)


def _independent(L, estimates):
    """Linearly independent combinations (r, p) that span L (k, p): these, if they are."""
    size = np.linalg.norm(L, axis=1)
    left, values, _ = np.linalg.svd(L / size[:, None], full_matrices=False)
    rank = int(np.sum(values > _INDEPENDENT * values[0]))
    if rank == len(L):
        return L, estimates
    # An orthonormal basis, however often and in which form a combination is given.
    back = (left[:, :rank] / values[:rank]).T / size
    basis = back @ L
    turn = np.linalg.svd(basis, full_matrices=False)
    return turn[2][:rank], np.diag(1 / turn[1]) @ turn[0].T @ back @ estimates
