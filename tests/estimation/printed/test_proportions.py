"""BernoulliMean from one-bit messages, as the paper prints it."""

import numpy as np
import pytest

from pfl_sklearn import BernoulliMean, PrivacyWarning


def test_one_bit_warns():
    with pytest.warns(PrivacyWarning, match="mechanism='one_bit'"):
        BernoulliMean(epsilon=1.0, mechanism="one_bit", method="printed").fit_counts(
            [3, 4, 5, 6], [9, 9, 9, 9]
        )


@pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")
def test_one_bit_probabilities_are_probabilities():
    outside = 0
    for seed in range(20):
        model = BernoulliMean(
            mechanism="one_bit", method="printed", epsilon=0.5, random_state=seed
        ).fit_counts([1, 5, 9, 4, 2], [10] * 5)
        outside += np.sum((model.means_ < 0) | (model.means_ > 1))
        probabilities = model.predict_proba(np.zeros((5, 1)), groups=np.arange(5))
        assert np.all((probabilities >= 0) & (probabilities <= 1))
        assert not np.isnan(model.predict_log_proba(np.zeros((5, 1)), groups=np.arange(5))).any()
        assert np.isnan(model.credible_interval()).all()
    assert outside > 0
