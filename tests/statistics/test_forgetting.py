"""Statistics and models without clients who ask for that, and parts that count once."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import PersonalizedLinearRegression
from pfl_sklearn.statistics import ClientStatistics

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"x": RNG.normal(size=80), "g": np.tile(["a", "b", "c", "d"], 20)})
FRAME["y"] = FRAME["x"] + RNG.normal(size=80)
COLUMNS = {"groups": "g", "target": "y", "features": ["x"]}
KEPT = ClientStatistics.from_frame(FRAME, **COLUMNS)
CLIENT_FIELDS = ("clients", "n_samples_per_client", "packed", "log_weights", "lowest", "highest")


def test_statistics_without_a_client_are_those_of_the_others():
    others = ClientStatistics.from_frame(FRAME[FRAME["g"] != "b"], **COLUMNS)
    for clients in (["b"], np.array(["b", "b"]), pd.Series(["b"])):
        kept = KEPT.without(clients)
        for name in CLIENT_FIELDS:
            np.testing.assert_array_equal(getattr(kept, name), getattr(others, name))
    assert KEPT.clients.tolist() == ["a", "b", "c", "d"]
    assert KEPT.without(["b", "z"], unknown="ignore").clients.tolist() == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("clients", "options", "match"),
    [
        (["b", "z"], {}, "1 ids that are not in the statistics, such as 'z'"),
        ([1], {"unknown": "ignore"}, "number ids.*the statistics have string"),
        ("b", {}, "list of ids; got 'b'"),
        (["b"], {"unknown": "drop"}, "'error' or 'ignore'; got 'drop'"),
        (["a", "b", "c", "d"], {}, "expected others"),
    ],
)
def test_clients_who_cannot_be_forgotten(clients, options, match):
    with pytest.raises(ValueError, match=match):
        KEPT.without(clients, **options)


def test_float_ids_are_forgotten_by_their_exact_values():
    ids = pd.Categorical([0.5, 0.5, 1.5, 2.5])
    kept = ClientStatistics.from_rows(None, [1.0, 2.0, 3.0, 4.0], groups=ids)
    assert kept.without([1.5]).clients.tolist() == [0.5, 2.5]


COUNTS = (FRAME["y"] > 0).astype(int)
MODELS = {
    "linear": (PersonalizedLinearRegression(random="intercept"), FRAME["y"], {}),
    "gaussian": (GaussianMean(), FRAME["y"], {}),
    "bernoulli": (BernoulliMean(), np.array(["no", "yes"])[COUNTS], {}),
    "poisson": (PoissonMean(), COUNTS, {"exposure": np.exp(FRAME["x"])}),
}


def in_two_parts(model, target, params, chosen):
    """The model after two calls of ``partial_fit`` with the chosen rows."""
    fitted = clone(model)
    for half in (FRAME.index < 40, FRAME.index >= 40):
        rows = chosen & half
        extra = {name: values[rows] for name, values in params.items()}
        fitted.partial_fit(FRAME[["x"]][rows], target[rows], groups=FRAME["g"][rows], **extra)
    return fitted


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_client_is_that_of_the_others(name):
    model = in_two_parts(*MODELS[name], FRAME.index >= 0)
    before = dict(vars(model))
    kept, others = model.without(["b"]), in_two_parts(*MODELS[name], FRAME["g"] != "b")
    assert vars(kept).keys() == vars(others).keys()
    assert kept._statistics.clients.tolist() == ["a", "c", "d"]
    for attribute in ("clients_", "n_features_in_", "feature_names_in_", "classes_"):
        if hasattr(others, attribute):
            np.testing.assert_array_equal(getattr(kept, attribute), getattr(others, attribute))
    rows = {"groups": FRAME["g"], **MODELS[name][2]}
    np.testing.assert_array_equal(
        kept.set_params(unseen="population").predict(FRAME[["x"]], **rows),
        others.set_params(unseen="population").predict(FRAME[["x"]], **rows),
    )
    assert all(vars(model)[attribute] is value for attribute, value in before.items())
    with pytest.raises(ValueError, match="1 ids that are not in the statistics"):
        kept.without(["b"])


@pytest.mark.parametrize("name", ["linear", "gaussian"])
def test_models_of_rows_keep_nothing_to_forget(name):
    model, target, _ = MODELS[name]
    model = clone(model).fit(FRAME[["x"]], target, groups=FRAME["g"])
    with pytest.raises(ValueError, match="was not fitted by partial_fit"):
        model.without(["b"])


def test_the_same_part_counts_once(tmp_path):
    KEPT.to_parquet(tmp_path / "monday")
    monday = ClientStatistics.from_parquet(tmp_path / "monday")
    tuesday = ClientStatistics.from_frame(FRAME, **COLUMNS)  # another day with the same rows
    total = monday + tuesday
    assert total.n_samples_per_client.tolist() == [40] * 4
    assert total.parts == tuple(sorted([*monday.parts, *tuesday.parts]))
    for again in (monday, KEPT, tuesday, total, KEPT.of_clients([1]), KEPT.without(["a"])):
        with pytest.raises(ValueError, match=r"client '[ab]' would count twice.*part '[0-9a-f]+'"):
            total + again
    # Clients of one part may come apart and together again.
    whole = KEPT.of_clients([0, 2]) + KEPT.of_clients([1, 3])
    np.testing.assert_array_equal(whole.packed, KEPT.packed)
    assert whole.parts == KEPT.parts
