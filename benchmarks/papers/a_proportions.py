"""Proportions of paper A under four priors (Section 4, long version; appendix K.2, ICLR)."""

import numpy as np
from paper_panel import Panel

from pfl_sklearn.datasets import make_bernoulli_clients
from pfl_sklearn.estimation import BernoulliMean
from pfl_sklearn.priors import GridPrior

N_CLIENTS, N_TRIALS, SEEDS = 10_000, 14, 5
PRINTED = {
    "normal": (37.1, 3.9),
    "uniform": (12.0, 1.6),
    "3-spike": (24.3, 2.8),
    "beta": (34.0, 3.7),
}
MODELS = {
    "as printed": BernoulliMean(method="printed"),
    "default": BernoulliMean(),
    "grid": BernoulliMean(GridPrior()),
}


def compute():
    gains: dict = {prior: {name: [] for name in MODELS} for prior in PRINTED}
    for prior in PRINTED:
        for seed in range(SEEDS):
            drawn = make_bernoulli_clients(N_CLIENTS, N_TRIALS, prior=prior, random_state=seed)
            base = np.mean((drawn.successes / N_TRIALS - drawn.probabilities) ** 2)
            for name, model in MODELS.items():
                model.fit_counts(drawn.successes, drawn.trials)
                error = np.mean((model.means_ - drawn.probabilities) ** 2)
                gains[prior][name].append(100 * (1 - error / base))
    return {
        prior: {name: [float(np.mean(each)), float(np.std(each))] for name, each in found.items()}
        for prior, found in gains.items()
    }


def rows(found):
    def shown(gain):
        return f"{gain[0]:.1f} ± {gain[1]:.1f} %"

    return [
        [
            f"Less squared error than local, {prior} prior",
            shown(PRINTED[prior]),
            shown(each["as printed"]),
            f"{shown(each['default'])}; GridPrior {shown(each['grid'])}",
        ]
        for prior, each in found.items()
    ]


def why(found):
    return (
        "Within the printed standard deviations. Equation 6 (ICLR) takes the variance of the "
        "shares for that of the prior; by default the sampling variance is left out, which gains "
        f"{found['normal']['default'][0] - found['normal']['as printed'][0]:.1f} points where "
        "clients are alike. GridPrior estimates any shape of the prior."
    )


PANEL = Panel(
    "a_proportions",
    "A",
    "Proportions under four priors (Section 4, long version)",
    "10,000 clients with 14 trials, five draws (the number of draws is not printed); the normal "
    "prior has mean .5 and standard deviation .15, and the beta prior both parameters 4.",
    compute,
    rows,
    why,
)
