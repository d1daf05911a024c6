"""Run all benchmarks and write their table to output/benchmarks.md.

Every line is a ratio of two sides measured in turn in one run, with one BLAS and OpenMP thread:
seconds of the peer over seconds of ours, median of the pairs. Absolute times mean little on a
shared machine.

    python benchmarks/run.py                 # all of them
    python benchmarks/run.py means kernels   # some of the files bench_*.py
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
HEADER = "| comparison | peer, s | ours, s | ratio | target |\n|---|---|---|---|---|"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="files to run, as in bench_NAME.py; default all")
    parser.add_argument("--output", type=Path, default=Path("output/benchmarks.md"))
    options = parser.parse_args()
    names = options.names or sorted(path.stem[6:] for path in HERE.glob("bench_*.py"))
    lines = [HEADER]
    print(HEADER, flush=True)
    for name in names:
        process = subprocess.Popen(
            [sys.executable, HERE / f"bench_{name}.py"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD,
        )
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        if process.wait():
            sys.exit(f"bench_{name}.py failed")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nTable written to {options.output}")


if __name__ == "__main__":
    main()
