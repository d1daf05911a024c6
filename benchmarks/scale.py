"""Statistics of many clients in a Parquet file, and fits from them: seconds and peak memory.

The file has standard normal features x0, x1, ..., a target y and clients g, in random order: 80
bytes a row on the disk with eight features. Every way runs in a process of its own.

    python benchmarks/scale.py                            # 1e7 rows of 1e6 clients, 8 features
    python benchmarks/scale.py --rows 1e8 --clients 1e5 --ways duckdb chunks
    python benchmarks/scale.py --rows 1e6 --clients 1e4 --ways dask-1 dask-2 --no-fits
    python benchmarks/scale.py --exponents                # by which power times grow
"""

import argparse
import contextlib
import importlib
import json
import math
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

ROWS_AT_ONCE = 500_000
COLUMNS = {"groups": "g", "target": "y"}
HEADERS = "step", "seconds", "processor seconds", "peak memory, GB"
WIDTHS = 36, 9, 17, 15
# What an exponent is taken of: a table, and what one of its sizes is multiplied by.
BASE = {"rows": 2e6, "clients": 1e5, "features": 8}
FACTORS = {"rows": 10, "clients": 10, "features": 2}


def write(path, n_rows, n_clients, d):
    """Rows whose clients differ in their level."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    level = 0.5 * np.random.default_rng(0).normal(size=n_clients)
    writer = None
    for start in range(0, n_rows, ROWS_AT_ONCE):
        rng, n = np.random.default_rng(start + 1), min(ROWS_AT_ONCE, n_rows - start)
        clients, X = rng.integers(0, n_clients, n), rng.normal(size=(n, d))
        y = X @ np.linspace(-1, 1, d) + level[clients] + rng.normal(size=n)
        columns = {f"x{j}": X[:, j] for j in range(d)}
        table = pa.table({"g": clients, **columns, "y": y})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


@contextlib.contextmanager
def chunks(path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Buffers of PyArrow's own keep all that it has read of the file.
    batches = pq.ParquetFile(path, pre_buffer=False).iter_batches(ROWS_AT_ONCE)
    yield (pa.Table.from_batches([batch]) for batch in batches)


@contextlib.contextmanager
def duckdb(path):
    import duckdb as engine

    with engine.connect() as connection:
        connection.execute("SET memory_limit = '3GB'")
        connection.execute(f"SET temp_directory = '{Path(path).parent}'")
        yield connection.read_parquet(path)


@contextlib.contextmanager
def polars(path):
    import polars as engine

    yield engine.scan_parquet(path)


@contextlib.contextmanager
def dask(path, n_workers):
    """A data frame whose partitions are read by so many processes."""
    from dask.dataframe import read_parquet
    from distributed import Client, LocalCluster

    options = {"n_workers": n_workers, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster):
        yield read_parquet(path, split_row_groups=True)


WAYS = {"duckdb": duckdb, "polars": polars, "chunks": chunks}
WAYS |= {f"dask-{n}": partial(dask, n_workers=n) for n in (1, 2)}
LOCAL = "duckdb", "polars", "chunks"


def peak():
    """Largest memory of this process so far, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def timed(name, function):
    """Result of a function, whose name, seconds and memory are written as a line of JSON."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps([name, wall, cpu, peak()]), flush=True)
    return result


def measure(way, path, d, with_fits):
    """Statistics of a file by one way, and fits from them."""
    from pfl_sklearn.linear_model import PersonalizedLinearRegression
    from pfl_sklearn.statistics import ClientStatistics

    importlib.import_module("pyarrow.parquet")  # which takes a second, whatever the file is
    read = ClientStatistics.from_chunks if way == "chunks" else ClientStatistics.from_frame
    with WAYS[way](path) as frame:
        features = [f"x{j}" for j in range(d)]
        reading = partial(read, frame, features=features, **COLUMNS)
        statistics = timed(f"statistics by {way}", reading)
    for random in ("intercept", "all") if with_fits else ():
        model = PersonalizedLinearRegression(random=random)
        timed(f'fit, random="{random}"', partial(model.fit_statistics, statistics))


def steps(sizes, ways, with_fits):
    """Name, seconds, processor seconds and memory of every step, on a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rows.parquet")
        write(path, int(sizes["rows"]), int(sizes["clients"]), int(sizes["features"]))
        for k, way in enumerate(ways):
            fits = [] if with_fits and not k else ["--no-fits"]
            own = ["--features", str(int(sizes["features"])), "--path", path, "--ways", way, *fits]
            command = [sys.executable, __file__, *own]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                yield from map(json.loads, process.stdout)
            if process.returncode:
                sys.exit(process.returncode)


def show(*cells, widths=WIDTHS):
    """Print a row of a table as the guide has it."""
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    print("  ".join(padded).rstrip(), flush=True)


def rule(widths=WIDTHS):
    show(*("=" * width for width in widths), widths=widths)


def print_steps(sizes, ways, with_fits):
    rule()
    show(*HEADERS)
    rule()
    for name, wall, cpu, memory in steps(sizes, ways, with_fits):
        show(name, f"{wall:.1f}", f"{cpu:.1f}", f"{memory:.2f}")
    rule()


def print_exponents(ways, with_fits):
    """By which power of a size processor seconds grow, from a base table."""
    seconds = {}
    for size in (None, *FACTORS):
        sizes = {name: BASE[name] * (FACTORS[name] if name == size else 1) for name in BASE}
        seconds[size] = {name: cpu for name, _, cpu, _ in steps(sizes, ways, with_fits)}
    widths = 36, *(13 for _ in FACTORS)
    rule(widths)
    show("step", *(f"{size} x{factor}" for size, factor in FACTORS.items()), widths=widths)
    rule(widths)
    for name, base in seconds[None].items():
        powers = [math.log(seconds[s][name] / base, factor) for s, factor in FACTORS.items()]
        show(name, *(f"{power:.2f}" for power in powers), widths=widths)
    rule(widths)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--clients", type=float, default=1e6)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(LOCAL), choices=list(WAYS))
    parser.add_argument("--no-fits", action="store_true")
    parser.add_argument("--exponents", action="store_true")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with_fits = not options.no_fits
    if options.path:  # a process of one way
        measure(options.ways[0], options.path, options.features, with_fits)
    elif options.exponents:
        print_exponents(options.ways, with_fits)
    else:
        print_steps({name: getattr(options, name) for name in BASE}, options.ways, with_fits)


if __name__ == "__main__":
    main()
