"""How right tests, intervals and probabilities are that analysts read: by simulated tables.

    python benchmarks/inference.py                         # about an hour and a half
    python benchmarks/inference.py --only totals --share 0.1

It prints one table per subject, with the standard error of every figure in the last digits:
sizes of tests of a feature of clients, coverage of robust intervals, of totals and of new rows,
calibration of exceedance probabilities, and stated over actual squared errors of Fay-Herriot
models.
"""

import argparse
import warnings

import numpy as np
from joblib import Parallel, delayed

from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)

MODELS = {
    "numbers": PersonalizedLinearRegression,
    "classes": PersonalizedLogisticRegression,
    "counts": PersonalizedPoissonRegression,
}
KNOWN = {"random": "intercept", "unseen": "population"}


def responses(kind, rng, predictors):
    """Responses with these predictors, and their means."""
    if kind == "numbers":
        return predictors + rng.normal(size=len(predictors)), predictors
    if kind == "classes":
        means = 1 / (1 + np.exp(-predictors))
        return (rng.random(len(means)) < means).astype(int), means
    return rng.poisson(np.exp(predictors)), np.exp(predictors)


def sizes(rng, m, ratio):
    """Rejections at .05 of a feature of clients that has no effect."""
    codes, feature = np.repeat(np.arange(m), 8), (np.arange(m) % 2).astype(float)
    y = ratio * rng.normal(size=m)[codes] + rng.normal(size=len(codes))
    model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
    model.fit(feature[codes, None], y, groups=codes)
    dfs = ("satterthwaite", "kenward_roger", "normal")
    return {df: model.contrast({"x0": 1}, df=df)["p_value"].iloc[0] < 0.05 for df in dfs}


def robust(rng, noise):
    """Coverage of intervals by CR2 for 20 clients, half of which have three times the noise."""
    codes = np.repeat(np.arange(20), 8)
    group = (codes % 2).astype(float)
    drawn = rng.standard_t(3, 160) if noise == "t3" else rng.normal(size=160)
    y = 0.3 * rng.normal(size=20)[codes] + drawn * (1 + 2 * group)
    rows = {"X": np.column_stack([group, rng.normal(size=160)]), "y": y, "groups": codes}
    model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in").fit(**rows)
    found = {}
    for errors, given in (("robust", rows), ("model", {})):
        table = model.contrast(np.eye(3)[1:], errors=errors, **given).iloc[:2]
        inside = (table["lower"] <= 0) & (table["upper"] >= 0)
        found |= {f"{errors}, of clients": inside.iloc[0], f"{errors}, of rows": inside.iloc[1]}
    return found


def totals(rng, kind):
    """Coverage of totals: 10 states of 20 counties of 8 rows, and a state of 20 new counties."""
    county = np.repeat(np.arange(200), 8)
    effects = 0.7 * rng.normal(size=220)
    x = rng.normal(size=1600)
    y, _ = responses(kind, rng, 0.3 + 0.5 * x + effects[county])
    model = MODELS[kind](**KNOWN).fit(x[:, None], y, groups=county)
    county = np.repeat(np.arange(220), 30)
    x, state = rng.normal(size=len(county)), county // 20
    _, means = responses(kind, rng, 0.3 + 0.5 * x + effects[county])

    def inside(by):
        table = model.predict_total(x[:, None], groups=county, by=by)
        true = np.bincount(by, means)
        return ((table["lower"] <= true) & (true <= table["upper"])).to_numpy()

    states, counties = inside(state), inside(county)
    return {
        "all": inside(np.zeros_like(county)).mean(),
        "states": states[:10].mean(),
        "new state": states[10],
        "counties": counties[:200].mean(),
        "new counties": counties[200:].mean(),
    }


DESIGNS = {
    "10 x 8": [8] * 10,
    "50 x 3": [3] * 50,
    "one with 80 %": [80, *[2] * 10],
}


def new_rows(rng, kind, design):
    """Coverage of intervals of new rows (for classes of their probabilities)."""
    n_rows = DESIGNS[design]
    codes, m = np.repeat(np.arange(len(n_rows)), n_rows), len(n_rows)
    effects, x = 0.7 * rng.normal(size=m + 10), rng.normal(size=len(codes))
    y, _ = responses(kind, rng, 0.5 + 0.5 * x + effects[codes])
    model = MODELS[kind](**KNOWN).fit(x[:, None], y, groups=codes)
    codes = np.arange(m + 10)
    x = rng.normal(size=len(codes))
    new, means = responses(kind, rng, 0.5 + 0.5 * x + effects)
    if kind == "classes":
        lower, upper = (bound[:, 1] for bound in model.predict_interval(x[:, None], groups=codes))
        new = means
    else:
        lower, upper = model.predict_interval(x[:, None], groups=codes, new_row=True)
    inside = (lower <= new) & (new <= upper)
    return {"known clients": inside[:m].mean(), "new clients": inside[m:].mean()}


def exceedance(rng, kind):
    """Clients above a threshold by the decile of the stated probability, and their shares."""
    m, n = 40, rng.integers(3, 30, size=40)
    if kind == "numbers":
        truth, at = rng.normal(size=m), 0.5
        codes = np.repeat(np.arange(m), n)
        y = truth[codes] + 2 * rng.normal(size=len(codes))
        model = GaussianMean().fit(np.zeros((len(y), 1)), y, groups=codes)
    elif kind == "classes":
        truth, at = rng.beta(4, 6, size=m), 0.45
        model = BernoulliMean().fit_counts(rng.binomial(n, truth), n)
    else:
        truth, at = rng.gamma(4, 0.25, size=m), 1.2
        model = PoissonMean().fit_counts(rng.poisson(n * truth / 5), n / 5)
    stated = model.exceedance(at).to_numpy()
    # The same number of clients of every set in each tenth would hide what is rare.
    tenth = np.minimum((10 * stated).astype(int), 9)
    return {
        f"{k / 10:.1f} to {(k + 1) / 10:.1f}": (
            np.sum((truth > at)[tenth == k]) - np.sum(stated[tenth == k]),
            np.sum(tenth == k),
        )
        for k in range(10)
    }


def fay_herriot(rng, m, variance, uncertainty):
    """Stated and actual squared errors of areas, those of Datta and Lahiri (2000), and coverage."""
    psi = np.repeat([0.3, 0.6, 1.0, 1.6, 2.5], m // 5)
    x = rng.normal(size=m)
    theta = 1 + 0.5 * x + np.sqrt(variance) * rng.normal(size=m)
    y = theta + np.sqrt(psi) * rng.normal(size=m)
    model = PersonalizedLinearRegression(
        random="intercept", noise_variance=1.0, uncertainty=uncertainty
    ).fit(x[:, None], y, groups=np.arange(m), sample_weight=1 / psi)
    mean, std = model.predict(x[:, None], groups=np.arange(m), return_std=True)
    inside = np.abs(mean - theta) <= 1.959964 * std
    between, X = float(model.prior_.covariance[0, 0]), np.column_stack([np.ones(m), x])
    total = between + psi
    own, of_population = between * psi / total, psi / total
    information = np.linalg.inv(X.T @ (X / total[:, None]))
    of_population = of_population**2 * np.einsum("np,pq,nq->n", X, information, X)
    of_variance = psi**2 / total**3 * 2 / np.sum(total**-2.0)
    return {
        "stated": np.mean(std**2),
        "second order": np.mean(own + of_population + 2 * of_variance),
        "actual": np.mean((mean - theta) ** 2),
        "inside": inside,
    }


SUBJECTS = {
    "sizes": (sizes, 4000, [(m, ratio) for m in (6, 10, 20) for ratio in (0.5, 1.0, 3.0)]),
    "robust": (robust, 2000, [("normal",), ("t3",)]),
    "totals": (totals, 1000, [(kind,) for kind in MODELS]),
    "new_rows": (new_rows, 2000, [(kind, design) for kind in MODELS for design in DESIGNS]),
    "exceedance": (exceedance, 400, [(kind,) for kind in MODELS]),
    "fay_herriot": (
        fay_herriot,
        2000,
        [(m, v, u) for m in (15, 40) for v in (0.3, 1.0) for u in ("plug_in", "full")],
    ),
}


def one_set(simulate, seed, arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(np.random.default_rng([seed, 1]), *arguments)


def line(name, found):
    """Text of the figures of all sets of a case."""
    parts = []
    for key in found[0]:
        values = np.array([each[key] for each in found], dtype=float)
        if name == "exceedance":
            n_clients = values[:, 1].sum()
            share = values[:, 0].sum() / max(n_clients, 1)
            parts.append(f"{key}: {share:+.3f} of {n_clients:.0f}")
        elif values.ndim == 2 or name != "fay_herriot" or key == "inside":
            values = values.reshape(len(values), -1).mean(axis=1)
            error = values.std() / np.sqrt(len(values))
            parts.append(f"{key} {values.mean():.4f} ({error:.4f})")
    if name == "fay_herriot":
        actual = np.array([each["actual"] for each in found])
        for key in ("second order", "stated"):
            stated = np.array([each[key] for each in found])
            ratio = stated.mean() / actual.mean()
            error = np.std(stated / stated.mean() - actual / actual.mean()) / np.sqrt(len(found))
            parts.insert(0, f"{key} / actual {ratio:.3f} ({ratio * error:.3f})")
    return "; ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the number of sets")
    parser.add_argument("--jobs", type=int, default=-1)
    options = parser.parse_args()
    for name in options.only:
        simulate, n_sets, cases = SUBJECTS[name]
        print(f"\n{simulate.__doc__.splitlines()[0]} ({int(options.share * n_sets)} sets)")
        for arguments in cases:
            seeds = range(int(options.share * n_sets))
            jobs = (delayed(one_set)(simulate, seed, arguments) for seed in seeds)
            found = Parallel(n_jobs=options.jobs)(jobs)
            print(f"{', '.join(map(str, arguments))}: {line(name, found)}", flush=True)


if __name__ == "__main__":
    main()
