# Every target sets up what it needs. Variables: MODEL=smollm2  PORT=8000  FILE=tests/...  ROOM=planner  PROMPT="..."  PYTHON=python3.12
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
MODEL ?= smollm2
PORT ?= 8000
PROMPT ?=
PEERS ?=
export PROMPT

BIN := .venv/bin
WITH_SERVER := examples/openai_client.py examples/tool_calls.py
PARITY := .venv-parity/bin
GPU := .venv-gpu/bin
STEP := sh tools/step.sh
TWO := -n 2 --dist loadfile  # files of tests, shared out among two processes
# Three at a time, since a fifth of the time most of them wait for something. By name, not those with
# most tests first: at the end they would wait for the longest.
THREE := -n 3 --dist loadfile --no-loadscope-reorder
REST := $(THREE) --durations=15 --durations-min=5 --ignore=tests/core --ignore=tests/model/cost --ignore=tests/parity
# The tests start hundreds of programs, which read compiled modules instead of compiling them.
export PYTHONDONTWRITEBYTECODE :=
# Suites over all backends; of these `make test-gpu` runs what is of cuda.
OF_ALL_BACKENDS := $(addprefix tests/answers/, test_same_answer.py test_same_answer_of_families.py) \
	$(addprefix tests/backends/, test_runners.py test_drafts_in_steps.py)
PIP := -m pip --disable-pip-version-check --quiet

.PHONY: help serve demo test test-full test-gpu test-gpu-full test-parity test-parity-full test-clients lint pure engine engine-full mutants some-mutants examples bench bench-peers setup clean

help:
	@echo "make serve        serve a model over HTTP, as OpenAI's clients expect   (MODEL=, PORT=)"
	@echo "make demo         answer a handful of prompts at once, with speeds      (MODEL=, PROMPT=)"
	@echo "make test         lint, type-check, and run every kind of test this machine can run"
	@echo "make test FILE=tests/core/scheduling/test_scheduler.py   only the tests of a file or folder"
	@echo "make test ROOM=planner   lint, and the tests of a room and of all that imports it"
	@echo "make test-full    the same with the full matrices of models and formats (long)"
	@echo "make test-gpu     the cuda backend on a CPU: twins of kernels, Triton's interpreter (own environment, with torch)"
	@echo "make test-parity  compare with Hugging Face transformers (own environment, with torch)"
	@echo "make test-parity-full  the same with every key of every config flipped and left out, and llama.cpp beside us (an hour)"
	@echo "make bench        the offline benchmark                                 (MODEL=)"
	@echo "make bench-peers  compare with llama.cpp, OpenVINO and vLLM (long; PEERS=\"--without vllm\")"
	@echo "make setup        only the set-up the others do first"
	@echo "make test-clients run programs that others wrote against a server       (CLIENT=openai, agents, python)"
	@echo "make clean        remove environments and caches, never models"

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	@$(STEP) "Creating .venv with $$($(PYTHON) --version)" $(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP) --quiet uninstall --yes setuptools  # Python 3.11 puts it there; nothing needs it
	@$(STEP) "Installing locked dependencies" $(BIN)/python $(PIP) install --require-hashes --no-deps -r requirements.lock
	@$(STEP) "Installing Ridgeline" $(BIN)/python $(PIP) install --no-deps -e .
	@touch $@

.venv/ready-test: requirements-test.lock .venv/ready
	@$(STEP) "Installing locked test dependencies" $(BIN)/python $(PIP) install --require-hashes --no-deps -r requirements-test.lock
	@touch $@

.venv-parity/ready: requirements-parity.txt pyproject.toml
	@$(STEP) "Creating .venv-parity" $(PYTHON) -m venv .venv-parity
	@$(STEP) "Installing transformers and torch" $(PARITY)/python $(PIP) install -r requirements-parity.txt
	@$(STEP) "Installing Ridgeline" $(PARITY)/python $(PIP) install -e .
	@touch $@

.venv-gpu/ready: requirements-gpu.txt pyproject.toml
	@$(STEP) "Creating .venv-gpu" $(PYTHON) -m venv .venv-gpu
	@$(STEP) "Installing torch and Triton" $(GPU)/python $(PIP) install -r requirements-gpu.txt
	@$(STEP) "Installing Ridgeline" $(GPU)/python $(PIP) install -e .
	@touch $@

.venv-parity/ready-full: requirements-parity-full.txt .venv-parity/ready
	@$(STEP) "Fetching the source of llama.cpp, and templates" $(PARITY)/python $(PIP) download --no-deps \
		--no-binary llama-cpp-python --dest .venv-parity/source -r requirements-parity-full.txt
	@tar -xzf .venv-parity/source/*.tar.gz -C .venv-parity/source
	@$(PARITY)/python -m zipfile -e .venv-parity/source/xinference-*.whl .venv-parity/source/xinference
	@$(STEP) "Building llama.cpp (minutes)" $(PARITY)/python $(PIP) install .venv-parity/source/*.tar.gz
	@touch $@

serve: setup
	@echo "==> Serving $(MODEL); Ctrl-C ends it"
	@exec $(BIN)/ridgeline serve $(MODEL) --port $(PORT)

demo: setup
	@$(STEP) "Demo of $(MODEL)" $(BIN)/python -m ridgeline.cli.commands.demo $(MODEL)

bench: setup
	@$(STEP) "Offline benchmark of $(MODEL)" $(BIN)/ridgeline bench offline $(MODEL)

bench-peers: setup
	@echo "==> Comparing with the peers: an hour, on a machine that does nothing else"
	@$(BIN)/python -m peers --model $(MODEL) $(PEERS)

ifdef FILE
test: .venv/ready-test
	@$(BIN)/pytest -q $(FILE)
else ifdef ROOM
test: lint
	@files=$$($(BIN)/python tools/lane.py $(ROOM)) && \
		$(STEP) "Tests that a change in $(ROOM)/ can reach" $(BIN)/pytest -q -m "not full" $(THREE) $$files
else
test: lint pure engine some-mutants examples
endif

test-full: lint pure engine-full mutants examples

lint: .venv/ready-test
	@$(STEP) "Linting" $(BIN)/ruff check .
	@$(STEP) "Checking the format" $(BIN)/ruff format --check --quiet .
	@$(STEP) "Checking types" $(BIN)/mypy
	@$(STEP) "Checking who imports whom" $(BIN)/lint-imports --no-cache --no-logo
	@$(STEP) "Checking sizes" $(BIN)/python tools/size.py
	@$(STEP) "Checking the results" $(BIN)/python tools/results.py --check

pure: .venv/ready-test
	@$(STEP) "Pure tests, every branch of core/" $(BIN)/pytest -q $(TWO) tests/core tests/model/cost \
		--cov=src/ridgeline/core --cov-branch --cov-report=term:skip-covered --cov-fail-under=100

engine: .venv/ready-test
	@$(STEP) "Tests of files, backends and real models" $(BIN)/pytest -q -m "not full" $(REST)

engine-full: .venv/ready-test
	@$(STEP) "Tests of files, backends and real models, full matrices" $(BIN)/pytest -q $(REST)

some-mutants: .venv/ready-test
	@$(STEP) "Every fourteenth mutant: the pure tests must notice each" $(BIN)/python -m tests.mutants 14

mutants: .venv/ready-test
	@$(STEP) "Mutants: the pure tests must notice each" $(BIN)/python -m tests.mutants

examples: .venv/ready-test
	@for example in $(filter-out $(WITH_SERVER),$(wildcard examples/*.py)); do \
		$(STEP) "Example $$example" $(BIN)/python $$example || exit 1; done
	@for example in $(WITH_SERVER); do $(STEP) "Example $$example" \
		$(BIN)/python tools/with_server.py $(MODEL) $$example || exit 1; done

.venv-clients/ready: requirements-clients.txt
	@$(STEP) "Creating .venv-clients" $(PYTHON) -m venv .venv-clients
	@$(STEP) "Installing uv" .venv-clients/bin/python $(PIP) install -r requirements-clients.txt
	@touch $@

test-clients: .venv/ready .venv-clients/ready
	@UV=$(CURDIR)/.venv-clients/bin/uv $(BIN)/python -m tests.clients $(CLIENT)

# Each process has one thread, and so many files at a time. Triton is told before it is imported.
test-gpu: .venv-gpu/ready
	@export OMP_NUM_THREADS=1 TRITON_INTERPRET=1; \
		$(STEP) "The cuda backend on a CPU" $(GPU)/python -m pytest -q $(TWO) -m "not full" tests/gpu && \
		$(STEP) "The suites of all backends" $(GPU)/python -m pytest -q $(TWO) -m "not full" -k cuda $(OF_ALL_BACKENDS)

test-gpu-full: .venv-gpu/ready
	@export OMP_NUM_THREADS=1 TRITON_INTERPRET=1; \
		$(STEP) "The cuda backend on a CPU, full matrices" $(GPU)/python -m pytest -q $(TWO) tests/gpu && \
		$(STEP) "The suites of all backends, full matrices" $(GPU)/python -m pytest -q $(TWO) -k cuda $(OF_ALL_BACKENDS)

test-parity: .venv-parity/ready
	@$(STEP) "Parity with transformers" $(PARITY)/python -m pytest -q tests/parity

# What converts files for llama.cpp stands in its source alone, beside a package "tests".
test-parity-full: .venv-parity/ready-full
	@source=$$(echo $(CURDIR)/.venv-parity/source/llama_cpp_python-*/vendor/llama.cpp); \
		export PYTHONPATH=$(CURDIR):$$source:$$source/gguf-py; \
		$(STEP) "Parity with llama.cpp" $(PARITY)/python -m pytest -q tests/parity/test_llama_cpp.py
	@$(STEP) "Chat templates of published models" $(PARITY)/python -m pytest -q tests/parity/test_published_templates.py
	@echo "==> Every key of every config flipped, and left out, in turn"
	@$(PARITY)/python -m tests.parity.full

clean:
	rm -rf .venv .venv-clients .venv-gpu .venv-parity .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	rm -rf "$${RIDGELINE_HOME:-$$HOME/.cache/ridgeline}/kernels-of-tests"
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
