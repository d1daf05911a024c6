"""The page of the papers: panels beside the print, errata, and an index of algorithms."""

import io
import re

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

TITLES = {
    "A": "A statistical framework, AdaMix and AdaPeD",
    "B": "PPSGD",
    "C": "Private-ColME",
}
INTRODUCTION = """.. Written by benchmarks/papers/regenerate.py.

.. _papers:

The papers, regenerated
=======================

Three papers describe the methods that this package began with. This page has figures and tables of
theirs as they are printed, as the printed algorithms give them here, and as the defaults do.
``make papers`` computes the cheap panels anew and writes the page;
``benchmarks/papers/regenerate.py --all`` computes all of them.

- **A** is Ozkara, Girgis, Data and Diggavi, "A statistical framework for personalized federated
  learning and estimation: theory, algorithms, and privacy" (ICLR 2023), and its long version, "A
  generative framework for personalized learning and estimation: theory, algorithms, and privacy"
  (arXiv, 2022). The two number theorems and algorithms differently.
- **B** is Bietti, Wei, Dudik, Langford and Wu, "Personalization improves privacy-accuracy tradeoffs
  in federated learning" (ICML 2022).
- **C** is Yakimenka, Weng, Lin, Rosnes and Kliewer, `Differentially-private collaborative online
  personalized mean estimation <https://arxiv.org/abs/2411.07094>`_ (2024).

Not everything can be regenerated. The tables of paper A on images stand in the :doc:`comparison on
images <comparison>`, with subsets of FEMNIST and CIFAR-10. There are no figures for CIFAR-100 and
Stack Overflow (B, 1b and the left of 2), whose data are missing here, and B's Figures 1c, 1d and 2
have digits of other writers than the paper.
"""
ERRATA = """
Errata
------

Where the papers' text does not hold, or leaves something open, the default is what holds, and a
parameter gives what is printed, if it can be used at all.

.. list-table::
   :header-rows: 1
   :class: table-sm small

   * - Where
     - Printed
     - Sound
     - As printed by
"""
# Where, printed, sound, and the parameter that gives what is printed.
FAULTS = [
    ("A, Theorem 2, part 2 (ICLR)",
     "noise :math:`(b / \\epsilon) \\sqrt{8 \\log(2 / \\delta)}` on each of d coordinates",
     "a client's mean moves in all of them: :math:`\\sqrt d` times as much, by the analytic "
     "Gaussian mechanism", "``local_noise_std(version=\"printed\")``"),
    ("A, range of a mean", "r + sd :math:`\\sqrt{\\log(m^2 n)}`",
     "sd :math:`\\sqrt{2 \\log(2 m^2 n)}`, or some client is cut",
     "``mean_half_width(version=\"printed\")``"),
    ("A, equation 6 (ICLR), 32 (ICLR)",
     "the variance of the shares as that of the prior; in 32 no -1",
     "the sampling variance is subtracted; alpha + beta has a -1",
     "``BernoulliMean(method=\"printed\")``, ``\"printed_eq32\"``"),
    ("A, equation 6 (ICLR)", "the centre of the others' shares written as :math:`\\mu_l`",
     ":math:`\\mu_i`", "\\-"),
    ("A, equation (10) (ICLR)", ":math:`(2 \\pi \\sigma)^{d/2}`",
     ":math:`(2 \\pi \\sigma^2)^{d/2}`", "\\-"),
    ("A, Laplace prior", "m log(2 b)", "m d log(2 b)", "\\-"),
    ("A, Theorem 4 (ICLR)", "the prior's variance from one-bit messages",
     "they carry nothing on it: subset selection, or two bits",
     "``BernoulliMean(mechanism=\"one_bit\", method=\"printed\")``; ``\"printed_eq32\"`` has the "
     "weight without -1 that the theorem prints"),
    ("A, Algorithm 3 (ICLR), 1 (long)", "k-means of the clients' estimates",
     "the marginal likelihood",
     "``GaussianMean(DiscretePrior(k), method=\"printed\")``"),
    ("A, (54) and Algorithm 4 (ICLR); (19) and 2 (long)", "variances by the joint maximum",
     "it has none: the marginal likelihood",
     "``PersonalizedLinearRegression(solver=\"gd\")``, variances given or floored"),
    ("A, Algorithm 5 (ICLR), 3 (long)", "a step of the logistic regression with the wrong sign",
     "the other sign; the marginal likelihood", "\\-"),
    ("A, Algorithms 1 and 6 (ICLR), 4 and 7 (long)", "clusters point estimates, no noise variance",
     "expectation-maximization of the marginal likelihood",
     "``PersonalizedLinearRegression(method=\"printed\", noise_variance=...)``"),
    ("A, (53) (ICLR)", "the error of least squares, also with fewer rows than columns",
     "an estimate of minimum norm misses the part that no row has to do with as well",
     "``local_coef_error(X, noise_variance, coef=...)`` of coefficients of 0"),
    ("A, (57) (ICLR): density of distillation", "Beta arguments divided by psi p(x)", "multiplied",
     "``distillation_log_density(version=\"printed\")``"),
    ("A, Theorem 5 (ICLR), 7 (long)", "clipping and noise in every local step, a Poisson bound for "
     "samples of a fixed size, the constant 6",
     "one clipped message a round, exact accounting",
     "``AdaPeDClassifier(noise=\"per_step\")``, with the epsilon that holds; "
     "``printed_adaped_rdp``"),
    ("A, elections and linear regression", "gains of 10.7 %, 8.0 to 14.8 %", "not reproducible",
     "above"),
    ("B, Theorem 5.2, Lemma B.4", ":math:`q (1 - q)`, :math:`m_{max} / M`",
     ":math:`1 - q`, :math:`m_{max} / (q M)`",
     "``total_gradient_variance(version=\"printed\")``, ``smoothness_alpha(version=\"printed\")``"),
    ("B, experiments", "a fixed number of clients, accounted as Poisson samples",
     "Poisson samples, or the accounting of fixed ones",
     "``sampling=\"fixed\"``, with the epsilon that holds"),
    ("B, Lemma 4.6", "the text: linear in epsilon", "its square, as in (10)",
     "``personalization_threshold(version=\"printed\")``"),
    ("C, Lemma 1", "the classic Gaussian mechanism at epsilon 1", "the analytic one",
     "``CollaborativeMean(mechanism=\"pm1\", accounting=\"printed\")``"),
    ("C, pairs", "noise of its own for every recipient", "epsilon holds against one recipient; "
     "one broadcast stream holds against all", "``mechanism=\"pm1\"``, ``\"pm2\"``"),
    ("C, PM-II", "epsilon and delta divided by 15 levels", "noise by the root of 15",
     "``CollaborativeMean(mechanism=\"pm2\", accounting=\"printed\")``"),
    ("C, restricted schedule", "whom an agent asks depends on its mean, which it so reveals",
     "asking in turn, or one stream for everybody",
     "``CollaborativeMean(mechanism=\"pm1\", schedule=\"restricted\")``"),
]  # fmt: skip
INDEX = """
Index of algorithms
-------------------

.. list-table::
   :header-rows: 1
   :class: table-sm small

   * - Paper and number
     - Name
     - Estimator and parameters
"""
ALGORITHMS = [
    ("A, Theorems 1 and 2 (ICLR)", "Gaussian means, also private and quantized",
     "GaussianMean",
     "``epsilon=``, ``clip_norm=``, ``trust=\"local\"``; ``mechanism=\"quantizer\"``, ``n_bits=``"),
    ("A, Theorems 3 and 4 (ICLR)", "proportions, also private", "BernoulliMean",
     "``epsilon=``; as printed ``mechanism=\"one_bit\"``, ``method=\"printed\"``"),
    ("A, Algorithm 3 (ICLR), 1 (long)", "means of a discrete mixture", "GaussianMean",
     "``prior=DiscretePrior(k)``; ``method=\"printed\"``"),
    ("A, Algorithm 4 (ICLR), 2 (long)", "linear regression", "PersonalizedLinearRegression",
     "``prior=GaussianPrior(covariance_type=\"spherical\")``; as printed ``solver=\"gd\"``, "
     "``noise_variance=``, and a known covariance"),
    ("A, Algorithm 5 (ICLR), 3 (long)", "logistic regression", "PersonalizedLogisticRegression",
     "``prior=GaussianPrior(covariance_type=\"spherical\")``"),
    ("A, Algorithm 6 (ICLR), 7 (long)", "regression with discrete points",
     "PersonalizedLinearRegression",
     "``prior=DiscretePrior(k)``; as printed ``method=\"printed\"``, ``noise_variance=``"),
    ("A, Algorithm 1 (ICLR), 4 (long)", "AdaMix", "PersonalizedLinearRegression",
     "``prior=GaussianMixturePrior(k)``; as printed ``method=\"printed\"``, ``noise_variance=``; "
     "nets: ``AdaMixNetClassifier``"),
    ("A, Algorithm 2 (ICLR), 5 (long)", "AdaPeD", "AdaPeDClassifier",
     "``psi_min=.5`` (CIFAR: 1), ``psi_learning_rate=.03``, ``global_loss=0``, "
     "``personal_start=\"own\"`` as printed"),
    ("A, Section 3.2 and Theorem 5 (ICLR)", "DP-AdaPeD", "AdaPeDClassifier",
     "``epsilon=``; ``noise=\"per_step\"`` as printed"),
    ("A, Algorithm 7 (ICLR), 6 (long)", "AdaPeD with steps of clients that were not sampled",
     "AdaPeDClassifier", "``train_unsampled=True``"),
    ("B, Algorithm 1", "PPSGD, all clients in every round", "PPSGDRegressor",
     "``client_fraction=1``; classes: ``PPSGDClassifier``"),
    ("B, Algorithm 2", "PPSGD with sampled clients", "PPSGDRegressor",
     "``client_fraction=``, ``weighting=\"samples\"``"),
    ("B, Algorithm 3", "PPSGD, mean of the clients' risks", "PPSGDRegressor",
     "``client_fraction=``, ``weighting=\"clients\"``"),
    ("B, (12)", "a shared net with additive heads", "PPSGDNetClassifier",
     "``clip_norm=``, ``epsilon=``"),
    ("C, Algorithm 1 with PM-I, PM-II", "Private-ColME", "CollaborativeMean",
     "``mechanism=\"pm1\"`` or ``\"pm2\"``, ``weights=``, ``decision=\"test\"``, "
     "``accounting=\"printed\"``"),
]  # fmt: skip


_UNITED = re.compile(r" (?=[±%])|(?<=±) ")  # spaces at which no figure breaks


def pages(panels, found):
    """Contents of the page and its pictures, by path below the documentation."""
    parts, written = [INTRODUCTION], {}
    for paper, title in TITLES.items():
        shown = [each for each in panels.values() if each.paper == paper and each.name in found]
        if shown:
            parts.append(_heading(f"{paper}: {title}", "-"))
        for panel in shown:
            figures = found[panel.name]
            parts.append(_heading(panel.title, "~") + f"\nSettings: {panel.settings}\n")
            if panel.draw:
                path = f"_static/papers_{panel.name}.svg"
                written[path] = picture(panel, figures)
                parts.append(f"\n.. image:: {path}\n   :alt: {panel.title}\n   :width: 100%\n")
            parts.append(_csv(panel.header, panel.rows(figures)) + f"\n{panel.why(figures)}\n")
    parts.append(ERRATA + "".join(_item(fault) for fault in FAULTS))
    entries = [(where, name, f"{_role(kind)}; {how}") for where, name, kind, how in ALGORITHMS]
    parts.append(INDEX + "".join(_item(entry) for entry in entries))
    return {"papers.rst": "\n".join(part.strip("\n") + "\n" for part in parts), **written}


def picture(panel, figures):
    """SVG of a panel, the same on every machine."""
    same = {"svg.hashsalt": panel.name, "svg.fonttype": "none"}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **same}):
        n_rows, n_columns = panel.grid
        size = (6.5, 4) if panel.grid == (1, 1) else (3.2 * n_columns, 3.2 * n_rows)
        fig, axes = plt.subplots(n_rows, n_columns, figsize=size, layout="constrained")
        panel.draw(axes if panel.grid == (1, 1) else list(axes.flat), figures)
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(fig)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _role(kind):
    module = {"GaussianMean": "estimation", "BernoulliMean": "estimation"}.get(kind, "linear_model")
    if kind.startswith(("AdaPeD", "PPSGDNet")):
        module = "neural_network"
    if kind == "CollaborativeMean":
        module = "online"
    return f":class:`~pfl_sklearn.{module}.{kind}`"


def _item(cells):
    first, *others = cells
    return f"   * - {first}\n" + "".join(f"     - {cell}\n" for cell in others)


def _heading(text, line):
    return f"\n{text}\n{line * len(text)}\n"


def _csv(header, rows):
    lines = ["", ".. csv-table::", "   :header-rows: 1", "   :class: table-sm small", ""]
    for row in [header, *rows]:
        cells = [_UNITED.sub("\N{NO-BREAK SPACE}", each) for each in row]
        lines.append("   " + ", ".join(f'"{cell}"' for cell in cells))
    return "\n".join(lines) + "\n"
