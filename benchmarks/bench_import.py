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
    peer = "import sklearn.linear_model"
    # The package imports what is used; its linear models are what compares with the peer's.
    for code, bar in (("import pfl_sklearn", 1.15), ("import pfl_sklearn.linear_model", 1.25)):
        for each in (peer, code):
            cpu_seconds(each)
        pairs = [(cpu_seconds(peer), cpu_seconds(code)) for _ in range(9)]
        theirs, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(second / first for first, second in pairs)
        print(
            f"| ours over peer: {code}; {peer} | {theirs:.3g} | {ours:.3g} | {ratio:.2f}x "
            f"| < {bar}x |"
        )


if __name__ == "__main__":
    main()
