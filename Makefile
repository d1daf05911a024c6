# make demo | test | test-slow | test-tables | test-other-kernels | test-without-torch | lint | docs |
# bench; each sets up .venv first if it has to.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Two workers with one thread each: threads of the linear algebra would only be in each other's way.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
INPUTS = setup.cfg pyproject.toml constraints.txt

.PHONY: demo test test-slow test-tables test-other-kernels test-without-torch lint docs bench clean
.DELETE_ON_ERROR:

# One stamp per set of extras: make -s demo needs matplotlib only.
$(VENV)/.%.stamp: $(INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

demo: $(VENV)/.plot.stamp
	$(BIN)/python examples/demo.py

test: $(VENV)/.test.stamp
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.test.stamp
	$(PYTEST) -m slow

# Only what reads the folder that PFL_SKLEARN_DATA names; `make test` skips it where there is none.
test-tables: $(VENV)/.test.stamp
	$(PYTEST) -m tables tests

# Other processors round otherwise: the numerical tests on the kernels of an old one.
test-other-kernels: $(VENV)/.test.stamp
	OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default $(PYTEST) -m "not slow" tests/linear_model \
		tests/estimation tests/priors tests/neural_network tests/online tests/statistics

# A short pass as if PyTorch and skorch were not installed.
test-without-torch: $(VENV)/.test.stamp
	PFL_SKLEARN_WITHOUT_TORCH=1 $(PYTEST) -m "not slow" tests/test_import.py tests/test_base.py \
		tests/rounds tests/test_common.py -k "not sklearn_checks and not finite_tables"

lint: $(VENV)/.test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(VENV)/.bench.stamp
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) docs/_build docs/auto_examples docs/generated output
