# Everything sets itself up: a virtual environment in .venv with the locked versions.

# Bytecode is kept, and written once at the set-up: processes then start in half the time.
unexport PYTHONDONTWRITEBYTECODE

# The newest of these that is there and can make a virtual environment; PYTHON=... takes another.
PYTHONS := python3.13 python3.12 python3.11
PYTHON ?= $(shell for python in $(PYTHONS); do \
	$$python -c "import ensurepip, venv" 2>/dev/null && echo $$python && break; done)
NO_PYTHON = looked for $(PYTHONS) with the modules venv and ensurepip, and found none: install one \
	(on Ubuntu 24.04: apt install python3.12-venv), or name yours, as in make PYTHON=/opt/python3.12
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := 0.11.33

# The Flower of requirements.lock, and the one of `make test-flower`: 1.32.1, or a newer one.
FLOWER := 1.32.1
VERSION ?= $(FLOWER)
# Those that `make test-wheel` installs the wheel for, by version or path.
WHEEL_PYTHONS ?= 3.11 3.12 3.13
OTHER := .flower/$(VERSION)
ON_OTHER = PYTHONPATH=$(CURDIR):$(CURDIR)/baselines:$(CURDIR)/$(OTHER)/ours $(OTHER)/bin/python

COMPILE := $(BIN)/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url \
	--universal --python-version 3.11 --all-extras pyproject.toml

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

FAST := -m "not slow and not faults and not docker and not matrix and not wheel"
# All but what has a target of its own. Three workers, as tests of processes mostly wait; a file is one
# worker's, which shares its federations, and files of slow tests come first (tests/conftest.py).
CHECKS := -m "not all_faults and not docker and not matrix and not wheel" \
	-n 3 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5

OUT ?= gpu-results
PARTS ?=
DATA_ROOT ?=
COMMIT ?= $(shell git describe --always --dirty 2>/dev/null)

NODES ?= 10
CLASSES ?= 2
ROUNDS ?=
STRATEGY ?= hfldd

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-matrix test-attacks test-faults test-faults-all test-docker flower-environment test-flower test-flower-fast flower-probe test-chart test-wheel test-lowest test-newest gpu-kit gpu images fuzz mutants lint bench settings lock proto clean

help:
	@echo "make demo    train on digits with FedAvg and HFLDD or FedHEAD, real processes; compare"
	@echo "             (NODES=$(NODES) CLASSES=$(CLASSES) ROUNDS=$(or $(ROUNDS),10) STRATEGY=$(STRATEGY))"
	@echo "make test    lint, types and tests: what a change must pass"
	@echo "             (make test-faults: those tests alone that kill processes in mid-run)"
	@echo "make test-matrix  tests of each strategy or option for the other ones too (marked matrix)"
	@echo "make test-faults-all  every fault with every strategy"
	@echo "make test-attacks  the proofs of docs/promises.md against hostile nodes, apps and runs"
	@echo "make test-flower VERSION=1.42.0  installs that Flower beside ours, tries all that a deployment needs,"
	@echo "             and writes its column of the table in docs/flower.md; half an hour"
	@echo "             (make test-flower-fast: the fast tests there)"
	@echo "make flower-probe VERSION=1.43.0  the same, but quick: which names of Flower's that we use are missing"
	@echo "             there, and whether FedAvg runs"
	@echo "make test-chart  renders the Helm chart, and holds it to Kubernetes' schemas"
	@echo "make test-wheel  installs the wheel for each of WHEEL_PYTHONS=\"$(WHEEL_PYTHONS)\", with all that it"
	@echo "             needs, and does with it what the docs show; minutes and 7 GB for each"
	@echo "make test-lowest, make test-newest  the fast tests with the lowest and the newest versions that"
	@echo "             pyproject.toml allows; minutes and 7 GB for each. PyTorch 2.8 has no virtual GPU:"
	@echo "             tests that need one skip there, and say so"
	@echo "make gpu-kit DATA_ROOT=DIR  builds .gpu-kit for a GPU machine without internet (MNIST in DIR)"
	@echo "make gpu     everything that needs a GPU, in eight minutes (PARTS=\"doctor tests\" OUT=$(OUT))"
	@echo "make fuzz    settings, links, virtual data, checkpoints, replies: ten minutes of hostile bytes"
	@echo "make mutants what small changes of the code the fast tests notice: twenty minutes"
	@echo "make lint    ruff and mypy alone"
	@echo "make bench   the benchmarks, as tables"
	@echo "make settings writes the run config in both pyproject.toml and docs/settings.md anew, from the code"
	@echo "make setup   install into $(VENV)"

$(READY): requirements.lock pyproject.toml baselines/pyproject.toml
	$(or $(PYTHON),$(error $(NO_PYTHON))) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip sync --quiet --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps \
		--editable . --editable baselines
	$(BIN)/python -c "import torch._dynamo, flwr_distill.client.app, flwr_distill.server.app, \
		flwr_distill.flower.executor, flwr_distill.flower.supernode"
	@touch $@

setup: $(READY)

demo: $(READY)
	$(BIN)/flwr-distill demo --nodes $(NODES) --classes $(CLASSES) \
		$(ROUNDS:%=--rounds %) --strategy $(STRATEGY)

lint: $(READY)
	$(LINT)

# mypy takes minutes of one core: the tests run meanwhile.
test: $(READY)
	{ $(LINT); } & $(BIN)/pytest $(CHECKS); tests=$$?; wait $$! && exit $$tests

test-faults: $(READY)
	$(BIN)/pytest -m "faults and not all_faults" -n 3 --dist loadfile

test-matrix: $(READY)
	$(BIN)/pytest -m matrix -n 2

test-attacks: $(READY)
	$(BIN)/pytest tests/attacks -n 2 --dist loadfile

test-faults-all: $(READY)
	CAUSES_TABLE=1 $(BIN)/pytest -m faults -n 2 --dist loadfile

fuzz: $(READY)
	FUZZ_EXAMPLES=3500 $(BIN)/pytest tests/fuzz --timeout 900

mutants: $(READY)
	$(BIN)/python tests/mutants/mutants.py --json mutants.json

test-docker: $(READY)
	$(BIN)/pytest -m docker tests/deploy

# On a GPU machine without internet: its own torch, and the wheels of `make gpu-kit`.
ifneq ($(wildcard .gpu-kit/wheels),)
ifeq ($(wildcard $(READY)),)
GPU_READY := .gpu-kit/site/.ready
GPU_PYTHON := PATH=$(CURDIR)/.gpu-kit/site/bin:$$PATH PYTHONPATH=$(CURDIR):$(CURDIR)/.gpu-kit/site python3
endif
endif
GPU_READY ?= $(READY)
GPU_PYTHON ?= $(BIN)/python

.gpu-kit/site/.ready:
	python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
		--target .gpu-kit/site .gpu-kit/wheels/*.whl
	@touch $@

gpu-kit: $(READY)
	$(BIN)/python -m benchmarks.gpu_kit.build --data-root "$(DATA_ROOT)"

gpu: $(GPU_READY)
	$(GPU_PYTHON) -m benchmarks.gpu_kit --out $(OUT) $(if $(PARTS),--parts $(PARTS)) \
		$(DATA_ROOT:%=--data-root %) --commit "$(COMMIT)"

# What the lock has, but for that Flower, which our range need not allow, and what it needs; the
# packages come from uv's cache. Ours are beside them: some tests want them from a bundle alone.
flower-environment: $(READY)
	mkdir -p .flower
	cp requirements.lock $(OTHER).lock
	echo "flwr[simulation]==$(VERSION)" | $(COMPILE) --override - --output-file $(OTHER).lock
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(OTHER)
	$(BIN)/uv pip sync --quiet --python $(OTHER)/bin/python $(OTHER).lock
	$(BIN)/uv pip install --quiet --python $(OTHER)/bin/python --target $(OTHER)/ours \
		--no-deps --editable . --editable baselines
	$(OTHER)/bin/python -c "import torch._dynamo, flwr_distill.client.app, flwr_distill.server.app"

# The rows of the table in docs/flower.md, and its column for that Flower.
test-flower: flower-environment
	$(ON_OTHER) -m pytest -m deployment --junitxml $(OTHER).xml; failed=$$?; \
	$(BIN)/python -m tests.flower.table $(VERSION) $(OTHER).xml && exit $$failed

test-flower-fast: flower-environment
	$(ON_OTHER) -m pytest $(FAST) -n 2

flower-probe: flower-environment
	$(ON_OTHER) -m flwr_distill.flower.names; names=$$?; \
	$(ON_OTHER) -m pytest -m matrix tests/flower -k "fedavg or killed or own" && exit $$names

# Helm's own code, and Kubernetes' schemas: too large for everyone's environment.
test-chart: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target .chart \
		helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	PYTHONPATH=.chart $(BIN)/python -m pytest tests/deploy/test_chart.py

test-wheel: $(READY)
	WHEEL_PYTHONS="$(WHEEL_PYTHONS)" $(BIN)/pytest -m wheel tests/wheel

# An environment for each, as `uv` resolves our ranges at one end; the tests' own tools are pinned.
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest: test-%: $(READY)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .ranges/$*
	$(BIN)/uv pip install --quiet --python .ranges/$*/bin/python --resolution $(RESOLUTION) \
		--upgrade --editable ".[simulation,partitions,backbones,test]" --editable baselines
	.ranges/$*/bin/python -m pytest $(FAST) -n 2

images:
	docker build $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE=$(PYTHON_IMAGE)) \
		$(if $(PIP_EXTRA_INDEX_URL),--build-arg PIP_EXTRA_INDEX_URL=$(PIP_EXTRA_INDEX_URL)) \
		--file docker/Dockerfile --tag flwr-distill .

bench: $(READY)
	$(BIN)/python -m benchmarks.rounds --quick
	$(BIN)/python -m benchmarks.distill --quick
	$(BIN)/python -m benchmarks.traffic --quick

settings: $(READY)
	$(BIN)/python -m flwr_distill.server.settings_catalogue
	$(BIN)/python -m flwr_distill.server.settings_catalogue flwr-distill-baselines baselines/settings.md
	$(BIN)/python -m flwr_distill.node.list_page

lock: $(READY)
	echo flwr==$(FLOWER) | $(COMPILE) --upgrade --constraint - --output-file requirements.lock

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -Itypings --python_out=typings --pyi_out=typings \
		--grpc_python_out=typings flwr_distill/links/links.proto

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutants mutants.json
