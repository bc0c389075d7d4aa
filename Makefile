# Everything here works in .venv, and installs only what its target needs, at the versions of constraints.txt.
#
#   make demo              the first program, examples/first.py, then examples/digits.py, which has everything: DEVICES=2 for two processes,
#                          ARGS="--precision bf16-mixed"
#   make examples          run every example at a small size; a table of times and results at the end names those that failed. ARGS="gan.py
#                          imdb/" for some of them
#   make demo-faults       cause seven faults of training jobs (kills, damaged files, hangs), and show what each run does about it
#   make test              the fast tests; make test-launch those that start real interpreters, make test-slow the slow ones,
#                          make test-all all of them. WORKERS=0 runs them in one process, ARGS="tests/engine -x" chooses
#   make test-gpu          the tests of a GPU, on the interpreter that PYTHON names as it is (.venv without it); where there is no
#                          GPU they are skipped
#   make test-versions     the fast tests and those of launchers with the oldest and the newest torch on each Python that is here (noxfile.py):
#                          5 GB a torch; ARGS="--list", ARGS="--python 3.12 -k oldest", ARGS="-- tests/trainer -x"
#   make test-device       tests on the simulated accelerator of tests/simulated_device, which the first run compiles: those of devices,
#                          and the fast ones of the trainer, the data, the precisions and checkpoints; ARGS="tests/engine -x" for others
#   make test-cluster      jobs of SLURM, Open MPI and Ray under real daemons, which the tests start and end; those of the first two are
#                          skipped where Debian's slurm-wlm, munge and openmpi-bin are not installed, or without root
#   make test-faults       faults of real jobs, one test for each: hangs, NaNs, signals, stores, workers, networks
#   make faults            the same one at a time, and their table in benchmarks/RESULTS.md
#   make check             formatting, lint, types; make format mends the first two
#   make docs              the documentation as a site, in site/; a warning is an error
#   make release-check     build the packages in dist/, check their metadata with twine, and train with the wheel in a new environment
#   make bench             benchmarks/overhead.py (ARGS), models.py (MODEL_ARGS), ragged.py (RAGGED_ARGS), start.py (START_ARGS),
#                          ddp_overhead.py (DDP_ARGS), strategies.py (STRATEGY_ARGS)
#                          and checkpoint.py (CHECKPOINT_ARGS), beside other frameworks and beside their goals
#   make bench-gpu         benchmarks/gpu.py: on a machine with a GPU, ARGS="--minutes 9"; on its own torch with PYTHON=python3, which makes no
#                          .venv and installs nothing; anywhere, ARGS="--device cpu --small"
#   make bench-launch      benchmarks/launching.py: starts, failures, lost nodes and signals of launchers, on nodes that are network
#                          namespaces (as root, half an hour); ARGS="--rows 5,6 --rounds 1"
#   make soak              kill training runs at random and compare their ends; KILLS=200 SEED=0, SOAK_ARGS="--strategies ddp"
#   make fuzz              random runs: resumed, cut, on other strategies and ranks; SEEDS=20 START=0 KINDS="resume cuts", MINUTES=60 a kind,
#                          FUZZ_ARGS="--jobs 2"; FUZZ_ARGS="--config '{...}'" KINDS=resume for one configuration
#   make clean             remove .venv

PYTHON ?= python3
DEVICES ?= 1
ARGS ?=
WORKERS ?= 2
START_ARGS ?=
DDP_ARGS ?=
STRATEGY_ARGS ?=
MODEL_ARGS ?=
RAGGED_ARGS ?=
SOAK_ARGS ?=
KILLS ?= 200
SEED ?= 0
SEEDS ?=
START ?= 0
KINDS ?=
MINUTES ?=
FUZZ_ARGS ?=
CHECKPOINT_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Without build isolation, or the packages that come as source would each build against a torch of their own. Python compiles
# what it imports when it imports it, which is a third of what pip would compile.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-compile -c constraints.txt

# Tests start many interpreters: an environment that forbids bytecode would have each compile the package and pytest its tests.
export PYTHONDONTWRITEBYTECODE :=

# Targets for a machine with a GPU take an interpreter that they are given as it is, with the torch that it has.
ifeq ($(origin PYTHON),file)
GPU_PYTHON := $(BIN)/python
TEST_GPU_STAMP := $(VENV)/test.stamp
BENCH_GPU_STAMP := $(VENV)/bench.stamp
else
GPU_PYTHON := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
endif

# A file's tests stay in one process, and the longest files begin (tests/conftest.py has their order).
SHARED_OUT = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# None of these tests are in the fast sets, and their imports take seconds.
QUICK := --ignore tests/programs --ignore tests/device --ignore tests/cluster --ignore tests/faults
# The folders of the fast tests are in memory, if it has 2 GiB for them and lets programs run there, as that of a Docker container does
# not: on a disk they would spend a tenth of their time on making files.
IN_MEMORY := $(shell test "$$(df --output=avail /dev/shm 2> /dev/null | tail -n 1)" -gt 2000000 2> /dev/null && test -w /dev/shm \
	&& ! grep -qs ' /dev/shm [^ ]* [^ ]*noexec' /proc/mounts && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

ON_SIMULATED := PYTHONPATH=$(CURDIR)/tests/simulated_device $(BIN)/python -m pytest

.PHONY: demo demo-faults examples test test-launch test-slow test-all test-device test-cluster test-faults faults test-gpu test-versions check \
	format docs release-check bench bench-gpu bench-launch soak fuzz clean

demo: $(VENV)/examples.stamp
	$(BIN)/python examples/first.py
	$(BIN)/python examples/digits.py --devices $(DEVICES) $(ARGS)

demo-faults: $(VENV)/examples.stamp
	$(BIN)/python examples/tour.py faults/

examples: $(VENV)/tour.stamp
	$(BIN)/python examples/tour.py $(ARGS)

test: $(VENV)/test.stamp
	$(IN_MEMORY) $(BIN)/python -m pytest -m "not slow and not launch and not gpu and not device" $(QUICK) $(SHARED_OUT) $(ARGS)

test-launch: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "launch and not slow and not gpu and not device" $(QUICK) $(SHARED_OUT) $(ARGS)

test-slow: WORKERS = 3 # for two cores: some of these tests wait for a time to pass
test-slow: $(VENV)/programs.stamp $(VENV)/docs.stamp
	$(BIN)/python -m pytest -m "slow and not gpu and not device" $(SHARED_OUT) $(ARGS)

test-all: $(VENV)/programs.stamp $(VENV)/docs.stamp
	$(BIN)/python -m pytest -m "not gpu and not device and not cluster and not faults" $(SHARED_OUT) $(ARGS)

test-device: $(VENV)/test.stamp
	$(if $(ARGS),,$(ON_SIMULATED) -m "device or gpu" $(SHARED_OUT) tests/device tests/data tests/checkpoint)
	SIM_DEVICES=1 TRAINWRIGHT_TEST_ACCELERATOR=auto $(ON_SIMULATED) -m "not slow and not gpu and not device" $(SHARED_OUT) \
		$(if $(ARGS),$(ARGS),tests/trainer tests/data tests/precision tests/checkpoint tests/strategies/test_placement.py)

test-cluster: $(VENV)/cluster.stamp # in one process, which starts the daemons once
	$(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

test-faults: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m faults tests/faults $(SHARED_OUT) $(ARGS)

faults: $(VENV)/test.stamp # one at a time, because the table has seconds
	rm -f benchmarks/out/faults.jsonl; mkdir -p benchmarks/out
	TRAINWRIGHT_FAULT_ROWS=$(CURDIR)/benchmarks/out/faults.jsonl $(BIN)/python -m pytest -m faults tests/faults $(ARGS)
	$(BIN)/python tests/faults/fault_rows.py benchmarks/out/faults.jsonl

test-gpu: $(TEST_GPU_STAMP)
	$(GPU_PYTHON) tests/gpu_session.py $(ARGS)

test-versions: $(VENV)/versions.stamp
	$(BIN)/nox $(ARGS)

check: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

release-check: $(VENV)/release.stamp
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	TRAINWRIGHT_DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/test_packaging.py $(ARGS)

bench: $(VENV)/bench.stamp
	$(BIN)/python benchmarks/overhead.py $(ARGS)
	$(BIN)/python benchmarks/models.py $(MODEL_ARGS)
	$(BIN)/python benchmarks/ragged.py $(RAGGED_ARGS)
	$(BIN)/python benchmarks/start.py $(START_ARGS)
	$(BIN)/python benchmarks/ddp_overhead.py $(DDP_ARGS)
	$(BIN)/python benchmarks/strategies.py $(STRATEGY_ARGS)
	$(BIN)/python benchmarks/checkpoint.py $(CHECKPOINT_ARGS)

bench-gpu: $(BENCH_GPU_STAMP)
	$(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

bench-launch: $(VENV)/test.stamp
	$(BIN)/python benchmarks/launching.py $(ARGS)

soak: $(VENV)/test.stamp
	$(BIN)/python benchmarks/soak.py --kills $(KILLS) --seed $(SEED) $(SOAK_ARGS)

fuzz: $(VENV)/test.stamp
	PYTHONPATH=benchmarks $(BIN)/python -m fuzz $(KINDS) --start $(START) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(FUZZ_ARGS)

clean:
	rm -rf $(VENV)

# A stamp says that its packages are there. They are installed anew when one of these two files has changed.
$(VENV)/base.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools wheel hatchling editables
	touch $@

$(VENV)/examples.stamp: $(VENV)/base.stamp
	$(INSTALL) -e ".[examples]"
	touch $@

$(VENV)/tour.stamp: $(VENV)/examples.stamp
	# Its engines come as source, which looks for the torch that is there.
	$(INSTALL) -e ".[examples,stories,deepspeed,fairscale]" datasets peft nbclient ipykernel
	touch $@

$(VENV)/test.stamp: $(VENV)/base.stamp
	$(INSTALL) -e ".[test]"
	# DeepSpeed and FairScale come as source, which looks for the torch that is there.
	$(INSTALL) -e ".[test,deepspeed,fairscale]"
	# Python warns when it compiles torchao's sources, and in tests a warning is an error.
	$(BIN)/python -W ignore -m compileall -q $(VENV)/lib/python3*/site-packages/torchao
	touch $@ $(VENV)/examples.stamp

$(VENV)/programs.stamp: $(VENV)/test.stamp
	$(INSTALL) -e ".[programs]"
	touch $@

$(VENV)/cluster.stamp: $(VENV)/test.stamp
	$(INSTALL) -e ".[ray]"
	touch $@

$(VENV)/docs.stamp: $(VENV)/base.stamp
	$(INSTALL) -e ".[docs]"
	touch $@

$(VENV)/release.stamp: $(VENV)/test.stamp
	$(INSTALL) -e ".[release]"
	touch $@

$(VENV)/versions.stamp: $(VENV)/base.stamp
	$(INSTALL) "nox[uv]"
	touch $@

$(VENV)/bench.stamp: $(VENV)/base.stamp
	# First torch: DeepSpeed and FairScale come as source, which looks for the one that is there.
	$(INSTALL) -e .
	$(INSTALL) -e ".[bench]"
	touch $@
