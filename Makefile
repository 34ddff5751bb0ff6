# Everything here needs Python 3.11 or newer and make, and works in .venv. The environment is made
# on first use and brought up to date whenever requirements.txt or pyproject.toml changes.
#
#   make train          the quickstart: trains on real digits, about two minutes
#   make train CONFIG=configs/gpt_1f1b.py ARGS=--config.num_steps=100
#   make test           the tests, about 8 minutes on two cores
#   make test-all       also longer tests and more cases, about 50 minutes
#   make test-slow      the tests that take minutes each, all other cases, every printed command: hours
#   make test-wheel     builds the package, installs it in an empty environment, runs the README
#   make test-new       a sample of the core's tests with Python 3.12 and the newest JAX, Flax and Optax
#   make test-zoo-new   a sample of the zoo with these
#   make dist ADDRESS=https://...   the package of a release in dist/, checked; ADDRESS is the project's page
#   make gpu-compiler   the compiler for H100s; with it the tests also compile steps for GPUs
#   make check          formatting, likely mistakes, types
#   make types          types alone
#   make docs           the documentation, into docs/_build/html; a warning is an error
#   make format         formats the code
#   make clean          removes everything that was made

PYTHON ?= python3
CONFIG ?= configs/quickstart.py
ARGS ?=
ADDRESS ?=

# The newest JAX and Flax need it.
NEW_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)

BIN := .venv/bin
STAMP := .venv/requirements.stamp
NEW := .venv-new
DOCS_STAMP := .venv/docs.stamp
RELEASE_STAMP := .venv/release.stamp
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: train test test-all test-slow test-wheel test-new test-zoo-new dist gpu-compiler check types docs format clean

train: $(STAMP)
	$(BIN)/python train/train.py --config $(CONFIG) $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow and not exhaustive" $(ARGS)

test-all: test
	$(PYTEST) -m "exhaustive and not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)

test-wheel: $(RELEASE_STAMP)
	$(BIN)/python -m pytest tests/test_wheel.py $(ARGS)

# Two users of one README get two versions of JAX: 0.10 with Python 3.11, and a newer one with later Pythons.
test-new: TESTS := tests/schedules/test_every_schedule.py tests/engine/test_engine.py tests/test_reference.py \
	tests/pipeline/test_transparency.py tests/pipeline/test_asynchronous.py tests/checkpoints/test_checkpoints.py \
	tests/layers/test_indexing.py
test-zoo-new: TESTS := tests/flax_zoo
test-new test-zoo-new:
	@if $(NEW_PYTHON) -c '' 2>/dev/null; then $(MAKE) --no-print-directory $(NEW)/requirements.stamp in-new TESTS="$(TESTS)"; \
	else echo "$@: skipped, there is no $(NEW_PYTHON): make $@ NEW_PYTHON=..."; fi

.PHONY: in-new
in-new:
	@$(NEW)/bin/python -c 'import sys, flax, jax, optax; print("Python", sys.version.split()[0], *(f"{m.__name__} {m.__version__}" for m in (jax, flax, optax)))'
	$(NEW)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "not slow and not exhaustive" $(TESTS) $(ARGS)

$(NEW)/requirements.stamp: pyproject.toml
	test -x $(NEW)/bin/python || $(NEW_PYTHON) -m venv $(NEW)
	$(NEW)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable ".[test]"
	@touch $@

dist: $(RELEASE_STAMP)
	rm -rf dist
	$(BIN)/python release/package.py $(if $(ADDRESS),--address $(ADDRESS))

gpu-compiler: benchmarks/gpu_env/requirements.stamp

benchmarks/gpu_env/requirements.stamp: benchmarks/requirements-gpu.txt $(STAMP)
	$(BIN)/python benchmarks/compile_gpu.py --setup
	@touch $@

check: $(STAMP) types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --fresh-env --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(f"jpipe needs Python 3.11 or newer, got {sys.version.split()[0]}: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable ".[docs]"
	@touch $@

$(RELEASE_STAMP): $(STAMP)
	$(PIP) --editable ".[release]"
	@touch $@

clean:
	rm -rf .venv $(NEW) .pytest_cache .ruff_cache .mypy_cache build dist docs/_build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
