"""Fits that end without a clean-up, as if their process had been killed."""

import os

import pytest

from pfl_sklearn._rounds import checkpoint as _checkpoint


class Killed(BaseException):
    pass


def interrupt(model, data, at):
    """The model after a fit that ended in round `at`; its checkpoint is left."""
    X, y, groups = data
    observe = _checkpoint.Checkpoint.observe

    def killing(checkpoint, state):
        observe(checkpoint, state)
        if state.round == at:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpoint.Checkpoint, "observe", killing)
        with pytest.raises(Killed):
            model.fit(X, y, groups=groups)
    assert os.path.exists(model.checkpoint)
    return model
