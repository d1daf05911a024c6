"""AdaMix on networks: every client has a network near one of several centres."""

from functools import partial

import numpy as np
from scipy.special import softmax

from pfl_sklearn._parameters import AT_LEAST_ONE, NOT_NEGATIVE, parameter, with_parameters
from pfl_sklearn._rounds.loop import Method, Update
from pfl_sklearn.neural_network._base import BaseNeural
from pfl_sklearn.neural_network._engine._averaging import (
    n_components_for,
    running_shares,
    train,
    untrained,
)
from pfl_sklearn.neural_network._engine._targets import NeuralClassifierMixin, NeuralRegressorMixin

_SMALLEST_SHARE_IN_CLIENTS = (
    0.1  # clients in a centre, by its share: so few that others outweigh it at once
)


def adamix(setup, n_components, proximal):
    """AdaMix as a method: clients have their nets, the server has the centres and their shares."""
    engine = setup.engines.client
    n, p = n_components, engine.n_parameters

    def init():
        start = engine.start()
        server = {"global": start, "centres": np.tile(start, (n, 1)), "shares": np.full(n, 1 / n)}
        # Centres come to differ because the clients of the first round belong to them by chance.
        rng = np.random.default_rng(None if setup.seed is None else (*setup.seed, 1))
        chance = rng.dirichlet(np.ones(n), setup.n_clients)
        equal = np.full((setup.n_clients, n), 1 / n)
        return server, {**untrained(setup), "belongs": equal, "chance": chance}

    def server_update(server, total, t):
        # Centres of less than a client, of which little or only noise is known, move little.
        centres = server["centres"] + total["centres"] / np.maximum(total["belongs"], 1.0)[:, None]
        counts = np.maximum(total["belongs"], 0.0)
        shares = running_shares(server["shares"], counts, setup.n_clients)
        # A share of 0 would stay 0, as its logarithm is minus infinity.
        shares = np.maximum(shares, _SMALLEST_SHARE_IN_CLIENTS / setup.n_clients)
        shares = shares / shares.sum()
        return {"global": shares @ centres, "centres": centres, "shares": shares}

    update = partial(setup.engines.update, partial(adamix_steps, setup, proximal))
    shapes = setup.shapes(centres=(n, p), belongs=(n,))
    # They follow from the rows of this call, so those of earlier calls are out of date.
    constants = {"n_rows": setup.n_rows.astype(float)}
    return Method(init, update, server_update, shapes, constants=constants)


def adamix_steps(setup, proximal, server, t, block):
    """Nets of a block's clients, and what the centres are to learn of them."""
    clients, engine = block.clients, setup.engines.client
    together = (server["centres"] == server["centres"][0]).all()
    # Not a product of matrices, whose last bits depend on the block.
    centre = np.einsum("gm,mp->gp", clients["belongs"], server["centres"])
    centre = centre.astype(engine.array_dtype)
    models, losses = train(
        engine, block, clients["personal"], setup.rates[t], proximal, personal=True, towards=centre
    )
    nets = models.array()
    away = nets[:, None] - server["centres"]
    # Running statistics are no parameters, and have no density under the prior.
    near = responsibilities_at(away[:, :, : engine.n_trained], server, proximal, clients["n_rows"])
    belongs = clients["chance"] if together else near
    message = {"centres": belongs[:, :, None] * away, "belongs": belongs}
    started = np.ones(block.n_clients, dtype=bool)
    new = {**clients, "personal": nets, "started": started, "belongs": belongs}
    return Update(setup.message(**message), new, losses)


def responsibilities_at(away, server, proximal, n_rows):
    """How much (g, M) clients belong to each centre, at differences (g, M, p) from them."""
    square = np.einsum("gmp,gmp->gm", away, away)
    return softmax(np.log(server["shares"]) - 0.5 * proximal * n_rows[:, None] * square, axis=1)


@with_parameters
class _AdaMixNet:
    r"""AdaMix on networks: every client has a network near one of several centres.

    Groups of clients form by themselves.

    Attributes
    ----------
    responsibilities_ : ndarray of shape (n_clients, n_components)
        How much each client belongs to each centre; equally, if it never took part.

    See Also
    --------
    FedEM%(kind)s : clients mix global networks instead.

    Notes
    -----
    The prior of Section 3.1 of Ozkara et al. (2023), a mixture of Gaussian distributions of the
    clients' parameters, on networks. The paper also estimates its variances together with the
    networks, and that joint density grows without bound where all networks of a component agree:
    here `proximal` gives the variance, and centres and their shares are estimated. In every round a
    sampled client trains its own network with a pull towards the mean of the centres that it
    belongs to, finds how much it belongs to each, and sends its weighted differences from the
    centres and these weights. As long as the centres are equal, weights are drawn at random, so
    that the centres separate. A centre moves by the weighted mean of the differences, over a total
    weight of at least one client. Shares are running averages, none below a tenth of a client. How
    much a client belongs to a centre depends on the number of its rows in this call of ``fit`` or
    ``partial_fit``. The population's network is the weighted mean of the centres; a client that
    never took part has it, and one that comes later starts from it. With noise the differences and
    the weights are clipped together, as one vector, and get noise once.

    Memory: one vector of parameters for each client; a round needs M + 3 for each client of a
    block, and two messages of M vectors for each sampled client.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.
    """

    n_components: int | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, None],
        text="""
            int >= 1 or None
                Number of centres, at most the number of clients. None: 2, but 1 for a single
                client, and as many as before if the rounds go on.
            """,
    )
    proximal: float = parameter(
        default=1.0,
        ranges=[NOT_NEGATIVE],
        text="""
            float >= 0
                Weight of half the squared distance between a client's network and its centres in
                its mean loss, by an implicit step. It is the precision of the prior over the number
                of rows.
            """,
    )
    _clients_keep = "net"
    _client_results = {"responsibilities_": "belongs"}
    _equal_clients = "whose centres count clients"
    _plain_server = "whose centres are weighted means of the clients' nets"

    def _method(self, setup):
        n_before = None if setup.before is None else len(setup.before.server["centres"])
        n_components = n_components_for(self.n_components, setup.n_clients, n_before)
        return adamix(setup, n_components, self.proximal)


@with_parameters
class AdaMixNetClassifier(NeuralClassifierMixin, _AdaMixNet, BaseNeural):
    r"""Classification by AdaMix: a net of its own for every client, near one of several centres.

    Examples
    --------
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> from pfl_sklearn.neural_network import AdaMixNetClassifier
    >>> digits = load_digits_clients(10, classes_per_client=3)
    >>> model = AdaMixNetClassifier(n_rounds=10, random_state=0)
    >>> model = model.fit(digits.data, digits.target, groups=digits.groups)
    >>> model.score(digits.data, digits.target, groups=digits.groups) > 0.95
    True
    """


@with_parameters
class AdaMixNetRegressor(NeuralRegressorMixin, _AdaMixNet, BaseNeural):
    """Regression by AdaMix: a network of its own for every client, near one of several centres."""
