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
ROUNDS = [SampledGaussian(1.0, 10)]  # all clients: a closed form
# A valid value of every argument.
ONES = """mu epsilon noise_std sensitivity noise_multiplier radius mu_add_remove
mu_replace_one bound mu_zero_out clip_norm variance_bound feature_bound target_bound alpha
beta smoothness norm half_width gradient_std gradient_variance w_variance theta_variance
prior_variance sampling_variance between_std noise_variance between_variance release_variance
message_sensitivity psi_clip_norm psi_noise_std"""
VALUES = dict.fromkeys(ONES.split(), 1.0)
VALUES |= {"mean_bound": 0.0, "point_bound": 0.0, "gradient_norms": 0.0, "delta": 1e-5, "rate": 0.1}
VALUES |= {"n_releases": 1, "batch_sizes": 1, "class_size": 1, "n_rounds": 10, "n_sampled": 10}
VALUES |= {"clip_quantile": 0.5, "client_fraction": 0.5, "mean": 0.5, "weight": 0.5, "icc": 0.2}
VALUES |= {"variance": 0.1, "spread": 0.1, "inverse_trials": 0.2, "trials": 3, "order": 2.0}
VALUES |= {"orders": (2.0,), "rdp": (1.0,), "expected_trials": 3.0, "levels": 2, "n_rows": 5}
VALUES |= {"bits_noise_multiplier": 2.5, "clip_learning_rate": 0.2, "n_coordinates": 3, "bits": 3}
VALUES |= {"n_bits": 8, "n_categories": 4, "n_features": 2, "n_clients": 50, "n_steps": 5}
VALUES |= {"n_candidates": 32, "given_truth": 75, "given_other": 25, "n_draws": 100, "w": [1.0]}
VALUES |= {"with_canary": SCORES + 2, "without": SCORES, "thetas": [[1.0], [2.0]], "coef": [1.0]}
VALUES |= {"true_coef": [2.0], "covariance": [1.0], "times": [1, 2], "weights": [0.5, 0.5]}
VALUES |= {"X": [[1.0]], "probabilities": [0.5], "population_probabilities": [0.5]}
VALUES |= {"psi": 2.0, "input_shares": [1.0]}
VALUES |= {"events": ROUNDS, "relation": "zero_out", "labels": [0, 0, 1]}


def row(names, allowed="", **given):
    """Valid arguments, and which of them may be infinite or, after a minus, negative."""
    return {name: given.get(name, VALUES[name]) for name in names.split()}, allowed


SHARES = "n_clients batch_sizes client_fraction"
SPENT = "epsilon delta n_features"
FUNCTIONS = {
    privacy.gdp_delta: row("mu epsilon", "mu epsilon"),
    privacy.gdp_epsilon: row("mu delta", "mu"),
    privacy.gdp_mu: row("epsilon delta", "epsilon"),
    privacy.rdp_to_dp: row("orders rdp delta", "rdp"),
    privacy.epsilon_spent: row("noise_std sensitivity delta n_releases", "noise_std"),
    privacy.calibrate_noise: row("epsilon delta sensitivity n_releases", "epsilon"),
    privacy.calibrate_rounds: row("epsilon delta n_rounds rate", "epsilon", rate=1.0),
    privacy.events_epsilon: row("events delta relation"),
    privacy.selection_epsilon: row("events expected_trials delta relation"),
    privacy.SampledGaussian: row("noise_multiplier n_rounds rate", "noise_multiplier"),
    privacy.GaussianEvent: row(
        "mu_add_remove mu_replace_one n_releases mu_zero_out",
        "mu_add_remove mu_replace_one mu_zero_out",
    ),
    privacy.PureEvent: row("epsilon delta relation", "epsilon"),
    privacy.ClientMoments: row("radius variance_bound"),
    privacy.ClippedSum: row(
        "clip_norm noise_multiplier clip_quantile bits_noise_multiplier clip_learning_rate"
    ),
    privacy.DiscreteGaussianMechanism: row(
        "n_coordinates message_sensitivity epsilon delta n_bits bound"
    ),
    privacy.DiscreteLaplaceMechanism: row("sensitivity epsilon", sensitivity=1),
    privacy.GaussianMechanism: row("sensitivity epsilon delta", "epsilon"),
    privacy.OneBit: row("epsilon"),
    privacy.TwoBit: row("epsilon"),
    privacy.SubsetSelection: row("n_categories epsilon"),
    privacy.StochasticQuantizer: row("bits bound"),
    privacy.PrivateClustering: row(f"{SPENT} n_clients n_steps n_candidates", "epsilon"),
    privacy.RegressionMoments: row("n_features feature_bound target_bound"),
    auditing.odds_lower_bound: row("given_truth given_other n_draws alpha", alpha=1e-6),
    auditing.gdp_lower_bound: row("with_canary without alpha", "-with_canary -without", alpha=1e-3),
    theory.alpha_norm: row("w thetas alpha", "alpha -w -thetas", w=1.0, thetas=[1.0, 2.0]),
    theory.minimal_norm_solution: row("coef alpha n_clients", "alpha -coef"),
    theory.smoothness_alpha: row(f"{SHARES} smoothness alpha", "alpha"),
    theory.total_gradient_variance: row(
        f"{SHARES} alpha w_variance theta_variance gradient_norms n_features noise_std", "alpha"
    ),
    theory.ppsgd_noise_std: row(f"{SHARES} noise_multiplier clip_norm"),
    theory.ppsgd_learning_rate: row("smoothness norm gradient_std n_rounds", "norm"),
    theory.ppsgd_bound: row("smoothness norm gradient_std n_rounds", "norm"),
    theory.ppsgd_private_bound: row(
        "smoothness alpha w thetas w_variance theta_variance n_rounds clip_norm epsilon delta"
        " client_fraction",
        "alpha epsilon -w -thetas",
    ),
    theory.personalization_threshold: row(
        f"n_clients gradient_variance clip_norm {SPENT}", "epsilon"
    ),
    theory.linear_excess_risk: row("coef true_coef covariance", "-coef -true_coef -covariance"),
    theory.own_weight: row("prior_variance sampling_variance", "prior_variance sampling_variance"),
    theory.mean_risk: row(
        "n_clients n_rows between_variance noise_variance n_features", "between_variance"
    ),
    theory.released_mean_risk: row(
        "n_clients n_rows between_variance noise_variance release_variance n_features",
        "between_variance release_variance",
    ),
    theory.mean_half_width: row("n_clients n_rows between_std noise_std mean_bound n_features"),
    theory.mixture_mean_radius: row("n_clients n_rows noise_std n_features point_bound"),
    theory.quantizer_variance: row("half_width n_bits"),
    theory.local_noise_std: row(f"half_width {SPENT}", "epsilon"),
    theory.beta_moments: row("alpha beta"),
    # Variances that are not positive have the weight 0, and noisy means may be anywhere.
    theory.beta_own_weight: row("mean variance trials", "-mean -variance"),
    theory.beta_shrinkage: row("icc trials", "-icc", trials=np.array([3.0])),
    theory.debiased_share_variance: row("mean spread inverse_trials", "-mean -spread"),
    theory.beta_risk: row("alpha beta trials"),
    theory.beta_risk_bound: row("alpha beta trials n_clients weight epsilon", "epsilon -weight"),
    theory.local_coef_error: row("X noise_variance coef", "-X -coef"),
    theory.distillation_log_density: row("probabilities population_probabilities psi input_shares"),
    theory.stream_error: row("n_rows noise_variance class_size"),
    theory.received_mean_variance: row("times noise_variance release_variance weights", "-weights"),
    theory.oracle_stream_error: row("n_rows noise_variance release_variance labels"),
    theory.partial_sum_variance: row("half_width epsilon delta levels", "epsilon"),
    theory.printed_adaped_rdp: row(
        "order n_rounds n_clients n_sampled clip_norm noise_std psi_clip_norm psi_noise_std"
    ),
}
NAMES_OF_NO_NUMBERS = {"events", "relation", "labels"}


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
