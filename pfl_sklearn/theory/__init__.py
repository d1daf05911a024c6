"""Formulas of the theorems: risks, bounds, step sizes and thresholds, as plain functions.

The functions take what a theorem takes (variances, norms, numbers of clients), not data. Where a
printed result does not hold, the default is the corrected one. An argument that is out of its range
raises a ValueError.

References
----------
Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

Bietti, A., Wei, C.-Y., Dudik, M., Langford, J. and Wu, Z. S. (2022). Personalization improves
privacy-accuracy tradeoffs in federated learning. ICML.

Yakimenka, Y., Weng, C.-W., Lin, H.-Y., Rosnes, E. and Kliewer, J. (2024).
Differentially-private collaborative online personalized mean estimation. arXiv:2411.07094.
"""

from pfl_sklearn.theory._learning import distillation_log_density, local_coef_error
from pfl_sklearn.theory._means import (
    WeightAndRisk,
    local_noise_std,
    mean_half_width,
    mean_risk,
    mixture_mean_radius,
    own_weight,
    quantizer_variance,
    released_mean_risk,
)
from pfl_sklearn.theory._ppsgd import (
    alpha_norm,
    minimal_norm_solution,
    ppsgd_learning_rate,
    ppsgd_noise_std,
    smoothness_alpha,
    total_gradient_variance,
)
from pfl_sklearn.theory._ppsgd_bounds import (
    RiskBound,
    linear_excess_risk,
    personalization_threshold,
    ppsgd_bound,
    ppsgd_private_bound,
)
from pfl_sklearn.theory._printed._adaped import printed_adaped_rdp
from pfl_sklearn.theory._proportions import (
    beta_moments,
    beta_own_weight,
    beta_risk,
    beta_risk_bound,
    beta_shrinkage,
    debiased_share_variance,
)
from pfl_sklearn.theory._streams import (
    oracle_stream_error,
    partial_sum_variance,
    received_mean_variance,
    stream_error,
)

__all__ = [
    "RiskBound",
    "WeightAndRisk",
    "alpha_norm",
    "beta_moments",
    "beta_own_weight",
    "beta_risk",
    "beta_risk_bound",
    "beta_shrinkage",
    "debiased_share_variance",
    "distillation_log_density",
    "linear_excess_risk",
    "local_coef_error",
    "local_noise_std",
    "mean_half_width",
    "mean_risk",
    "minimal_norm_solution",
    "mixture_mean_radius",
    "oracle_stream_error",
    "own_weight",
    "partial_sum_variance",
    "personalization_threshold",
    "ppsgd_bound",
    "ppsgd_learning_rate",
    "ppsgd_noise_std",
    "ppsgd_private_bound",
    "printed_adaped_rdp",
    "quantizer_variance",
    "received_mean_variance",
    "released_mean_risk",
    "smoothness_alpha",
    "stream_error",
    "total_gradient_variance",
]
