# Everything a newcomer needs: `make demo` and `make test` set up what they need themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test lint types unit test-slow bench anchors lag doom clean

help:
	@echo "make demo       five CartPole games train a policy through the front door, in about a minute or two"
	@echo "make test       lint, types and the test suite"
	@echo "make test-slow  learning runs and other long tests"
	@echo "make bench      benchmarks; prints tables, absolute numbers depend on the machine's load"
	@echo "make anchors    environments with published results, three seeds each, into docs/results.md (an hour or more)"
	@echo "make lag        how the losses cope with old experience, into docs/results.md (half an hour or more)"
	@echo "make doom       ViZDoom 'basic' learns to shoot the monster (up to 30 minutes)"
	@echo "make setup      only the virtual environment in $(VENV)"
	@echo "make clean      remove the virtual environment and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "tetherl needs Python 3.11 or newer; '$(PYTHON)' was not found. Install it, or name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tetherl needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "== setting up $(VENV) (once; a few minutes when packages have to be downloaded)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@touch $(STAMP)
	@echo "== ready: $(BIN)/tetherl --help"

demo: setup
	@$(BIN)/tetherl demo

test: lint types unit

lint: setup
	@echo "== ruff: lint and format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@echo "== mypy: types of the package"
	@$(BIN)/mypy

unit: setup
	@echo "== pytest: the test suite"
	@$(BIN)/python -m pytest

test-slow: setup
	@echo "== pytest: learning runs and other long tests"
	@$(BIN)/python -m pytest -m slow --timeout 3600

bench: setup
	@$(BIN)/python benchmarks/serving.py
	@$(BIN)/python benchmarks/training.py

anchors: setup
	@$(BIN)/python benchmarks/anchors.py --write

lag: setup
	@$(BIN)/python benchmarks/lag.py --write

doom: setup
	@$(BIN)/python examples/doom/run.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build src/*.egg-info
