"""From a table and parameters to a run of PPSGD: rows, step sizes, rounds."""

import math
from numbers import Integral
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array, hstack, issparse
from sklearn.utils import check_random_state

from pfl_sklearn._clients import EncodedClients, client_batches, match_clients, rows_by_client
from pfl_sklearn._rounds.loop import (
    ClientRows,
    DivergenceError,
    Method,
    Plan,
    Sampling,
    State,
    start,
)
from pfl_sklearn.linear_model._ppsgd._sparse import (
    LocalModels,
    Pairs,
    SparseRows,
    keys_of,
    pairs_of,
    sparse_ppsgd,
)
from pfl_sklearn.linear_model._ppsgd._steps import steepest_batch
from pfl_sklearn.linear_model._ppsgd._updates import LOSSES, averaged, ppsgd, step_sizes
from pfl_sklearn.theory import ppsgd_learning_rate, smoothness_alpha


def with_intercept(features, fit_intercept):
    """Columns of the design: the features, and ones last."""
    if not fit_intercept:
        return features
    if issparse(features):
        return hstack([features, np.ones((features.shape[0], 1))], format="csr")
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def seeds(random_state):
    """Entropy of the order of rows and of the rounds; None draws from the operating system."""
    if random_state is None:
        return None, None
    if isinstance(random_state, Integral):
        words = (int(random_state),)
    else:
        words = tuple(check_random_state(random_state).randint(0, 2**31 - 1, size=4).tolist())
    return (*words, 0), (*words, 1)


def client_rows(features, y, codes, where, batch_size, fit_intercept, rng, earlier=None):
    """Rows in client order, those of a client shuffled by a generator; None keeps their order.

    The clients are at positions `where` of the state. `earlier` are pairs that it has already, if
    features are sparse.
    """
    n_clients = len(where)
    order, offsets = rows_by_client(codes, n_clients)
    if rng is not None:
        order = order[np.lexsort((rng.random(len(order)), codes[order]))]
    sizes = np.diff(offsets)
    batch_sizes = sizes if batch_size is None else np.minimum(sizes, batch_size)
    design = with_intercept(features[order], fit_intercept)
    rows = ClientRows(design, y[order], offsets, batch_sizes, where)
    if not issparse(features):
        return rows
    owners = np.repeat(where, sizes)
    found = pairs_of(design, owners)
    pairs = found if earlier is None else earlier.union(found)
    return SparseRows(rows, pairs, pairs.find(keys_of(design, owners)))


def sampling_of(kind, client_fraction, n_clients):
    """How clients are sampled.

    Raises
    ------
    ValueError
        If not a single client would be.
    """
    if kind == "poisson":
        return Sampling(client_fraction)
    n_fixed = math.floor(client_fraction * n_clients * (1 + 1e-12))
    if not n_fixed:
        raise ValueError(
            f"client_fraction={client_fraction!r} of {n_clients} clients is less than one client; "
            "sampling='fixed' needs at least one. Raise it, or use sampling='poisson'."
        )
    return Sampling(n_fixed / n_clients, n_fixed)


def auto_learning_rate(rows, loss, weighting, alpha, sampling):
    """Half the inverse curvature of the steepest batch: it looks at the data.

    Less if the population model steps, and so few clients are expected in a round that there are
    often many more.
    """
    relative = np.ones(rows.n_clients)
    if weighting == "samples":
        relative = rows.batch_sizes / rows.batch_sizes.mean()
    steepest = steepest_batch(rows.X, rows.offsets, rows.batch_sizes, relative)
    if sampling.n_fixed is None:
        n_expected = sampling.rate * rows.n_clients
        steepest *= 1 + min(alpha * n_expected, 1.0) * (1 - sampling.rate) / n_expected
    return 0.5 / (loss.curvature * steepest) if steepest > 0 else 1.0


class Run(NamedTuple):
    """What rounds need besides a state and a mechanism."""

    method: Method
    rows: ClientRows
    sampling: Sampling
    entropy: tuple[int, ...] | None
    n_jobs: int | None
    learning_rate: float

    def plan(self, n_rounds):
        """Rounds up to a number of them."""
        return Plan(n_rounds, self.sampling, self.entropy, self.n_jobs)


class Targets(NamedTuple):
    """Checked rows: features, targets or labels `y`, and the attributes that follow from them."""

    features: np.ndarray
    y: np.ndarray
    n_outputs: int
    loss: str
    attributes: dict


class Progress(NamedTuple):
    """Where an estimator's rounds are, so that they can go on; `pairs` if features are sparse."""

    state: State
    clients: np.ndarray
    n_rows: np.ndarray
    spent: tuple | None
    learning_rate: float
    stopped: bool
    pairs: Pairs | None
    noise_multiplier: float


class Roster(NamedTuple):
    """Ids of all clients, positions of the earlier ones and of those with rows now."""

    ids: np.ndarray
    earlier: np.ndarray
    now: np.ndarray


def roster_of(earlier, ids):
    """Clients of earlier rounds and of these."""
    if earlier is None:
        return Roster(ids, np.zeros(0, dtype=np.intp), np.arange(len(ids)))
    match_clients(ids, len(ids), earlier.clients)
    both = np.union1d(earlier.clients, ids)
    return Roster(both, np.searchsorted(both, earlier.clients), np.searchsorted(both, ids))


class Task(NamedTuple):
    """Checked data, earlier rounds (or None), and how rounds are run on them."""

    targets: Targets
    clients: EncodedClients
    earlier: Progress | None
    roster: Roster
    run: Run

    @property
    def pairs(self):
        """Pairs of a client and a feature if features are sparse, else None."""
        return getattr(self.run.rows, "pairs", None)


def make_task(model, targets, clients, earlier, seed):
    """Task of a model's parameters; `seed` None draws from the operating system."""
    roster = roster_of(earlier, clients.ids)
    run = make_run(model, targets, clients, roster, earlier, seed)
    return Task(targets, clients, earlier, roster, run)


def fingerprints(task):
    """Arrays that a checkpoint has to agree with."""
    targets, (ids, codes) = task.targets, task.clients
    return targets.features, targets.y, ids, codes, np.array(task.run.entropy or ())


def check_continues(earlier, fit_intercept, average, n_features):
    """Raise ValueError if rounds cannot go on with these parameters."""
    server = earlier.state.server
    if fit_intercept != (len(server["coef"]) > n_features):
        name, value = "fit_intercept", fit_intercept
    elif average != ("moment" in server):
        name, value = "average", average
    else:
        return
    raise ValueError(
        f"{name}={value} was {not value} in the rounds before, which these rounds go on from; fit "
        "anew, with warm_start=False."
    )


def first_state(task, mechanism, clip_quantile=None):
    """State that rounds start from; what earlier rounds left stays as it is.

    A bound that follows a quantile goes on from where it was.
    """
    earlier, roster = task.earlier, task.roster
    if earlier is None:
        return start(task.run.method, len(roster.ids), mechanism)
    state = earlier.state.copy()
    where, size = roster.earlier, len(roster.ids)
    state.used = _expand(state.used, where, size)
    if clip_quantile is None or math.isinf(state.bound):
        state.bound = mechanism.start()
    if earlier.pairs is not None:
        where = task.pairs.find(earlier.pairs.among(roster.earlier).keys)
        size = len(task.pairs.keys)
    state.clients = {name: _expand(old, where, size) for name, old in state.clients.items()}
    return state


def _expand(values, where, size):
    """Array (size, ...) with `values` at positions `where`, and 0 elsewhere."""
    full = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
    full[where] = values
    return full


def progress_after(task, state, events, last):
    """Progress of rounds that were to go on to `last`, spending events."""
    earlier, roster = task.earlier, task.roster
    n_rows = np.zeros(len(roster.ids), dtype=np.int64)
    spent, stopped = (), state.round < last
    if earlier is not None:
        n_rows[roster.earlier] = earlier.n_rows
        spent, stopped = earlier.spent, stopped or earlier.stopped
    n_rows[roster.now] += np.bincount(task.clients.codes)
    spent = None if events is None or spent is None else (*spent, *events)
    noise = earlier.noise_multiplier if earlier is not None and last == earlier.state.round else 0.0
    if events:
        noise = events[-1].noise_multiplier
    rate = task.run.learning_rate
    return Progress(state, roster.ids, n_rows, spent, rate, stopped, task.pairs, noise)


def make_run(model, targets, clients, roster, earlier, seed):
    """Run of a model's parameters; a learning rate that was found in earlier rounds stays."""
    order, entropy = seeds(seed)
    n_clients = len(clients.ids)
    rows = client_rows(
        targets.features,
        targets.y,
        clients.codes,
        roster.now,
        model.batch_size,
        model.fit_intercept,
        np.random.default_rng(order) if model.shuffle else None,
        earlier and earlier.pairs and earlier.pairs.among(roster.earlier),
    )
    sampling = sampling_of(model.sampling, model.client_fraction, n_clients)
    n_expected = sampling.rate * n_clients
    loss = LOSSES[targets.loss]
    learning_rate = model.learning_rate
    if learning_rate == "theory":
        learning_rate = theory_learning_rate(model, rows, n_expected)
    elif learning_rate == "auto" and earlier is not None:
        learning_rate = earlier.learning_rate
    elif learning_rate == "auto":
        learning_rate = auto_learning_rate(rows, loss, model.weighting, model.alpha, sampling)
    mean_batch = float(rows.batch_sizes.mean()) if model.weighting == "samples" else None
    shape = (targets.features.shape[1] + model.fit_intercept, targets.n_outputs)
    steps = step_sizes(model.alpha, learning_rate, n_expected)
    settings = (shape, loss, steps, n_expected * (mean_batch or 1.0), mean_batch, model.average)
    if issparse(targets.features):
        watched = bool(getattr(model, "_skl_callbacks", []))
        lazy = not (model.average or model.warm_start or watched)
        method = sparse_ppsgd(rows.pairs, *settings, lazy)
    else:
        method = ppsgd(len(roster.ids), *settings)
    return Run(method, rows, sampling, entropy, model.n_jobs, float(learning_rate))


def check_learning_rate(model):
    """Raise ValueError if the constants that learning_rate='theory' takes are missing."""
    given = {name: getattr(model, name) for name in ("smoothness", "solution_norm", "gradient_std")}
    if model.learning_rate != "theory":
        return
    if given["smoothness"] is None:
        raise ValueError(
            "learning_rate='theory' needs smoothness: a bound on the curvature of a row's loss in "
            "both models together (for the squared loss twice the largest squared norm of a row of "
            "X). It is yours, never taken from the data."
        )
    if (given["solution_norm"] is None) != (given["gradient_std"] is None):
        raise ValueError(
            "solution_norm and gradient_std belong together; got "
            f"solution_norm={given['solution_norm']!r}, gradient_std={given['gradient_std']!r}."
        )


def theory_learning_rate(model, rows, n_expected):
    """Larger of the two steps at the step eta of the theorems."""
    smoothness = smoothness_alpha(
        model.smoothness,
        model.alpha,
        rows.n_clients,
        batch_sizes=rows.batch_sizes,
        client_fraction=n_expected / rows.n_clients,
        weighting=model.weighting,
    )
    norm, std = model.solution_norm or 1.0, model.gradient_std or 0.0
    eta = ppsgd_learning_rate(smoothness, norm, std, model.n_rounds)
    return eta if math.isinf(model.alpha) else eta * max(model.alpha, 1 / n_expected)


def models(state, clients, pairs=None):
    """Fitted attributes of a state: population model (p, c), local ones (m, p, c), clients."""
    population, local = state.server["coef"], state.clients["local"]
    if "moment" in state.server:
        population = averaged(population, state.server["moment"], state.round)
        local = averaged(local, state.clients["local_moment"], state.round)
    if pairs is not None:
        local = LocalModels(pairs, local, len(clients))
    return {"_population": population, "_local": local, "clients_": clients}


def check_converged(state, learning_rate, protected):
    """Raise DivergenceError if the rounds diverged: if `protected`, by what is released alone."""
    finite = np.isfinite(state.server["coef"]).all()
    if not protected:
        finite &= np.isfinite(state.clients["local"]).all()
        finite &= len(state.history["loss"]) == state.round
    if not finite:
        raise DivergenceError(
            f"The rounds diverged: learning_rate={learning_rate:.4g} is too large for these "
            "features. Lower it, or scale the features."
        )


def rounds_of_a_pass(clients, batch_size, client_fraction):
    """Rounds in which every row is expected to be used once."""
    batches = -(-np.bincount(clients.codes).max() // batch_size) if batch_size else 1
    return math.ceil(batches / client_fraction)


def linear_predictors(X, codes, population, local):
    """Predictors (n, c) of rows X (n, p) of clients; of the population where codes are -1.

    `local` are models (m, p, c) or :class:`LocalModels`, or None if no client is known.
    """
    found = X @ population
    known = np.flatnonzero(codes >= 0)
    if local is None or not len(known):
        return found
    if hasattr(local, "predictors"):
        found[known] += local.predictors(csr_array(X[known]), codes[known])
        return found
    for clients, block in client_batches(codes[known], len(local)):
        rows = known[block]
        part = X[rows.ravel()].toarray().reshape(*rows.shape, -1) if issparse(X) else X[rows]
        found[rows] += part @ local[clients]
    return found
