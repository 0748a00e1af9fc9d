# `make demo` and `make test` need python3 (3.11 or newer), pip and make, and nothing else:
# they install what they use into a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
# For example `-c file`, to hold some versions.
PIP_ARGS ?=
BIN = $(VENV)/bin
# An environment without pip of its own needs no `ensurepip`, which some systems split off.
INSTALL = $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo test fast lint clean

demo: $(VENV)/.examples
	$(BIN)/python examples/fit_image.py

test: lint
	$(BIN)/python -m pytest -n auto

# The part of the suite that runs on other versions of Python and JAX.
fast: $(VENV)/.test
	$(BIN)/python -m pytest -n auto -m "not slow"

lint: $(VENV)/.test $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(INSTALL) -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/.examples: EXTRAS = examples
$(VENV)/.test: EXTRAS = examples,test
$(VENV)/.lint: EXTRAS = examples,test,lint

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache .hypothesis dist
