"""Measuring two sides in turn."""

import statistics
import time

SHORT = 2  # rounds of a fit that stands for all that is not a round


def seconds(function):
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpu_seconds(function):
    """Processor seconds of one call, all threads together."""
    start = time.process_time()
    function()
    return time.process_time() - start


def per_round(side, clock=cpu_seconds):
    """Seconds of a round of a side (fit, n_rounds); ``fit(n)`` runs n rounds."""
    fit, n_rounds = side
    short = clock(lambda: fit(SHORT))
    return (clock(lambda: fit(SHORT + n_rounds)) - short) / n_rounds


def warm_seconds(function, clock=seconds):
    """Seconds of a call right after an untimed one, unless that took more than three seconds.

    After a pause the first touch of freshly mapped memory is several times slower on virtual
    machines; either side would pay for it by chance.
    """
    first = clock(function)
    return first if first > 3 else clock(function)


def compare(name, peer, ours, target, pairs=5, clock=seconds):
    """Print one line of the table: medians of both sides, median ratio of the pairs, range."""
    times = [(warm_seconds(peer, clock), warm_seconds(ours, clock)) for _ in range(pairs)]
    ratios = sorted(first / second for first, second in times)
    middle = statistics.median(ratios)
    slow, fast = (statistics.median(side) for side in zip(*times, strict=True))
    print(
        f"| {name} | {slow:.3g} | {fast:.3g} | {middle:.1f}x ({ratios[0]:.1f}-{ratios[-1]:.1f}) "
        f"| {target} |",
        flush=True,
    )


def peak_above_input(function):
    """Megabytes by which the largest resident size exceeds that before the call (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    function()
    return (resident("VmHWM") - before) / 1024


def resident(name):
    """Kilobytes of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
