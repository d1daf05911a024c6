"""What the PPSGD regressor and classifier share: their runs, and the models that runs leave."""

import math
from numbers import Integral, Real

import numpy as np
from scipy.sparse import csr_array, hstack, issparse
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn._rounds.estimator import BaseRounds, Run, sampling_of
from pfl_sklearn._rounds.privacy import is_private
from pfl_sklearn._rounds.release import JointSum
from pfl_sklearn._rounds.rows import ClientRows, InTurn
from pfl_sklearn.linear_model._base import client_predictors
from pfl_sklearn.linear_model._ppsgd._sparse import (
    LateNoise,
    LocalModels,
    SparseRows,
    keys_of,
    pairs_of,
    sparse_ppsgd,
)
from pfl_sklearn.linear_model._ppsgd._steps import (
    auto_learning_rate,
    check_learning_rate,
    divergence_advice,
    step_sizes,
    theory_learning_rate,
)
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES, averaged, ppsgd
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum


class BasePPSGD(BaseRounds):
    """Rounds of PPSGD, and the models that they leave.

    A subclass reads its targets (`_read`; the details of its table are the number of outputs and
    the name of the loss) and turns predictors into predictions.
    """

    _client_attributes = ("_local", "n_samples_per_client_")
    _population_attributes = ("_population",)
    _state_attributes = (
        "_single",
        "classes_",
        "n_rounds_",
        "learning_rate_",
        "noise_multiplier_",
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

    _parameter_constraints = {
        **BaseRounds._parameter_constraints,
        "alpha": [Interval(Real, 0, math.inf, closed="both")],
        "learning_rate": [
            Interval(Real, 0, None, closed="neither"),
            StrOptions({"auto", "theory"}),
        ],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "weighting": [StrOptions({"samples", "clients"})],
        "average": ["boolean"],
        "fit_intercept": ["boolean"],
        "shuffle": ["boolean"],
        "smoothness": [Interval(Real, 0, None, closed="neither"), None],
        "solution_norm": [Interval(Real, 0, None, closed="neither"), None],
        "gradient_std": [Interval(Real, 0, None, closed="neither"), None],
    }

    def __init__(
        self,
        *,
        alpha=1.0,
        learning_rate="auto",
        n_rounds=100,
        batch_size=10,
        client_fraction=1.0,
        sampling="poisson",
        weighting="samples",
        average=False,
        fit_intercept=True,
        shuffle=True,
        smoothness=None,
        solution_norm=None,
        gradient_std=None,
        epsilon=math.inf,
        noise_multiplier=None,
        delta=1e-5,
        clip_norm=None,
        clip_quantile=None,
        ledger=None,
        warm_start=False,
        checkpoint=None,
        checkpoint_every=10,
        unseen="warn",
        n_jobs=None,
        random_state=None,
    ):
        self.alpha = alpha
        self.learning_rate = learning_rate
        self.n_rounds = n_rounds
        self.batch_size = batch_size
        self.client_fraction = client_fraction
        self.sampling = sampling
        self.weighting = weighting
        self.average = average
        self.fit_intercept = fit_intercept
        self.shuffle = shuffle
        self.smoothness = smoothness
        self.solution_norm = solution_norm
        self.gradient_std = gradient_std
        self.epsilon = epsilon
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.clip_norm = clip_norm
        self.clip_quantile = clip_quantile
        self.ledger = ledger
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        self.unseen = unseen
        self.n_jobs = n_jobs
        self.random_state = random_state

    @property
    def _communicates(self):
        return self.alpha > 0

    def _check_parameters(self):
        check_learning_rate(self)

    def _make_run(self, table, clients, roster, earlier, order):
        """Run on a table; a learning rate that earlier rounds found stays."""
        if earlier is not None:
            self._check_continues(earlier)
        n_outputs, loss = table.details
        rows = self._client_rows(table, clients, roster, earlier, order)
        sampling = sampling_of(self.sampling, self.client_fraction, len(clients.ids))
        n_expected = sampling.rate * len(clients.ids)
        learning_rate = self._learning_rate(rows, LOSSES[loss], sampling, n_expected, earlier)
        batch_sizes = rows.schedule.batch_sizes
        mean_batch = float(batch_sizes.mean()) if self.weighting == "samples" else None
        shape = (table.features.shape[1] + self.fit_intercept, n_outputs)
        steps = step_sizes(self.alpha, learning_rate, n_expected)
        divisor = n_expected * (mean_batch or 1.0)
        settings = (shape, LOSSES[loss], steps, divisor, mean_batch, self.average)
        shared = {
            "rows": rows,
            "sampling": sampling,
            "found": {"learning_rate_": learning_rate},
            "advice": divergence_advice(table, learning_rate, is_private(self)),
        }
        if not issparse(table.features):
            method = ppsgd(len(roster.ids), *settings)
            return Run(
                method=method,
                release_of=lambda mechanism: JointSum(mechanism, method.messages),
                positions=roster.earlier,
                **shared,
            )
        step, lazy = steps.population / divisor, not self._shows_every_round()
        return Run(
            method=sparse_ppsgd(rows.pairs, *settings),
            release_of=lambda mechanism: LateNoise(SparseClippedSum(mechanism), step, lazy),
            positions=_pair_positions(rows.pairs, earlier, roster),
            layout=rows.pairs,
            **shared,
        )

    def _shows_every_round(self):
        """Whether the whole population model is needed after each round."""
        watched = bool(getattr(self, "_skl_callbacks", []))
        return self.average or self.warm_start or watched

    def _client_rows(self, table, clients, roster, earlier, order):
        """Rows in client order; with `shuffle` each client's in an order drawn from `order`."""
        codes, where = clients.codes, roster.now
        by_client, offsets = rows_by_client(codes, len(where))
        if self.shuffle:
            rng = np.random.default_rng(order)
            by_client = by_client[np.lexsort((rng.random(len(by_client)), codes[by_client]))]
        sizes = np.diff(offsets)
        batch_sizes = sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)
        design = with_intercept(table.features[by_client], self.fit_intercept)
        rows = ClientRows(design, table.y[by_client], offsets, where, InTurn(batch_sizes))
        if not issparse(design):
            return rows
        owners = np.repeat(where, sizes)
        pairs = pairs_of(design, owners)
        if earlier is not None:
            pairs = earlier.layout.among(roster.earlier).union(pairs)
        return SparseRows(rows, pairs, pairs.find(keys_of(design, owners)))

    def _learning_rate(self, rows, loss, sampling, n_expected, earlier):
        """Number that `learning_rate` stands for."""
        if self.learning_rate == "theory":
            return float(theory_learning_rate(self, rows, n_expected))
        if self.learning_rate != "auto":
            return float(self.learning_rate)
        if earlier is not None:
            return earlier.found["learning_rate_"]
        dense = getattr(rows, "rows", rows)
        return float(auto_learning_rate(dense, loss, self.weighting, self.alpha, sampling))

    def _check_continues(self, earlier):
        """Raise ValueError if the earlier rounds had a model of another shape."""
        server = earlier.state.server
        had_intercept = len(server["coef"]) > self.n_features_in_
        if self.fit_intercept != had_intercept:
            name, value = "fit_intercept", self.fit_intercept
        elif self.average != ("moment" in server):
            name, value = "average", self.average
        else:
            return
        raise ValueError(
            f"{name}={value} was {not value} in the rounds before, which these rounds continue; "
            "fit anew, with warm_start=False."
        )

    def _rounds_of_a_pass(self, clients):
        """Rounds in which every row is expected to be used once."""
        most = np.bincount(clients.codes).max()
        n_batches = -(-most // self.batch_size) if self.batch_size else 1
        return math.ceil(n_batches / self.client_fraction)

    def _models(self, state, ids, layout):
        """Population model (p, c) and local ones (m, p, c), or those of pairs."""
        population, local = state.server["coef"], state.clients["local"]
        if "moment" in state.server:
            population = averaged(population, state.server["moment"], state.round)
            local = averaged(local, state.clients["local_moment"], state.round)
        if layout is not None:
            local = LocalModels(layout, local, len(ids))
        return {"_population": population, "_local": local}

    def _inputs(self, X):
        """Attributes of the input's columns."""
        probe = clone(self)
        validate_data(probe, X, skip_check_array=True)
        names = ("n_features_in_", "feature_names_in_")
        return {name: getattr(probe, name) for name in names if hasattr(probe, name)}

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _features(self, features, earlier):
        """Checked features in the form that the rounds have."""
        if issparse(features):
            features = csr_array(features)
        if earlier is None or issparse(features) == (earlier.layout is not None):
            return features
        return features.toarray() if issparse(features) else csr_array(features)

    def _predictors(self, X, groups):
        """Predictors (n, c) of rows under the models of their clients."""
        codes = self._encode_predict(X, groups)
        X = validate_data(self, X, reset=False, dtype=np.float64, accept_sparse="csr")
        design = with_intercept(X, len(self._population) > X.shape[1])
        local = self._local if hasattr(self, "clients_") else None
        with np.errstate(over="ignore", invalid="ignore"):  # a local model may diverge under noise
            return np.nan_to_num(additive_predictors(design, codes, self._population, local))

    @property
    def population_coef_(self):
        """Coefficients w ([c,] d) of the population model."""
        return self._coefficients(self._population)

    @property
    def population_intercept_(self):
        """Intercepts ([c]) of the population model."""
        return self._intercepts(self._population)

    @property
    def local_coef_(self):
        """Coefficients theta_i (n_clients, [c,] d) of the clients' own models.

        If `X` was sparse, they are a sparse array (n_clients * c, d): c rows for every client.
        """
        self._require_fitted("clients_")
        if hasattr(self._local, "matrix"):
            return self._local.matrix()[:, : self.n_features_in_]
        return self._coefficients(self._local)

    @property
    def local_intercept_(self):
        """Intercepts (n_clients[, c]) of the clients' own models."""
        self._require_fitted("clients_")
        return self._intercepts(self._dense_local())

    def _dense_local(self):
        return self._local.dense() if hasattr(self._local, "dense") else self._local

    @property
    def coef_(self):
        """Coefficients w + theta_i (n_clients, [c,] d) of every client."""
        self._require_fitted("clients_")
        return self.population_coef_ + self._coefficients(self._dense_local())

    @property
    def intercept_(self):
        """Intercepts (n_clients[, c]) of every client."""
        return self.population_intercept_ + self.local_intercept_

    def _coefficients(self, values):
        """Coefficients ([m,] [c,] d) without the intercept, of values ([m,] p, c)."""
        check_is_fitted(self)
        found = np.moveaxis(values[..., : self.n_features_in_, :], -1, -2)
        return found[..., 0, :] if self._single else found

    def _intercepts(self, values):
        """Intercepts ([m,] [c]) of values ([m,] p, c); 0 without one."""
        check_is_fitted(self)
        if values.shape[-2] > self.n_features_in_:
            found = values[..., -1, :]
        else:
            found = np.zeros_like(values[..., 0, :])
        found = found[..., 0] if self._single else found
        return float(found) if found.ndim == 0 else found


def with_intercept(features, fit_intercept):
    """Columns of the design: the features, and ones last."""
    if not fit_intercept:
        return features
    if issparse(features):
        return hstack([features, np.ones((features.shape[0], 1))], format="csr")
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def _pair_positions(pairs, earlier, roster):
    """Positions of the pairs of earlier rounds among these."""
    if earlier is None:
        return np.zeros(0, dtype=np.intp)
    return pairs.find(earlier.layout.among(roster.earlier).keys)


def additive_predictors(design, codes, population, local):
    """Predictors (n, c) of rows (n, p) of clients; of the population where codes are -1.

    `local` are models (m, p, c) or :class:`LocalModels`, or None if no client is known.
    """
    found = design @ population
    if local is None:
        return found
    if hasattr(local, "predictors"):
        known = np.flatnonzero(codes >= 0)
        found[known] += local.predictors(csr_array(design[known]), codes[known])
        return found
    nobody = np.zeros(population.shape[::-1])
    coef = local.swapaxes(-1, -2)
    return found + client_predictors(design, codes, coef, None, nobody, nobody[:, 0])
