# Two commands are all that a fresh machine needs:
#   make serve    serve the embedded model on 127.0.0.1:8000
#   make test     lint, types, import contracts, tests
# Both make .venv once; a second run installs nothing unless pyproject.toml, constraints.txt or a C++ source changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SERVE_FLAGS ?=
PYTEST_FLAGS ?=
PROCESSES ?= 2
MINUTES ?= 10
CUTS ?= 2000
JOBS ?= 2
KILLS ?= 0
LIMITS ?= 0
WATCH_MINUTES ?= 0.5
NATIVE := hatch_build.py $(wildcard src/baton/model/cpu/native/*)

.PHONY: gpu gpu-wheels serve test lint types imports pytest newest soak soak-server soak-cuts soak-structured soak-speculation clients agents browser findings deploy-check wheel check-wheel install install-dev clean

serve: $(VENV)/.installed
	$(BIN)/baton serve --host 127.0.0.1 --port 8000 $(SERVE_FLAGS)

test: lint types imports pytest deploy-check

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-cache

# Schemathesis gives all tests that it makes of a function one name, by which pytest-xdist tells tests apart.
ALONE := tests/gateway/http/test_openapi.py

# PROCESSES of tests at once, the files of each process one after the other (fixtures of a module are made once).
pytest: $(VENV)/.installed-dev
	$(BIN)/pytest $(PYTEST_FLAGS) $(ALONE)
	$(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations=20 $(PYTEST_FLAGS) $(ALONE:%=--ignore=%)

# The short tests with the newest of everything that pyproject.toml allows, in an environment of its own; BEYOND=1: also
# beyond its upper bounds. torch stays the one of constraints.txt. For a schedule: once a week tells in time.
BEYOND ?= 0
newest:
	$(PYTHON) tools/newest.py --venv $(VENV)-newest $(if $(filter 1,$(BEYOND)),--beyond)

# Fresh seeds of the simulator for MINUTES, with JOBS processes.
soak: $(VENV)/.installed
	$(BIN)/baton simulate --scenario all --minutes $(MINUTES) --jobs $(JOBS)

# A mixed load on a real 1P1D server for MINUTES, with KILLS kills: answers, and the memory of each process.
soak-server: $(VENV)/.installed-dev
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --kills $(KILLS) --out benchmarks/results/soak.json

# Frameworks of agents (tests/clients/requirements.txt) against a server: they want other versions of common packages
# than it does, so they have an environment of their own, and the server runs in $(VENV).
clients: $(VENV)/.installed $(VENV)-clients/.installed
	BATON_PYTHON=$(BIN)/python $(VENV)-clients/bin/pytest -q tests/clients

# Agents as programs, each with a task that takes its tools (docs/agents.md): tests/agents/package.json and requirements.txt, in
# an environment of their own (1.5 GB), and without any network but 127.0.0.1.  What passed: build/agents.
agents: $(VENV)/.installed-dev $(VENV)-agents/.installed-node
	BATON_AGENTS=$(VENV)-agents unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' - \
	  $(BIN)/pytest -q -s tests/agents

$(VENV)-agents/.installed-node: tests/agents/package.json tests/agents/package-lock.json $(VENV)-agents/.installed
	cp tests/agents/package.json tests/agents/package-lock.json $(VENV)-agents
	cd $(VENV)-agents && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# Pages in a real Chromium (Debian: apt-get install chromium), with playwright (tests/browser/requirements.txt) in an
# environment of its own.  Pictures: build/browser.  LIMITS=1 asserts limits of time, too; WATCH_MINUTES: of its memory.
browser: $(VENV)/.installed $(VENV)-browser/.installed
	BATON_PYTHON=$(BIN)/python BATON_LIMITS=$(LIMITS) BATON_BROWSER_MINUTES=$(WATCH_MINUTES) \
	  $(VENV)-browser/bin/pytest -q --timeout=1800 tests/browser

# What real libraries, formats and peers do that nobody would guess (findings/README.md): does it still hold?  FINDINGS: which.
FINDINGS ?= $(wildcard findings/*.sh)
findings:
	@failed=; for script in $(FINDINGS); do \
	  echo "== $$script"; timeout 1200 bash "$$script" || failed="$$failed $$script"; \
	done; \
	if [ -n "$$failed" ]; then echo "changed, or could not be shown:$$failed" >&2; exit 1; fi

# The Helm chart, rendered and validated offline, and its containers' commands run as processes.
deploy-check: $(VENV)/.installed-deploy
	$(BIN)/python tools/check_deploy.py
	$(BIN)/pytest -q tests/deploy

# CUTS random prompts on all backends, cut at random, with prefix hits, preemptions and hand-overs: the same bits?
soak-cuts: $(VENV)/.installed-dev
	BATON_CUTS=$(CUTS) nice -n 10 $(BIN)/pytest -q -s --timeout=0 tests/model/attention/test_cuts.py tests/e2e/test_cuts.py

# Structured outputs of a model of random weights: REQUESTS over 100 schemas, then again beside preemptions, hand-overs, kills.
REQUESTS ?= 2000
soak-structured: $(VENV)/.installed-dev
	BATON_STRUCTURED=$(REQUESTS) nice -n 10 $(BIN)/pytest -q -s --timeout=0 --basetemp=build/soak-structured tests/e2e/test_structured_faults.py

# ASKED requests of servers that draft, and of such that do not: models, forms of numbers, ranks, faults. The same answers?
ASKED ?= 10000
soak-speculation: $(VENV)/.installed-dev
	BATON_SOAK_SPECULATION=$(ASKED) nice -n 10 $(BIN)/pytest -q -s --timeout=0 --basetemp=build/soak-speculation tests/e2e/speculating

# All that a GPU can show, in eight minutes (docs/cuda.md): needs no network and no $(VENV), only a Python with torch,
# triton, transformers and numpy. What else it needs was fetched by `make gpu-wheels`, where there is a network.
GPU_FLAGS ?=
GPU_PYTHON ?= 3.12
gpu:
	$(PYTHON) tools/gpu_run.py $(GPU_FLAGS)

gpu-wheels: $(VENV)/.installed
	$(BIN)/python tools/gpu_packages.py fetch --python $(GPU_PYTHON)

# In dist/: a source distribution, and the wheel that is built of it, with the compiled library (docs/releasing.md).
# auditwheel fails if the library needs a newer glibc than the tag says.
PLATFORM ?= manylinux_2_28_$(shell uname -m)
wheel: $(VENV)/.installed-release
	rm -rf build/wheel
	BATON_NATIVE=1 PIP_CONSTRAINT=$(abspath constraints.txt) $(BIN)/python -m build --outdir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat $(PLATFORM) --only-plat --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist/

# The newest wheel, in a fresh environment without a compiler: does `baton serve` answer, with the C++ kernels?
check-wheel: $(VENV)/.installed-release
	$(BIN)/python tools/check_wheel.py "$$(ls -t dist/*.whl | head -n 1)"

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14)) or None' \
	  || { echo "Baton needs Python 3.11 to 3.13; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What contributors and wheels need is compiled for every CPU, this for the one that is here.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing into $(VENV): some minutes the first time"
	BATON_NATIVE=cpu $(PIP) install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing into $(VENV), with the tools of contributors: some minutes the first time"
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-release: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(PIP) install --quiet -c constraints.txt -e '.[release]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-deploy: $(VENV)/.installed-dev
	$(PIP) install --quiet -c constraints.txt -e '.[dev,deploy,ray]'
	touch $@

$(VENV)-%/.installed: tests/%/requirements.txt
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(VENV)-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	$(VENV)-$*/bin/python -m pip --disable-pip-version-check check
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-agents $(VENV)-browser $(VENV)-newest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
