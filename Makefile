# `make demo` shows what ckptd does; `make test` passes the tests. Both set up all that they need in $(VENV).
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
KILLS ?= 50
MEGABYTES ?= 256
ROUNDS ?= 10
COVERED := */daemon/journal*.py,*/daemon/records.py,*/daemon/recovery.py,*/daemon/saver.py,*/shared/session.py
COVERING := $(wildcard tests/daemon/test_journal*.py) tests/daemon/test_records.py tests/daemon/test_recovery.py tests/daemon/test_saver.py \
	tests/shared/test_session.py

.PHONY: demo test lint kills rank-kills crash-matrix trust coverage coverage-all bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[torch,demo,dev]"
	touch $@

demo: $(INSTALLED)
	$(RUN) -m examples.demo

test: $(INSTALLED)
	$(RUN) -m pytest -n 3 --dist worksteal -q

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# SIGKILLs at random microseconds, with a table of what they hit.
kills: $(INSTALLED)
	$(RUN) -m tests.crash.kills --kills $(KILLS) --megabytes $(MEGABYTES)

# The same of a torchrun with four ranks.
rank-kills: $(INSTALLED)
	$(RUN) -m tests.crash.rank_kills --kills $(KILLS) --megabytes $(MEGABYTES)

# Every failpoint, alone and in pairs, ROUNDS times over.
crash-matrix: $(INSTALLED)
	for round in $$(seq $(ROUNDS)); do $(RUN) -m pytest -n 2 -q tests/crash/test_failpoints.py || exit 1; done

# Every rig that looks for what could be lost: for MINUTES, with LONG=1 for hours, or as much as CI runs; ONLY names some of them.
trust: $(INSTALLED)
	$(RUN) -m tests.crash.trust $(if $(MINUTES),--minutes $(MINUTES),$(if $(LONG),--long,--short)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

# What must be covered whole, every branch: journal, commit, recovery, session.
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

bench: $(INSTALLED)
	$(RUN) -m benchmarks.daemon
	$(RUN) -m benchmarks.snapshot
	$(RUN) -m benchmarks.steady
	$(RUN) -m benchmarks.single_tensor

clean:
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
