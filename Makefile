# A fresh clone needs nothing but Python 3.11+ and this file:
#   make train      sets up .venv, trains the small model, shows where everything is
#   make test       sets up .venv, lints and runs the tests (some 10 minutes on 2 cores)
#   make test-all   the slow tests too, and those that take minutes each
# Set-up is repeated only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

.PHONY: train test test-all lint setup

train: $(READY)
	$(BIN)/dsv41-train +experiment=tiny

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up .venv; the first time takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
