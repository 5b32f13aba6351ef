# `make demo` shows what ckptd does, and `make test` runs the tests. Both install what they need in $(VENV).
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PARALLEL := -n 4 --dist worksteal -q -rs
PYTEST := $(RUN) -m pytest $(PARALLEL)
KILLS ?= 50
MEGABYTES ?= 256
ROUNDS ?= 10
MINUTES ?= 8
PAIRS ?= 2000
COVERED := */daemon/journal/*.py,*/daemon/recovery.py,*/daemon/saving/saver.py,*/shared/wire/session.py
COVERING := $(wildcard tests/daemon/journal/test_*.py) tests/daemon/test_recovery.py tests/daemon/saving/test_saver.py \
	tests/shared/wire/test_session.py

# Without the files of compiled modules, each of four workers would compile all tests at each run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all crashes cost matrix lint kills rank-kills crash-matrix trust oracle frameworks coverage coverage-all bench perf gpu man clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[torch,demo,dev]"
	touch $@

# All acts of the demo, or those that ACTS names, as in `make demo ACTS="1 3"`. The first one shows the main job in half a minute.
demo: $(INSTALLED)
	$(RUN) -m examples.demo

# Every test that stays in the process, and one with processes for each promise of the documents. With ROOM, all tests of that directory or
# file below tests/, as in `make test ROOM=daemon/journal`. With FAILED=1, only the tests that failed last.
test: $(INSTALLED)
	$(PYTEST) $(if $(FAILED),--last-failed) $(if $(ROOM),-m "not frameworks" tests/$(ROOM),-m "(promise or not processes) and not frameworks")

# All tests but those that kill processes by the hundred, which `make crashes` runs. Of the frameworks, each example is killed once;
# `make frameworks` has the others. REST=1 leaves out what `make test` runs.
test-all: $(INSTALLED)
	$(PYTEST) $(if $(FAILED),--last-failed) --ignore tests/crash -m "$(if $(REST),processes and not promise and )not frameworks"

crashes: $(INSTALLED)
	$(PYTEST) $(if $(FAILED),--last-failed) tests/crash

# The CPU time of the tests, with everything that they start, by room and by what they start. ROOM as above.
cost: $(INSTALLED)
	$(RUN) -m tests.support.cost $(PARALLEL) --ignore tests/crash -m "not frameworks" $(if $(ROOM),tests/$(ROOM))

# The tests of all that meets torch, the formats or asyncio, on the lowest, a middle and the newest torch that pip finds, with each Python that
# ckptd must run on. The rigs under tests/crash are left out: they take long, and what they kill depends on neither version. TORCH and PYTHONS
# name other releases, as in `make matrix TORCH="2.8 2.13" PYTHONS=3.13`. A Python that is not on PATH is a failure, unless SKIP_MISSING=1.
matrix:
	$(PYTHON) -m tests.matrix $(if $(TORCH),--torch $(TORCH)) $(if $(PYTHONS),--python $(PYTHONS)) $(if $(SKIP_MISSING),--skip-missing)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Kills a job with SIGKILL at random microseconds, and prints a table of what the kills hit.
kills: $(INSTALLED)
	$(RUN) -m tests.crash.kills --kills $(KILLS) --megabytes $(MEGABYTES)

# The same for a torchrun with four ranks.
rank-kills: $(INSTALLED)
	$(RUN) -m tests.crash.rank_kills --kills $(KILLS) --megabytes $(MEGABYTES)

# Kills at every failpoint, alone and in pairs, ROUNDS times.
crash-matrix: $(INSTALLED)
	for round in $$(seq $(ROUNDS)); do $(RUN) -m pytest -n 2 -q tests/crash/test_failpoints.py || exit 1; done

# Runs the rigs that look for lost checkpoints: for MINUTES, or for hours with LONG=1. ONLY selects some of them.
trust: $(INSTALLED)
	$(RUN) -m tests.crash.trust $(if $(LONG),--long,--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

# Compares recoveries with torch's own round trip: PAIRS random programs and changes of them, two at a time.
oracle: $(INSTALLED)
	$(RUN) -m tests.oracle --lanes 2 --pairs $(PAIRS) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT))

# Tests each framework and kills its example, in an environment of its own. NAMES selects some of them.
frameworks:
	$(PYTHON) -m tests.frameworks $(NAMES) --kills $(KILLS)

# Requires full branch coverage of the journal, the commit, the recovery and the session.
coverage: $(INSTALLED)
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -q $(COVERING)
	$(RUN) -m coverage combine -q
	$(RUN) -m coverage report -m --fail-under=100 --include="$(COVERED)"

# What all tests cover of each package, daemons and ranks in processes of their own included, against a floor for each.
coverage-all: $(INSTALLED)
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -n 3 --dist worksteal -q
	$(RUN) -m coverage combine -q
	$(RUN) -m tests.support.floors

# Measures ckptd beside its peers and the machine's limits. The first run trains the states that are saved; allow an hour and a half for all of it.
# ZipNN, a peer of the codecs, needs a C compiler; without it, its rows are missing.
bench: $(INSTALLED)
	-$(RUN) -m pip install --quiet zipnn torch-checkpointing orbax-checkpoint
	$(RUN) -m benchmarks.saves
	$(RUN) -m benchmarks.throttled
	$(RUN) -m benchmarks.codecs
	$(RUN) -m benchmarks.deltas
	$(RUN) -m benchmarks.master_copies
	$(RUN) -m benchmarks.steps
	$(RUN) -m benchmarks.daemon
	$(RUN) -m benchmarks.finite
	$(RUN) -m benchmarks.steady
	$(RUN) -m benchmarks.single_tensor
	$(RUN) -m benchmarks.conversions
	$(RUN) -m benchmarks.partition
	$(RUN) -m benchmarks.scale
	-$(RUN) -m benchmarks.several_nodes
	-$(RUN) -m benchmarks.peers
	-$(RUN) -m benchmarks.object_store
	$(RUN) -m benchmarks.table

# Measures this version beside the commit in benchmarks/baseline, by turns, for about twelve minutes, or an hour with LONG=1, and fails if a figure
# has become worse. ROWS="A;B" selects rows. HERE=1 measures this version alone, beside plain copies and writes, and fails past twice the limits.
perf: $(INSTALLED)
	$(RUN) -m benchmarks.perf $(if $(LONG),--long) $(if $(HERE),--here) $(if $(ROWS),--rows "$(ROWS)")

# Checks the accelerator path: a line for each check, beside torch's own pinned copy. Without a GPU it runs on simulated lanes. ONLY selects
# checks, LONG=1 takes 16 GB and 30 kills, PLANTED=1 plants a fault in each check, which must find it. It needs no test tools: where torch is
# installed, `python -m tests.gpu` does the same.
gpu: $(INSTALLED)
	$(RUN) -m tests.gpu --json $(if $(PLANTED),gpu-planted,gpu).json $(if $(ONLY),--only $(ONLY)) $(if $(LONG),--long) $(if $(PLANTED),--planted)

# Writes the manual pages from the commands.
man: $(INSTALLED)
	$(RUN) -m tests.support.manual

clean:
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
