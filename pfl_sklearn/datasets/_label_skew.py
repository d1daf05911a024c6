"""Clients that differ in their labels, made from the rows of one table."""

from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_digits
from sklearn.utils import Bunch, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from pfl_sklearn._compat import safe_indexing
from pfl_sklearn._typing import RandomState, TableLike
from pfl_sklearn.datasets._generators import rows_per_client


def make_label_skew_clients(
    X: TableLike,
    y: TableLike,
    n_clients: int = 50,
    classes_per_client: int = 3,
    *,
    n_samples: Any = None,
    random_state: RandomState = None,
) -> Bunch:
    """Distribute the rows of a table over clients with a few of the classes each.

    Parameters
    ----------
    X : array-like of shape (n_rows, ...)
        Rows of any kind: an array of any number of dimensions, a DataFrame, a list.
    y : array-like of shape (n_rows,)
        Labels of the rows, numbers or strings.
    n_clients : int, default=50
        Number of clients.
    classes_per_client : int, default=3
        Number of classes of every client, from 1 to the number of classes.
    n_samples : int or array-like of shape (n_clients,), default=None
        Number of rows of every client, at least `classes_per_client`. None: all rows of the table
        are used, and together the clients must have all classes, so
        ``n_clients * classes_per_client >= n_classes``.
    random_state : int, RandomState instance or None, default=None
        Seed of the split.

    Returns
    -------
    Bunch
        - ``data``: the rows of `X` that are used, of its type; `X` itself, not a copy, if all are;
        - ``target``: ndarray of shape (n,), their labels;
        - ``groups``: ndarray of shape (n,), 0 to n_clients - 1;
        - ``rows``: ndarray of shape (n,), their positions in `X`, in increasing order;
        - ``classes``: ndarray of shape (n_classes,), the sorted labels;
        - ``class_shares``: ndarray of shape (n_clients, n_classes), the expected share of each
          class in a client's rows.

    Raises
    ------
    ValueError
        If a parameter is out of its range, the lengths of `X` and `y` differ, `y` is not one label
        per row, or a class has too few rows for its clients.

    Notes
    -----
    A row belongs to one client at most. Every client has exactly `classes_per_client` classes,
    chosen at random under one condition: the numbers of clients of any two classes differ by one at
    most, and not at all if `n_clients` is a multiple of the number of classes.

    With `n_samples` a client has equally many rows of each of its classes, up to one. Without it,
    the rows of a class are distributed evenly over the clients that have it, so clients are as
    unequal as the classes are.

    This is the "pathological" split of federated learning (McMahan et al., 2017). Ozkara et al.
    (2023) have 50 clients with three of the ten classes of MNIST each, and with four of CIFAR-10.

    References
    ----------
    McMahan, H. B., Moore, E., Ramage, D., Hampson, S. and Agüera y Arcas, B. (2017).
    Communication-efficient learning of deep networks from decentralized data. AISTATS.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_digits
    >>> from pfl_sklearn.datasets import make_label_skew_clients
    >>> X, y = load_digits(return_X_y=True)
    >>> clients = make_label_skew_clients(X, y, 10, 3, n_samples=20, random_state=0)
    >>> clients.data.shape
    (200, 64)
    >>> labels, counts = np.unique(clients.target[clients.groups == 0], return_counts=True)
    >>> labels.tolist(), counts.tolist()
    ([1, 6, 9], [7, 7, 6])
    """
    classes, codes = _encode_classes(X, y)
    _check_label_skew(n_clients, classes_per_client, len(classes), n_samples is None)
    rng = check_random_state(random_state)
    client_classes = _deal_classes(n_clients, classes_per_client, len(classes), rng)
    title = f"{n_clients} clients with {classes_per_client} classes each"
    # One row of each of its classes, to count the clients of a class.
    has = _divide_evenly(np.full(n_clients, classes_per_client), client_classes, len(classes))
    if n_samples is None:
        _check_supply(title, has.sum(axis=0), classes, codes, "classes_per_client")
        # The rows of a class are divided evenly over the clients that have it.
        expected = np.bincount(codes) / has.sum(axis=0) * has
        counts = _round_by_class(expected)
    else:
        sizes = rows_per_client("n_samples", n_samples, n_clients)
        if sizes.min() < classes_per_client:
            raise ValueError(
                f"n_samples must be at least classes_per_client={classes_per_client}; got "
                f"{sizes.min()}."
            )
        expected, counts = has, _divide_evenly(sizes, client_classes, len(classes))
        title = f"{title} and {sizes.sum()} rows"
        _check_supply(title, counts.sum(axis=0), classes, codes, "n_samples")
    shares = expected / expected.sum(axis=1, keepdims=True)
    return _bunch_of_clients(X, classes, codes, counts, shares, rng)


def make_dirichlet_clients(
    X: TableLike,
    y: TableLike,
    n_clients: int = 50,
    concentration: float = 0.3,
    *,
    n_samples: Any = None,
    random_state: RandomState = None,
) -> Bunch:
    r"""Distribute the rows of a table over clients with label distributions from a Dirichlet.

    .. math::

       q_i \sim \operatorname{Dirichlet}(\gamma K p), \qquad
       y \sim q_i \text{ in the rows of client } i,

    with K classes, their shares p in the table, and the concentration :math:`\gamma`. If classes
    are equally frequent, every parameter of the Dirichlet is :math:`\gamma`.

    Parameters
    ----------
    X : array-like of shape (n_rows, ...)
        Rows of any kind: an array of any number of dimensions, a DataFrame, a list.
    y : array-like of shape (n_rows,)
        Labels of the rows, numbers or strings.
    n_clients : int, default=50
        Number of clients, at most the number of rows.
    concentration : float, default=0.3
        Positive :math:`\gamma`. Small: nearly one class per client. Large: all clients are alike.
    n_samples : int or array-like of shape (n_clients,), default=None
        Number of rows of every client, at least 1. None: all rows of the table are used.
    random_state : int, RandomState instance or None, default=None
        Seed of the split.

    Returns
    -------
    Bunch
        - ``data``: the rows of `X` that are used, of its type; `X` itself, not a copy, if all are;
        - ``target``: ndarray of shape (n,), their labels;
        - ``groups``: ndarray of shape (n,), 0 to n_clients - 1;
        - ``rows``: ndarray of shape (n,), their positions in `X`, in increasing order;
        - ``classes``: ndarray of shape (n_classes,), the sorted labels;
        - ``class_shares``: ndarray of shape (n_clients, n_classes), the expected share of each
          class in a client's rows. With `n_samples` these are the :math:`q_i`.

    Raises
    ------
    ValueError
        If a parameter is out of its range, the lengths of `X` and `y` differ, `y` is not one label
        per row, or a class has fewer rows than the clients draw.

    Notes
    -----
    A row belongs to one client at most. With `n_samples` the labels of client i are independent
    draws from :math:`q_i`. A class that runs out is an error: going on with the other classes, as
    is common, gives rows that do not follow :math:`q_i`. The concentration of Hsu et al. (2019) is
    :math:`\gamma K`.

    Without `n_samples` the rows of a class are divided over the clients in proportion to their
    shares of it, :math:`q_{ic} / \sum_j q_{jc}`, rounded to whole rows. Clients differ in size
    then, and the expected shares are those of the quotients. A client that would have no row takes
    one from another client, of the class that it expects most of.

    References
    ----------
    Hsu, T.-M. H., Qi, H. and Brown, M. (2019). Measuring the effects of non-identical data
    distribution for federated visual classification. arXiv:1909.06335.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from pfl_sklearn.datasets import make_dirichlet_clients
    >>> X, y = load_digits(return_X_y=True)
    >>> clients = make_dirichlet_clients(X, y, 10, n_samples=20, random_state=0)
    >>> clients.data.shape, clients.class_shares.shape
    ((200, 64), (10, 10))
    """
    classes, codes = _encode_classes(X, y)
    _check_whole_number("n_clients", n_clients)
    if n_clients > len(codes):
        raise ValueError(
            f"n_clients must be at most the number of rows, {len(codes)}; got {n_clients}."
        )
    if not isinstance(concentration, Real) or not 0 < concentration < np.inf:
        raise ValueError(f"concentration must be a finite number above 0; got {concentration!r}.")
    rng = check_random_state(random_state)
    totals = np.bincount(codes)
    # Every parameter is the concentration itself if classes are equally frequent.
    log_gammas = _log_gammas(concentration * len(classes) * totals / len(codes), n_clients, rng)
    if n_samples is None:
        # Logarithms throughout: with a small concentration most shares are below 1e-300.
        log_rows = np.log(totals) + log_softmax(log_softmax(log_gammas, axis=1), axis=0)
        shares = softmax(log_rows, axis=1)
        counts = _fill_empty_clients(_round_by_class(np.exp(log_rows)), shares)
    else:
        sizes = rows_per_client("n_samples", n_samples, n_clients)
        # Gamma variables over their sum are a Dirichlet draw.
        shares = softmax(log_gammas, axis=1)
        counts = np.array([rng.multinomial(*draw) for draw in zip(sizes, shares, strict=True)])
        title = f"{n_clients} clients with {concentration=} and {sizes.sum()} rows"
        _check_supply(title, counts.sum(axis=0), classes, codes, "n_samples")
    return _bunch_of_clients(X, classes, codes, counts, shares, rng)


def _encode_classes(X, y):
    """Sorted classes (n_classes,) and every row's position among them (n_rows,)."""
    check_consistent_length(X, y)
    check_classification_targets(y)
    return np.unique(column_or_1d(y), return_inverse=True)


def _check_whole_number(name, value):
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}.")


def _check_label_skew(n_clients, classes_per_client, n_classes, all_rows):
    _check_whole_number("n_clients", n_clients)
    _check_whole_number("classes_per_client", classes_per_client)
    if classes_per_client > n_classes:
        raise ValueError(
            f"classes_per_client must be at most {n_classes}, the number of classes; got "
            f"{classes_per_client!r}."
        )
    if all_rows and n_clients * classes_per_client < n_classes:
        raise ValueError(
            f"n_clients * classes_per_client must be at least {n_classes}, so that every class has "
            f"a client; got {n_clients} * {classes_per_client}."
        )


def _check_supply(title, needed, classes, codes, parameter):
    """Refuse clients that need more rows of a class than there are."""
    available = np.bincount(codes)
    worst = np.argmax(needed - available)
    if needed[worst] > available[worst]:
        raise ValueError(
            f"{title} are too many for {available.min()} to {available.max()} rows per class: "
            f"class {classes.tolist()[worst]!r} has {available[worst]} rows and would need "
            f"{needed[worst]}; lower n_clients or {parameter}."
        )


def _deal_classes(n_clients, classes_per_client, n_classes, rng):
    """Classes (n_clients, classes_per_client), different within a client and evenly used.

    Each run of `n_classes` clients starts at all the classes and takes the same steps from there,
    so each class is used equally often; the steps differ between runs. The remaining clients take
    consecutive classes one after the other, which reaches as many classes as possible.
    """
    n_runs, rest = divmod(n_clients, n_classes)
    # Distinct steps, so that no client gets a class twice.
    steps = rng.random((n_runs, n_classes)).argsort(axis=1)[:, :classes_per_client]
    starts = np.arange(n_classes)
    runs = starts[None, :, None] + steps[:, None, :]
    last_clients = classes_per_client * np.arange(rest)[:, None] + np.arange(classes_per_client)
    positions = np.concatenate([runs.reshape(-1, classes_per_client), last_clients])
    return rng.permutation(n_classes)[positions % n_classes]


def _divide_evenly(sizes, dealt, n_classes):
    """Counts (n_clients, n_classes): a client's rows over its classes, the first get the rest."""
    # In a run of clients every class comes first once, second once, and so on: the remainders are
    # even.
    k = dealt.shape[1]
    per_class = sizes[:, None] // k + (np.arange(k) < sizes[:, None] % k)
    counts = np.zeros((len(sizes), n_classes), dtype=np.intp)
    np.put_along_axis(counts, dealt, per_class, axis=1)
    return counts


def _log_gammas(parameters, n_clients, rng):
    """Logarithms (n_clients, n_classes) of gamma variables; those of small parameters underflow."""
    # Gamma(a) is Gamma(a + 1) times the a-th root of a uniform variable.
    size = (n_clients, len(parameters))
    # Dirichlet draws of NumPy divide gamma variables; those of a concentration of .01 are often 0.
    return np.log(rng.gamma(parameters + 1, size=size)) - rng.exponential(size=size) / parameters


def _round_by_class(expected):
    """Whole numbers with the same sums by class, by largest remainder; first clients win ties."""
    counts = np.floor(expected).astype(np.intp)
    remaining = np.rint(expected.sum(axis=0)).astype(np.intp) - counts.sum(axis=0)
    # Ranks of the remainders, the largest first.
    rank = np.argsort(np.argsort(counts - expected, axis=0, kind="stable"), axis=0)
    return counts + (rank < remaining)


def _fill_empty_clients(counts, shares):
    """Give each client without a row one of the class it expects most of and others can spare."""
    counts = counts.copy()
    for client in np.flatnonzero(counts.sum(axis=1) == 0):
        spare = counts * (counts.sum(axis=1, keepdims=True) > 1)
        # One at a time: a client that has given all but one of its rows must not give the last.
        code = np.where(spare.any(axis=0), shares[client], -1).argmax()
        counts[spare[:, code].argmax(), code] -= 1
        counts[client, code] += 1
    return counts


def _bunch_of_clients(X, classes, codes, counts, class_shares, rng):
    groups = _deal_rows(codes, counts, rng)
    rows = np.flatnonzero(groups >= 0)
    return Bunch(
        data=X if len(rows) == len(codes) else safe_indexing(X, rows),
        target=classes[codes[rows]],
        groups=groups[rows],
        rows=rows,
        classes=classes,
        class_shares=class_shares,
    )


def _deal_rows(codes, counts, rng):
    """Client (n_rows,) of every row, -1 for unused rows, from counts (n_clients, n_classes)."""
    # The shuffled rows of a class are dealt in turn, one to each client that still needs one.
    clients, class_codes = np.nonzero(counts)
    copies = counts[clients, class_codes]
    place = np.repeat(np.arange(len(copies)), copies)
    turn = np.arange(len(place)) - np.repeat(np.cumsum(copies) - copies, copies)
    # Sorted by class, then by turn, then by client.
    takers = clients[place[np.lexsort((clients[place], turn, class_codes[place]))]]
    shuffled = rng.permutation(len(codes))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]  # rows by class, shuffled within
    by_class = codes[order]
    n_rows = np.bincount(codes)
    rank = np.arange(len(order)) - (np.cumsum(n_rows) - n_rows)[by_class]
    groups = np.full(len(codes), -1, dtype=np.intp)
    groups[order[rank < counts.sum(axis=0)[by_class]]] = takers
    return groups


_LARGEST_DIGIT_PIXEL = 16.0  # counts of dots in 4 x 4 squares of a bitmap


def load_digits_clients(
    n_clients: int = 20,
    classes_per_client: int = 2,
    *,
    random_state: RandomState = 0,
    return_X_y: bool = False,
    as_frame: bool = False,
) -> Any:
    """Load scikit-learn's digits, distributed over clients with a few of the ten classes each.

    Parameters
    ----------
    n_clients : int, default=20
        Number of clients.
    classes_per_client : int, default=2
        Number of classes of every client, 1 to 10. Together the clients must have all ten, so
        ``n_clients * classes_per_client >= 10``.
    random_state : int, RandomState instance or None, default=0
        Seed of the split; the digits are always the same.
    return_X_y : bool, default=False
        Return ``data, target, groups`` instead of a Bunch.
    as_frame : bool, default=False
        Return `data` as a DataFrame, and `target` and `groups` as Series.

    Returns
    -------
    Bunch
        - ``data``: ndarray of shape (1797, 64), pixels over 16, in [0, 1];
        - ``target``: ndarray of shape (1797,), digits 0 to 9;
        - ``groups``: ndarray of shape (1797,), 0 to n_clients - 1;
        - ``frame``: None, or with `as_frame` a DataFrame that also holds ``target`` and ``client``;
        - ``feature_names``, ``target_names``: lists.

    data, target, groups : as above
        With `return_X_y`.

    Raises
    ------
    ValueError
        If a parameter is not a whole number in its range, or there are too few digits for all
        clients, or too few clients for all classes.

    Notes
    -----
    Row k is row k of :func:`sklearn.datasets.load_digits`. Every row belongs to one client. Classes
    are distributed evenly: exactly if `n_clients` is a multiple of ten, otherwise up to one client.
    The rows of a class are distributed evenly over the clients that have it. The scale, 16, is the
    largest possible pixel value; it is not taken from the data.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.datasets import load_digits_clients
    >>> digits = load_digits_clients(5, classes_per_client=2)
    >>> [np.unique(digits.target[digits.groups == k]).tolist() for k in range(5)]
    [[2, 8], [4, 9], [1, 6], [3, 7], [0, 5]]
    """
    digits = load_digits(as_frame=as_frame)
    groups = make_label_skew_clients(
        digits.data, digits.target, n_clients, classes_per_client, random_state=random_state
    ).groups
    data, target, frame = digits.data / _LARGEST_DIGIT_PIXEL, digits.target, None
    if as_frame:
        groups = pd.Series(groups, name="client")
        frame = pd.concat([data, target, groups], axis=1)
    if return_X_y:
        return data, target, groups
    return Bunch(
        data=data,
        target=target,
        groups=groups,
        frame=frame,
        feature_names=digits.feature_names,
        target_names=digits.target_names.tolist(),
    )
