"""Statistics of many clients in a Parquet file, and fits from them: seconds and peak memory.

The file has standard normal features x0, x1, ..., a target y and clients g, in random order. Every
way runs in a process of its own.

    python benchmarks/scale.py                            # 1e7 rows of 1e6 clients, 8 features
    python benchmarks/scale.py --rows 1e8 --clients 1e5
    python benchmarks/scale.py --ways chunks --no-fits
"""

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

ROWS_AT_ONCE = 500_000
COLUMNS = {"groups": "g", "target": "y"}


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


def chunks(path, features):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pfl_sklearn.statistics import ClientStatistics

    # Buffers of PyArrow's own keep all that it has read of the file.
    batches = pq.ParquetFile(path, pre_buffer=False).iter_batches(ROWS_AT_ONCE)
    frames = (pa.Table.from_batches([batch]) for batch in batches)
    return ClientStatistics.from_chunks(frames, features=features, **COLUMNS)


def duckdb(path, features):
    import duckdb as engine

    from pfl_sklearn.statistics import ClientStatistics

    with engine.connect() as connection:
        connection.execute("SET memory_limit = '3GB'")
        frame = connection.read_parquet(path)
        return ClientStatistics.from_frame(frame, features=features, **COLUMNS)


def polars(path, features):
    import polars as engine

    from pfl_sklearn.statistics import ClientStatistics

    return ClientStatistics.from_frame(engine.scan_parquet(path), features=features, **COLUMNS)


WAYS = {"duckdb": duckdb, "polars": polars, "chunks": chunks}


def peak():
    """Largest memory of this process so far, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


def timed(name, function):
    """Result of a function whose seconds are printed."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak():.2f} |", flush=True)
    return result


def measure(way, path, d, with_fits):
    from pfl_sklearn.linear_model import PersonalizedLinearRegression

    features = [f"x{j}" for j in range(d)]
    statistics = timed(f"statistics by {way}", lambda: WAYS[way](path, features))
    for random in ("intercept", "all") if with_fits else ():
        model = PersonalizedLinearRegression(random=random)
        timed(f"fit from them, random={random!r}", partial(model.fit_statistics, statistics))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--clients", type=float, default=1e6)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--no-fits", action="store_true")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path:  # a process of one way
        measure(options.ways[0], options.path, options.features, not options.no_fits)
        return
    print("| step | seconds | processor seconds | peak memory, GB |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rows.parquet")
        write(path, int(options.rows), int(options.clients), options.features)
        for k, way in enumerate(options.ways):
            fits = ["--no-fits"] if options.no_fits or k else []
            own = ["--features", str(options.features), "--path", path, "--ways", way, *fits]
            subprocess.run([sys.executable, __file__, *own], check=True)


if __name__ == "__main__":
    main()
