# Everything here needs Python 3.11 or newer and make, and works in .venv, which is made
# from requirements.txt on first use and again whenever that file changes.
#
#   make train                             the quickstart: real digits, about two minutes
#   make train CONFIG=configs/gpt_1f1b.py ARGS=--config.num_steps=100
#   make test                              the tests, without the slow ones
#   make test-all                          all of them
#   make check                             formatting and likely mistakes
#   make format                            formats the code

PYTHON ?= python3
CONFIG ?= configs/quickstart.py
ARGS ?=

BIN := .venv/bin
STAMP := .venv/requirements.stamp
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8

.PHONY: train test test-all check format clean

train: $(STAMP)
	$(BIN)/python train/train.py --config $(CONFIG) $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"jpipe needs Python 3.11 or newer, got {sys.version.split()[0]}: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
