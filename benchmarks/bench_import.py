"""Cost of the import against scikit-learn's linear models: CPU time of whole processes."""

import resource
import statistics
import subprocess
import sys


def cpu_seconds(code):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    codes = "import sklearn.linear_model", "import pfl_sklearn"
    for code in codes:
        cpu_seconds(code)
    pairs = [tuple(cpu_seconds(code) for code in codes) for _ in range(9)]
    peer, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(second / first for first, second in pairs)
    print(
        f"| ours over peer: import pfl_sklearn; import sklearn.linear_model | {peer:.3g} "
        f"| {ours:.3g} | {ratio:.2f}x | < 1.15x |"
    )


if __name__ == "__main__":
    main()
