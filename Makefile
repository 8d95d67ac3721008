# make demo    train the example classifier with `littrainer run` (creates .venv on the first call)
# make test    run the quick tests, which every change needs
# make test-all  run all tests, those of unchanged scripts of TRL, sentence-transformers, setfit and PEFT among them
# make test-libraries  of these the ones of the unchanged scripts
# make soak    run what takes longer still, hours: damages, 50 kills, full disks (as root), 80 numbers that go wrong,
#              50 times without memory, 100 sequences of layouts, 50 runs that come back by themselves, 200 runs at an
#              address, losses of 496 heads, verified examples, 26 scripts that fail late and the
#              examples, five forecasts, delays that log_speed finds, 480 random orders of calls
# make test-trackers  let the clients of experiment trackers write offline, and compare with transformers
# make test-gpu  run the tests that need GPUs, of which this machine should have one or two
# make docs    build the documentation's site into site/, with its links checked
# make docs-serve  show the site at http://127.0.0.1:8000, rebuilt at each change of a page
# make package  build the wheel and the sdist into dist/, and check how they describe themselves
# make lint    ruff (rules and format) and mypy
# make format  let ruff rewrite what it can
# make bench   what littrainer costs, compared with transformers, plain Lightning and a raw loop; about 25 minutes on two quiet cores
# make bench-short  the same with the smallest sizes, to see that all of it works; about two minutes
# make bench-record  the same as bench, kept in docs/benchmarks/record.json, and from it tables and curves of the documentation
# make bench-docs  write tables and curves of the documentation from docs/benchmarks/record.json
# make docs-sample  write the sample report and its pictures again, from the training in docs/samples/; needs Chromium
# make clean   remove .venv, caches and what runs left behind
#
# Each of these installs into .venv what it needs beyond what is there.
# Another interpreter for the environment: make test PYTHON=python3.12
# More arguments:                          make test PYTEST_ARGS="-k resume -x"
#                                          make demo DEMO_ARGS="--epochs 2"
#                                          make bench BENCH_ARGS="--only step --rounds 9 --json step.json"

PYTHON ?= python3
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
EARLIER := .venv/transformers-5.3.0
FSSPEC := .venv/fsspec
LIBRARIES := .venv/libraries
TRACKERS := .venv/trackers
DOCS := .venv/docs
PACKAGING := .venv/packaging
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Compiling all modules would take half of the time; what is imported is compiled then.
INSTALL := install -qq --no-compile
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS)
BEGAN := $(shell date +%s)

# Where this variable is set, each start would compile our own modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-libraries soak test-trackers test-gpu docs docs-serve package lint format bench bench-short bench-record bench-docs docs-sample clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# Runs a command and tells at its end, passed or failed, what took how long.
timed = @began=$$(date +%s); \
	trap 'echo "make $@: installed in $$((began - $(BEGAN))) s, then ran for $$(($$(date +%s) - began)) s"' EXIT; \
	(set -x; $1)

# torch comes first and by its exact version, so that a wheel of it on the local disk is taken where pip knows of one.
# The build backend stands in the constraints too: without build isolation the whole installation is repeatable.
# So does pip, which has to know dependency groups.
.venv/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The development environment needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; } || { rm -rf .venv; \
		echo "$(PYTHON) cannot make an environment: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"; \
		exit 1; }
	@echo "installing torch, pip and the build backend"
	@$(PIP) $(INSTALL) -c constraints.txt pip torch==2.13.0 hatchling hatch-fancy-pypi-readme editables
	@echo "that took $$(($$(date +%s) - $(BEGAN))) s; installing littrainer and what the demo needs"
	@$(PIP) $(INSTALL) -c constraints.txt --no-build-isolation --editable '.[demo]'
	@touch $@

# Checkpoints are exchanged with transformers 5.3.0 too. It asks for an earlier huggingface_hub, so it has a folder of its
# own, which a test puts on the path of a process of its own; whatever else it needs is in the environment.
$(EARLIER)/.installed: tests/transformers-5.3.0.txt .venv/.demo
	@rm -rf $(EARLIER)
	@$(PIP) $(INSTALL) --no-deps --target $(EARLIER) -r $<
	@touch $@

# Runs at an address are tried with earlier releases of fsspec, each in a folder of its own.
$(FSSPEC)/.installed: tests/fsspec-releases.txt .venv/.demo
	@rm -rf $(FSSPEC)
	@for release in $$(grep -v '^#' $<); do \
		$(PIP) $(INSTALL) --no-deps --target $(FSSPEC)/$$release fsspec==$$release || exit; done
	@touch $@

.venv/.lint: .venv/.demo
.venv/.test: $(EARLIER)/.installed
.venv/.full: .venv/.test
.venv/.lint .venv/.test .venv/.full:
	@echo "installing the dependency group $(@:.venv/.%=%)"
	@$(PIP) $(INSTALL) -c constraints.txt --group $(@:.venv/.%=%)
	@if [ $@ = .venv/.test ]; then $(BIN)/python -m tests.simulated_gpu.build; fi
	@touch $@

demo: .venv/.demo
	$(call timed,$(BIN)/littrainer run examples/text_classification.py $(DEMO_ARGS))

test: .venv/.test
	$(call timed,$(PYTEST) --quick $(PYTEST_ARGS))

test-all: $(LIBRARIES)/.installed $(FSSPEC)/.installed
	$(call timed,$(PYTEST) $(PYTEST_ARGS))

# Of each `make test-all` runs a small sample.
soak: .venv/.full
	$(call timed,for part in 'faults.damage' 'faults.damage --bits 20' faults.kills faults.full_disk faults.numbers \
		faults.memory faults.layouts faults.chaos faults.remote_folder fidelity.heads commands.verified_scripts \
		check.late_failures check.forecasts loop.delays; do $(BIN)/python -m tests.$$part || exit; done; \
		FIDELITY_ORDERS=420 FIDELITY_ORDERS_IN_TWO_PROCESSES=60 $(PYTEST) $(PYTEST_ARGS) -k of_calls \
		tests/fidelity tests/distributed/test_fidelity_in_two_processes.py)

# An environment that sees the packages of the first one, which is why torch is not installed twice.
define environment_beside
	@rm -rf $(@D)
	@$(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c 'import pathlib, sysconfig as s; here = s.get_path("purelib"); \
		there = pathlib.Path(s.get_path("purelib", vars={"base": "$(@D)"})); \
		(there / "first_environment.pth").write_text(f"import site; site.addsitedir({here!r})\n")'
endef

# The scripts of these libraries run in it; the tests themselves run in the first one.
$(LIBRARIES)/.installed: tests/libraries/requirements.txt .venv/.full
	@echo "installing TRL, sentence-transformers and setfit beside it"
	$(environment_beside)
	@$(PIP) --python $(LIBRARIES)/bin/python $(INSTALL) -c constraints.txt -r $<
	@touch $@

test-libraries: $(LIBRARIES)/.installed
	$(PYTEST) tests/libraries $(PYTEST_ARGS)

# As for the libraries. `make test-all` has TensorBoard, Weights & Biases, MLflow and Trackio; these are the others.
$(TRACKERS)/.installed: tests/tracking/services/requirements.txt .venv/.full
	@echo "installing clients of experiment trackers beside it"
	$(environment_beside)
	@$(PIP) --python $(TRACKERS)/bin/python $(INSTALL) --no-deps -r $<
	@touch $@

test-trackers: $(TRACKERS)/.installed
	$(TRACKERS)/bin/python -m pytest -n $(PYTEST_WORKERS) tests/tracking/services $(PYTEST_ARGS)

# One after the other: peaks of memory are measured.
test-gpu: .venv/.full
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

# Pages and distributions are made from the sources, of which nothing is imported: neither needs torch or the package.
$(DOCS)/.installed: docs/requirements.txt
$(PACKAGING)/.installed: tests/packaging/requirements.txt
$(DOCS)/.installed $(PACKAGING)/.installed:
	@echo "installing $< into $(@D)"
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input $(INSTALL) -r $<
	@touch $@

# The variable keeps an announcement of the theme's successor out of the output.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict
	@echo "the site begins at site/index.html"

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --strict

# `build` makes the wheel of the sdist, in an environment of its own, as an installer does.
package: $(PACKAGING)/.installed
	@rm -rf dist
	$(PACKAGING)/bin/python -m build
	$(PACKAGING)/bin/python -m twine check --strict dist/*

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.test
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-short: .venv/.test
	$(BIN)/python -m benchmarks --short $(BENCH_ARGS)

bench-record: .venv/.test
	$(BIN)/python -m benchmarks --json docs/benchmarks/record.json $(BENCH_ARGS)
	@$(MAKE) --no-print-directory bench-docs

# Tables and curves show the figures of one file, so that none is copied by hand.
bench-docs: .venv/.test
	$(BIN)/python -m benchmarks.tables docs/benchmarks/record.json
	$(BIN)/python -m benchmarks.growth docs/benchmarks/record.json
	$(BIN)/python -m benchmarks.overview docs/benchmarks/record.json

docs-sample: .venv/.test
	$(BIN)/python docs/site_build/sample_report.py

clean:
	rm -rf .venv site dist runs lightning_logs .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
