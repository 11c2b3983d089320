# The two commands of the README are `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
ARGS ?=
NOT_TEXT := site-packages dist-packages test tests idlelib lib2to3

.PHONY: env train test lint prove clean
.DELETE_ON_ERROR:

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pith needs Python 3.11 or newer, got " + sys.version.split()[0] + "; run: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The Python standard library's own sources become tokens, then a small MoE is trained in two processes.
# More options for `pith train`: make train ARGS="--set train.steps=50"
train: env
	$(BIN)/pith data prepare "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
		--out runs/data/python --suffix .py --holdout 0.05 --invalid skip $(NOT_TEXT:%=--exclude %)
	$(BIN)/pith train examples/small.toml $(ARGS)

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m 'not prove'

# Hours rather than minutes; an interrupted run goes on where it stopped. Writes PROOF.md.
prove: env
	$(BIN)/python -m tests.prove

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
