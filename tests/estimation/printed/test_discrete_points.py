"""GaussianMean with points by the printed rounds."""

import numpy as np

from pfl_sklearn.estimation._printed._discrete_points import printed_points
from pfl_sklearn.estimation._variance_components import client_means
from pfl_sklearn.priors import DiscretePrior
from tests.helpers.client_groups import POINTS, WEIGHTS, fit, make_groups, mse


def test_the_printed_rounds():
    """Algorithm 3 (ICLR): near EM where groups lie apart; drawn together by rounds where not."""
    y, groups, theta, _ = make_groups(2000, sizes=(8,))
    printed = fit(y, groups, DiscretePrior(3), method="printed")
    assert mse(printed.means_, theta) < 2 * mse(fit(y, groups, DiscretePrior(3)).means_, theta)
    assert mse(printed.means_, theta) < 0.3 * mse(printed.local_means_, theta)
    y, groups, _, _ = make_groups(300, sizes=(1,))
    table = client_means(y, groups, 300)
    spread = [
        np.trace(printed_points(table.means, np.ones(300), DiscretePrior(3), n).moments()[1])
        for n in (0, 1, 3, 100)
    ]
    assert np.all(np.diff(spread) < 0)
    assert spread[0] > 2
    assert spread[-1] < 0.01
    known = DiscretePrior(3, points=POINTS, weights=WEIGHTS)
    np.testing.assert_array_equal(
        fit(y, groups, known, method="printed", noise_variance=1.0).means_,
        fit(y, groups, known, noise_variance=1.0).means_,
    )
