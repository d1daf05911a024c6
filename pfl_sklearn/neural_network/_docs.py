"""Texts that the docstrings of neural estimators share."""

from pfl_sklearn._docs import ROUNDS

NEURAL = {
    **ROUNDS,
    "recipe": """
        estimator : skorch net or None, default=None
            Recipe of the net: a ``skorch.NeuralNetClassifier`` (or ``NeuralNetRegressor``) that was
            not initialized. Its module, criterion, optimizer, ``lr``, ``batch_size`` (-1: all
            rows), ``device`` and ``predict_nonlinearity`` are used, and an
            ``LRScheduler`` among its callbacks is stepped once a round. What rounds have no use for
            (``max_epochs``, ``train_split``, other callbacks, ``verbose``) has to keep its default.
            Search its parameters as ``estimator__lr`` or ``estimator__module__hidden``. None: a
            :class:`MLP` of 64 hidden units.
        """,
    "rounds": """
        n_rounds : int or None, default=100
            Rounds of communication. None: ``fit`` goes on until the loss of held-out rows is flat,
            and returns the nets with the lowest loss; see the notes. With noise the data must have
            no say in it, and None is 100 rounds.
        """,
    "max_rounds": """
        max_rounds : int, default=1000
            Rounds after which ``fit`` ends with a ``ConvergenceWarning`` if the loss is not flat.
        """,
    "steps": """
        local_steps : int >= 1, default=10
            Gradient steps of a sampled client in a round, on batches of ``batch_size`` rows of the
            net, or all its rows if it has fewer. Momentum starts anew in every round.
        """,
    "label_prior": """
        label_prior : None, "client", DirichletPrior or SparseDirichletPrior, default=None
            Prior of the clients' label frequencies. Probabilities are multiplied by a client's
            frequency of each label over the population's, and made to sum to 1; nets that clients
            keep as their own are trained through this. "client" estimates a
            :class:`~pfl_sklearn.priors.SparseDirichletPrior`; with noise it is the flat
            Dirichlet prior, whose parameters are all 1, which is known. With noise, what a
            :class:`~pfl_sklearn.priors.DirichletPrior` leaves unknown is estimated from one noisy
            sum over all clients, which takes a part of epsilon and which further calls keep; other
            priors have to be known. What you give must not come from these data.
        """,
    "label_prior_share": """
        label_prior_share : float in (0, 1) or None, default=None
            Share of the budget that the noisy sum for an unknown ``DirichletPrior`` takes: of the
            squared parameter mu of Gaussian DP that belongs to `epsilon` and `delta`. The rounds
            have the rest. With `noise_multiplier` it is the share of what the sum and `n_rounds`
            rounds spend together, in the limit of many rounds. None: 0.05. Without noise it has no
            effect.
        """,
    "label_prior_attribute": """
        label_prior_ : DirichletPrior, SparseDirichletPrior or another label prior
            Fitted prior of the label frequencies. Only with `label_prior`.
        """,
    "nothing_sent": """
        epsilon : float in (0, inf], default=inf
            Nothing is sent, so nothing gets noise, and under any finite value the report states an
            epsilon of 0. What a finite value does change is that nothing is taken from the rows of
            all clients together: the default net works in the units that the features have,
            ``BatchNorm`` is refused, and a client whose loss is not finite keeps its net rather
            than ends the fit. With inf those units come from all rows, and the report promises
            nothing.
        noise_multiplier : float or None, default=None
            A value above 0 does what a finite `epsilon` does; which one has no effect.
        delta : float in [0, 1), default=1e-5
            Has no effect.
        clip_norm : float or None, default=None
            Has no effect: there are no messages to clip.
        clip_quantile : float in (0, 1) or None, default=None
            Has no effect, but is refused without `clip_norm`, as in other methods.
        ledger : PrivacyLedger or None, default=None
            File that records each fit. One with a finite `epsilon` spends nothing there; one
            without is recorded as unprotected.
        """,
    "labels_at_most": """
        epsilon : float in (0, inf], default=inf
            Only the noisy sum for an unknown `label_prior` has a use for it, and takes all of it.
            Otherwise nothing is sent, so nothing gets noise, and the report states an epsilon of 0
            under any finite value. What a finite value does change is that nothing is taken from
            the rows of all clients together: the default net works in the units that the features
            have, ``BatchNorm`` is refused, and a client whose loss is not finite keeps its net
            rather than ends the fit. With inf those units come from all rows, and the report
            promises nothing.
        noise_multiplier : float or None, default=None
            Standard deviation of the noise on that sum over its sensitivity, :math:`\\sqrt 2`.
            Without the sum a value above 0 does what a finite `epsilon` does.
        delta : float in [0, 1), default=1e-5
            That of the noisy sum, for which it has to be above 0; otherwise without effect.
        clip_norm : float or None, default=None
            Has no effect: there are no messages to clip.
        clip_quantile : float in (0, 1) or None, default=None
            Has no effect, but is refused without `clip_norm`, as in other methods.
        ledger : PrivacyLedger or None, default=None
            File that records each fit. One with a finite `epsilon` spends what the noisy sum
            spends; one without is recorded as unprotected.
        """,
    "warm_start": """
        warm_start : bool, default=False
            Let ``fit`` continue to `n_rounds` rounds in all, with the noise multiplier that it had
            unless another is given.
        """,
    "net_attributes": """
        parameters_ : ndarray of shape (n_clients, p)
            Parameters of the clients' nets, in the order of the module's; buffers that training
            moves come last.
        population_parameters_ : ndarray of shape (p,)
            Those of the population's net.
        net_ : skorch net
            Fitted net: the population's, or the client's if the estimator has only one client, as
            those of ``for_client`` have. Built when asked for. Its classes are positions in
            ``classes_``.
        """,
    "common_notes": """
        Rows may have any shape that the module takes. A fit holds a copy of them in the type of the
        module's parameters, float32 unless the module says otherwise; integers stay integers if the
        module has an embedding. Values are not scaled on the way: images of type uint8 reach a
        module as 0.0 to 255.0, so divide them by 255 first. Only the default net, in a fit without
        noise, brings features to standard units by itself. Lazy layers take their sizes from the
        rows. For one response a module may give outputs of shape (n,) or (n, 1).

        Initial weights come from `random_state`, and torch's global generators are left as they
        were. If the recipe holds a module instance, training starts from a copy of it.

        Clients are trained in blocks. Chains of linear layers with rectifiers, tanh or softmax
        between them run for a whole block at once if batches have at most 128 rows; other modules
        run client by client. Buffers that training moves, such as the running statistics of
        ``BatchNorm``, are averaged like parameters; with noise they are refused. Every client
        counts equally, whatever its number of rows. Without `clip_norm` the server divides by the
        number of clients that took part, with it by the expected number.

        In a fit with noise no exception that the net raises on the rows of a client ends the fit:
        the client counts as 0 and keeps the net that it had. A ``RuntimeWarning`` at the end names
        the classes of such exceptions, but neither clients nor values. The noise does not cover
        this warning, so do not publish it.

        With ``n_rounds=None`` the loss is that of the recipe's criterion, on the held-out rows of
        each client, for the net that the client would predict with; under `label_prior` with the
        label frequencies of its other rows. It is looked at whenever the rounds have grown by a
        quarter, and is not taken for flat before 30 rounds, nor before each client took part in
        about ten. Held-out rows take no part in the rounds, apart from the units of the default
        net. Whatever clients do after the rounds they do on all rows, and the label frequencies
        that they predict with are those of all rows. If the rounds only do harm, ``n_rounds_`` is 0
        and nets are as they started. The best nets so far are kept, which takes as much memory
        again as the clients' nets. For criteria other than cross-entropy, squared and
        absolute error any decrease of the loss counts, whatever `tol` is.
        """,
}
