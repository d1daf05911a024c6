"""Fits and predictions on the small table that tests of nets share."""

from tests.helpers.nets import table


def fit(model):
    """The model, fitted to the table."""
    X, y, groups = table()
    return model.fit(X, y, groups=groups)


def proba(model):
    """Probabilities of the table's rows, each by its client's net."""
    X, _, groups = table()
    return model.predict_proba(X, groups=groups)
