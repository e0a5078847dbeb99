# `make demo` and `make test` are all one needs: each makes its own environment first. PYTHON picks the interpreter.

PYTHON ?= python3
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
LOCK_PYTHONS ?= python3.10 python3.11 python3.12 python3.13

MODEL_FILES = $(wildcard src/depthroute/modeling/*.py)
BIN := .venv/bin
READY := .venv/.ready
OLDEST_READY := .venv-oldest/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest lint format bench lock clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         the whole road on a real model; results in outputs/demo (DEMO_ARGS='--tiny' for a short one)"
	@echo "make test         lint, types and the test suite (PYTEST_ARGS='-k name' to choose)"
	@echo "make test-oldest  the smoke tests on the oldest supported transformers"
	@echo "make lint | format | bench | lock | clean"

# $(call environment,folder,lock file): torch with what its platform needs, the rest as pinned, the package itself editable.
# An existing environment is brought up to date, not thrown away.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"python: found {sys.version.split()[0]}, needed: 3.10 or newer (make PYTHON=python3.12 ...)")'
	@echo "Setting up $(1) from $(2): a few minutes the first time"
	@$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --no-compile --constraint $(2) $(shell grep -x 'torch==[0-9.]*' $(2))
	@echo "Installing the other $(shell grep -c '^[a-z]' $(2)) pinned packages"
	$(1)/bin/python -m pip install --quiet --no-compile --no-deps --requirement $(2)
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(1)/.ready
endef

$(READY): requirements-dev.lock pyproject.toml
	$(call environment,.venv,requirements-dev.lock)

$(OLDEST_READY): requirements-oldest.lock pyproject.toml
	$(call environment,.venv-oldest,requirements-oldest.lock)

demo: $(READY)
	$(BIN)/depthroute demo --out outputs/demo $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# what needs lm-eval, scipy, the linters or the demo's weights is not part of this environment
test-oldest: $(OLDEST_READY)
	.venv-oldest/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m smoke \
		--ignore tests/evaluation --ignore tests/studies --ignore tests/demo \
		--ignore tests/packaging $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/mlint.py $(MODEL_FILES)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/depthroute bench $(BENCH_ARGS)

lock:
	$(PYTHON) .ci/lock.py $(LOCK_PYTHONS)

clean:
	rm -rf .venv .venv-oldest build dist .pytest_cache .ruff_cache .mypy_cache
