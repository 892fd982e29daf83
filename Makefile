# Everything below makes its own environment; nothing needs to be active.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST_ARGS ?= -n auto

# What an interpreter or a library of another version could change; the rest is SQL, files and processes.
PORTABLE = tests/test_values.py tests/test_states.py tests/test_ledger.py tests/test_models.py tests/test_engine.py \
  tests/test_aio.py tests/test_host_engines.py tests/test_public_surface.py tests/test_demo.py tests/test_execution.py \
  tests/test_prune.py tests/plan/test_scheduling.py tests/plan/test_in_session.py

.PHONY: demo cockpit test test-all test-lowest test-portable portable faults fuzz soak lint bench bench-full dist clean

# With DB=postgresql+psycopg://… in a schema of its own there, which it makes and drops.
demo: $(VENV)/.runtime
	@$(if $(findstring postgresql,$(DB)),$(PIP) install --editable ".[postgresql]")
	@$(BIN)/tsg $(if $(DB),--db "$(DB)") demo
	@echo "(or: make cockpit)"

# A sample plan that moves by itself, in the browser.
cockpit: $(VENV)/.runtime
	@$(PIP) install --editable ".[cockpit]"
	@$(BIN)/tsg demo --cockpit

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(TESTS)

# The suite on every Python from 3.11 on that this machine has, each in an environment of its own.
test-all:
	@for version in 3.11 3.12 3.13 3.14; do \
	  python=$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
	  [ -n "$$python" ] || python=$$(command -v python$$version || true); \
	  if [ -n "$$python" ] && "$$python" -c 'import sqlite3' 2>/dev/null; then \
	    echo "== Python $$version"; \
	    $(MAKE) --no-print-directory test PYTHON="$$python" VENV=".venv-$$version" TESTS="$(TESTS)" || exit 1; \
	  else echo "== Python $$version: not on this machine"; fi; \
	done

portable:
	@echo $(PORTABLE)

# That part of it on every Python here, and with the oldest libraries.
test-portable:
	@$(MAKE) --no-print-directory test-all TESTS="$(PORTABLE)"
	@$(MAKE) --no-print-directory test-lowest TESTS="$(PORTABLE)"

# The suite with the oldest versions that pyproject.toml allows.
test-lowest: VENV = .venv-lowest
test-lowest:
	@[ -e $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"
	@sed -nE 's/^ *"(sqlalchemy|alembic|click)>=([0-9.]+)",$$/\1==\2/p' pyproject.toml > $(VENV)/lowest.txt
	$(PIP) install --editable ".[postgresql,async,asyncpg,table,mcp,cockpit]" --group test --constraint $(VENV)/lowest.txt
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(TESTS)

# More of the same as in the suite: rounds of kills and every call refused in turn, values, an hour of load on each
# database. THREAT_MODEL.md has the table that the first of them prints.
ROUNDS ?= 3000
SECONDS_EACH ?= 600
SOAK_SECONDS ?= 3600

faults: $(VENV)/.test
	TSG_FAULT_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest $(PYTEST_ARGS) tests/faults

fuzz: $(VENV)/.test
	TSG_FUZZ_SECONDS=$(SECONDS_EACH) $(BIN)/python -m pytest $(PYTEST_ARGS) tests/fuzz

soak: $(VENV)/.test
	TSG_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -s tests/faults/test_soak.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What README.md quotes: beside the published package and beside plain SQL, with 100,000 tasks and up to 1,000,000;
# bench-full with 1,000,000 and up to 10,000,000. BENCH_ARGS="--only apply,doctor --rounds 3" measures less.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --name bench $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.report benchmarks/results/bench.json > benchmarks/results/bench.md

bench-full: $(VENV)/.bench
	$(BIN)/python -m benchmarks --tasks 1000000 --largest 10000000 --name full $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.report benchmarks/results/full.json > benchmarks/results/full.md

# Wheel and sdist, and the demonstration from the wheel in an environment that has nothing else.
dist: $(VENV)/.lint
	rm -rf dist .venv-dist
	$(PIP) install build
	$(BIN)/python -W error -m build --outdir dist .
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip --disable-pip-version-check --quiet install dist/*.whl
	cd / && $(CURDIR)/.venv-dist/bin/tsg demo

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"

$(VENV)/.runtime: pyproject.toml hatch_build.py | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(PIP) install --editable ".[postgresql,async,asyncpg,table,mcp,cockpit]" --group test
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	$(PIP) install --editable ".[postgresql]" --group bench
	@touch $@

$(VENV)/.lint: $(VENV)/.runtime
	$(PIP) install --editable . --group lint
	@touch $@
