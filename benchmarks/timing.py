"""Measuring two sides in turn."""

import statistics
import time


def seconds(function):
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def warm_seconds(function):
    """Seconds of a call right after an untimed one, unless that took more than three seconds.

    After a pause the first touch of freshly mapped memory is several times slower on virtual
    machines; either side would pay for it by chance.
    """
    first = seconds(function)
    return first if first > 3 else seconds(function)


def compare(name, peer, ours, target, pairs=5):
    """Print one line of the table: medians of both sides, median ratio of the pairs, range."""
    times = [(warm_seconds(peer), warm_seconds(ours)) for _ in range(pairs)]
    ratios = sorted(first / second for first, second in times)
    middle = statistics.median(ratios)
    slow, fast = (statistics.median(side) for side in zip(*times, strict=True))
    print(
        f"| {name} | {slow:.3g} | {fast:.3g} | {middle:.1f}x ({ratios[0]:.1f}-{ratios[-1]:.1f}) "
        f"| {target} |",
        flush=True,
    )
