# `make train` and `make test` do all the set-up. `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PyTorch's own index, for example for a CPU-only build on Linux:
#   make train TORCH_INDEX=<URL>
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
               --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Arguments for `blsgd run`, such as ARGS="-s epochs=5 -s seed=1"
ARGS ?=

.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

train: $(VENV)/.installed  ## Train on real images with a fast and a slow worker
	@$(BIN)/blsgd run . -c digits $(ARGS)

# Three at once keep two cores busy, also while tests wait; more only import torch more often.
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider -n 3 --dist loadfile --no-loadscope-reorder

test: check  ## Lint, types, and tests of every rule
	@echo "tests: the second at which each file begins"
	@$(PYTEST)

test-all: check  ## Also the guides, the examples and nodes of several devices, as they are started
	@echo "tests: the second at which each file begins"
	@$(PYTEST) -m 'not soak'

fuzz: $(VENV)/.installed-dev  ## New random examples: settings, 100,000 records, 10,000 files
	@HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -m hypothesis \
	    $$(grep -rlE '^from hypothesis' tests --include='test_*.py')

soak: $(VENV)/.installed-dev  ## An hour of failures at random; writes docs/results/soak
	@$(BIN)/python -m tests.faults.soak $(ARGS)

simulation: $(VENV)/.installed-dev  ## Train the same app in Flower's simulation
	@$(BIN)/python scripts/flower_engine.py simulation -c configs/digits.toml

deployment: $(VENV)/.installed  ## Train it with a SuperLink and two SuperNodes on this machine
	@$(BIN)/python scripts/flower_engine.py deployment -c 'epochs=2' \
	    --node "device='cpu:0' tier='fast'" --node "device='cpu:1' tier='slow' slowdown=4.0"

docs: $(VENV)/.installed-dev  ## Build the site into docs/_build
	@$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

check: $(VENV)/.installed-dev  ## Lint and types
	@echo "lint and types"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

format: $(VENV)/.installed-dev  ## Format, and write the defaults into pyproject.toml
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/python scripts/write_defaults.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; name one: make train PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV): the first time takes a few minutes"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP_INSTALL) --editable '.[simulation,vision,text,lora,lightning,tensorboard,docs,dev]'
	@touch $@

.PHONY: help train test test-all fuzz soak simulation deployment docs check format
