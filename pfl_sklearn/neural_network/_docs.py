"""Texts that the docstrings of neural estimators share."""

from pfl_sklearn._docs import ROUNDS

NEURAL = {
    **ROUNDS,
    "classes": """
        classes_ : ndarray of shape (n_classes,)
            Sorted class labels.
        """,
    "label_prior_attribute": """
        label_prior_ : DirichletPrior, SparseDirichletPrior or another label prior
            Fitted prior of the label frequencies. Only with `label_prior`.
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
