r"""A client's last layer, as the posterior mode around the population's.

Row j of a client has columns :math:`x_j` (r,): the inputs of the last layer over their root mean
square u in the client's rows, and 1 for the bias. Its logits are :math:`f_j + D' x_j`, with those
of the population's network, :math:`f_j` (K,), and a deviation D (r, K) whose entries are normal
with variance s. The criterion is the log-likelihood less :math:`|D|^2 / (2 s)`. The evidence is the
log marginal likelihood in Laplace's approximation: the criterion at the mode less :math:`\log
\det(I + s X' W X) / 2`, where W is the information on the logits.

Clients with equally many rows n go together. We solve the cheaper of two systems: in the rows, one
of n for every class (Rasmussen and Williams, 2006, Algorithm 3.3), or in the r K weights.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

from pfl_sklearn._rounds.loop import LastPhase, Update
from pfl_sklearn._rounds.rows import Reshuffled
from pfl_sklearn._typing import Floats, Integers

# Prior variances of a row's logit, on average over rows, among which one is chosen.
_RATIO = 8.0
VARIANCES = np.concatenate([[0.0], _RATIO ** np.arange(-3, 5)])
_LOG_VARIANCE_SD = 1.5  # of the logarithm of a variance that a client chooses alone
_LAST_STEP = 1e-10  # nats; the step with this squared Newton decrement is the last
_CLOSE_ENOUGH = 1e-6  # the same where only the evidence is wanted: its error is about this
_LARGEST_BY_ROWS = (
    1e4  # variances of a row's logit beyond which the systems in the rows lose their digits
)
_ROWS_OF_EVIDENCE = 128  # of a client that its evidence is about, at most
_MOST_NEWTON_STEPS = 100  # a bound: damped steps get there long before
_SMALLEST_STEP = 1e-9  # of Newton's: if even that is worse, the criterion is at its rounding
_DECREASE_BY_ROUNDING = 1e-13  # of the criterion, relative
_SYSTEM_NUMBERS = 1 << 20  # of clients that go together
_EQUAL_EVIDENCE = 1e-9  # nats


# The last phase of a method ----------------------------------------------------------------------


def bayes_heads(setup, head, private):
    """Last phase in which clients get last layers of their own: modes around the global one.

    What is kept is how they deviate from it. The prior variance is `head`, or chosen by the
    evidence: for all clients together or, if `private`, for each of them by its own rows and a
    prior that is public.
    """
    engine = setup.engines.client
    layer, all_rows = engine.last_layer, Reshuffled(None, 1)

    def first(server, clients):
        return {"evidence": np.zeros((setup.n_clients, len(VARIANCES)))}

    def init(server, clients):
        if head != "bayes":
            # Given by the user, so public.
            variances = np.full(setup.n_clients, float(head))
        elif private:
            # A common variance would carry rows of all clients into what each of them keeps.
            variances = best_variances(clients["evidence"] + log_prior())
        else:
            common = best_variances(clients["evidence"].sum(axis=0, keepdims=True))
            variances = np.repeat(common, setup.n_clients)
        heads = np.zeros((setup.n_clients, *layer.head_shape), dtype=engine.array_dtype)
        return {"head": heads, "head_variance": variances}

    weighing = LastPhase(first, partial(_evidence, engine), all_rows) if head == "bayes" else None
    return LastPhase(init, partial(_heads, engine), all_rows, after=weighing)


def _evidence(engine, server, t, batch, clients, phase_arrays):
    """Evidence of a block's clients at each prior variance."""
    x, _, logits, labels, failures = _head_rows(engine, server, batch, clients)
    with np.errstate(over="ignore", invalid="ignore"):  # of networks that diverge
        evidence = evidence_curves(x, logits, labels)
    return Update({}, {"evidence": evidence}, np.zeros(len(x)), failures)


def _heads(engine, server, t, batch, clients, phase_arrays):
    """How last layers of a block's clients deviate from the global one."""
    x, units, logits, labels, failures = _head_rows(engine, server, batch, clients)
    variances = phase_arrays["head_variance"]
    with np.errstate(over="ignore", invalid="ignore"):
        # From the variance of a row's logit to that of one of its r parameters.
        deviations, _ = head_modes(x, logits, labels, variances / x.shape[2])
        # Back to the units of the layer's inputs, in which the bias, which is last, has none.
        deviations[:, : engine.last_layer.shape[1]] /= units[:, None, None]
        heads = deviations.transpose(0, 2, 1).astype(engine.array_dtype)
    arrays = {"head": heads, "head_variance": variances}
    return Update({}, arrays, np.zeros(len(x)), failures)


def _head_rows(engine, server, batch, clients):
    """Columns (g, n, r) of the last layer, units (g,), logits (g, n, K), labels (g, n).

    The fifth value are the names of the classes of exceptions that did not end the fit.
    """
    layer = engine.last_layer
    inputs, logits, failures = layer.inputs_and_outputs(engine, server["global"], batch.X[:, 0])
    if "offset" in clients:
        # The layer is fitted as the client will predict, with its label frequencies.
        logits = logits + clients["offset"][:, None]
    return *head_columns(inputs, layer.bias is not None), logits, batch.y[:, 0], failures


# The mode of a client ----------------------------------------------------------------------------


class _ByRows(NamedTuple):
    """Deviations X' state, with a state (g, n, K)."""

    x: Floats  # (g, n, r)
    kernel: Floats  # (g, n, n), X X'
    variances: Any  # (g, 1, 1)

    def shift(self, state):
        """What a state adds to the logits (g, n, K)."""
        return self.kernel @ state

    def inner(self, state, other, shift):
        """Inner products (g,) of deviations; `shift` is what the other adds to the logits."""
        return _sums(state * shift)

    def residual(self, score, state):
        """Gradient of the criterion in the rows' coordinates, times the variance."""
        return self.variances * score - state

    def step(self, p, residual):
        """Newton's step."""
        inverses, _ = self._inverses(p)
        weighted = self._by_class(inverses, self.kernel @ residual)
        total = np.linalg.solve(inverses.sum(axis=1), weighted.sum(axis=2, keepdims=True))
        return residual - self.variances * (weighted - self._by_class(inverses, total))

    def log_det(self, p):
        """log det(I + s X' W X) (g,)."""
        inverses, systems = self._inverses(p)
        by_class = np.linalg.slogdet(systems)[1].sum(axis=1)
        return by_class + np.linalg.slogdet(inverses.sum(axis=1))[1]

    def deviations(self, state):
        return self.x.transpose(0, 2, 1) @ state

    def _inverses(self, p):
        """For every class (s X X' + 1/p)^-1, as (g, K, n, n), and a matrix whose determinant is
        that of I + p^1/2 s X X' p^1/2.
        """
        p, (_, n, r) = np.ascontiguousarray(p.transpose(0, 2, 1)), self.x.shape
        s = self.variances[:, None]
        if n <= r:  # systems of n, symmetric and well conditioned
            root = np.sqrt(p)
            outer = root[..., :, None] * root[..., None, :]
            systems = outer * (s * self.kernel[:, None]) + np.eye(n)
            return outer * np.linalg.inv(systems), systems
        # By Woodbury's identity, from systems of r.
        weighted = p[..., None] * self.x[:, None]
        across = weighted.transpose(0, 1, 3, 2)
        systems = s * (across @ self.x[:, None]) + np.eye(r)
        inverses = -s * (weighted @ np.linalg.inv(systems) @ across)
        inverses[..., np.arange(n), np.arange(n)] += p
        return inverses, systems

    @staticmethod
    def _by_class(matrices, values):
        """Products (g, n, K) of matrices (g, K, n, n) and values (g, n, K or 1)."""
        columns = np.ascontiguousarray(values.transpose(0, 2, 1))[..., None]
        return (matrices @ columns)[..., 0].transpose(0, 2, 1)


class _ByWeights(NamedTuple):
    """Deviations that are the state (g, r, K) itself."""

    x: Floats  # (g, n, r)
    variances: Any  # (g, 1, 1)

    def shift(self, state):
        """What a state adds to the logits (g, n, K)."""
        return self.x @ state

    def inner(self, state, other, shift):
        """Inner products (g,) of deviations; `shift` is what the other adds to the logits."""
        return _sums(state * other)

    def residual(self, score, state):
        """Gradient of the criterion, times the variance."""
        return self.variances * (self.x.transpose(0, 2, 1) @ score) - state

    def step(self, p, residual):
        """Newton's step."""
        right = residual.reshape(len(p), -1, 1)
        return np.linalg.solve(self._systems(p), right).reshape(residual.shape)

    def log_det(self, p):
        """log det(I + s X' W X) (g,)."""
        return np.linalg.slogdet(self._systems(p))[1]

    def deviations(self, state):
        return state

    def _systems(self, p):
        """I + s X' W X (g, r K, r K)."""
        (g, _, r), n_classes = self.x.shape, p.shape[2]
        systems = np.empty((g, r, n_classes, r, n_classes))
        across = self.variances * self.x.transpose(0, 2, 1)
        for k in range(n_classes):
            for c in range(k + 1):
                weight = p[..., k] * ((k == c) - p[..., c])
                block = across @ (weight[..., None] * self.x)
                systems[:, :, k, :, c] = systems[:, :, c, :, k] = block
        systems = systems.reshape(g, r * n_classes, r * n_classes)
        return systems + np.eye(r * n_classes)


def head_columns(features: Floats, has_bias: bool) -> tuple[Floats, Floats]:
    """Columns (g, n, r) of inputs of the last layer (g, n, d), and their units (g,)."""
    units = np.sqrt(np.mean(features**2, axis=(1, 2)))
    units[units == 0] = 1.0  # a client whose last hidden layer is silent
    x = features / units[:, None, None]
    return (np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2) if has_bias else x), units


def head_modes(
    x: Floats, logits: Floats, labels: Integers, variances: Floats
) -> tuple[Floats, Floats]:
    """Modes of clients with equally many rows, and the evidence there.

    They have columns `x` (g, n, r), logits (g, n, K) of the population's network with the client's
    offsets, labels (g, n), and prior variances s (g,) of a deviation's entries; with 0 the
    deviation is 0. Returns deviations (g, r, K) and evidence (g,) in nats.
    """
    deviations, evidence = _modes_at_each(x, logits, labels, variances[None], _LAST_STEP)
    return deviations, evidence[:, 0]


def evidence_curves(x: Floats, logits: Floats, labels: Integers) -> Floats:
    """Evidence (g, V) of clients at each of `VARIANCES` of a row's logit; see `head_modes`.

    Of clients with many rows the first 128 are used, which tell enough.
    """
    rows = slice(_ROWS_OF_EVIDENCE)
    x, logits, labels = x[:, rows], logits[:, rows], labels[:, rows]
    variances = np.repeat(VARIANCES[:, None] / x.shape[2], len(x), axis=1)
    return _modes_at_each(x, logits, labels, variances, _CLOSE_ENOUGH)[1]


def best_variances(curves: Floats) -> Floats:
    """Variances (g,) of largest evidence, from evidence (g, V) at `VARIANCES`.

    Between neighbours that are not the best, a parabola in the logarithm says where it is. Of equal
    values the smallest variance is taken.
    """
    top = curves.max(axis=1, keepdims=True)
    at = np.argmax(curves >= top - _EQUAL_EVIDENCE, axis=1)
    # Not with the variance 0 as a neighbour, whose logarithm is infinite.
    inside = np.clip(at, 2, len(VARIANCES) - 2)
    rows = np.arange(len(curves))
    lower, middle, upper = (curves[rows, inside + k] for k in (-1, 0, 1))
    curvature = 2 * middle - lower - upper
    shift = np.divide(
        upper - lower, 2 * curvature, out=np.zeros(len(curvature)), where=curvature > 0
    )
    fine = (at == inside) & (np.abs(shift) <= 1)
    return VARIANCES[at] * _RATIO ** np.where(fine, shift, 0.0)


def log_prior() -> Floats:
    """Log prior density (V,) at `VARIANCES`, up to a constant: log-normal around 1; 0 has none."""
    logs = np.log(VARIANCES, out=np.full(len(VARIANCES), -np.inf), where=VARIANCES > 0)
    return -0.5 * (logs / _LOG_VARIANCE_SD) ** 2


def _modes_at_each(x, logits, labels, variances, last):
    """:func:`_modes_at` of some clients after the others, whose systems would take much memory."""
    (g, n, r), n_classes = x.shape, logits.shape[2]
    by_rows = _by_rows(x, logits, variances)
    numbers = n_classes * n * (n + r) if by_rows else (r * n_classes) ** 2
    size = max(_SYSTEM_NUMBERS // numbers, 1)
    slices = [slice(first, first + size) for first in range(0, g, size)]
    parts = [_modes_at(x[s], logits[s], labels[s], variances[:, s], last) for s in slices]
    return tuple(np.concatenate(values) for values in zip(*parts, strict=True))


def _by_rows(x, logits, variances):
    """Whether K systems of n, of rank r at most, are exact enough and cheaper than one of r K."""
    (_, n, r), n_classes = x.shape, logits.shape[2]
    rank = min(n, r)
    # Multiplications of a Newton step, up to a common factor.
    by_rows = 2 * n_classes * n * rank * (n + rank) + n**3
    by_weights = (r * n_classes) ** 2 * (2 * r * n_classes / 3 + n / 2)
    return variances.max() * r <= _LARGEST_BY_ROWS and by_rows <= by_weights


def _modes_at(x, logits, labels, variances, last):
    """Deviations (g, r, K) at the last of the variances (V, g), and the evidence (g, V) at all.

    The search for a mode starts from the one before.
    """
    g, _, r = x.shape
    form: Any = _ByWeights(x, None)
    state = np.zeros((g, r, logits.shape[2]))
    if _by_rows(x, logits, variances):
        form, state = _ByRows(x, x @ x.transpose(0, 2, 1), None), np.zeros_like(logits)
    evidence = np.empty((g, len(variances)))
    for at, client_variances in enumerate(variances):
        form = form._replace(variances=client_variances[:, None, None])
        state, p, value = _newton(form, logits, labels, state, last)
        evidence[:, at] = value - 0.5 * form.log_det(p)
    return form.deviations(state), evidence


def _newton(form, logits, labels, state, last):
    """State at the mode, probabilities (g, n, K) and criterion (g,) there.

    The steps are damped, and each client stops on its own.
    """
    s = form.variances[:, 0, 0]
    # Variance 0 has no penalty to compute: the deviation stays at 0.
    precision = np.divide(1.0, s, out=np.zeros(len(s)), where=s > 0)
    chosen = np.eye(logits.shape[2])[labels]
    shift, moving = form.shift(state), np.ones(len(s), dtype=bool)
    log_p, value = _penalized(form, precision, logits + shift, chosen, state, shift)
    for _ in range(_MOST_NEWTON_STEPS):
        score = chosen - np.exp(log_p)
        step = form.step(np.exp(log_p), form.residual(score, state))
        shift_step, size = form.shift(step), moving.astype(float)[:, None, None]
        decrement = _sums(score * shift_step) - precision * form.inner(state, step, shift_step)
        while True:
            new, new_shift = state + size * step, shift + size * shift_step
            log_p, reached = _penalized(form, precision, logits + new_shift, chosen, new, new_shift)
            allowed = value - _DECREASE_BY_ROUNDING * (1 + np.abs(value))
            worse = ~(reached >= allowed) & (size[:, 0, 0] > _SMALLEST_STEP)  # NaN is worse
            if not worse.any():
                break
            size[worse] /= 2
        state, shift, value = new, new_shift, reached
        moving &= decrement >= last
        if not moving.any():
            break
    return state, np.exp(log_p), value


def _penalized(form, precision, logits, chosen, state, shift):
    """Log probabilities (g, n, K), and log-likelihood less penalty (g,)."""
    log_p = log_softmax(logits, axis=2)
    return log_p, _sums(chosen * log_p) - 0.5 * precision * form.inner(state, state, shift)


def _sums(values):
    """Sums (g,) of arrays (g, n, k)."""
    return values.sum(axis=(1, 2))
