"""Public tables of images."""

import numpy as np
import pytest

from pfl_sklearn.datasets import fetch_cifar10, fetch_femnist, fetch_mnist

FILES = {
    fetch_mnist: "mnist.npz",
    fetch_femnist: "femnist_206writers.npz",
    fetch_cifar10: "cifar10_subset10k.npz",
}
SPLIT = [fetch_mnist, fetch_cifar10]
another_file = pytest.mark.filterwarnings("ignore:.*documentation:UserWarning")


def arrays_of(fetch):
    """Small arrays as in the file that a function reads."""
    rng = np.random.default_rng(0)
    shape = (32, 32, 3) if fetch is fetch_cifar10 else (28, 28)
    images = rng.integers(0, 256, size=(7, *shape), dtype=np.uint8)
    labels = np.arange(7, dtype=np.uint8)
    if fetch is fetch_femnist:
        return {"X": images, "y": labels + 50, "writer": np.arange(7, dtype=np.int16) // 2}
    return {
        "X_train": images[:4],
        "y_train": labels[:4],
        "X_test": images[4:],
        "y_test": labels[4:],
    }


def write(folder, fetch, **changed):
    arrays = {k: v for k, v in (arrays_of(fetch) | changed).items() if v is not None}
    np.savez(folder / FILES[fetch], **arrays)
    return arrays


@pytest.mark.parametrize("fetch", FILES)
def test_images_that_are_not_there(fetch, tmp_path, monkeypatch):
    monkeypatch.delenv("PFL_SKLEARN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=f"{FILES[fetch]}.*data_home.*PFL_SKLEARN_DATA"):
        fetch()
    with pytest.raises(FileNotFoundError, match=f"{FILES[fetch]}.*{tmp_path}.*uint8.*https://"):
        fetch(data_home=tmp_path)


@pytest.mark.parametrize("fetch", FILES)
def test_another_file_is_read_with_a_warning(fetch, tmp_path, monkeypatch):
    write(tmp_path, fetch)
    monkeypatch.setenv("PFL_SKLEARN_DATA", str(tmp_path))
    with pytest.warns(UserWarning, match=f"{FILES[fetch]}.*documentation") as caught:
        images = fetch()
    assert caught[0].filename == __file__
    assert len(images.data) == 7
    assert images.data.dtype == np.float32
    assert images.target.dtype == np.int64
    assert images.data.flags.c_contiguous


@another_file
@pytest.mark.parametrize("fetch", SPLIT)
def test_subsets(fetch, tmp_path):
    arrays = write(tmp_path, fetch)
    raw = np.concatenate([arrays["X_train"], arrays["X_test"]])
    channels = raw[:, None] if fetch is fetch_mnist else np.moveaxis(raw, 3, 1)
    for subset, rows in (("all", slice(7)), ("train", slice(4)), ("test", slice(4, 7))):
        images = fetch(subset=subset, data_home=tmp_path)
        np.testing.assert_array_equal(images.data, channels[rows] / np.float32(255))
        assert images.target.tolist() == list(range(7))[rows]
        data, target = fetch(subset=subset, data_home=tmp_path, return_X_y=True)
        np.testing.assert_array_equal(data, images.data)
        np.testing.assert_array_equal(target, images.target)
    with pytest.raises(ValueError, match=r"subset.*all.*train.*test.*'valid'"):
        fetch(subset="valid", data_home=tmp_path)


@another_file
def test_writers(tmp_path):
    arrays = write(tmp_path, fetch_femnist)
    letters = fetch_femnist(data_home=tmp_path)
    np.testing.assert_array_equal(letters.data[:, 0], arrays["X"] / np.float32(255))
    assert letters.groups.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert [letters.target_names[k] for k in letters.target] == list("opqrstu")
    for given, wanted in zip(
        fetch_femnist(data_home=tmp_path, return_X_y=True),
        (letters.data, letters.target, letters.groups),
        strict=True,
    ):
        np.testing.assert_array_equal(given, wanted)


@another_file
@pytest.mark.parametrize("fetch", FILES)
def test_files_of_another_shape(fetch, tmp_path):
    arrays = arrays_of(fetch)
    X, y, last = ("X", "y", 61) if fetch is fetch_femnist else ("X_test", "y_test", 9)
    wrong = [
        ({X: None, y: None}, f"{X}, {y}"),
        ({X: arrays[X][:, :-1]}, rf"{X}.*uint8.*\(n, (\d+), \1.*{arrays[X].shape[1] - 1}"),
        ({X: arrays[X].astype(float)}, f"{X}.*uint8.*float64"),
        ({y: arrays[y][:-1]}, f"{y}.*{len(arrays[y])}.*{len(arrays[y]) - 1}"),
        ({y: arrays[y] + np.uint8(60)}, rf"{y}.* 0 to {last}.*\b{arrays[y].max() + 60}\b"),
        ({y: arrays[y].astype(str)}, f"{y}.*whole numbers.*<U"),
    ]
    if fetch is fetch_femnist:
        wrong.append(({"writer": arrays["writer"][1:]}, r"writer.*\b7\b.*\b6\b"))
    for changed, message in wrong:
        write(tmp_path, fetch, **changed)
        with pytest.raises(ValueError, match=f"{FILES[fetch]}.*{message}"):
            fetch(data_home=tmp_path)


@pytest.mark.slow
def test_mnist(data_home):
    """Counts by digit and the pixels' moments, as published."""
    train = fetch_mnist(subset="train", data_home=data_home)
    assert train.data.shape == (60_000, 1, 28, 28)
    digits = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(train.target).tolist() == digits
    assert train.data.mean(dtype=float) == pytest.approx(0.1307, abs=5e-5)
    assert train.data.std(dtype=float) == pytest.approx(0.3081, abs=5e-5)
    test = fetch_mnist(subset="test", data_home=data_home)
    assert test.data.shape == (10_000, 1, 28, 28)
    digits = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(test.target).tolist() == digits
    assert (test.data.min(), test.data.max()) == (0, 1)
    assert test.target_names == list("0123456789")


def test_cifar10(data_home):
    images = fetch_cifar10(data_home=data_home)
    assert images.data.shape == (10_000, 3, 32, 32)
    assert np.bincount(images.target[:8000]).tolist() == [800] * 10
    assert np.bincount(images.target[8000:]).tolist() == [200] * 10
    # Published for the full training set; six standard errors of 10,000 images.
    channels = images.data.mean(axis=(0, 2, 3), dtype=float)
    np.testing.assert_allclose(channels, [0.4914, 0.4822, 0.4465], atol=6 * 0.14 / 100)
    # Ships are on blue, deer are not.
    blue = images.data[:, 2].mean(axis=(1, 2)) - images.data[:, 0].mean(axis=(1, 2))
    names = np.array(images.target_names)[images.target]
    assert blue[names == "ship"].mean() > 0 > blue[names == "deer"].mean()


def test_femnist(data_home):
    letters = fetch_femnist(data_home=data_home)
    assert letters.data.shape == (6237, 1, 28, 28)
    sizes = np.bincount(letters.groups)
    assert (len(sizes), sizes.min(), np.median(sizes), sizes.max()) == (206, 5, 28, 69)
    assert np.sum(sizes >= 20) == 189
    assert np.sum(letters.target < 10) == 3679
    assert len(letters.target_names) == 62
    assert (letters.data.min(), letters.data.max()) == (0, 1)
    # An l is thinner than an M.
    ink = {
        name: letters.data[letters.target == code].mean()
        for code, name in enumerate(letters.target_names)
    }
    assert ink["l"] < 0.6 * ink["M"]
