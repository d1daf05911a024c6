"""Figures and tables of the papers, computed again, and the page that shows them beside the print.

Every panel is a module of this folder, and its figures are a file of the folder results. Cheap
panels are computed anew; the others only where the file is missing or --all is given.

    python benchmarks/papers/regenerate.py             # make papers: some seconds, and the page
    python benchmarks/papers/regenerate.py --all       # two hours on one core, most for nets
    python benchmarks/papers/regenerate.py --only c_oracle
"""

import argparse
import importlib
import json
import os
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import papers_page  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent.parent / "docs"
CHEAP = 0.5  # minutes
PANELS = (
    *("a_private_means", "a_elections", "a_proportions", "a_linear_regression", "a_adamix"),
    *("b_synthetic", "b_digits", "b_digit_nets", "c_agents", "c_oracle"),
)


def panels():
    """Panels by name, in the order of the page."""
    return {name: importlib.import_module(name).PANEL for name in PANELS}


def stored(results=RESULTS):
    """Figures of the panels that have been computed, by name."""
    files = {name: results / f"{name}.json" for name in PANELS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def compute(panel, results=RESULTS):
    """Compute a panel and store what it found."""
    begun = time.process_time()
    figures = panel.compute()
    results.mkdir(exist_ok=True)
    text = json.dumps(_rounded(figures), indent=1)
    (results / f"{panel.name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{panel.name}: {time.process_time() - begun:.0f} CPU seconds", flush=True)


def _rounded(figures):
    """Figures to six digits, which other processors reproduce."""
    if isinstance(figures, dict):
        return {name: _rounded(each) for name, each in figures.items()}
    if isinstance(figures, list):
        return [_rounded(each) for each in figures]
    return float(f"{figures:.6g}") if isinstance(figures, float) else figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PANELS, help="some of the panels")
    parser.add_argument("--all", action="store_true", help="panels that take minutes, too")
    options = parser.parse_args()
    found, every = stored(), panels()
    for name in options.only or PANELS:
        if options.all or options.only or name not in found or every[name].minutes <= CHEAP:
            compute(every[name])
    for path, content in papers_page.pages(every, stored()).items():
        file = DOCS / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
