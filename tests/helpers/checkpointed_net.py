"""A neural fit with a checkpoint; as a script it is slow enough to be killed."""

import sys
import warnings

from pfl_sklearn.neural_network import AdaPeDClassifier
from tests.helpers.checkpointed_run import slow_down
from tests.helpers.nets import Dropped, recipe, table


def checkpointed_net(folder):
    X, y, groups = table()
    model = AdaPeDClassifier(
        recipe(Dropped),
        n_rounds=60,
        local_steps=2,
        client_fraction=0.5,
        noise_multiplier=1.0,
        clip_norm=0.3,
        random_state=3,
        checkpoint=f"{folder}/run.npz",
        checkpoint_every=2,
    )
    return model.fit(X, y, groups=groups)


if __name__ == "__main__":
    slow_down()
    warnings.simplefilter("ignore")
    checkpointed_net(sys.argv[1])
