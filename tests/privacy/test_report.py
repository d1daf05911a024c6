"""The privacy report: facts, JSON, warnings, and pipelines as a whole."""

import dataclasses
import json
import math

import numpy as np
import pytest
import sklearn
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import StackingClassifier, VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import TunedThresholdClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PersonalizedStackingRegressor,
    PrivacyWarning,
    privacy_of,
)
from pfl_sklearn.datasets import make_gaussian_clients
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import PrivacyReport, calibrate_noise, epsilon_spent
from pfl_sklearn.privacy._report import without_guarantee

CLIENTS = make_gaussian_clients(200, 4, random_state=0)
ROWS = {"groups": CLIENTS.groups}
PRIVATE = {"epsilon": 1.0, "clip_norm": 4.0, "noise_variance": 1.0}


def fit(**params):
    return GaussianMean(**params).fit(CLIENTS.data, CLIENTS.target, **ROWS)


def test_facts_of_a_central_release():
    report = fit(**PRIVATE, prior=GaussianPrior(covariance=1.0)).privacy_
    assert (report.epsilon, report.delta, report.unit) == (1.0, 1e-5, "client")
    assert (report.relation, report.trust, report.rounds) == ("replace_one", "central", 1)
    assert report.sensitivity == 2.0
    assert report.noise_std == pytest.approx(calibrate_noise(1.0, 1e-5, 2.0))
    ((relation, epsilon),) = report.epsilon_under
    assert relation == "zero_out"
    assert epsilon == pytest.approx(
        epsilon_spent(report.noise_std, 1.0, delta=1e-5, relation="zero_out")
    )
    assert report.n_clients == 200
    assert not report.noise_reproducible
    assert report.warnings == ()


@pytest.mark.filterwarnings("ignore:The released noise variance")
def test_variances_are_bought_in_the_same_budget():
    assert fit(epsilon=1.0, clip_norm=4.0).privacy_.sensitivity == pytest.approx(5**0.5)
    assert fit(**PRIVATE).privacy_.sensitivity == 2.0
    known = fit(**PRIVATE, prior=GaussianPrior(mean=0.0)).privacy_
    assert known.sensitivity == 1.0
    nothing = fit(**PRIVATE, prior=GaussianPrior(mean=0.0, covariance=1.0)).privacy_
    assert (nothing.epsilon, nothing.mechanism) == (
        0.0,
        "nothing is released: the population is known",
    )


def test_printed_report_names_everything_that_an_epsilon_needs():
    text = str(fit(**PRIVATE).privacy_)
    assert max(map(len, text.splitlines())) <= 96
    text = " ".join(text.split())
    for words in (
        "epsilon = 1",
        "delta = 1e-05",
        "unit: one client",
        "replace_one",
        "adversary",
        "released",
        "not covered",
        "assumptions",
        "under zero_out",
    ):
        assert words in text


@pytest.mark.parametrize(
    "model",
    [
        GaussianMean(),
        PersonalizedStackingRegressor([("line", LinearRegression())], cv=2, fallback=False),
    ],
)
def test_a_report_is_one_line_if_no_privacy_was_asked_for(model):
    few = CLIENTS.groups < 5
    model.fit(CLIENTS.data[few], CLIENTS.target[few], groups=CLIENTS.groups[few])
    report = model.privacy_
    line = "No privacy was asked for: epsilon = inf, nothing protects the clients."
    assert repr(report) == str(report) == line
    assert report.not_released


def test_a_report_of_privacy_that_could_not_be_had_is_whole():
    quantized = GaussianMean(mechanism="quantizer", n_bits=9, clip_norm=4.0, noise_variance=1.0)
    for reason, report in (
        ("quantizer", quantized.fit(CLIENTS.data, CLIENTS.target, **ROWS).privacy_),
        ("scaler", without_guarantee(fit(**PRIVATE).privacy_, "a scaler has seen the rows.")),
    ):
        lines = str(report).splitlines()
        assert "NONE: epsilon = inf" in lines[1]
        assert lines[-1].startswith("  warnings")
        assert reason in str(report)
        assert "not covered" in str(report)


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
@pytest.mark.parametrize(
    "model",
    [
        GaussianMean(),
        GaussianMean(**PRIVATE, random_state=0),
        GaussianMean(mechanism="quantizer", n_bits=9, clip_norm=4.0, noise_variance=1.0),
    ],
    ids=repr,
)
def test_json_round_trip(model):
    report = model.fit(CLIENTS.data, CLIENTS.target, **ROWS).privacy_
    text = report.to_json()
    values = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert values["schema_version"] == 1
    assert values["package_version"]
    assert PrivacyReport.from_dict(values) == report
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.epsilon = 0.1
    with pytest.raises(ValueError, match=r"schema_version.*\b1\b.*\b7\b"):
        PrivacyReport.from_dict({**values, "schema_version": 7})


def test_a_large_delta_is_warned_of():
    with pytest.warns(PrivacyWarning, match=r"delta = 0\.01\b.*1 / n_clients = 0\.005\b"):
        fit(**PRIVATE, delta=0.01)


@pytest.mark.parametrize(
    ("steps", "culprit"),
    [
        ([StandardScaler()], "StandardScaler"),
        ([FunctionTransformer(), StandardScaler(with_mean=False)], "StandardScaler"),
        ([FunctionTransformer(), Normalizer()], None),
        (["passthrough"], None),
    ],
)
def test_a_pipeline_is_as_private_as_its_worst_step(steps, culprit):
    pipeline = make_pipeline(*steps, GaussianMean(**PRIVATE))
    with sklearn.config_context(enable_metadata_routing=True):
        pipeline.fit(CLIENTS.data, CLIENTS.target, **ROWS)
    X = np.column_stack([CLIENTS.groups, CLIENTS.data])
    wrapped = ClientColumn(pipeline, 0).fit(X, CLIENTS.target)
    for fitted in (pipeline, wrapped):
        report = privacy_of(fitted)
        if culprit is None:
            assert report.epsilon == 1.0
        else:
            assert report.epsilon == math.inf
            assert culprit in report.warnings[-1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: TunedThresholdClassifierCV(inner, thresholds=3, cv=2),
        lambda inner: CalibratedClassifierCV(inner, cv=2),
        lambda inner: VotingClassifier([("a", inner)]),
        lambda inner: StackingClassifier([("a", inner)]),
    ],
)
def test_what_others_learn_around_a_private_model_leaks(wrap):
    X = np.column_stack([np.tile(np.arange(4), 10), np.zeros(40)])
    y = np.resize([0, 1, 1], 40)
    inner = ClientColumn(BernoulliMean(epsilon=1.0, mechanism="two_bit"), 0)
    report = privacy_of(wrap(inner).fit(X, y))
    assert report.epsilon == math.inf
    assert "has no privacy report" in report.warnings[0]
    frozen = FrozenEstimator(inner.fit(X, y))
    assert privacy_of(frozen).epsilon == 1.0


def test_targets_transformed_by_others_and_strangers_leak():
    X = np.column_stack([CLIENTS.groups, CLIENTS.data])
    outer = TransformedTargetRegressor(ClientColumn(GaussianMean(**PRIVATE), 0))
    assert privacy_of(outer.fit(X, CLIENTS.target)).epsilon == math.inf

    class Stranger(GaussianMean):
        pass

    own = Stranger(**PRIVATE).fit(CLIENTS.data, CLIENTS.target, **ROWS)
    report = privacy_of(own)
    assert report.epsilon == math.inf
    assert "Stranger is not part of pfl_sklearn" in report.warnings[0]


@pytest.mark.parametrize("epsilon", [np.int64(1), np.float32(1), np.float64(1)])
def test_numbers_of_numpy_are_valid_json(epsilon):
    report = fit(**{**PRIVATE, "epsilon": epsilon}).privacy_
    assert json.loads(report.to_json())["epsilon"] == 1.0


def test_other_estimators_have_no_report():
    with pytest.raises(ValueError, match=r"LinearRegression.*privacy report"):
        privacy_of(LinearRegression().fit([[0.0], [1.0]], [0, 1]))


def test_reports_of_proportions():
    clients = np.arange(6), np.full(6, 9)
    local = BernoulliMean(epsilon=1.0).fit_counts(*clients).privacy_
    assert (local.delta, local.trust, local.epsilon_under) == (0.0, "local", ())
    assert "subset selection" in local.mechanism
    central = BernoulliMean(epsilon=1.0, trust="central", delta=0.01).fit_counts(*clients).privacy_
    assert central.sensitivity == pytest.approx(2**0.5)
    assert dict(central.epsilon_under)["zero_out"] < 1.0
