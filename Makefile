# make quickstart: install into .venv and train a small model.   make test: install the dev extra and run all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := build/.installed
DEV_STAMP := build/.installed-dev
SOURCES := pyproject.toml native/CMakeLists.txt native/libra_init.py $(wildcard native/src/*)

.PHONY: quickstart test lint types bench clean

quickstart: $(STAMP)
	$(BIN)/libra train conf/quickstart.yaml --fresh

test: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m pytest -c ../pyproject.toml --rootdir=.. .

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the editable install's import hook, so it gets the same package as a tree of links.
types: $(DEV_STAMP)
	mkdir -p build/typing/libra
	for room in conf resources scheduler_plugin tasks pipeline native; do \
	    ln -sfn ../../../$$room build/typing/libra/$$room; done
	ln -sfn ../../../native/libra_init.py build/typing/libra/__init__.py
	cd build/typing && ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml -p libra

bench: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m benchmarks

clean:
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch is named on its own first: pip then takes one exact build of it and resolves the rest around that.
$(STAMP): $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable .
	mkdir -p build && touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	mkdir -p build && touch $@
