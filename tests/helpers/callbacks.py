"""Callbacks of fits, and what they recorded."""


class StopAfter:
    """Callback that ends a fit, and counts its calls."""

    def __init__(self, n_rounds):
        self.n_rounds, self.calls = n_rounds, []

    def setup(self, estimator, context):
        self.calls.append("setup")

    def on_fit_task_begin(self, estimator, context):
        self.calls.append(f"begin {context.task_name}")

    def on_fit_task_end(self, estimator, context):
        self.calls.append(f"end {context.task_name}")
        return self.calls.count("end round") == self.n_rounds

    def teardown(self, estimator, context):
        self.calls.append("teardown")


class Watch:
    """Callback that keeps the names of tasks, and asks for an end that it does not get."""

    max_propagation_depth = None

    def __init__(self):
        self.open, self.ended = [], []

    def setup(self, estimator, context):
        self.open.append("setup")

    def on_fit_task_begin(self, estimator, context):
        self.open.append(context.task_name)

    def on_fit_task_end(self, estimator, context):
        assert self.open.pop() == context.task_name
        self.ended.append((*self.open, context.task_name)[1:])
        return True

    def teardown(self, estimator, context):
        self.ended.append(self.open.pop())


def scores_of(monitor):
    """Scores of the rounds of the last fit."""
    found = monitor.get_logs().data_as_pandas
    return found[found["task_name"] == "round"]
