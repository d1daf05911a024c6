"""Clients and rows: segment sums, sorting and encoding against pandas and numpy."""

import numpy as np
import pandas as pd
from timing import compare

from pfl_sklearn._clients import encode_clients, rows_by_client, segment_sums

N = 10**7


def main():
    rng = np.random.default_rng(0)
    values = rng.normal(size=N)
    series = pd.Series(values)
    for m in (10**5, 10**6):
        codes = rng.integers(0, m, N)
        compare(
            f"segment sums on given codes, N = 10^7, m = {m:,}; pandas groupby",
            lambda codes=codes: series.groupby(codes).sum(),
            lambda codes=codes, m=m: segment_sums(values, codes, m),
            ">= 5x",
        )
        ids = rng.choice(2**50, m, replace=False)[codes]

        def encode_and_sum(ids=ids):
            found = encode_clients(ids, N)
            return segment_sums(values, found.codes, len(found.ids))

        compare(
            f"the same with encoding of arbitrary integers, m = {m:,}",
            lambda ids=ids: series.groupby(ids).sum(),
            encode_and_sum,
            "- (the peer hashes them the same way)",
        )
        compare(
            f"the same with encoding of dense integers, m = {m:,}",
            lambda codes=codes: series.groupby(codes).sum(),
            lambda codes=codes: encode_and_sum(codes),
            ">= 2x",
        )
        compare(
            f"rows by client, N = 10^7, m = {m:,}; stable argsort",
            lambda codes=codes: np.argsort(codes, kind="stable"),
            lambda codes=codes, m=m: rows_by_client(codes, m),
            "-",
            pairs=3,
        )
        compare(
            f"encoding of arbitrary integers, N = 10^7, m = {m:,}; np.unique",
            lambda ids=ids: np.unique(ids, return_inverse=True),
            lambda ids=ids: encode_clients(ids, N),
            "-",
            pairs=3,
        )
    wide, codes = rng.normal(size=(N // 10, 10)), rng.integers(0, 10**5, N // 10)
    compare(
        "segment sums of 10 columns, N = 10^6; bincount per column",
        lambda: [np.bincount(codes, weights=wide[:, k], minlength=10**5) for k in range(10)],
        lambda: segment_sums(wide, codes, 10**5),
        ">= 2x",
    )


if __name__ == "__main__":
    main()
