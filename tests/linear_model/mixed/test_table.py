"""Tables of rows: sums over clients, and over levels that clients share."""

import numpy as np
import pytest
from scipy.sparse import issparse

from pfl_sklearn.linear_model._mixed._table import RegressionTable


@pytest.mark.parametrize("given", [False, True])
def test_cross_products_of_clients_and_levels(given):
    rng = np.random.default_rng(0)
    n, m, q = 60, 7, 2
    columns, y, codes = rng.normal(size=(n, 3)), rng.normal(size=n), rng.integers(0, m, n)
    weights = rng.uniform(0.1, 3, n)
    table = RegressionTable(columns, y, codes, m, weights, q, None, ["a", "b", "c"], False)
    items, schools = rng.integers(0, 5, n), rng.integers(0, 3, n)
    groupings = [(items, columns[:, [2]], 5), (schools, columns[:, [2, 0]], 3)]
    design = np.zeros((n, m * q + 5 + 3 * 2 + 3 + 1))
    for i in range(n):
        design[i, codes[i] * q : codes[i] * q + q] = columns[i, :q]
        design[i, 14 + items[i]] = columns[i, 2]
        design[i, 19 + 2 * schools[i] : 21 + 2 * schools[i]] = columns[i, [2, 0]]
    design[:, 25:28], design[:, 28] = columns, y
    if given:  # curvatures, say
        weights = rng.uniform(0.1, 3, n)
    products = table.cross_products(groupings, weights if given else None)
    assert issparse(products)
    # Two clients share no row.
    assert products[:14, :14].nnz <= m * q**2
    np.testing.assert_allclose(products.toarray(), design.T @ (weights[:, None] * design))
    alone = table._replace(weights=None).cross_products()
    bare = np.delete(design, np.s_[14:25], axis=1)
    np.testing.assert_allclose(alone.toarray(), bare.T @ bare, atol=1e-12)
