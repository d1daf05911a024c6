"""Set up the rounds of PPSGD: rows in client order, scaled features, method and stopping rule."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, hstack
from sklearn.utils.extmath import row_norms

from pfl_sklearn._columns import check_float_range
from pfl_sklearn._rounds.out_of_core import StoredRows, blocks_of, chosen_rows
from pfl_sklearn._rounds.privacy import JointSum, is_private, normalizes
from pfl_sklearn._rounds.rows import ClientRows, InTurn, is_sparse
from pfl_sklearn._rounds.run import CheckedTable, FitPlan, ModelRounds
from pfl_sklearn._rounds.step_sizes import alpha_of
from pfl_sklearn._rounds.stopping import FlatRule, split_rows
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.linear_model._algebra import client_predictors
from pfl_sklearn.linear_model._ppsgd._sparse import (
    FeaturePairs,
    LateNoise,
    LocalModels,
    SparseRows,
    pair_keys,
)
from pfl_sklearn.linear_model._ppsgd._steps import steps_of_run, uses_data_scales
from pfl_sklearn.linear_model._ppsgd._updates import (
    best_constant,
    model_iterates,
    ppsgd,
    with_client_steps,
)
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum

_SMALLEST_FEATURE = 1e-304  # times the target's size: coefficients of 1e304 leave room for steps
_CONSTANT_SPREAD = 1e-12  # times a column's mean: a smaller spread is rounding error
_UNIT_SCALE = 3.0  # root mean square of a column that needs no scaling


class DesignRows(NamedTuple):
    """Rows of a design (n, p), dense, CSR or stored, with targets and sorted codes (n,)."""

    design: Any
    y: np.ndarray
    codes: Integers


def ppsgd_rounds(model: Any, table: CheckedTable, plan: FitPlan) -> ModelRounds:
    """Rounds on a checked table; the learning rate of earlier rounds stays."""
    if plan.earlier is not None:
        _check_continues(model, plan.earlier.state.server)
    # This error depends on the data, so private fits skip the check.
    if uses_data_scales(model):
        _check_squarable(table)
    loss = model._loss
    # Not the number drawn: the divisor of a sum would otherwise depend on who is sampled.
    n_expected = plan.n_expected
    alpha = alpha_of(model.alpha, n_expected)
    design, coordinates = _design(model, table, plan.earlier)
    train, held = _split_design(model, design, table.y, plan)
    rows = _client_rows(model, train, plan)
    # A client who comes later takes steps in the units of those of the fit.
    mean = model._mean_batch if plan.is_frozen else float(rows.schedule.batch_sizes.mean())
    # Messages are sums over rows for "samples" and means for "clients": Algorithms 2 and 3.
    mean_batch = mean if model.weighting == "samples" else None
    rate, steps, client_steps = steps_of_run(model, plan, rows, alpha, n_expected, mean_batch)
    # Normalized messages have lost the number of their rows.
    divisor = n_expected * (1.0 if normalizes(model) else mean_batch or 1.0)
    layout = rows.pairs if isinstance(rows, SparseRows) else None
    n_local = len(plan.clients.ids) if layout is None else len(layout.keys)
    shape = design.shape[1], table.n_outputs
    # A client may bound its local steps by its own rows: that reveals nothing to others.
    bounded = normalizes(model)
    method = ppsgd(
        n_local, shape, loss, steps, divisor, mean_batch, model.average, bounded, layout is not None
    )
    # Rounds of a client alone, around a frozen population, release nothing.
    protected = is_private(model) and not plan.is_frozen
    constant, unit = (None, 0.0) if protected else best_constant(loss, train.y, table.n_outputs)
    if not np.isfinite(unit):  # no step size helps with targets whose squares overflow
        _check_squarable(table)
    if client_steps is not None:
        # From zero the first rounds would do little but find the intercept.
        intercept = constant if model.fit_intercept else None
        arrays = {} if coordinates is None else coordinates._asdict()
        # Clients without rows take no steps.
        local_steps = np.zeros(len(plan.clients.ids))
        local_steps[plan.clients.now_at] = client_steps
        local_steps = local_steps if layout is None else local_steps[layout.owners]
        method = with_client_steps(method, arrays, intercept, local_steps)
    release = _release(model, plan.mechanism, method, layout, steps.population / divisor)
    smoothness = model.smoothness if model.learning_rate == "theory" else None
    advice = divergence_advice(table, rate, is_private(model), smoothness)
    rounds = ModelRounds(
        method=method,
        rows=rows,
        release=release,
        positions=plan.clients.earlier_at if layout is None else rows.earlier,
        attributes={"learning_rate_": rate, "_mean_batch": mean},
        layout=layout,
        advice=advice,
    )
    return rounds if protected else _with_losses(rounds, model, train, held, unit, alpha, plan)


def _check_continues(model, server):
    """Raise ValueError if the parameters do not match the state `server` of the earlier rounds."""
    earlier = {
        "fit_intercept": len(server["coef"]) > model.n_features_in_,
        "average": "moment" in server,
    }
    for name, value in earlier.items():
        if getattr(model, name) != value:
            raise ValueError(
                f"{name}={not value} was {value} in the earlier rounds, which these rounds "
                "continue; fit anew, with warm_start=False."
            )
    # Only rounds of "auto" have a pace, which a rising loss lowers to shorten the steps.
    if uses_data_scales(model) != ("pace" in server):
        raise ValueError(
            f"got learning_rate={model.learning_rate!r}: a number cannot continue rounds of "
            "'auto', which rescale the features, nor 'auto' those of a number; fit anew, with "
            "warm_start=False."
        )


def _check_squarable(table):
    """Raise ValueError if values are too large to be squared; not for fits with noise."""
    # Columns are scaled inside, so small values do no harm.
    features = table.features.data if is_sparse(table.features) else table.features
    for _, rows in blocks_of(features):
        check_float_range("X", rows, smallest=0.0)
    if table.y.dtype.kind == "f":
        check_float_range("y", table.y)


# Rows ---------------------------------------------------------------------------------------------


def _design(model, table, earlier):
    """Design matrix and its coordinates; None if it holds the features as given."""
    design, coordinates = add_intercept(table.features, model.fit_intercept), None
    if earlier is not None:  # its models are in its coordinates
        coordinates = stored_coordinates(earlier.state.server)
    elif uses_data_scales(model) and model.clip_norm is None:  # a clip norm is in the user's units
        # Labels are integers, whose predictors are of size 1.
        target = np.abs(table.y).max() if table.y.dtype.kind == "f" else 1.0
        coordinates = standard_coordinates(design, model.fit_intercept, target)
    return design if coordinates is None else coordinates.of(design), coordinates


def _split_design(model, design, y, plan):
    """Training rows and held-out rows, each in client order."""
    codes = plan.clients.codes
    rng = np.random.default_rng(plan.setup_seed) if model.shuffle else None
    fraction = model.validation_fraction if plan.until_flat else 0.0
    parts = split_rows(codes, len(plan.clients.now_at), fraction, rng)
    return [DesignRows(chosen_rows(design, rows), y[rows], codes[rows]) for rows in parts]


def _client_rows(model, train, plan):
    """Rows of the clients, with the schedule of their batches."""
    design, y, codes = train
    sizes = np.bincount(codes)
    # A client with fewer rows than a batch uses all of them in every round.
    batch_sizes = sizes if model.batch_size is None else np.minimum(sizes, model.batch_size)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = design, y, offsets, plan.clients.now_at, InTurn(batch_sizes)
    if not is_sparse(design):
        return ClientRows(*rows)
    keys = pair_keys(design, plan.clients.now_at[codes])
    # Models of earlier rounds stay, also those of features that do not occur any more.
    before = keys[:0]
    if plan.earlier is not None:
        before = plan.earlier.layout.among(plan.clients.earlier_at).keys
    pairs = FeaturePairs(np.union1d(before, keys), design.shape[1])
    return SparseRows(*rows, pairs, pairs.find(keys), pairs.find(before))


# Rounds -------------------------------------------------------------------------------------------


def _release(model, mechanism, method, layout, step):
    """Release of dense or sparse messages; `step` is that of the population on their sum."""
    if layout is None:
        return JointSum(mechanism, method.messages)
    # Callbacks, averages and checks against one long fit read the whole model after each round.
    every_round = model.average or model.warm_start or bool(getattr(model, "_skl_callbacks", []))
    return LateNoise(mechanism or ClippedSum(None), step, lazy=not every_round)


def _with_losses(rounds, model, train, held, unit, alpha, plan):
    """The rounds with their final loss and, if their number is not given, their stopping rule."""
    sizes, batch_sizes = np.diff(rounds.rows.offsets), rounds.rows.schedule.batch_sizes
    # In training, clients count as in the rounds, or the loss may rise while the rounds descend.
    by_rows = model.weighting == "samples"
    train_weights = (batch_sizes if by_rows else 1.0) / sizes
    held_weights = np.ones(len(sizes)) if by_rows else 1 / sizes
    mean_loss = partial(_mean_loss, model._loss, plan, rounds.layout)

    def losses(state):
        trained = mean_loss(state, train, train_weights)
        # Clients of one row each hold none out; then the training loss stands for both.
        return trained, mean_loss(state, held, held_weights) if len(held.y) else trained

    rounds = rounds._replace(
        final_loss=lambda state: (mean_loss(state, train, train_weights), unit)
    )
    if not plan.until_flat:
        return rounds
    # About a pass over each client's rows. Local steps may need more rounds, as they are smaller
    # than the population's by this ratio.
    ratio = 0.0 if np.isinf(alpha) else alpha * plan.sampling.rate * rounds.rows.n_clients
    fewest = max(np.mean(sizes / batch_sizes) / model._participation, ratio)
    paced = uses_data_scales(model)
    rule = FlatRule(losses, model.tol, unit, fewest, paced, rounds.advice)
    return rounds._replace(rule=rule)


def _mean_loss(loss, plan, layout, state, rows, weights):
    """Mean loss of rows under the models of a state, with `weights` (m,) of their clients."""
    population, local = model_iterates(state, layout, len(plan.clients.ids))
    predictors = linear_predictors(rows.design, plan.clients.now_at[rows.codes], population, local)
    with np.errstate(over="ignore", invalid="ignore"):  # the stopping rule handles divergence
        losses = loss.function(predictors[None], rows.y[None])[1][0]
    weights = weights[rows.codes]
    return float(weights @ losses / weights.sum())


def divergence_advice(
    table: CheckedTable, learning_rate: float, private: bool, smoothness: float | None = None
) -> str:
    """What to do if the rounds diverge; in a private fit the text does not depend on the data.

    `smoothness` is None unless the rate is "theory".
    """
    rate, lower = f"learning_rate={learning_rate:.4g}", "lower it"
    if smoothness is not None:
        rate = (
            f"learning_rate='theory', which is {learning_rate:.4g} for smoothness={smoothness:.4g},"
        )
        lower = "raise smoothness"
    text = f"{rate} is too large"
    if private:
        return f"{text} for these features. {lower.capitalize()}, or scale the features."
    if _largest_size(table.features) > _UNIT_SCALE:
        return f"{text} for these features. Scale them, or {lower}."
    return f"{text}, although the features have unit scale. {lower.capitalize()}."


def _largest_size(X):
    """Largest root mean square of a column of X (n, d), dense, CSR or stored."""
    with np.errstate(over="ignore"):
        squares = sum(row_norms(rows.T, squared=True) for _, rows in blocks_of(X))
        return float(np.sqrt(squares.max(initial=0.0) / X.shape[0]))


# Coordinates --------------------------------------------------------------------------------------


class Coordinates(NamedTuple):
    """Scaled features, in which steps are taken: x becomes (x - center) / scale; both (p,)."""

    center: Floats
    scale: Floats

    def of(self, design: Any) -> Any:
        """Rows (n, p), dense, CSR or stored, in these coordinates."""
        if isinstance(design, StoredRows):
            return design.changed(self.of)
        if is_sparse(design):  # the centre is 0: rows less a centre would be dense
            return csr_array(design.multiply(1 / self.scale))
        return (design - self.center) / self.scale

    def back(self, values: Any) -> Any:
        """Models (..., p, c), or LocalModels, of the features as given; the intercept is last."""
        if isinstance(values, LocalModels):  # sparse features are never centred
            scale = self.scale[values.pairs.features, None]
            return values._replace(values=values.values / scale)
        coef = values / self.scale[:, None]
        if self.center.any():
            coef[..., -1, :] -= np.einsum("...pc,p->...c", coef, self.center)
        return coef


def stored_coordinates(server: dict[str, Floats]) -> Coordinates | None:
    """Coordinates in a server's state; None if steps are taken in the features as given."""
    return Coordinates(server["center"], server["scale"]) if "center" in server else None


def standard_coordinates(design: Any, fit_intercept: bool, target: float = 1.0) -> Coordinates:
    """Features of rows (n, p) less their means, over the fourth root of their mean fourth power.

    That is 1.3 standard deviations of normal features, but three of an indicator that is 1 in one
    of a hundred rows: in units of its standard deviation, clients would overfit what they hardly
    see. Sparse rows are not centred, nor are rows without an intercept. Raises ValueError for
    features so small that coefficients overflow, for targets of size `target`.
    """
    center = np.zeros(design.shape[1])
    if is_sparse(design):
        design = csr_array(design, copy=True)  # the arrays may be the caller's
        design.sum_duplicates()
        size = np.asarray(abs(design).max(axis=0).todense()).ravel()
        size = np.where(size > 0, size, 1.0)
        # Divided, since one over the size may be infinite.
        shares = design.data / size[design.indices]
        powers = np.bincount(design.indices, shares**4, design.shape[1])
    else:
        if fit_intercept:  # the intercept absorbs the shift; without one, centring changes the fit
            sums = sum(rows[:, :-1].sum(axis=0) for _, rows in blocks_of(design))
            center[:-1] = sums / len(design)
        sizes = [np.abs(rows - center).max(axis=0) for _, rows in blocks_of(design)]
        size = np.max(sizes, axis=0)
        size = np.where(size > 0, size, 1.0)  # before fourth powers, which overflow beyond 1e77
        powers = np.zeros(design.shape[1])
        for _, rows in blocks_of(design):
            squares = ((rows - center) / size) ** 2
            powers += np.einsum("np,np->p", squares, squares)
    scale = size * (powers / design.shape[0]) ** 0.25
    constant = scale <= _CONSTANT_SPREAD * np.abs(center)
    tiny = ~constant & (scale < target * _SMALLEST_FEATURE)
    if tiny.any():
        raise ValueError(
            f"X has a column of size {scale[tiny][0]:.1e} for a target of size {target:.1e}; "
            "coefficients would overflow: rescale X."
        )
    return Coordinates(center, np.where(constant, 1.0, scale))


def add_intercept(features: Any, fit_intercept: bool) -> Any:
    """Columns of the design: the features, and ones last."""
    if not fit_intercept:
        return features
    if isinstance(features, StoredRows):
        return features.changed(partial(add_intercept, fit_intercept=True))
    if is_sparse(features):
        ones: Any = np.ones((features.shape[0], 1))
        return hstack([features, ones], format="csr")
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def linear_predictors(design: Any, codes: Integers, population: Floats, local: Any) -> Floats:
    """Predictors (n, c) of rows (n, p) of clients; of the population where codes are -1.

    `local` are models (m, p, c) or :class:`LocalModels`, or None if no client is known.
    """
    parts = []
    for part, rows in blocks_of(design):
        predictors = rows @ population
        if isinstance(local, LocalModels):
            predictors += local.predictors(csr_array(rows), codes[part])
        elif local is not None:
            unseen = np.zeros(population.shape[::-1])  # a client that fit did not see adds nothing
            models = local.swapaxes(-1, -2), None, unseen, unseen[:, 0]
            predictors += client_predictors(rows, codes[part], *models)
        parts.append(predictors)
    return np.concatenate(parts)
