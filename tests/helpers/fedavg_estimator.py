"""A small estimator on rounds whose state, messages and last phase are not PPSGD's."""

import math
from numbers import Real

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.callback import with_callbacks
from sklearn.utils.validation import validate_data

from pfl_sklearn._clients import rows_by_client
from pfl_sklearn._compat import Interval, fit_context
from pfl_sklearn._rounds.estimator import BaseRounds
from pfl_sklearn._rounds.privacy import JointSum
from pfl_sklearn._rounds.rows import ClientRows, Reshuffled
from pfl_sklearn._rounds.run import CheckedTable, ModelRounds
from pfl_sklearn.base import ClientRegressorMixin
from tests.helpers.rounds_methods import fedavg


class Recipe(BaseEstimator):
    """A component whose text hides its parameter, as that of a neural net does."""

    def __init__(self, lr=0.1):
        self.lr = lr

    def __repr__(self):
        return "Recipe()"


class FedAvgRegressor(ClientRegressorMixin, BaseRounds):
    """Linear FedAvg without intercept, fine-tuned by every client at the end."""

    _client_attributes = ("tuned_",)
    _population_attributes = ("global_",)
    _released_names = ("global_",)
    _kept_names = ("tuned_",)
    _parameter_constraints = {
        **BaseRounds._parameter_constraints,
        "recipe": [BaseEstimator],
        "local_steps": [Interval(Real, 1, None, closed="left")],
    }

    def __init__(
        self,
        recipe=None,
        *,
        local_steps=2,
        n_rounds=5,
        client_fraction=1.0,
        sampling="poisson",
        drop_fraction=0.0,
        epsilon=math.inf,
        noise_multiplier=None,
        delta=1e-5,
        clip_norm=None,
        clip_quantile=None,
        ledger=None,
        warm_start=False,
        checkpoint=None,
        checkpoint_every=2,
        unseen="warn",
        n_jobs=None,
        random_state=None,
    ):
        self.recipe = recipe
        self.local_steps = local_steps
        self.n_rounds = n_rounds
        self.client_fraction = client_fraction
        self.sampling = sampling
        self.drop_fraction = drop_fraction
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

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X, y, *, groups=None):
        return self._partial_fit(X, y, groups)

    def _read(self, X, y, earlier):
        X = np.asarray(X, dtype=np.float32)
        return CheckedTable(X, np.asarray(y, dtype=np.float64), {"n_features_in_": X.shape[1]})

    def _make_rounds(self, table, plan):
        clients = plan.clients
        by_client, offsets = rows_by_client(clients.codes, len(clients.now_at))
        schedule = Reshuffled(4, self.local_steps)
        X, y = table.features[by_client], table.y[by_client]
        rows = ClientRows(X, y, offsets, clients.now_at, schedule)
        n_clients, n_expected = len(clients.ids), plan.n_expected
        method = fedavg(n_clients, X.shape[1], self.recipe.lr, n_expected, fine_tuning=2)
        return ModelRounds(
            method=method,
            rows=rows,
            release=JointSum(plan.mechanism, method.messages),
            positions=clients.earlier_at,
            attributes={},
            layout=None,
            advice="lower the learning rate of the recipe.",
        )

    def _rounds_of_a_pass(self, clients):
        return 2

    def _models(self, state, ids, layout):
        before = np.repeat(state.server["global"][None], len(ids), axis=0)
        return {
            "global_": state.server["global"],
            "tuned_": state.phase_arrays.get("tuned", before),
        }

    def predict(self, X, *, groups=None):
        codes = self._encode_predict(X, groups)
        X = validate_data(self, X, reset=False)
        models = np.concatenate([getattr(self, "tuned_", self.global_[None]), self.global_[None]])
        return np.einsum("nd,nd->n", X, models[codes])
