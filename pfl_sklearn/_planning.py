"""Errors to expect of a fit before any data are read, by fits to made-up tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.utils import check_random_state

from pfl_sklearn._client_tables import SummaryTable
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._warnings import warn_caller

# What a fit without privacy has: the parameters of a promise at the values that make none.
_NO_PROMISE = {
    "epsilon": math.inf,
    "ledger": None,
    "unit": "client",
    "publish": None,
    "bounds": None,
    "clients": None,
    "grid": None,
    "rows_per_person": None,
    "target": "population",
}
_EPSILONS = 1e-3, 1e3  # that a search looks between
_MOST_CLIENTS, _MOST_ROWS = 100_000, 100_000
_TRIES = 5  # tables that a fit may refuse before it counts as refused
_STEP, _CLOSE = 2.0, 1.03  # factors by which a search moves at first, and in the end


class Guess(NamedTuple):
    """What is assumed of a table that nobody has seen."""

    population: Any  # a prior
    sizes: np.ndarray  # (m,), rows, trials or exposure
    noise_variance: Any
    X: Any  # rows (k, d) of features like those to come, a frame or an array, or None

    @property
    def codes(self) -> np.ndarray:
        """Clients (n,) of the rows."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes.astype(np.int64))


class MadeUpTable(NamedTuple):
    """A table, as a function that fits an estimator to it, and what the fit is to find."""

    fitted: Callable[[Any], Any]
    population: Floats  # (p,)
    clients: Floats  # (m, p)
    of_table: Floats | None = None  # (m, p), means of the rows that are there, if they are wanted


class Expected(NamedTuple):
    """Errors of simulated fits, and the report of the last one."""

    errors: Floats  # (2, p), of population and clients
    report: Any


class PlansErrors:
    """Estimators that say which errors to expect of numbers of clients and rows, and of epsilon.

    A subclass makes up a table (`_made_up`) and reads a fit to it (`_planned_values`).
    """

    _guessed_kind: ClassVar[Any]  # the class of the prior
    _guesses: ClassVar[tuple[bool, bool]]  # whether tables need a noise_variance, and features
    _takes_exposure: ClassVar[bool] = False

    def expected_error(
        self,
        population: Any,
        n_clients: int,
        n_rows: Any,
        *,
        noise_variance: float | None = None,
        X: TableLike = None,
        epsilon: Any = None,
        n_simulations: int = 200,
        random_state: Any = 0,
    ) -> pd.DataFrame:
        """Errors to expect of a fit with these parameters, from public numbers and guesses alone.

        Tables are made up with the given numbers, and fitted with this estimator's parameters, with
        and without its privacy. No data are read, no ledger is charged, and nothing is spent.

        Parameters
        ----------
        population : prior
            Guess of the population, with all parameters given: a GaussianPrior for means, a
            BetaPrior for proportions, a GammaPrior for rates; for regressions a GaussianPrior of
            the intercept (if fitted) and the coefficients, with a variance of 0 where clients do
            not differ.
        n_clients : int
            Number of clients.
        n_rows : float or array-like of shape (n_clients,)
            Rows of every client; for proportions trials, for rates the exposure.
        noise_variance : float, default=None
            Guess of the variance of a row, for means and linear regressions.
        X : array-like of shape (k, d), default=None
            Rows of features like those to come, for regressions: public or invented. Rows of the
            made-up tables are drawn from them. Groupings cannot be planned.
        epsilon : float or array-like of shape (e,), default=None
            Promises to compare; None: the estimator's own.
        n_simulations : int, default=200
            Number of tables. With 200 the errors of the population have a standard error of 5 %,
            those of clients a smaller one.
        random_state : int, RandomState instance or None, default=0
            Seed of the tables, and of the noise.

        Returns
        -------
        DataFrame
            Root mean squared errors of the "population" and of the "clients", indexed by "epsilon"
            (and for regressions by "coefficient"); infinity is a fit without privacy. A note below
            the table says what epsilon stands for (``attrs["privacy"]``). With ``target="table"``
            clients' errors are those to the means of the rows that are there.
            :meth:`PrivacyAccuracyDisplay.from_expected_error
            <pfl_sklearn.inspection.PrivacyAccuracyDisplay.from_expected_error>` plots it.

        Raises
        ------
        ValueError
            If a guess does not go with the estimator, the estimator has no finite epsilon, or it
            refuses fits of this size under every epsilon.

        Warns
        -----
        UserWarning
            If it refuses fits of this size under some; their errors are NaN.
        """
        own = self.epsilon  # type: ignore[attr-defined]
        epsilons = np.atleast_1d(np.asarray(own if epsilon is None else epsilon, dtype=float))
        _check_epsilons(epsilons)
        guess = self._checked_guess(population, n_clients, n_rows, noise_variance, X)
        estimators = [self._private(value) for value in epsilons]
        estimators.append(self._without_privacy())
        found = self._simulated(guess, estimators, n_simulations, random_state)
        refusals = [each for each in found[:-1] if isinstance(each, ValueError)]
        if isinstance(found[-1], ValueError) or len(refusals) == len(epsilons):
            raise found[-1] if isinstance(found[-1], ValueError) else refusals[0]
        if refusals:
            warn_caller(f"The errors of fits that are refused are NaN: {refusals[0]}", UserWarning)
        report = next(each.report for each in found if not isinstance(each, ValueError))
        unknown = np.full(found[-1].errors.shape, np.nan)
        errors = [unknown if isinstance(each, ValueError) else each.errors for each in found]
        return _with_promise(self._table_of_errors([*epsilons, math.inf], np.array(errors)), report)

    def solve_expected_error(
        self,
        error: float,
        population: Any,
        *,
        n_clients: int | None = None,
        n_rows: Any = None,
        epsilon: float | None = None,
        of: str = "clients",
        **options: Any,
    ) -> float:
        """Epsilon, number of clients or rows with which the expected error is `error`.

        Parameters
        ----------
        error : float, > 0
            Root mean squared error to reach; for regressions the mean over the coefficients of
            squared errors counts.
        population : prior
            As in :meth:`expected_error`.
        n_clients, n_rows, epsilon : as in :meth:`expected_error`, default=None
            The one that is None is found; the other two have to be given.
        of : {"clients", "population"}, default="clients"
            Whose error.
        **options
            Further arguments of :meth:`expected_error`.

        Returns
        -------
        float
            To about 3 %: the smallest that is enough. Whole numbers for clients and rows.

        Raises
        ------
        ValueError
            If not exactly one is None, or no epsilon up to 1,000, and no 100,000 clients or rows,
            are enough.
        """
        sizes = {"n_clients": n_clients, "n_rows": n_rows, "epsilon": epsilon}
        unknown = [name for name, value in sizes.items() if value is None]
        if len(unknown) != 1 or of not in ("clients", "population"):
            raise ValueError(
                "exactly one of n_clients, n_rows and epsilon must be None, and of 'clients' or "
                f"'population'; got {sizes} and of={of!r}."
            )
        if not (isinstance(error, Real) and 0 < error < math.inf):
            raise ValueError(f"error must be a finite number above 0; got {error!r}.")
        if epsilon is not None:
            _check_epsilons(np.array([epsilon], dtype=float))
        (name,) = unknown
        low, high = {
            "epsilon": _EPSILONS,
            "n_clients": (2.0, _MOST_CLIENTS),
            "n_rows": (1.0, _MOST_ROWS),
        }[name]

        guesses = {name: options.pop(name, None) for name in ("noise_variance", "X")}
        drawn = {"n_simulations": 200, "random_state": 0} | options
        was_fitted, refusal = False, None

        def reached(value):
            nonlocal was_fitted, refusal
            value = value if name == "epsilon" else math.ceil(value)
            given = {**sizes, name: value}
            estimator = self._private(given.pop("epsilon"))
            guess = self._checked_guess(population, **given, **guesses)
            (found,) = self._simulated(guess, [estimator], **drawn)
            if isinstance(found, ValueError):  # perhaps too little to fit anything
                refusal = found
                return False
            was_fitted = True
            return math.sqrt(np.mean(found.errors[int(of == "clients")] ** 2)) <= error

        # From the cheap end: large tables take long.
        value = low
        while not reached(value):
            if value >= high:
                if not was_fitted and refusal is not None:
                    raise refusal
                raise ValueError(
                    f"no {name} up to {high:g} has an expected error of {error:g} of the {of}; "
                    "expected a larger error, or more of the other numbers."
                )
            low, value = value, min(value * _STEP, high)
        while value / low > _CLOSE and (name == "epsilon" or math.ceil(low) + 1 < math.ceil(value)):
            middle = math.sqrt(low * value)
            low, value = (low, middle) if reached(middle) else (middle, value)
        return value if name == "epsilon" else math.ceil(value)

    def _checked_guess(self, population, n_clients, n_rows, noise_variance, X):
        kind = self._guessed_kind
        if not isinstance(population, kind) or not population.is_known:
            raise ValueError(
                f"population must be a {kind.__name__} with all parameters given; got "
                f"{population!r}."
            )
        groupings = getattr(self, "groupings", None)
        named = groupings != "auto" if isinstance(groupings, str) else len(groupings or ()) > 0
        if named or getattr(self, "participants", None) is not None:
            raise ValueError(
                "made-up tables have neither participants nor groupings; plan without them, for "
                "the clients that take part."
            )
        if not (isinstance(n_clients, int | np.integer) and n_clients > 0):
            raise ValueError(f"n_clients must be a whole number above 0; got {n_clients!r}.")
        sizes = np.asarray(n_rows, dtype=float)
        valid = sizes.shape in ((), (n_clients,)) and (sizes > 0).all() and np.isfinite(sizes).all()
        if not valid or not (self._takes_exposure or np.all(sizes == np.floor(sizes))):
            kind = "positive" if self._takes_exposure else "positive whole"
            raise ValueError(
                f"n_rows must be one {kind} number, or one for each of {n_clients} clients; got "
                f"{n_rows!r}."
            )
        takes_noise, takes_features = self._guesses
        for name, value, needed in (
            ("noise_variance", noise_variance, takes_noise),
            ("X", X, takes_features),
        ):
            if (value is None) == needed:
                raise ValueError(
                    f"{type(self).__name__} {'needs' if needed else 'takes no'} {name} to make up "
                    f"tables; got {name}={value!r}."
                )
        if noise_variance is not None and not 0 <= noise_variance < math.inf:
            raise ValueError(
                f"noise_variance must be a finite number of at least 0; got {noise_variance!r}."
            )
        return Guess(population, np.broadcast_to(sizes, (int(n_clients),)), noise_variance, X)

    def _private(self, epsilon):
        return clone(self).set_params(epsilon=epsilon, ledger=None)

    def _without_privacy(self):
        params = self.get_params(deep=False)  # type: ignore[attr-defined]
        return clone(self).set_params(**{k: v for k, v in _NO_PROMISE.items() if k in params})

    def _simulated(self, guess, estimators, n_simulations, random_state):
        """Expected of each estimator, or the ValueError with which it refuses all tables."""
        if not (isinstance(n_simulations, int | np.integer) and n_simulations > 0):
            raise ValueError(
                f"n_simulations must be a whole number above 0; got {n_simulations!r}."
            )
        rng = check_random_state(random_state)
        fits: list[list[Any]] = [[] for _ in estimators]
        refusals: list[list[ValueError]] = [[] for _ in estimators]
        for _ in range(n_simulations):
            table = self._made_up(guess, rng)  # type: ignore[attr-defined]
            seed = int(rng.randint(2**31 - 1))
            for k, estimator in enumerate(estimators):
                if not fits[k] and len(refusals[k]) >= _TRIES:
                    continue
                # Some draws cannot be fitted, such as one of a single class.
                try:
                    fits[k].append(self._squares(table, estimator.set_params(random_state=seed)))
                except ValueError as error:
                    refusals[k].append(error)
        return [
            Expected(np.sqrt(np.mean([squares for squares, _ in done], axis=0)), done[-1][1])
            if done
            else refused[0]
            for done, refused in zip(fits, refusals, strict=True)
        ]

    def _squares(self, table, estimator):
        """Mean squared errors (2, p) of population and clients of one fit, and its report."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # made-up tables are nobody's, and seeds no danger
            model = table.fitted(estimator)
        population, clients = self._planned_values(model)  # type: ignore[attr-defined]
        truth = table.clients
        if getattr(self, "target", "population") == "table":
            truth = table.of_table
            if math.isinf(model.epsilon):  # the means of the rows are their own
                clients = truth
        errors = [(population - table.population) ** 2, np.mean((clients - truth) ** 2, axis=0)]
        return np.array(errors), model.privacy_

    def _table_of_errors(self, epsilons, errors):
        index, names = pd.Index(epsilons, name="epsilon"), self._planned_names(errors.shape[-1])
        if names is not None:
            index = pd.MultiIndex.from_product([epsilons, names], names=["epsilon", "coefficient"])
        columns = {"population": errors[:, 0].ravel(), "clients": errors[:, 1].ravel()}
        return SummaryTable(columns, index)

    def _planned_names(self, p):
        """Names of the p values, or None if there is one without a name."""
        return None


def _check_epsilons(epsilons):
    if not ((epsilons > 0) & np.isfinite(epsilons)).all():
        raise ValueError(f"epsilon must be finite and above 0; got {epsilons.tolist()}.")


def _with_promise(table, report):
    """The table, with what its epsilons stand for as a note and as attributes."""
    table.attrs["promise"] = {
        "unit": report.unit,
        "relation": report.relation,
        "delta": report.delta,
    }
    table.attrs["privacy"] = (
        f"epsilon: unit one {report.unit}, relation {report.relation}, delta = {report.delta:g}; "
        f"adversary: {report.adversary}."
    )
    return table
