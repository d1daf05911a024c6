"""Public tables of small images, which do not ship with the package."""

import hashlib
import os
import string
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import Bunch

from pfl_sklearn._warnings import warn_caller

DATA_VARIABLE = "PFL_SKLEARN_DATA"


class PublicTable(NamedTuple):
    """A file, its checksum, what it holds, and a clause that says where its data are published."""

    file: str
    sha256: str
    contents: str
    source: str


def find_table(table: PublicTable, data_home: Any) -> Path:
    """Path of a table's file; a public function's caller is warned if its checksum differs."""
    # What is given goes before what the environment says.
    folder = data_home or os.environ.get(DATA_VARIABLE)
    path = Path(folder or ".") / table.file
    if not folder or not path.is_file():
        raise FileNotFoundError(
            f"no {table.file} in {folder or f'data_home or {DATA_VARIABLE}'}: give the folder of "
            f"{table.contents} as data_home or in {DATA_VARIABLE}; {table.source}."
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != table.sha256:  # a table of one's own is fine, but its figures will differ
        message = f"{path} is not the table that the documentation's figures were made with."
        warn_caller(message, UserWarning)
    return path


_LARGEST_BYTE = 255
_SUBSETS = {"all": ("train", "test"), "train": ("train",), "test": ("test",)}
_DIGITS = list(string.digits)
# In the order of LEAF's labels.
_CHARACTERS = list(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer"]
_CIFAR_CLASSES += ["dog", "frog", "horse", "ship", "truck"]

_MNIST = PublicTable(
    file="mnist.npz",
    sha256="d2fc8bab397b964798b4c839bd1e705e10a4bb65f4d56a88002229d145796751",
    contents="a file with the arrays X_train and X_test (uint8, n x 28 x 28), y_train and y_test",
    source="the images are published at http://yann.lecun.com/exdb/mnist and, as PNG files, at "
    "https://github.com/rasbt/mnist-pngs",
)
_FEMNIST = PublicTable(
    file="femnist_206writers.npz",
    sha256="4ec7e5f331f27be79cb50375a1db166e552da84fade2c2c45521a821aa264ad9",
    contents="a file with the arrays X (uint8, n x 28 x 28, background 0), y (0 to 61) and writer",
    source="it is made from the LEAF benchmark (https://leaf.cmu.edu), as sampled in "
    "https://github.com/s-huu/PMTL",
)
_CIFAR10 = PublicTable(
    file="cifar10_subset10k.npz",
    sha256="329511cf98cb59716c1ae0fd05f86bc8bc4b6df37b601686e9ccf62ebf8a69f7",
    contents="a file with the arrays X_train and X_test (uint8, n x 32 x 32 x 3), y_train and "
    "y_test",
    source="the images are published at https://www.cs.toronto.edu/~kriz/cifar.html",
)


def fetch_mnist(*, subset: str = "all", data_home: Any = None, return_X_y: bool = False) -> Any:
    """Read MNIST: 70,000 handwritten digits.

    The file does not ship with the package, and nothing is downloaded.

    Parameters
    ----------
    subset : {"all", "train", "test"}, default="all"
        Which images to read. "all" has the training images first.
    data_home : str or path, default=None
        Folder with ``mnist.npz``. None: the environment variable ``PFL_SKLEARN_DATA``.
    return_X_y : bool, default=False
        Return a tuple instead of a Bunch.

    Returns
    -------
    Bunch
        - ``data``: float32 ndarray of shape (n, 1, 28, 28) in [0, 1], background 0; n is 70,000,
          60,000 or 10,000;
        - ``target``: int64 ndarray of shape (n,), 0 to 9;
        - ``target_names``: list of the ten digits.

    data, target : as above
        With `return_X_y`.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If `subset` is unknown, or the file lacks an array or has one of another shape or type.

    Notes
    -----
    Order and split are the official ones. All images take 220 MB. Pixels are divided by 255, their
    largest possible value, not by a value from the data. A file with another checksum is read with
    a warning. License: usually given as CC BY-SA 3.0; the digits come from NIST's Special Databases
    1 and 3.

    References
    ----------
    LeCun, Y., Bottou, L., Bengio, Y. and Haffner, P. (1998). Gradient-based learning applied to
    document recognition. Proceedings of the IEEE, 86, 2278-2324.

    Examples
    --------
    >>> from pfl_sklearn.datasets import fetch_mnist
    >>> fetch_mnist(data_home="/nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: no mnist.npz in /nowhere: ...
    """
    images, labels = _read_parts(_MNIST, data_home, subset, (28, 28), len(_DIGITS))
    # One channel, of grey: networks take channels first.
    return _image_bunch(images[:, None], labels, _DIGITS, return_X_y)


def fetch_femnist(*, data_home: Any = None, return_X_y: bool = False) -> Any:
    """Read 6,237 handwritten digits and letters of 206 writers, a part of FEMNIST.

    The file does not ship with the package, and nothing is downloaded.

    Parameters
    ----------
    data_home : str or path, default=None
        Folder with ``femnist_206writers.npz``. None: the environment variable ``PFL_SKLEARN_DATA``.
    return_X_y : bool, default=False
        Return a tuple instead of a Bunch.

    Returns
    -------
    Bunch
        - ``data``: float32 ndarray of shape (6237, 1, 28, 28) in [0, 1], background 0;
        - ``target``: int64 ndarray of shape (6237,): 0 to 9 digits, 10 to 35 capitals, 36 to 61
          small letters;
        - ``groups``: int64 ndarray of shape (6237,), writers 0 to 205;
        - ``target_names``: list of the 62 characters.

    data, target, groups : as above
        With `return_X_y`.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file lacks an array, or has one of another shape or type.

    Notes
    -----
    Writers have 5 to 69 images, 28 in the median; 189 have 20 or more. These are the test images of
    a sample of LEAF's FEMNIST, without LEAF's division into training and test images; divide them
    with :class:`~pfl_sklearn.model_selection.ClientShuffleSplit`. LEAF has white backgrounds; here
    the background is 0, as in MNIST. Pixels are divided by 255, their largest possible value, not
    by a value from the data. A file with another checksum is read with a warning. License: the
    images come from NIST's Special Database 19, a work of the US government. LEAF's code is
    published under BSD-2; the sample has no license of its own.

    References
    ----------
    Caldas, S., Duddu, S. M. K., Wu, P., Li, T., Konečný, J., McMahan, H. B., Smith, V. and
    Talwalkar, A. (2018). LEAF: a benchmark for federated settings. arXiv:1812.01097.

    Examples
    --------
    >>> from pfl_sklearn.datasets import fetch_femnist
    >>> fetch_femnist(data_home="/nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: no femnist_206writers.npz in /nowhere: ...
    """
    path = find_table(_FEMNIST, data_home)
    X, y, writer = _read_arrays(path, ["X", "y", "writer"])
    _check_images(path, "X", X, (28, 28))
    labels = _check_labels(path, "y", y, len(X), len(_CHARACTERS))
    groups = _check_labels(path, "writer", writer, len(X))
    # One channel, of grey: networks take channels first.
    return _image_bunch(X[:, None], labels, _CHARACTERS, return_X_y, groups=groups)


def fetch_cifar10(*, subset: str = "all", data_home: Any = None, return_X_y: bool = False) -> Any:
    """Read 10,000 of the 60,000 color images of CIFAR-10.

    The file does not ship with the package, and nothing is downloaded.

    Parameters
    ----------
    subset : {"all", "train", "test"}, default="all"
        Which images to read. "all" has the training images first.
    data_home : str or path, default=None
        Folder with ``cifar10_subset10k.npz``. None: the environment variable ``PFL_SKLEARN_DATA``.
    return_X_y : bool, default=False
        Return a tuple instead of a Bunch.

    Returns
    -------
    Bunch
        - ``data``: float32 ndarray of shape (n, 3, 32, 32) in [0, 1], channels red, green, blue; n
          is 10,000, 8,000 or 2,000;
        - ``target``: int64 ndarray of shape (n,), 0 to 9;
        - ``target_names``: list of the ten classes, from airplane to truck.

    data, target : as above
        With `return_X_y`.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If `subset` is unknown, or the file lacks an array or has one of another shape or type.

    Notes
    -----
    800 training and 200 test images of every class were drawn at random from all images, so the
    split is not the official one, and accuracies do not compare with published ones. All images
    take 123 MB. Pixels are divided by 255, their largest possible value, not by a value from the
    data. A file with another checksum is read with a warning. License: the authors state none, and
    ask to cite the report below.

    References
    ----------
    Krizhevsky, A. (2009). Learning multiple layers of features from tiny images. Technical report,
    University of Toronto.

    Examples
    --------
    >>> from pfl_sklearn.datasets import fetch_cifar10
    >>> fetch_cifar10(data_home="/nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: no cifar10_subset10k.npz in /nowhere: ...
    """
    images, labels = _read_parts(_CIFAR10, data_home, subset, (32, 32, 3), len(_CIFAR_CLASSES))
    # Networks take channels first.
    return _image_bunch(images.transpose(0, 3, 1, 2), labels, _CIFAR_CLASSES, return_X_y)


def _read_parts(table, data_home, subset, shape, n_classes):
    """Images (n, *shape) and labels (n,) of a subset, training images first."""
    if subset not in _SUBSETS:
        raise ValueError(f"subset must be one of {', '.join(_SUBSETS)}; got {subset!r}.")
    path, images, labels = find_table(table, data_home), [], []
    for part in _SUBSETS[subset]:
        X, y = _read_arrays(path, [f"X_{part}", f"y_{part}"])
        _check_images(path, f"X_{part}", X, shape)
        images.append(X)
        labels.append(_check_labels(path, f"y_{part}", y, len(X), n_classes))
    return np.concatenate(images), np.concatenate(labels)


def _read_arrays(path, names):
    """The named arrays of a file."""
    # Without pickled objects, NumPy's default: a file of somebody else's runs no code.
    with np.load(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise ValueError(f"{path} lacks the arrays {', '.join(missing)}.")
        return [file[name] for name in names]


def _check_images(path, name, images, shape):
    """Refuse another type or shape: a table of one's own must look like the public one."""
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        expected = ", ".join(map(str, shape))
        raise ValueError(
            f"{path}: {name} must be uint8 of shape (n, {expected}); got {images.dtype} of shape "
            f"{images.shape}."
        )


def _check_labels(path, name, values, n, n_classes=None):
    """Values (n,) as int64, from 0 to n_classes - 1."""
    if values.dtype.kind not in "iu" or values.shape != (n,):
        raise ValueError(
            f"{path}: {name} must be {n} whole numbers; got {values.dtype} of shape {values.shape}."
        )
    # An empty part has no smallest label.
    if n_classes is not None and n and not 0 <= values.min() <= values.max() < n_classes:
        raise ValueError(
            f"{path}: {name} must be from 0 to {n_classes - 1}; got {values.min()} to "
            f"{values.max()}."
        )
    # One type whatever the file has: torch takes labels as int64 alone.
    return values.astype(np.int64)


def _image_bunch(images, labels, names, return_X_y, **groups):
    # In float32 at once: quotients of whole numbers are float64, arrays of twice the size.
    data = np.divide(images, _LARGEST_BYTE, dtype=np.float32, order="C")
    if return_X_y:
        return data, labels, *groups.values()
    return Bunch(data=data, target=labels, **groups, target_names=list(names))
