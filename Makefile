# `make serve` and `make test` do all the set-up; see README.md.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 3000
ARGS ?=
BIN := $(VENV)/bin

.PHONY: serve test lint types clean

serve: $(VENV)/.serve
	$(BIN)/python -m tgi_trio --port $(PORT) $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tgi-trio needs Python 3.11 or later; say which with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e .
	-$(BIN)/python -m tgi_trio.shard.cpu tgi_trio/demo/model # compiles, so that no start has to
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
