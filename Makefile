# The two commands of the README are `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: env train test lint prove clean
.DELETE_ON_ERROR:

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pith needs Python 3.11 or newer, got " + sys.version.split()[0] + "; run: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not prove'

# Hours rather than minutes; an interrupted run goes on where it stopped. Writes PROOF.md.
prove: env
	$(BIN)/python -m tests.prove

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
