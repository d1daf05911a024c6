# make demo | test | test-slow | test-tables | test-other-kernels | test-without-torch |
# test-boosting | lint | docs | papers | bench | scale | spark; each sets up .venv first if it has
# to, spark one of its own.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SPARK = .venv-spark
# Two workers with one thread each: threads of the linear algebra would only be in each other's way.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
INPUTS = setup.cfg pyproject.toml constraints.txt
# Compiled modules are kept, or every worker of every run would compile package and tests again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-slow test-tables test-other-kernels test-without-torch test-boosting lint \
	docs papers bench scale spark clean
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

# `make test` skips what needs LightGBM and CatBoost unless they are installed.
test-boosting: $(VENV)/.test.stamp $(VENV)/.boosting.stamp
	$(PYTEST) tests/compose/test_other_boosting.py

lint: $(VENV)/.test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# Figures of the papers beside those printed: docs/papers.rst. All of them, two hours on one core:
# python benchmarks/papers/regenerate.py --all
papers: $(VENV)/.test.stamp
	$(BIN)/python benchmarks/papers/regenerate.py

bench: $(VENV)/.bench.stamp
	$(BIN)/python benchmarks/run.py

# Statistics of ten million rows by every engine: a few minutes, and a gigabyte of disk.
scale: $(VENV)/.bench.stamp
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/scale.py --exponents --ways duckdb chunks

# Spark has half a gigabyte, needs Java, and agrees with few versions of other packages.
$(SPARK)/.stamp: $(INPUTS)
	@test -x $(SPARK)/bin/python || $(PYTHON) -m venv $(SPARK)
	$(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[parquet,plot]" pytest hypothesis pyspark
	@touch $@

spark: $(SPARK)/.stamp
	$(SPARK)/bin/python -m pytest tests/statistics/test_spark.py

clean:
	rm -rf $(VENV) $(SPARK) docs/_build docs/auto_examples docs/generated output
