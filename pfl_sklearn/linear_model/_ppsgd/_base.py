"""Base of the PPSGD regressor and classifier: parameters, models and predictors."""

import math
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.utils import assert_all_finite, check_X_y

from pfl_sklearn._client_tables import CoefTableMixin
from pfl_sklearn._clients import Array
from pfl_sklearn._columns import name_bad_columns, validate_data
from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, POSITIVE, parameter, with_parameters
from pfl_sklearn._rounds.estimator import BaseRounds
from pfl_sklearn._rounds.out_of_core import stored_rows
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.rows import is_sparse
from pfl_sklearn.linear_model._ppsgd._run import (
    add_intercept,
    linear_predictors,
    ppsgd_rounds,
    stored_coordinates,
)
from pfl_sklearn.linear_model._ppsgd._sparse import FeaturePairs
from pfl_sklearn.linear_model._ppsgd._steps import check_learning_rate
from pfl_sklearn.linear_model._ppsgd._updates import model_iterates

# What the server keeps on sparse rows: the noise variance that features have got, and are due.
_NOISE_ACCOUNT = ("settled", "variance")


@with_parameters
class BasePPSGD(CoefTableMixin, BaseRounds):
    r"""Rounds of PPSGD, and the models that they return.

    A subclass reads its targets (`_read`), names its `_loss`, and turns predictors into
    predictions.

    Attributes
    ----------
    learning_rate_ : float
        The number behind `learning_rate`. That of "auto" is for the features as scaled inside.

    Notes
    -----
    These are Algorithms 1, 2 and 3 of Bietti et al. (2022). Algorithm 1 is ``client_fraction=1,
    batch_size=1``; Algorithm 3 is ``weighting="clients"`` with sampling. With Q clients expected in
    a round and a = ``alpha * Q``, w takes steps of ``learning_rate * min(a, 1)`` and a local model
    of ``learning_rate * min(1 / a, 1)``. The noise on w is ``noise_multiplier * clip_norm / Q``, or
    over Q mean batches for ``weighting="samples"``. The paper's figures show a; its text, `alpha`.

    We deviate from the paper in three ways. With noise and ``clip_norm=None``, a message is
    :math:`g_i / \|g_i\|` (Bu et al., 2023, without :math:`\gamma`), of sensitivity 1. The rows of a
    client are used in turn, from a random order, instead of being drawn independently. And clients
    are sampled independently by default: the paper draws a fixed number of them but accounts for
    independent draws, which understates epsilon.

    The guarantee is joint differential privacy for one client. It covers all iterates of the
    population model together, against anybody, including all other clients together. Local
    models are not protected, nor are ``coef_``, predictions and ``history_``. The number of
    clients, their numbers of rows, the number of rounds and the labels that occur are public. If
    clients are sampled independently, the number of participants of a round has to stay secret.

    With sparse `X` a client's model has values only on the features of its own rows. The noise
    on a feature is drawn when somebody is about to see it, unless callbacks, `average` or
    `warm_start` need all noise in every round. The distribution is the same.

    References
    ----------
    Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization
    improves privacy-accuracy tradeoffs in federated learning. ICML.

    Bu, Z., Wang, Y.-X., Zha, S. and Karypis, G. (2023). Automatic clipping: differentially private
    deep learning made easier and stronger. NeurIPS.
    """

    _client_attributes = ("_local", "n_samples_per_client_")
    _population_attributes = ("_population", "_server")
    _state_attributes = (
        "_single",
        "classes_",
        "n_rounds_",
        "learning_rate_",
        "noise_multiplier_",
        "_mean_batch",
    )
    _released_names = (
        "population_coef_",
        "population_intercept_",
        "the population model of every round",
    )
    _kept_names = (
        "local_coef_",
        "coef_",
        "intercept_",
        "history_",
        "clients_",
        "n_samples_per_client_",
    )

    alpha: float | str = parameter(
        default="auto",
        ranges=[Interval(Real, 0, math.inf, closed="both"), StrOptions({"auto"})],
        text="""
            float in [0, inf] or "auto"
                How much is learned globally: 0 fits local models only, inf a global model only.
                Both models take equal steps at ``alpha * n_clients * client_fraction == 1``; "auto"
                sets this product to 30.
            """,
    )
    learning_rate: float | str = parameter(
        default="auto",
        ranges=[POSITIVE, StrOptions({"auto", "theory"})],
        text="""
            float, "theory" or "auto"
                Learning rate, on an average gradient, of the model that takes the larger step;
                `alpha` sets the ratio. Without noise, "auto" depends on the data: features are
                centred and scaled inside (sparse ones only scaled), w starts at the best constant,
                and the step is the inverse curvature of an average round. Given `clip_norm`,
                features stay as they are. "theory" is the step of Theorems 4.5 and 5.2 for
                `smoothness`, `solution_norm` and `gradient_std`. With noise and without
                `clip_norm`, the number is how far w may move in a round, and "auto" sets it from
                public numbers alone. With noise and `clip_norm`, "auto" is refused.
            """,
    )
    batch_size: int | None = parameter(
        default=10,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int or None
                Rows of a client in a round, at most all it has; None: all. Rows are used in turn.
            """,
    )
    weighting: str = parameter(
        default="samples",
        ranges=[StrOptions({"samples", "clients"})],
        text="""
            {"samples", "clients"}
                Which average loss is minimized: over rows (Algorithm 2, messages are sums over a
                batch) or over clients (Algorithm 3, messages are means over a batch).
            """,
    )
    average: bool = parameter(
        default=False,
        ranges=["boolean"],
        text="""
            bool
                Return the average iterate, which the theorems are about, instead of the last.
            """,
    )
    fit_intercept: bool = parameter(
        default=True,
        ranges=["boolean"],
        text="""
            bool
                Add an intercept. Its gradient is clipped together with the others.
            """,
    )
    shuffle: bool = parameter(
        default=True,
        ranges=["boolean"],
        text="""
            bool
                Put each client's rows in random order first.
            """,
    )
    smoothness: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text="""
            float or None
                For "theory": bound L on the curvature of a row's loss in both models together. For
                the squared loss, twice the largest squared norm of a row of `X` with the intercept.
            """,
    )
    solution_norm: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text=r"""
            float or None
                For "theory": the norm :math:`\|z^*\|_\alpha` of the solution.
            """,
    )
    gradient_std: float | None = parameter(
        default=None,
        ranges=[POSITIVE, None],
        text=r"""
            float or None
                For "theory": :math:`\sigma_{tot,\alpha}`, the standard deviation of a gradient.
            """,
    )
    clip_norm = parameter(
        text="""
            float or None
                L2 norm that each client's message is clipped to. Choose it without looking at the
                data. With noise, None scales every message to length one instead.
            """,
    )
    n_rounds: int | None = parameter(
        default=None,
        text="""
            int or None
                Rounds of communication. None: ``fit`` goes on until the loss of held-out rows is
                flat. With noise it must not depend on the data, and None is 100 rounds.
            """,
    )
    max_rounds: int = 10_000
    warm_start = parameter(
        text="""
            bool
                Let ``fit`` continue to `n_rounds` rounds in all, or until the loss is flat again,
                with the noise multiplier that it had unless another is given. With an integer
                `random_state` the result is the same, bit by bit, as that of all rounds at once,
                except for "theory" with `solution_norm` and for normalized messages, whose steps
                depend on `n_rounds`.
            """,
    )

    _normalizes_messages = True
    _check_parameters = check_learning_rate
    _make_rounds = ppsgd_rounds

    @property
    def _communicates(self):
        # With alpha=0 the population model takes no steps, so nothing leaves the clients.
        return isinstance(self.alpha, str) or self.alpha > 0

    def _rounds_of_a_pass(self, clients):
        """Rounds in which every row is expected to be used once."""
        # The client with most rows needs most rounds; others use theirs more than once.
        largest = np.bincount(clients.codes).max()
        n_batches = -(-largest // self.batch_size) if self.batch_size else 1
        return math.ceil(n_batches / self._participation)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_table(self, X, y, earlier, **targets):
        """Checked features, dense or sparse as in earlier rounds, and targets."""
        options = {"accept_sparse": "csr", "dtype": np.float64, "order": "C", "estimator": self}
        # Earlier rounds have models of pairs or of all features; the rows follow them.
        stored = stored_rows(X) if earlier is None or earlier.layout is None else None
        with name_bad_columns(X if stored is None else None, is_private(self)):
            if stored is None:
                features, y = check_X_y(X, y, **options, **targets)
            else:
                features = checked_floats(self, stored)
                _, y = check_X_y(np.zeros((len(stored), 1)), y, **options, **targets)
            assert_all_finite(y, input_name="y")  # in objects None and infinity have passed so far
        if earlier is not None:
            validate_data(self, X, reset=False, skip_check_array=True)
        of_pairs = is_sparse(features) if earlier is None else earlier.layout is not None
        if of_pairs:
            return csr_array(features), y
        return features.toarray() if is_sparse(features) else features, y

    def _models(self, state, ids, layout):
        """Population model (p, c) and local models (m, p, c), or LocalModels of sparse rows."""
        population, local = model_iterates(state, layout, len(ids))
        coordinates = stored_coordinates(state.server)
        if coordinates is not None:
            population, local = coordinates.back(population), coordinates.back(local)
        # All noise is drawn by now, so the account of it holds zeros that reveal nothing.
        names = [] if layout is None else _NOISE_ACCOUNT
        server = {**state.server, **{name: np.zeros_like(state.server[name]) for name in names}}
        return {"_population": population, "_local": local, "_server": server}

    def _frozen_layout(self):
        # Only rounds on sparse rows keep account of noise that is not drawn yet.
        if _NOISE_ACCOUNT[0] not in self._server:
            return None
        return FeaturePairs(np.zeros(0, dtype=np.int64), len(self._server["coef"]))

    def _predictors(self, X, groups):
        """Predictors (n, c) of rows under the models of their clients; (n,) if they are single."""
        codes, stored = self._encode_predict(X, groups), stored_rows(X)
        with name_bad_columns(X if stored is None else None):
            if stored is None:
                X = validate_data(self, X, reset=False, dtype=np.float64, accept_sparse="csr")
            else:
                validate_data(self, X, reset=False, skip_check_array=True)
                X = checked_floats(self, stored)
        design = add_intercept(X, len(self._population) > X.shape[1])
        # A released model has no clients, only the population's coefficients.
        local = self._local if hasattr(self, "clients_") else None
        with np.errstate(over="ignore", invalid="ignore"):  # a local model may diverge under noise
            predictors = linear_predictors(design, codes, self._population, local)
        predictors = np.nan_to_num(predictors)
        return predictors[:, 0] if self._single else predictors

    @property
    def population_coef_(self) -> Array:
        """Coefficients w ([c,] d) of the population model."""
        return self._coefficients(self._population)

    @property
    def population_intercept_(self) -> Any:
        """Intercepts ([c]) of the population model."""
        return self._intercepts(self._population)

    @property
    def local_coef_(self) -> Any:
        """Coefficients theta_i (n_clients, [c,] d) of the clients' own models.

        If `X` was sparse, they are a sparse array (n_clients * c, d): c rows for every client.
        """
        self._require_fitted("clients_")
        if hasattr(self._local, "matrix"):
            return self._local.matrix()[:, : self.n_features_in_]
        return self._coefficients(self._local)

    @property
    def local_intercept_(self) -> Array:
        """Intercepts (n_clients[, c]) of the clients' own models."""
        return self._intercepts(self._dense_local())

    def _dense_local(self):
        """Local models as an array (n_clients, p, c)."""
        self._require_fitted("clients_")
        return self._local.dense() if hasattr(self._local, "dense") else self._local

    @property
    def coef_(self) -> Array:
        """Coefficients w + theta_i (n_clients, [c,] d) of every client."""
        return self._coefficients(self._dense_local()) + self.population_coef_

    @property
    def intercept_(self) -> Array:
        """Intercepts (n_clients[, c]) of every client."""
        return self.population_intercept_ + self.local_intercept_

    def _coefficients(self, values):
        """Coefficients ([m,] [c,] d) without the intercept, of values ([m,] p, c)."""
        coef = np.moveaxis(values[..., : self.n_features_in_, :], -1, -2)
        return coef[..., 0, :] if self._single else coef

    def _intercepts(self, values):
        """Intercepts ([m,] [c]) of values ([m,] p, c); 0 without one."""
        intercepts = values[..., self.n_features_in_ :, :].sum(axis=-2)  # of one column, or none
        intercepts = intercepts[..., 0] if self._single else intercepts
        return float(intercepts) if intercepts.ndim == 0 else intercepts


def checked_floats(estimator, stored):
    """Stored rows in double precision, after the checks of an estimator's X."""
    return stored.checked(estimator, dtype=np.float64).changed(partial(np.asarray, dtype=float))
