"""Base of the neural estimators: from a recipe and rows to rounds, and on to predictions."""

from functools import partial
from itertools import filterfalse
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import Array, rows_by_client
from pfl_sklearn._columns import name_bad_columns, validate_data
from pfl_sklearn._parameters import with_parameters
from pfl_sklearn._rounds.estimator import BaseRounds
from pfl_sklearn._rounds.out_of_core import StoredRows, shape_and_type_of, stored_rows
from pfl_sklearn._rounds.privacy import JointSum, is_private
from pfl_sklearn._rounds.rows import ClientRows
from pfl_sklearn._rounds.run import ModelRounds
from pfl_sklearn._rounds.stopping import split_rows
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.base import client_values
from pfl_sklearn.neural_network._engine._averaging import (
    Engines,
    MethodSetup,
    init_as_declared,
    personal_or_global,
    weighted,
    with_offsets,
)
from pfl_sklearn.neural_network._training import TrainingParameters

_NOT_COPIED = (
    "hooks, class attributes and global variables of the net's code keep nothing of a client: "
    "every client trains a copy of the net, but all copies share these"
)

_PUBLIC_WEIGHTS = (
    "clients are weighted by their numbers of rows, over a mean that is a public constant"
)


def backend():
    """Modules that need torch and skorch.

    Raises ImportError if one of them is missing.
    """
    try:
        # Not at the top: the package is imported without torch as well.
        from pfl_sklearn.neural_network._engine import _checks, _engine, _probe, _recipe
    except ModuleNotFoundError as error:
        # Something else that is missing, in torch itself say, is another problem with another cure.
        if error.name not in ("torch", "skorch"):
            raise
        raise ImportError(
            f"neural estimators need PyTorch and skorch, and {error.name} is not installed: "
            "pip install torch skorch cloudpickle rich"
        ) from error
    return SimpleNamespace(engine=_engine, recipe=_recipe, probe=_probe, checks=_checks)


@with_parameters
class BaseNeural(TrainingParameters, BaseRounds):
    """Rounds of networks: a skorch net is the recipe, and rounds change vectors of parameters.

    A subclass reads its targets (``_read``), and provides ``_method(setup)``: a
    :class:`~pfl_sklearn._rounds.loop.Method` whose server has the population's parameters in
    "global". ``_nets(server, clients)`` gives the parameters of some clients' networks between
    rounds, clients first, or those of the population if they use its network.

    Attributes
    ----------
    parameters_ : ndarray of shape (n_clients, p)
        Parameters of the clients' networks, in the order of the module's; buffers that training
        moves come last.
    population_parameters_ : ndarray of shape (p,)
        Those of the population's network.
    net_ : skorch net
        Fitted network: the population's, or the client's if the estimator has only one client, as
        those of ``for_client`` have. Its classes are positions in ``classes_``, or numbers of
        outputs if there are more of these. Under `label_prior` the client's label frequencies are
        part of the bias of its last layer; a network without such a bias raises an AttributeError.

    Notes
    -----
    The :ref:`user guide <neural_networks>` says which types and shapes of rows a module gets, how
    outputs belong to classes, and what a fit keeps in memory.

    - Values are not scaled on the way to a module. Only the default network, in a fit without
      noise, brings features to standard units by itself.
    - Clients train in blocks: chains of linear layers with rectifiers, tanh or softmax between them
      for a whole block at once if batches have at most 128 rows, other modules client by client.
    - Buffers that training moves, such as the running statistics of ``BatchNorm``, are averaged
      like parameters; with noise they are refused. So are, in any fit, modules that keep what
      predictions depend on in attributes or in integers.
    - Every client counts equally unless ``weighting="samples"``. Without `clip_norm` the server
      divides by the number of clients that took part, or by that of their rows; with it by the
      expected number of clients.
    - In a fit with noise no exception that the network raises on the rows of a client ends the fit:
      the client counts as 0 and keeps the network that it had. A ``RuntimeWarning`` at the end
      names the classes of such exceptions. The noise does not cover it, so do not publish it.
    - With ``n_rounds=None`` the loss is that of the recipe's criterion, on held-out rows of each
      client, for the network that it would predict with. It is computed whenever the rounds have
      grown by a quarter, and counts as flat after 30 rounds at the earliest, in which each client
      took part in about ten. What clients do after the rounds they do on all rows. If the rounds
      only do harm, ``n_rounds_`` is 0 and networks are as they started.
    """

    _population_attributes: ClassVar[tuple[str, ...]] = ("_population", "_server")
    _state_attributes = ("_engines", "_single", "classes_", "n_rounds_", "noise_multiplier_")
    _released_names: ClassVar[tuple[str, ...]] = (
        "population_parameters_",
        "the population model of every round",
    )
    _optional_names: ClassVar[tuple[str, ...]] = (
        "_personal",
        "_heads",
        "head_variances_",
        "_offsets",
        "_label_counts",
        "_label_sums",
        "label_prior_",
    )
    _client_results: ClassVar[dict[str, str]] = {}  # fitted attributes, by the clients' arrays
    _own_steps = False  # whether the method needs plain gradient steps
    # What clients keep between rounds: "nothing", a "net" each, "layers" of one, or "other" arrays,
    # of which the class makes networks by `_nets`.
    _clients_keep: ClassVar[str] = "nothing"

    # Properties, so that a method names what it adds once, in `_client_results`.
    @property
    def _client_attributes(self):  # type: ignore[override]
        return "_personal", "_offsets", "n_samples_per_client_", *self._client_results

    @property
    def _kept_names(self):  # type: ignore[override]
        public = (name for name in self._client_results if not name.startswith("_"))
        return "parameters_", "history_", "clients_", "n_samples_per_client_", *public

    @property
    def _needs_probabilities(self) -> bool:
        """Whether the method, or one of its parameters, needs the probabilities of classes."""
        return False

    def _default_component(self, name, value):
        if name != "estimator" or value is not None:
            return None
        backend()
        from pfl_sklearn.neural_network._engine._mlp import default_recipe

        return default_recipe(self._is_classifier)

    def _recipe(self):
        return self._default_component("estimator", self.estimator) or self.estimator

    def _recipes(self):
        """Recipes of the clients' networks and, if it has one of its own, of the population's."""
        return {"estimator": self._recipe()}

    def _check_parameters(self):
        self._check_training()
        for name, recipe in self._recipes().items():
            self._check_recipe(recipe, name)

    def _check_recipe(self, recipe, name):
        """Raise ValueError if the recipe that parameter `name` holds cannot be followed."""
        refusals = backend().checks
        refusals.check_recipe(recipe, self._is_classifier, self._own_steps, name)
        if self._needs_probabilities:
            refusals.check_probabilities(recipe)
        if is_private(self):
            refusals.check_no_statistics(recipe)
        self._check_for_method(recipe)

    def _check_for_method(self, recipe):
        """Raise ValueError if the method cannot follow a recipe that others can."""

    @property
    def _assumptions(self):
        # The default network is ours, and nothing of it is shared.
        nets = self.estimator, getattr(self, "global_estimator", None)
        assumptions = () if nets == (None, None) else (_NOT_COPIED,)
        counts_rows = self._communicates and self.weighting == "samples"
        return (*assumptions, _PUBLIC_WEIGHTS) if counts_rows else assumptions

    # From rows to a run --------------------------------------------------------------------------

    def _features(self, X, seen):
        """Checked rows (n_rows, ...) of numbers, as `seen` in the fit before, if there was one."""
        backend().checks.check_is_table(X)
        stored, options = stored_rows(X), {"allow_nd": True, "dtype": "numeric"}
        with name_bad_columns(X, is_private(self)):
            if stored is None:
                features: Any = check_array(X, estimator=self, input_name="X", **options)
            else:
                features = stored.checked(self, **options)
            # check_array lets dates pass for numbers.
            if features.dtype.kind not in "fiub":
                raise ValueError(
                    f"X must hold floating-point numbers or integers; got {features.dtype}."
                )
        if seen:
            shape = self._engines.population.row_shape
            # Of two plain tables validate_data names the columns, as scikit-learn does.
            if features.shape[1:] != shape and features.ndim + len(shape) > 3:
                raise ValueError(f"X has rows of shape {features.shape[1:]}, but fit saw {shape}.")
            validate_data(self, X, reset=False, skip_check_array=True)
        return features

    def _make_rounds(self, table, plan):
        if plan.earlier is not None:
            self._check_goes_on(plan.earlier)
        ids, codes = plan.clients.now_ids, plan.clients.codes
        by_client, first_rows = rows_by_client(codes, len(ids))
        # Rows that are sorted already need no list of their places, nor a copy.
        order = None if (codes[1:] >= codes[:-1]).all() else by_client
        codes, table = codes[by_client], table._replace(y=table.y[by_client])
        if self._takes_units and not isinstance(table.features, StoredRows):
            # Units are sums of rows, whose last digits depend on the order of rows and of memory.
            rows = table.features if order is None else table.features[by_client]
            order, table = None, table._replace(features=np.ascontiguousarray(rows))
        # A network that stays is that of the fit, in whose units it works.
        frozen = plan.is_frozen
        engines = plan.earlier.layout if frozen else self._make_engines(table, plan)
        setup = self._setup(engines, plan)
        attributes, offsets = self._offsets_of_outputs(engines.client, table, codes, plan)
        method = self._method_of(setup, offsets)
        private = is_private(self)
        backend().checks.check_single_rows(engines, ids, codes, setup.batch_size, private)
        rounds = ModelRounds(
            method=method,
            rows=self._client_rows(table, first_rows, setup, plan)._replace(order=order),
            release=JointSum(plan.mechanism, method.messages, self._scales()),
            positions=plan.clients.earlier_at,
            attributes=attributes,
            layout=engines,
            advice=self._rate_advice(engines.trained[0].net, setup.rates.max()),
        )
        if frozen or not private:  # a client alone has nobody to protect its loss from
            rounds = rounds._replace(final_loss=self._final_loss(rounds))
        return self._until_flat(rounds, plan, table, codes) if plan.until_flat else rounds

    def _method_of(self, setup, offsets):
        """The method, with the offsets, client types and weights that every method gets."""
        method = with_offsets(self._method(setup), offsets)
        init = partial(init_as_declared, method.init, self._clients_keep, type(self).__name__)
        # Clients train in the network's own precision, and never read more of the population's.
        kinds = {"global": setup.engines.population.array_dtype}
        method = method._replace(init=init, kinds=kinds)
        return method if setup.weights is None else weighted(method, setup.weights)

    def _setup(self, engines, plan):
        """What the method is built from."""
        clients, recipes = plan.clients, backend().recipe
        n_rows, n_earlier = np.zeros((2, len(clients.ids)), dtype=np.intp)
        n_rows[clients.now_at] = np.bincount(clients.codes, minlength=len(clients.now_at))
        if plan.earlier is not None:
            n_earlier[clients.earlier_at] = plan.earlier.n_rows
        return MethodSetup(
            engines=engines,
            n_clients=len(clients.ids),
            n_expected=plan.n_expected,
            # Under a bound by the expected number, which is public: how many took part is a secret.
            by_count=self.clip_norm is None,
            base_rate=recipes.learning_rate(self._recipe()),
            rates=recipes.learning_rates(self._recipe(), plan.n_rounds),
            n_rows=n_rows,
            batch_size=self._batch_size,
            local_work=self._local_work,
            # Clients without rows now keep their share of what is averaged over all.
            weights=self._weights(np.where(n_rows > 0, n_rows, n_earlier)),
            server_step=self._server_step(),
            noisy_steps=None if self._noisy_steps is None else plan.mechanism,
            before=None if plan.earlier is None else plan.earlier.state,
            seed=plan.setup_seed,
            personal=self._clients_keep,
            frozen=plan.is_frozen,
        )

    def _client_rows(self, table, first_rows, setup, plan):
        """Rows of clients, as training takes them, with the schedule of batches."""
        recipes, engines = backend().recipe, setup.engines.trained
        net, private, columns = engines[0].net, is_private(self), engines[0].columns
        y = table.y if columns is None else columns[table.y]
        return ClientRows(
            recipes.as_input(net, table.features, private),
            recipes.as_targets(net, y, private, engines[0].output_shape),
            first_rows,
            plan.clients.now_at,
            self._schedule(setup),
            kind=recipes.input_type(net, table.features.dtype),
            at_once=min(engine.clients_at_once for engine in engines),
            # Networks trained one by one may draw, and noise in steps is each client's own: both
            # take seeds.
            seeded=not all(engine.stacked for engine in engines) or setup.noisy_steps is not None,
        )

    def _final_loss(self, rounds):
        """Loss after the rounds, as ``check_final_loss`` takes it."""
        from pfl_sklearn.neural_network._engine._held_out import final_loss

        by_rows = self.weighting == "samples"
        return final_loss(rounds.layout.client, self._nets, rounds.rows, by_rows)

    def _until_flat(self, rounds, plan, table, codes):
        """The rounds with some rows held out, whose loss says when they are over.

        Held-out rows are not trained on in the rounds, nor are their labels counted. The last phase
        has all rows.
        """
        from pfl_sklearn.neural_network._engine._held_out import flat_rule

        rng = np.random.default_rng(None if plan.setup_seed is None else (*plan.setup_seed, 0))
        n_clients, fraction = rounds.rows.n_clients, self.validation_fraction
        train_positions, held_out_positions = split_rows(codes, n_clients, fraction, rng)
        train, held = rounds.rows.only(train_positions), rounds.rows.only(held_out_positions)
        engines, codes = rounds.layout, codes[train_positions]
        check = backend().checks.check_single_rows
        check(engines, plan.clients.now_ids, codes, self._batch_size, private=False)
        # Frequencies that counted the held-out labels would make the loss on these look too low.
        seen = table._replace(features=None, y=table.y[train_positions])
        _, offsets = self._offsets_of_outputs(engines.client, seen, codes, plan)
        # What clients do after the rounds may count all of their labels.
        all_offsets = rounds.attributes.get("_offsets")
        rule = flat_rule(
            engines.client,
            self._nets,
            train,
            held,
            by_rows=self.weighting == "samples",
            at_least=self._fewest_rounds(train),
            tol=self.tol,
            advice=rounds.advice,
            all_rows=rounds.rows,
            all_constants={} if all_offsets is None else {"offset": all_offsets},
        )
        return rounds._replace(method=with_offsets(rounds.method, offsets), rows=train, rule=rule)

    def _warn_of_end(self, n_rounds, flat):
        if n_rounds:
            super()._warn_of_end(n_rounds, flat)
            return
        warn_caller(
            f"no round of {type(self).__name__} lowered the loss of held-out rows, so its networks "
            "are as they started, untrained. Lower the learning rate, give n_rounds, or let "
            "clients share a network (FedAvg).",
            ConvergenceWarning,
        )

    def _check_goes_on(self, earlier):
        """Raise ValueError if networks of the earlier rounds cannot be followed by these."""
        recipes = backend().recipe
        changed = earlier.layout.client.protected != is_private(self)
        if changed and recipes.has_units(self._recipe()):
            raise ValueError(
                "the default net works in other units with noise than without, so rounds of one "
                "kind cannot follow the other; fit anew, or give an estimator of another module."
            )
        before, by_clients = earlier.layout.client, self._noisy_steps is not None
        if before.protected and is_private(self) and before.noisy_steps != by_clients:
            raise ValueError(
                "the rounds before had their noise "
                f"{'in the steps' if before.noisy_steps else 'on the sum'}, and these would have "
                "it elsewhere, so that no one report holds for both; fit anew."
            )

    def _make_engines(self, table, plan):
        """Engines of networks whose weights are drawn now, or which earlier rounds had."""
        recipes, looks = self._recipes().values(), self._takes_units
        seeds = np.random.default_rng(plan.setup_seed).integers(1 << 63, size=len(recipes)).tolist()
        before = (None, None) if plan.earlier is None else plan.earlier.layout.pair
        made = [
            self._make_engine(recipe, table, old, seed, looks)
            for recipe, old, seed in zip(recipes, before, seeds, strict=False)
        ]
        backend().checks.check_same_outputs(made[0], made[-1])
        return Engines(made[0], made[-1])

    @property
    def _takes_units(self):
        """Whether networks work in standard units of the rows."""
        # Networks that follow each other's predictions work in the same units, or in none.
        return not is_private(self) and all(
            map(backend().recipe.has_units, self._recipes().values())
        )

    def _make_engine(self, recipe, table, earlier, seed, looks):
        """Engine of a recipe; one that `looks` takes units of its default net from the table."""
        recipes = backend().recipe
        recipe, X = recipes.fill_recipe(recipe, table, looks), table.features
        engine = self._engine_for(recipe, X.shape[1:], X.dtype, seed, earlier)
        engine.columns = recipes.columns_for(engine.net, engine.output_shape, table)
        engine.try_out()
        return engine

    def _engine_for(self, recipe, row_shape, kind, seed, earlier=None):
        """Engine of a recipe for rows of a shape and a type, whatever they are."""
        net, rows = backend().probe.started(recipe, row_shape, kind, seed, earlier)
        noise = {"protected": is_private(self), "noisy_steps": self._noisy_steps is not None}
        clips = backend().recipe.gradient_clips(recipe)
        return backend().engine.Engine(net, rows, self._batch_size, **noise, clips=clips)

    def _check_ahead(self, X, last):
        backend().checks.check_is_table(X)
        # Where nothing is charged, the fit itself is early enough.
        if not (is_private(self) or self.ledger is not None):
            return
        for recipe in self._recipes().values():
            backend().recipe.learning_rates(recipe, last)
        row_shape, kind = shape_and_type_of(X)
        if row_shape is None:
            return
        # The default network's sizes are not known yet, and it takes any rows.
        for recipe in filterfalse(backend().recipe.has_units, self._recipes().values()):
            self._engine_for(recipe, row_shape, kind, seed=0).try_out()

    def _offsets_of_outputs(self, engine, table, codes, plan):
        """What :meth:`_label_offsets` gives, with offsets of all outputs of an engine's network."""
        attributes, offsets = self._label_offsets(table, codes, plan)
        offsets = engine.widened(offsets)
        return attributes | ({} if offsets is None else {"_offsets": offsets}), offsets

    def _label_offsets(self, table, codes, plan):
        """Fitted attributes of label frequencies, and the clients' offsets; ({}, None) if none."""
        return {}, None

    def _scales(self):
        """Units of the parts of a message, as :class:`JointSum` takes them."""
        return None

    # From rounds to predictions -------------------------------------------------------------------

    def _models(self, state, ids, layout):
        # What a last phase made of the clients' networks takes the place of what the rounds left.
        clients = {**state.clients, **state.phase_arrays}
        nets = self._nets(state.server, clients)
        fitted = {"_population": state.server["global"], "_engines": layout}
        # Sums of messages made them, so they are as public as the population's network.
        fitted["_server"] = state.server
        if nets.ndim > 1:
            fitted["_personal"] = nets
        results = self._client_results.items()
        return fitted | {name: clients[array] for name, array in results if array in clients}

    def _frozen_layout(self):
        return self._engines

    _nets = staticmethod(personal_or_global)

    def _outputs(self, X, groups):
        """What the clients' networks give for their rows (n, ...)."""
        codes = self._encode_predict(X, groups)
        features, offsets = self._features(X, seen=True), getattr(self, "_offsets", None)
        if offsets is not None:
            offsets = client_values(offsets, np.zeros(offsets.shape[1]), codes)
        if not self._has_own:
            return self._engines.population.outputs(self._population, features, offsets)
        gathered = None
        for code in np.unique(codes):
            rows = np.flatnonzero(codes == code)
            engine, vector = self._net_of(code)
            client_offsets = None if offsets is None else offsets[rows]
            outputs = engine.outputs(vector, features[rows], client_offsets)
            if gathered is None:
                gathered = np.empty((len(features), *outputs.shape[1:]), outputs.dtype)
            gathered[rows] = outputs
        return gathered

    @property
    def _has_own(self):
        """Whether clients have networks, or last layers, of their own."""
        return hasattr(self, "_personal") or hasattr(self, "_heads")

    def _net_of(self, code):
        """Engine and parameters of the client at a position; of the population for -1."""
        # Clients that fit did not see have the code -1.
        if code < 0 or not self._has_own:
            return self._engines.population, self._population
        engine = self._engines.client
        if hasattr(self, "_personal"):
            return engine, self._personal[code]
        return engine, engine.last_layer.with_deviation(self._population, self._heads[code])

    @property
    def population_parameters_(self) -> Array:
        """Parameters (p,) of the population's network, in the order of the module's."""
        check_is_fitted(self)
        return self._population

    @property
    def parameters_(self) -> Array:
        """Parameters (n_clients, p) of the clients' networks, in the order of the module's."""
        self._require_fitted("clients_")
        if hasattr(self, "_personal"):
            return self._personal
        if hasattr(self, "_heads"):
            return np.stack([self._net_of(code)[1] for code in range(len(self.clients_))])
        # A view: a copy of the network for each client would be the memory that sharing one saves.
        return np.broadcast_to(self._population, (len(self.clients_), len(self._population)))

    @property
    def net_(self) -> Any:
        """Fitted skorch net: of the one client if there is only one, else of the population."""
        check_is_fitted(self)
        recipes, offsets = backend().recipe, getattr(self, "_offsets", None)
        alone = len(getattr(self, "clients_", ())) == 1
        engine, vector = self._net_of(0 if alone else -1)
        if alone and offsets is not None:
            vector = engine.with_offsets(vector, offsets[0])
        return recipes.as_fitted(engine, vector, getattr(self, "classes_", None))
