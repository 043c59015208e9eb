# Every target does its own set-up: the first run makes .venv and installs Quire into it, later runs reuse it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
READY  := $(VENV)/.quire-ready
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)
# Connectors of transfers and stores, without dependencies: pip would resolve torch anew. Their tests skip without them.
LIBRARIES := nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
CHECK  := $(BIN)/ruff format --check -q . && $(BIN)/ruff check -q . && $(BIN)/mypy && $(BIN)/lint-imports
LIVES  = $(if $(SEEDS),--seeds $(SEEDS),--seconds 30)
# One process for each core, up to four: each collects all tests, which takes up to ten seconds of CPU, and may run a
# server and a model. A file's tests stay together and in order.
# Compiled modules are kept, whatever the environment says: processes that tests start import them again and again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
COLLECTS := echo "==> Collecting tests: some seconds of CPU for each process, and more the first time"
WORKERS := -n $(shell n=$$(getconf _NPROCESSORS_ONLN || echo 2); echo $$((n < 4 ? n : 4))) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-all fuzz bench docs picture check clean setup

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: $(READY)  ## make .venv and install Quire with its development tools

$(READY): pyproject.toml constraints.txt
	@echo "==> Setting up $(VENV) (once; a few minutes on a slow connection: torch is 200 MB)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Quire needs Python 3.11 or newer; set PYTHON=..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Without a GPU, torch's CPU build: PyPI's own Linux wheel brings gigabytes of CUDA. Where a configured index has
	@# the CPU build it comes from there, else from torch's own index; the plain release is the last resort.
	@if command -v nvidia-smi >/dev/null; then $(PIP) torch==$(TORCH); else \
	  $(PIP) torch==$(TORCH)+cpu 2>/dev/null || \
	  $(PIP) torch==$(TORCH)+cpu --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null || \
	  $(PIP) torch==$(TORCH); fi
	@$(PIP) -e '.[dev]'
	@timeout 60 $(PIP) --no-deps $(LIBRARIES) || echo "==> Without $(LIBRARIES): their tests are skipped"
	@touch $(READY)
	@echo "==> Ready"

demo: $(READY)   ## serve the bundled models and talk to them: reuse, eviction, a refusal, hybrids, a restart that starts warm
	@echo "==> Starting the server and a client that holds several conversations"
	@$(BIN)/python -m examples.demo

test: $(READY)   ## the tests that are quick; mutants and long tests of what has changed, and a tenth of the others
	@$(COLLECTS)
	@$(PYTEST) -m "not slow and not gpu" --durations=10 $(WORKERS)

test-all: $(READY)  ## everything: all mutants, the long stateful runs and the soak test included
	-@$(PIP) -e ".[clients]" # their tests skip without them
	@$(COLLECTS)
	@QUIRE_RECOMPUTE_TOKENS=1 $(PYTEST) -m "not gpu" --durations=10 --timeout 1800 $(WORKERS)

fuzz: $(READY)   ## random operations on tiny caches for a minute, all checks after each; SEEDS=1000 for so many lives
	@$(BIN)/python -m tests.fuzz $(LIVES)
	@$(BIN)/python -m tests.fuzz $(LIVES) --tiers device,host,storage

bench: $(READY)  ## the engine benchmark at full size (minutes)
	@$(BIN)/python -m bench.engine.compare

docs: $(READY)   ## the documentation site, into build/site, without a warning
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || $(PIP) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "==> build/site/index.html"

picture: $(READY)  ## draw the picture of the README anew, from a run of the demo (half a minute)
	@$(BIN)/python docs/picture.py

check: $(READY)  ## ruff, mypy --strict, import-linter
	@$(CHECK)

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
