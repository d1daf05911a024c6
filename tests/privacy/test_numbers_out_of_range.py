"""Public functions of privacy and theory refuse NaN and numbers out of range, by name."""

import inspect
import math
import warnings

import numpy as np
import pytest

from pfl_sklearn import BernoulliMean, PoissonMean, privacy, theory
from pfl_sklearn.privacy import PrivacyWarning, SampledGaussian, auditing

BAD = {"nan": math.nan, "negative": -1.0, "infinite": math.inf}
SCORES = np.random.default_rng(0).normal(size=100)
CLIENTS = np.repeat(np.arange(10), 3)
COUNTS = np.tile([0, 1, 2], 10)
ROUNDS = [SampledGaussian(1.0, 10, 0.1)]


def shares_and_sizes(n_clients, **given):
    return {"n_clients": n_clients, "batch_sizes": 1, "client_fraction": 0.5, **given}


# Valid arguments, and which of them may be infinite or negative.
FUNCTIONS = {
    privacy.gdp_delta: ({"mu": 1.0, "epsilon": 1.0}, "mu epsilon"),
    privacy.gdp_epsilon: ({"mu": 1.0, "delta": 1e-5}, "mu"),
    privacy.gdp_mu: ({"epsilon": 1.0, "delta": 1e-5}, "epsilon"),
    privacy.rdp_to_dp: ({"orders": (2.0,), "rdp": (1.0,), "delta": 1e-5}, "rdp"),
    privacy.epsilon_spent: (
        {"noise_std": 1.0, "sensitivity": 1.0, "delta": 1e-5, "n_releases": 1},
        "noise_std",
    ),
    privacy.calibrate_noise: (
        {"epsilon": 1.0, "delta": 1e-5, "sensitivity": 1.0, "n_releases": 1},
        "epsilon",
    ),
    privacy.calibrate_rounds: (
        {"epsilon": 1.0, "delta": 1e-5, "n_rounds": 10, "rate": 0.1},
        "epsilon",
    ),
    privacy.events_epsilon: ({"events": ROUNDS, "delta": 1e-5, "relation": "zero_out"}, ""),
    privacy.selection_epsilon: (
        {"events": ROUNDS, "expected_trials": 3.0, "delta": 1e-5, "relation": "zero_out"},
        "",
    ),
    privacy.SampledGaussian: (
        {"noise_multiplier": 1.0, "n_rounds": 3, "rate": 0.5},
        "noise_multiplier",
    ),
    privacy.GaussianEvent: (
        {"mu_add_remove": 1.0, "mu_replace_one": 1.0, "n_releases": 1, "mu_zero_out": 1.0},
        "mu_add_remove mu_replace_one mu_zero_out",
    ),
    privacy.PureEvent: ({"epsilon": 1.0, "delta": 0.1, "relation": "zero_out"}, "epsilon"),
    privacy.ClientMoments: ({"radius": 1.0, "variance_bound": 1.0}, ""),
    privacy.ClippedSum: (
        {
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "clip_quantile": 0.5,
            "bits_noise_multiplier": 2.5,
            "clip_learning_rate": 0.2,
        },
        "",
    ),
    privacy.DiscreteGaussianMechanism: (
        {
            "n_coordinates": 3,
            "message_sensitivity": 1.0,
            "epsilon": 1.0,
            "delta": 1e-5,
            "n_bits": 8,
            "bound": 1.0,
        },
        "",
    ),
    privacy.GaussianMechanism: ({"sensitivity": 1.0, "epsilon": 1.0, "delta": 1e-5}, "epsilon"),
    privacy.OneBit: ({"epsilon": 1.0}, ""),
    privacy.TwoBit: ({"epsilon": 1.0}, ""),
    privacy.SubsetSelection: ({"n_categories": 4, "epsilon": 1.0}, ""),
    privacy.StochasticQuantizer: ({"bits": 3, "bound": 1.0}, ""),
    privacy.PrivateClustering: (
        {
            "epsilon": 1.0,
            "delta": 1e-5,
            "n_features": 2,
            "n_clients": 50,
            "n_steps": 5,
            "n_candidates": 32,
        },
        "epsilon",
    ),
    privacy.RegressionMoments: ({"n_features": 2, "feature_bound": 1.0, "target_bound": 1.0}, ""),
    auditing.odds_lower_bound: (
        {"given_truth": 75, "given_other": 25, "n_draws": 100, "alpha": 1e-6},
        "",
    ),
    auditing.gdp_lower_bound: (
        {"with_canary": SCORES + 2, "without": SCORES, "alpha": 1e-3},
        "-with_canary -without",
    ),
    theory.alpha_norm: ({"w": 1.0, "thetas": [1.0, 2.0], "alpha": 1.0}, "alpha -w -thetas"),
    theory.minimal_norm_solution: ({"coef": [1.0], "alpha": 1.0, "n_clients": 3}, "alpha -coef"),
    theory.smoothness_alpha: (shares_and_sizes(10, smoothness=1.0, alpha=1.0), "alpha"),
    theory.total_gradient_variance: (
        shares_and_sizes(
            10,
            alpha=1.0,
            w_variance=1.0,
            theta_variance=1.0,
            gradient_norms=0.0,
            n_features=3,
            noise_std=1.0,
        ),
        "alpha",
    ),
    theory.ppsgd_noise_std: (shares_and_sizes(10, noise_multiplier=1.0, clip_norm=1.0), ""),
    theory.ppsgd_learning_rate: (
        {"smoothness": 1.0, "norm": 1.0, "gradient_std": 1.0, "n_rounds": 10},
        "norm",
    ),
    theory.ppsgd_bound: (
        {"smoothness": 1.0, "norm": 1.0, "gradient_std": 1.0, "n_rounds": 10},
        "norm",
    ),
    theory.ppsgd_private_bound: (
        {
            "smoothness": 1.0,
            "alpha": 1.0,
            "w": [1.0],
            "thetas": [[1.0], [2.0]],
            "w_variance": 1.0,
            "theta_variance": 1.0,
            "n_rounds": 10,
            "clip_norm": 1.0,
            "epsilon": 1.0,
            "delta": 1e-5,
            "client_fraction": 0.5,
        },
        "alpha epsilon -w -thetas",
    ),
    theory.personalization_threshold: (
        {
            "n_clients": 10,
            "gradient_variance": 1.0,
            "clip_norm": 1.0,
            "n_features": 2,
            "epsilon": 1.0,
            "delta": 1e-5,
        },
        "epsilon",
    ),
    theory.linear_excess_risk: (
        {"coef": [1.0], "true_coef": [2.0], "covariance": [1.0]},
        "-coef -true_coef -covariance",
    ),
    theory.own_weight: (
        {"prior_variance": 1.0, "sampling_variance": 1.0},
        "prior_variance sampling_variance",
    ),
    theory.mean_risk: (
        {
            "n_clients": 10,
            "n_rows": 5,
            "between_variance": 1.0,
            "noise_variance": 1.0,
            "n_features": 1,
        },
        "between_variance",
    ),
    theory.released_mean_risk: (
        {
            "n_clients": 10,
            "n_rows": 5,
            "between_variance": 1.0,
            "noise_variance": 1.0,
            "release_variance": 1.0,
            "n_features": 1,
        },
        "between_variance release_variance",
    ),
    theory.mean_half_width: (
        {
            "n_clients": 10,
            "n_rows": 5,
            "between_std": 1.0,
            "noise_std": 1.0,
            "mean_bound": 0.0,
            "n_features": 1,
        },
        "",
    ),
    theory.mixture_mean_radius: (
        {"n_clients": 10, "n_rows": 5, "noise_std": 1.0, "n_features": 1, "point_bound": 0.0},
        "",
    ),
    theory.quantizer_variance: ({"half_width": 1.0, "n_bits": 3}, ""),
    theory.local_noise_std: (
        {"half_width": 1.0, "epsilon": 1.0, "delta": 1e-5, "n_features": 2},
        "epsilon",
    ),
    theory.beta_moments: ({"alpha": 1.0, "beta": 1.0}, ""),
    # Variances that are not positive have the weight 0, and noisy means may be anywhere.
    theory.beta_own_weight: ({"mean": 0.5, "variance": 0.1, "trials": 3}, "-mean -variance"),
    theory.beta_shrinkage: ({"icc": 0.2, "trials": np.array([3.0])}, "-icc"),
    theory.debiased_share_variance: (
        {"mean": 0.3, "spread": 0.1, "inverse_trials": 0.2},
        "-mean -spread",
    ),
    theory.beta_risk: ({"alpha": 1.0, "beta": 1.0, "trials": 3}, ""),
    theory.beta_risk_bound: (
        {"alpha": 1.0, "beta": 1.0, "trials": 3, "n_clients": 10, "weight": 0.5, "epsilon": 1.0},
        "epsilon -weight",
    ),
    theory.stream_error: ({"n_rows": 5, "noise_variance": 1.0, "class_size": 1}, ""),
    theory.received_mean_variance: (
        {"times": [1, 2], "noise_variance": 1.0, "release_variance": 1.0, "weights": [0.5, 0.5]},
        "-weights",
    ),
    theory.partial_sum_variance: (
        {"half_width": 1.0, "epsilon": 1.0, "delta": 1e-5, "levels": 2},
        "epsilon",
    ),
    theory.printed_adaped_rdp: (
        {
            "order": 2.0,
            "n_rounds": 10,
            "n_clients": 50,
            "n_sampled": 10,
            "clip_norm": 1.0,
            "noise_std": 1.0,
            "psi_clip_norm": 1.0,
            "psi_noise_std": 1.0,
        },
        "",
    ),
}
NAMES_OF_NO_NUMBERS = {"events", "relation"}


def with_bad(value, bad):
    """The value with its last number replaced."""
    if np.ndim(value) == 0:
        return bad
    values = np.array(value, dtype=float)
    values.flat[-1] = bad
    return values


@pytest.mark.filterwarnings("ignore::pfl_sklearn.privacy.PrivacyWarning")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_numbers_out_of_range_are_refused_by_name(function):
    arguments, allowed = FUNCTIONS[function]
    function(**arguments)
    for name in arguments.keys() - NAMES_OF_NO_NUMBERS:
        kinds = BAD.keys() - ({"infinite"} if name in allowed.split() else set())
        kinds -= {"negative"} if f"-{name}" in allowed.split() else set()
        for kind in sorted(kinds):
            with pytest.raises(ValueError, match=rf"\b{name}\b.*got "):
                function(**{**arguments, name: with_bad(arguments[name], BAD[kind])})


@pytest.mark.parametrize("version", ["sound", "printed"])
@pytest.mark.parametrize("function", [theory.local_noise_std, theory.partial_sum_variance])
def test_both_versions_of_noise_check_their_range(function, version):
    for name, bad in {"half_width": -1.0, "epsilon": math.nan, "delta": 1.0}.items():
        given = {"half_width": 1.0, "epsilon": 1.0, "delta": 1e-5, name: bad}
        with pytest.raises(ValueError, match=rf"{name} must be .*got {bad!r}\."):
            function(**given, version=version)


def test_every_public_function_is_tried():
    """All callables with numbers as arguments; the rest take estimators or hold what fits say."""
    others = {"BudgetExceeded", "FitCost", "FrequencyMoments", "PrivacyLedger", "PrivacyReport"}
    others |= {"PrivacyWarning", "SearchCost", "privacy_of", "search_cost", "compose_gdp"}
    others |= {"RiskBound", "WeightAndRisk"}
    public = {*privacy.__all__, *theory.__all__, *auditing.__all__} - others
    assert {function.__name__ for function in FUNCTIONS} == public
    for function, (arguments, _) in FUNCTIONS.items():
        numbers = {
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if "float" in str(parameter.annotation) or "int" in str(parameter.annotation)
        }
        # A noise multiplier may be given instead of epsilon.
        alternative = {"noise_multiplier"} if "epsilon" in numbers else set()
        assert numbers - alternative <= set(arguments), function.__name__


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_a_composition_refuses_each_bad_part(bad):
    with pytest.raises(ValueError, match=rf"mus must be at least 0; got {bad!r}"):
        privacy.compose_gdp([1.0, bad])
    assert privacy.compose_gdp(iter([3.0, 4.0])) == 5.0


def test_infinite_noise_protects_and_infinite_sensitivity_is_refused():
    assert privacy.epsilon_spent(math.inf, 1.0, delta=1e-5) == 0
    with pytest.raises(ValueError, match=r"sensitivity must be finite and above 0; got inf"):
        privacy.epsilon_spent(math.inf, math.inf, delta=1e-5)


def test_one_output_that_is_no_number_fails_an_audit():
    broken = np.append(SCORES, math.nan)
    with pytest.raises(ValueError, match=r"without must be finite; got nan in run 100\b.*\b1 such"):
        auditing.gdp_lower_bound(SCORES + 2, broken)
    with pytest.raises(ValueError, match=r"with_canary must be two scores or more.*\(1,\)"):
        auditing.gdp_lower_bound([1.0], SCORES)


def test_the_printed_privacy_warns_only_of_valid_numbers():
    arguments, _ = FUNCTIONS[theory.printed_adaped_rdp]
    with pytest.warns(PrivacyWarning, match="does not bound"):
        theory.printed_adaped_rdp(**arguments)


@pytest.mark.parametrize(
    "randomizer",
    [
        privacy.OneBit,
        privacy.TwoBit,
        lambda epsilon: privacy.SubsetSelection(4, epsilon),
        lambda epsilon: PoissonMean(epsilon=epsilon, cap=3).fit(COUNTS, COUNTS, groups=CLIENTS),
        lambda epsilon: BernoulliMean(epsilon=epsilon).fit(COUNTS, COUNTS > 1, groups=CLIENTS),
    ],
)
def test_local_answers_need_odds_that_differ_from_1(randomizer):
    with pytest.raises(ValueError, match=r"epsilon must be at least 1e-12.*got 1e-17"):
        randomizer(1e-17)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        randomizer(1e-12)
