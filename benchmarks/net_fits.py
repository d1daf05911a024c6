"""One fit of the comparison of nets: a method with a setting, to clients drawn with a seed."""

import copy
import math
import time
from typing import NamedTuple

import numpy as np
from code_digest import present_digest
from net_regimes import noise_for, recipe

from pfl_sklearn.model_selection import ClientShuffleSplit

SMALLEST = float(np.finfo(np.float32).eps)  # of probabilities, in log-losses
VALIDATION = 0.25  # of a client's training rows, in tuning
_NOTHING = {"accuracy": 0.0, "accuracy_sd": 0.0, "worst_decile": 0.0, "log_loss": math.inf}
_NO_ROUNDS = {"bytes_sent": np.zeros(0)}  # of a choice among two models


class Cell(NamedTuple):
    """One fit: of a method with a setting, to clients of a regime drawn with a seed."""

    regime: str
    method: str
    setting: dict
    seed: int
    tuning: bool

    def __str__(self):
        setting = (f"{name}={value}" for name, value in sorted(self.setting.items()))
        words = (self.regime, self.method, *setting, "tuning" if self.tuning else "test")
        return " | ".join((*words, f"seed {self.seed}"))


def rounds_of(cell, regime):
    """What the rounds of a cell's fit depend on; cells that agree in it share them."""
    method = regime.methods[cell.method]
    setting = {k: v for k, v in cell.setting.items() if k not in method.get("after", ())}
    return method.get("rounds", cell.method), sorted(setting.items()), cell.seed, cell.tuning


def plain_cell(cell, method):
    """The cell of rounds that another one goes on from."""
    setting = {k: v for k, v in cell.setting.items() if k not in method["after"]}
    return cell._replace(method=method["rounds"], setting=setting)


def model_of(cell, regime, train):
    """The model of a cell before its fit."""
    method, noise = regime.methods[cell.method], {}
    if "noise" in method:
        multiplier = noise_for(regime.printed_epsilon, regime.n_rounds, regime.client_fraction)
        noise = {method["noise"]: multiplier}
    model = method["estimator"](
        recipe(train.X, train.y, regime),
        n_rounds=regime.n_rounds,
        client_fraction=regime.client_fraction,
        sampling="fixed" if regime.client_fraction < 1 else "poisson",
        random_state=cell.seed,
        local_steps=regime.local_steps,
    )
    given, prefix = {**method["fixed"], **cell.setting, **noise}, method.get("prefix", "")
    return model.set_params(**{prefix + name: value for name, value in given.items()})


def read_by(cell, regime, model, train):
    """The model of a cell that begins where the rounds of another one's are."""
    method = regime.methods[cell.method]
    goes_on = copy.deepcopy(model).set_params(warm_start=True, n_rounds=model.n_rounds_)
    goes_on.set_params(**{**method["fixed"], **cell.setting})
    return goes_on.fit(train.X, train.y, groups=train.groups)


class StopAt:
    """Callback that ends a fit after a round; a warm start goes on as if there had been no end."""

    def __init__(self, n_rounds):
        self.left = n_rounds

    def setup(self, estimator, context):
        """The rounds are counted in ``on_fit_task_end``."""

    def on_fit_task_begin(self, estimator, context):
        """See ``setup``."""

    def on_fit_task_end(self, estimator, context):
        """Whether that was the last round."""
        self.left -= context.task_name == "round"
        return self.left <= 0

    def teardown(self, estimator, context):
        """See ``setup``."""


def parts_of_fit(cell, regime, train):
    """Rounds so far and the fitted model, which goes on, after each part of its rounds."""
    model = model_of(cell, regime, train)
    if regime.n_looks == 1:
        yield regime.n_rounds, model.fit(train.X, train.y, groups=train.groups)
        return
    model.set_params(warm_start=True)
    for k in range(regime.n_looks):
        first, last = (j * regime.n_rounds // regime.n_looks for j in (k, k + 1))
        model.set_callbacks(StopAt(last - first))
        yield last, model.fit(train.X, train.y, groups=train.groups)


def scores(model, rows):
    """Accuracy over clients, and log-loss over rows.

    A class that no training row had has probability 0.
    """
    probabilities = model.predict_proba(rows.X, groups=rows.groups)
    right = model.classes_[probabilities.argmax(axis=1)] == rows.y
    codes = np.unique(rows.groups, return_inverse=True)[1]
    by_client = np.bincount(codes, right) / np.bincount(codes)
    truth = (probabilities * (model.classes_ == rows.y[:, None])).sum(axis=1)
    return {
        "accuracy": by_client.mean(),
        "accuracy_sd": by_client.std(),
        "worst_decile": np.quantile(by_client, 0.1),
        "log_loss": -np.log(np.clip(truth, SMALLEST, 1)).mean(),
    }


def rows_of(cell, regime):
    """Rows to fit to, and rows to judge by: the test rows or, in tuning, some of the others."""
    train, test = regime.rows(cell.seed)
    if not cell.tuning:
        return train, test
    split = ClientShuffleSplit(1, test_size=VALIDATION, random_state=cell.seed)
    rest, held = next(split.split(train.X, groups=train.groups))
    return train.take(rest), train.take(held)


def results_of(cells, regime):
    """What the files of cells that share their rounds say; a fit that diverged has accuracy 0."""
    train, test = rows_of(cells[0], regime)
    common = {"digest": present_digest(), "n_train": len(train.y), "cpu_seconds": 0.0}
    found = [{**cell._asdict(), **common, "curve": []} for cell in cells]
    method, began = regime.methods[cells[0].method], time.process_time()
    shares = "rounds" in method
    plain = plain_cell(cells[0], method) if shares else cells[0]
    try:
        for n_rounds, model in parts_of_fit(plain, regime, train):
            shared = time.process_time() - began
            for cell, each in zip(cells, found, strict=True):
                began = time.process_time()
                if "error" not in each:
                    each |= look_at(cell, regime, model, train, test)
                    look = {name: each[name] for name in ("accuracy", "log_loss", "megabytes")}
                    each["curve"].append({"n_rounds": n_rounds, **look})
                each["cpu_seconds"] += shared + time.process_time() - began
            began = time.process_time()
    except ArithmeticError as error:
        for each in found:
            each |= {"error": str(error), **_NOTHING}
    else:
        if "noise" in method:
            report = model.privacy_
            found[0]["epsilon"] = {report.relation: report.epsilon, **dict(report.epsilon_under)}
    return found


def look_at(cell, regime, model, train, test):
    """Scores of a cell at this point of its rounds, or of those that it shares.

    Beside them are the megabytes that a client sent so far, on average.
    """
    n_clients = len(np.unique(train.groups))
    sent = {
        "megabytes": getattr(model, "history_", _NO_ROUNDS)["bytes_sent"].sum() / 1e6 / n_clients
    }
    try:
        if "rounds" in regime.methods[cell.method]:
            model = read_by(cell, regime, model, train)
        return scores(model, test) | sent
    except ArithmeticError as error:
        return {"error": str(error), **_NOTHING, **sent}
