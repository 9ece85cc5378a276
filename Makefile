# make serve   everything from nothing to a running server          MODEL=model.gguf ARGS="--parallel 4"
# make test    the same set-up plus the unpatched tree with its llama-server (the reference), then the tests
# make check   linters, types, formatting, patch queue
# A second run does only what changed: stamps for the environment, a hash of all inputs for the native build.

PYTHON ?= python3
MODEL  ?=
ARGS   ?=
BUILD  ?=
TESTS  ?=

VENV := .venv
BIN  := $(VENV)/bin
PY   := $(BIN)/python

.PHONY: help serve test check build upstream kernels format docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make /make /p' Makefile

serve: $(VENV)/.install build
	@model="$(MODEL)"; [ -n "$$model" ] || model=$$($(PY) -m llamamg.demo) || exit 1; \
	exec $(BIN)/llamamg serve --host 127.0.0.1 --port 8080 -m "$$model" $(ARGS)

test: $(VENV)/.install-test build upstream kernels
	@$(PY) -m llamamg.demo >/dev/null
	@$(PY) -m pytest $(TESTS)

check: $(VENV)/.install-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror native/src/*.h native/src/*.cpp
	$(PY) -m llamamg.native.patches check --fast
	$(PY) -m llamamg.native.patches docs --check

build: $(VENV)/.install
	@$(PY) -m llamamg.native.build $(BUILD)

upstream: $(VENV)/.install
	@$(PY) -m llamamg.native.build --upstream --server $(BUILD)

kernels: $(VENV)/.install
	@$(PY) -m llamamg.native.kernels

format: $(VENV)/.install-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/src/*.h native/src/*.cpp

docs: $(VENV)/.install
	$(PY) -m llamamg.native.patches docs

clean:
	rm -rf build

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than 3.10: run make PYTHON=python3.11 (or newer)" >&2; exit 1; }
	@echo "creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "cannot create $(VENV): install the venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

# Editable, so that an edit to the sources acts at once; the extras add only what the target needs.
$(VENV)/.install: pyproject.toml setup.py | $(PY)
	@echo "installing llamamg and its packages into $(VENV) ..."
	@$(PY) -m pip --disable-pip-version-check install --quiet -e .
	@touch $@

$(VENV)/.install-%: pyproject.toml setup.py | $(VENV)/.install
	@echo "installing what $* needs into $(VENV) ..."
	@$(PY) -m pip --disable-pip-version-check install --quiet -e '.[$*]'
	@touch $@
