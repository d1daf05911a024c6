"""Middle and right plot of Figure 1 of paper C: agents who know the classes."""

import numpy as np
from paper_panel import Panel

from pfl_sklearn.theory import oracle_stream_error, partial_sum_variance, stream_error

VARIANCE, STEPS, LEVELS = 0.25, 30_000, 15  # of PM-II at 30,000 steps, as the paper scales epsilon
TIMES = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000]
PROMISE = {"half_width": 0.75**0.5, "epsilon": 1.0, "delta": 1e-6}
CURVES = [
    *(("pm1", "last"), ("pm1", "mom")),
    *(("pm2", "last"), ("pm2", "mom"), ("pm2", "wmom")),
]


def compute():
    found: dict = {"times": TIMES}
    for n_agents in (200, 30):
        labels = np.random.default_rng(0).integers(0, 3, n_agents)
        sizes = np.bincount(labels)[labels]
        curves = {"ideal": stream_error(np.array(TIMES), VARIANCE, sizes).tolist()}
        for version in ("printed", "sound"):
            for mechanism, weights in CURVES:
                levels = LEVELS if mechanism == "pm2" else 1
                noise = partial_sum_variance(**PROMISE, levels=levels, version=version)
                given = {"mechanism": mechanism, "weights": weights}
                errors = oracle_stream_error(TIMES, VARIANCE, noise, labels, **given)
                curves[f"{mechanism} {weights}, {version}"] = errors.tolist()
        found[str(n_agents)] = curves
    return found


def rows(found):
    """Errors at 30,000 steps over those of agents alone."""
    table = []
    for n_agents in ("200", "30"):
        alone = VARIANCE / STEPS
        for mechanism, weights in CURVES:
            name = f"{mechanism} {weights}"
            last = [found[n_agents][f"{name}, {v}"][-1] / alone for v in ("printed", "sound")]
            plain = f"PM-{'I' * int(mechanism[-1])}, {weights}"
            what = f"{n_agents} agents, {plain}: error / local at 30,000 steps"
            table.append([what, "curve only", *(f"{value:.3f}" for value in last)])
    return table


def why(found):
    last = {name: each[-1] for name, each in found["30"].items() if name != "ideal"}
    best = min((name for name in last if name.endswith("printed")), key=last.__getitem__)
    assert best == "pm2 wmom, printed"
    return (
        "As the text says, PM-II with wMoM weights is best for 30 agents, and PM-I with the last "
        "mean for 200. The last column has the noise that the promise needs: the analytic Gaussian "
        "mechanism, and for PM-II the square root of its 15 levels instead of a fifteenth of "
        "epsilon and delta for each. Then PM-II is best in both. The promise is about one "
        "recipient; others together see less noise."
    )


def draw(ax, found):
    alone = VARIANCE / np.array(TIMES)
    for color, (mechanism, weights) in enumerate(CURVES):
        for version, line in (("printed", "--"), ("sound", "-")):
            curve = np.array(found["30"][f"{mechanism} {weights}, {version}"]) / alone
            label = f"PM-{'I' * int(mechanism[-1])}, {weights}" if version == "sound" else None
            ax.plot(TIMES, curve, line, color=f"C{color}", label=label)
    ax.plot(TIMES, np.array(found["30"]["ideal"]) / alone, "k:", label="all rows public")
    ax.set(xscale="log", xlabel="steps", ylabel="error / error alone", ylim=(0, 1.05))
    ax.set_title("30 agents; dashed: noise as printed", fontsize="medium")
    ax.legend(frameon=False, fontsize="small")


PANEL = Panel(
    "c_oracle",
    "C",
    "Agents who know the classes (Figure 1, middle and right)",
    "200 or 30 agents in three classes drawn at random, standard deviation .5, uniform values, "
    "epsilon 1 at a delta of 1e-6 over 30,000 steps, which protects a single value (replace one) "
    "from one other agent; exact, without a simulation.",
    compute,
    rows,
    why,
    ["", "Printed", "Noise as printed, here", "Noise as needed, here"],
    draw,
)
