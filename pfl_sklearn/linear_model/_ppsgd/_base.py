"""What the runs of the PPSGD regressor and classifier share."""

import math
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.utils import assert_all_finite, check_X_y
from sklearn.utils.validation import validate_data

from pfl_sklearn._columns import numbers_needed
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._rounds.estimator import BaseRounds
from pfl_sklearn._rounds.privacy import JointSum, is_private, normalizes
from pfl_sklearn._rounds.rows import ClientRows, InTurn, is_sparse
from pfl_sklearn._rounds.run import Run, sampling_of
from pfl_sklearn._rounds.stopping import split_rows
from pfl_sklearn._rounds.stored import chosen_rows, stored_rows
from pfl_sklearn.linear_model._ppsgd._coordinates import (
    Coordinates,
    DesignRows,
    coordinates_in,
    standard_coordinates,
    with_intercept,
)
from pfl_sklearn.linear_model._ppsgd._losses import final_loss, flat_rule
from pfl_sklearn.linear_model._ppsgd._models import AdditiveModels, checked_floats
from pfl_sklearn.linear_model._ppsgd._parameters import StepParameters
from pfl_sklearn.linear_model._ppsgd._sparse import (
    FeaturePairs,
    LateNoise,
    SparseRows,
    keys_of,
    sparse_ppsgd,
    steps_of_all,
)
from pfl_sklearn.linear_model._ppsgd._updates import (
    alpha_of,
    auto_steps,
    best_constant,
    check_learning_rate,
    check_squarable,
    divergence_advice,
    normalized_steps,
    ppsgd,
    public_move,
    step_sizes,
    theory_learning_rate,
    with_own_steps,
)
from pfl_sklearn.privacy._mechanisms._clipped_sum import ClippedSum
from pfl_sklearn.privacy._mechanisms._sparse_sum import SparseClippedSum


@with_parameters
class BasePPSGD(AdditiveModels, StepParameters, BaseRounds):
    r"""Rounds of PPSGD, and the models that they leave.

    A subclass reads its targets (`_read`), names its `_loss`, and turns predictors into
    predictions.

    Attributes
    ----------
    learning_rate_ : float
        The number that `learning_rate` stood for. That of "auto" is for the features inside.

    Notes
    -----
    This is Algorithms 1, 2 and 3 of Bietti et al. (2022). Algorithm 1 is
    ``client_fraction=1, batch_size=1``; Algorithm 3 is ``weighting="clients"`` with sampling.
    With N clients, Q = q N of them expected in a round, and the paper's :math:`\alpha` and
    :math:`\eta`:

    ==========================  ====================================================
    the paper's text            `alpha`
    the figures' alpha Q        ``alpha * Q``
    alpha in the authors' code  ``alpha * Q``; -1 there is ``alpha=inf``
    step in the authors' code   `learning_rate`
    step of w                   ``learning_rate * min(alpha * Q, 1)`` = alpha eta
    step of theta_i             ``learning_rate * min(1 / (alpha * Q), 1)`` = eta / Q
    noise on w (the paper's     ``noise_multiplier * clip_norm / Q``, or over Q times
    sigma_zeta)                 the mean batch for ``weighting="samples"``
    ==========================  ====================================================

    With ``weighting="samples"`` clients with larger batches take larger local steps; the table
    gives the step of a client with an average batch. `clip_norm` bounds sums over a batch
    there, and means over a batch for ``weighting="clients"``.

    "auto" divides features by the fourth root of the mean fourth power of what is left after
    centring: 1.3 standard deviations of normal features, and three of an indicator that is 1 in
    one row of a hundred, of which clients would otherwise learn too much.

    Without noise the defaults need no choice. A share of each client's rows is held out, and
    the loss on it is looked at whenever the rounds have grown by a quarter. The models returned
    are those with the lowest loss: local models have no penalty, and the end of the rounds is
    what keeps them from overfitting. If the training loss rises between two looks, the rounds
    go back to the best models so far, with half the step.

    With noise and ``clip_norm=None``, a client's message is :math:`g_i / \|g_i\|`, the automatic
    clipping of Bu et al. (2023) without their :math:`\gamma`; 0 stays 0. Its sensitivity is one,
    and the sum over clients, divided by Q, moves w by `learning_rate` at most, apart from the
    noise. "auto" lets all T rounds together move w by 2, and by less if the noise on a coefficient
    of w would exceed .2 in the end: by Q sqrt(T) / (5 z) for a noise multiplier of z. With c = 1/2
    for classes and 1 for the squared loss, local steps are 2 / c over the rounds that a client is
    expected to take part in, and at most the inverse curvature of the client's batch. An `alpha`
    below "auto" shortens the steps of w, one above it the local ones. Features, and responses, have
    to be of unit scale, with means near 0, by numbers that are public. Clients count equally in w,
    whatever `weighting`.

    We deviate from the paper in three ways. Messages may be normalized, as above. A client's rows
    are used in turn, from a random order, instead of being drawn independently. And we sample
    clients independently by default: the paper's experiments draw a fixed number of clients but
    account for them as if each had been drawn independently, which understates epsilon. For a
    fraction of .02, 2,000 rounds, a noise multiplier of 1 and a delta of 1e-4 that gives 4.84. The
    other clients together know who takes part in a sample of a fixed size, so against them epsilon
    is 48.3 if a client's contribution is replaced by nothing, and 153.4 if it is replaced by
    another one.

    The guarantee is joint differential privacy for one client. It covers all iterates of the
    population model together, against anybody who sees them, including all other clients
    together. What a client computes from the population model and its own rows does not harm
    the others. Local models are not protected, nor are ``coef_``, predictions and ``history_``.
    The number of clients, their numbers of rows, the number of rounds and the labels that occur
    are taken to be public. How many clients take part in a round has to stay secret if each is
    sampled independently.

    With sparse `X` a client's model has values only on the features of its own rows. The noise
    on a feature waits until somebody is about to see it, unless callbacks, `average` or
    `warm_start` need all noise in every round. The distribution is the same, in less time.

    Memory: ``n_clients * (d + 1)`` times n_outputs (n_classes) numbers, twice as many with
    `average`, and all of them twice while ``n_rounds=None`` keeps the best models. For sparse `X`
    it is n_outputs (n_classes) numbers for each pair of a client and a feature of its rows. A round
    takes as much again for its sampled clients. A fit without noise makes three copies of a dense
    `X`, and a fourth if it is not in double precision. Of a ``numpy.memmap`` or a ``pyarrow.Table``
    it makes none: beyond the models it takes 60 bytes a row, 40 MB, and the rows of a round's
    batches. It reads the file eight times before the rounds, once after them, and again whenever
    ``n_rounds=None`` looks at the loss.

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

    clip_norm: float | None = parameter(
        default=None,
        text="""
            float or None
                L2 norm that each client's message is clipped to. Choose it without looking at the
                data. With noise, None scales every message to length one, so that there is no norm
                to choose. Local models are not clipped.
            """,
    )
    n_rounds: int | None = parameter(
        default=None,
        text="""
            int or None
                Rounds of communication. None: ``fit`` goes on until the loss of held-out rows is
                flat. With noise the data must have no say in it, and None is 100 rounds.
            """,
    )
    max_rounds: int = parameter(
        default=10_000,
        text="""
            int
                Rounds after which ``fit`` ends with a ``ConvergenceWarning`` if the loss is not
                flat.
            """,
    )
    warm_start: bool = parameter(
        default=False,
        text="""
            bool
                Let ``fit`` continue to `n_rounds` rounds in all, or until the loss is flat again,
                with the noise multiplier that it had unless another is given. With an integer
                `random_state` the result of a number of rounds is the same, bit by bit, as that of
                all of them at once with ``warm_start=True``. The exceptions are "theory" with
                `solution_norm` and normalized messages, whose steps depend on `n_rounds`.
            """,
    )

    @property
    def _communicates(self):
        # With alpha=0 the population model takes no steps, so nothing leaves the clients.
        return isinstance(self.alpha, str) or self.alpha > 0

    @property
    def _normalizes_messages(self):
        return True

    @property
    def _reads_scales(self):
        """Whether steps, scales of features and the start follow from the data."""
        return self.learning_rate == "auto" and not normalizes(self)

    @property
    def _rate_source(self):
        """The smoothness that the learning rate follows from, or None if it is another one."""
        return self.smoothness if self.learning_rate == "theory" else None

    def _check_parameters(self):
        check_learning_rate(self)

    def _make_run(self, table, ahead):
        """Rounds on a checked table; the learning rate of earlier rounds stays."""
        earlier = ahead.earlier
        if earlier is not None:
            self._check_continues(earlier)
        # The error tells of the data, which are never looked at where noise is to protect them.
        if self._reads_scales:
            check_squarable(table)
        loss = self._loss
        n_clients, share = ahead.n_sampled_from, self.client_fraction
        sampling = sampling_of(self.sampling, share, n_clients, self.drop_fraction)
        # Not the number drawn: the divisor of a sum would otherwise depend on who takes part.
        n_expected = sampling.rate * ahead.n_sampled_from
        alpha = alpha_of(self.alpha, n_expected)
        design, coordinates = self._design(table, earlier)
        train, held = self._parts(design, table.y, ahead)
        rows = self._client_rows(train, ahead)
        # A client who comes later takes steps in the units of those of the fit.
        batch_sizes = rows.schedule.batch_sizes
        mean_batch = self._mean_batch if ahead.is_frozen else float(batch_sizes.mean())
        rate, own = self._learning_rate(rows, loss, alpha, n_expected, mean_batch, ahead)
        shape = (design.shape[1], table.n_outputs)
        if normalizes(self):
            n_taken = self._last_round(0) * self._participation
            steps = normalized_steps(rate, alpha, n_expected, loss, n_taken)
        else:
            steps = step_sizes(alpha, rate, n_expected)
        method, kind = self._method(rows, shape, loss, steps, n_expected, mean_batch, ahead)
        if own is not None:
            # From zero the first rounds would do little but find the intercept.
            constant = best_constant(loss, train.y, shape[1])[0] if self.fit_intercept else None
            own = steps_of_all(own, rows, ahead)
            method = with_own_steps(method, coordinates, own, constant)
        run = Run(
            method=method,
            rows=rows,
            sampling=sampling,
            settled={"learning_rate_": rate, "_mean_batch": mean_batch},
            advice=divergence_advice(table, rate, is_private(self), self._rate_source),
            **kind,
        )
        by_rows = self.weighting == "samples"
        if ahead.is_frozen or not is_private(self):  # a client alone has nobody to protect
            run = run._replace(final_loss=final_loss(run, loss, train, by_rows))
        if ahead.until_flat:
            fewest, paced = self._fewest_rounds(run, train, alpha), self._reads_scales
            rule = flat_rule(run, loss, train, held, by_rows, fewest, self.tol, paced)
            run = run._replace(rule=rule)
        return run

    def _method(self, rows, shape, loss, steps, n_expected, mean_batch, ahead):
        """Method for dense or sparse rows, with the release and the positions of its run."""
        # Messages are sums over rows for "samples" and means for "clients": Algorithms 2 and 3.
        mean_batch = mean_batch if self.weighting == "samples" else None
        # Normalized messages have lost the number of their rows.
        divisor = n_expected * (1.0 if normalizes(self) else mean_batch or 1.0)
        # What a client's own rows say is its own: steps bounded by them reveal nothing to others.
        settings = (shape, loss, steps, divisor, mean_batch, self.average, normalizes(self))
        if not isinstance(rows, SparseRows):
            method = ppsgd(len(ahead.ids), *settings)
            release = JointSum(ahead.mechanism, method.messages)
            return method, {"release": release, "positions": ahead.earlier_at}
        # Callbacks, averages and checks against one long fit read the whole model after each round.
        every_round = self.average or self.warm_start or bool(getattr(self, "_skl_callbacks", []))
        step, lazy = steps.population / divisor, not every_round
        mechanism = ClippedSum(None) if ahead.mechanism is None else ahead.mechanism
        return sparse_ppsgd(rows.pairs, *settings), {
            "release": LateNoise(SparseClippedSum(mechanism), step, lazy),
            "positions": rows.earlier,
            "layout": rows.pairs,
        }

    def _fewest_rounds(self, run, train, alpha):
        """Rounds before which no loss counts as flat: about a pass over each client's rows."""
        # Local steps, smaller by this ratio than the population's, may need more than a pass.
        ratio = 0.0 if math.isinf(alpha) else alpha * run.sampling.rate * len(run.rows.clients)
        sizes, batch_sizes = np.diff(train.offsets), run.rows.schedule.batch_sizes
        return max(np.mean(sizes / batch_sizes) / self._participation, ratio)

    def _design(self, table, earlier):
        """Design matrix and its coordinates, or None if it holds the features as given."""
        design = with_intercept(table.features, self.fit_intercept)
        if not self._reads_scales:
            return design, None
        if earlier is not None:  # models of the rounds before are in theirs
            coordinates: Any = coordinates_in(earlier.state.server)
        elif self.clip_norm is None:
            # Labels are integers, whose predictors are of size 1.
            target = np.abs(table.y).max() if table.y.dtype.kind == "f" else 1.0
            coordinates = standard_coordinates(design, self.fit_intercept, target)
        else:  # a clip norm is in the units of the features as given
            coordinates = Coordinates(np.zeros(design.shape[1]), np.ones(design.shape[1]))
        return coordinates.of(design), coordinates

    def _parts(self, design, y, ahead):
        """Training rows and held-out rows, each in client order."""
        ids, codes = ahead.clients
        rng = np.random.default_rng(ahead.order) if self.shuffle else None
        fraction = self.validation_fraction if ahead.until_flat else 0.0
        parts = split_rows(codes, len(ids), fraction, rng)
        return [DesignRows(chosen_rows(design, rows), y[rows], codes[rows]) for rows in parts]

    def _client_rows(self, part, ahead):
        """Rows of the clients, with the schedule of their batches."""
        design, y, offsets, where = part.design, part.y, part.offsets, ahead.now_at
        sizes = np.diff(offsets)
        # A client with fewer rows than a batch uses all of them in every round.
        batch_sizes = sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)
        rows = design, y, offsets, where, InTurn(batch_sizes)
        if not isinstance(design, csr_array):
            return ClientRows(*rows)
        keys = keys_of(design, np.repeat(where, sizes))
        # Models of earlier rounds stay, also those of features that do not occur any more.
        before = keys[:0]
        if ahead.earlier is not None:
            before = ahead.earlier.layout.among(ahead.earlier_at).keys
        pairs = FeaturePairs(np.union1d(before, keys), design.shape[1])
        return SparseRows(*rows, pairs, pairs.find(keys), pairs.find(before))

    def _learning_rate(self, rows, loss, alpha, n_expected, mean_batch, ahead):
        """Learning rate, and the clients' local steps (m,) if it is "auto", else None."""
        if self.learning_rate == "theory":
            if ahead.is_frozen:
                return self.learning_rate_, None
            # The theorems fix the step for all rounds of a fit in advance.
            last = self._last_round(0)
            return float(theory_learning_rate(self, rows, alpha, n_expected, last)), None
        if self.learning_rate != "auto":
            return float(self.learning_rate), None
        if normalizes(self):
            if ahead.earlier is not None and not ahead.events:  # nothing more is released
                return ahead.earlier.settled["learning_rate_"], None
            z = ahead.mechanism.noise_multiplier
            return public_move(z, self._last_round(0), n_expected), None
        # Rounds that go on keep their rate, as `learning_rate_` is one number for the whole fit.
        rate = None if ahead.earlier is None else ahead.earlier.settled["learning_rate_"]
        return auto_steps(rows, loss, self.weighting, alpha, n_expected, mean_batch, rate)

    def _check_continues(self, earlier):
        """Raise ValueError if the earlier rounds had a model of another shape."""
        server = earlier.state.server
        before = {
            "fit_intercept": len(server["coef"]) > self.n_features_in_,
            "average": "moment" in server,
        }
        for name, value in before.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name}={not value} was {value} in the rounds before, which these rounds "
                    "continue; fit anew, with warm_start=False."
                )
        # Only the rounds of "auto" have a pace, by which a rising loss shortens the steps.
        if self._reads_scales != ("pace" in server):
            raise ValueError(
                f"got learning_rate={self.learning_rate!r}: a number cannot continue the rounds of "
                "'auto', which have features and steps of their own, nor the other way round; fit "
                "anew, with warm_start=False."
            )

    def _rounds_of_a_pass(self, clients):
        """Rounds in which every row is expected to be used once."""
        # The client with most rows needs most rounds; others use theirs more than once.
        most = np.bincount(clients.codes).max()
        n_batches = -(-most // self.batch_size) if self.batch_size else 1
        return math.ceil(n_batches / self._participation)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _checked(self, X, y, earlier, **targets):
        """Checked features, in the form that the earlier rounds have, and targets."""
        options = {"accept_sparse": "csr", "dtype": np.float64, "order": "C", "estimator": self}
        # Earlier rounds have models of pairs or of all features; the rows follow them.
        stored = stored_rows(X) if earlier is None or earlier.layout is None else None
        with numbers_needed(X if stored is None else None, is_private(self)):
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
