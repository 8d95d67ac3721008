# make demo    train the example classifier with `littrainer run` (creates .venv on the first call)
# make test    run the tests
# make test-libraries  run unchanged scripts of TRL, sentence-transformers, setfit and PEFT, and compare with transformers
# make test-trackers  let the clients of experiment trackers write offline, and compare with transformers
# make test-gpu  run the tests that need GPUs, of which this machine should have one or two
# make docs    build the documentation's site into site/, with its links checked
# make docs-serve  show the site at http://127.0.0.1:8000, anew with each change of a page
# make package  build the wheel and the sdist into dist/, and check how they describe themselves
# make lint    ruff (rules and format) and mypy
# make format  let ruff rewrite what it can
# make bench   what littrainer costs beside transformers, plain Lightning and a raw loop; about 25 minutes on two quiet cores
# make bench-short  the same with the smallest sizes, to see that all of it works; about two minutes
# make bench-record  the same as bench, kept in docs/benchmarks/record.json, and from it tables and curves of the documentation
# make bench-docs  tables and curves of the documentation anew, from docs/benchmarks/record.json
# make clean   remove .venv, caches and what runs left behind
#
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
INSTALLED := .venv/.installed
EARLIER := .venv/transformers-5.3.0
LIBRARIES := .venv/libraries
TRACKERS := .venv/trackers
DOCS := .venv/docs
PACKAGING := .venv/packaging
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Where this variable is set, each start would compile our own modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-libraries test-trackers test-gpu docs docs-serve package lint format bench bench-short bench-record bench-docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

install: $(INSTALLED)

# torch comes first and by its exact version, so that a wheel of it on the local disk is taken where pip knows of one.
# The build backend stands in the constraints too: without build isolation the whole installation is repeatable.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "The development environment needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; } || { rm -rf .venv; \
		echo "$(PYTHON) cannot make an environment: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"; \
		exit 1; }
	@echo "installing torch and the build backend (1 of 2)"
	@$(PIP) install -qq -c constraints.txt torch==2.13.0 hatchling hatch-fancy-pypi-readme editables
	@echo "installing littrainer with its test and demo extras (2 of 2)"
	@$(PIP) install -qq -c constraints.txt --no-build-isolation --editable '.[test,demo]'
	@touch $@

# Checkpoints are exchanged with this release too. It asks for an earlier huggingface_hub, so it has a folder of its own,
# which a test puts on the path of a process of its own; whatever else it needs is in the environment.
$(EARLIER)/.installed: tests/transformers-5.3.0.txt $(INSTALLED)
	@echo "installing transformers 5.3.0 beside it, for tests of checkpoints"
	@rm -rf $(EARLIER)
	@$(PIP) install -qq --no-deps --target $(EARLIER) -r $<
	@touch $@

demo: $(INSTALLED)
	$(BIN)/littrainer run examples/text_classification.py $(DEMO_ARGS)

test: $(INSTALLED) $(EARLIER)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

# An environment that sees the packages of the first one, which is why torch is not installed twice.
define environment_beside
	@rm -rf $(@D)
	@$(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c 'import pathlib, sysconfig as s; here = s.get_path("purelib"); \
		there = pathlib.Path(s.get_path("purelib", vars={"base": "$(@D)"})); \
		(there / "first_environment.pth").write_text(f"import site; site.addsitedir({here!r})\n")'
endef

# An environment of its own, so that `make test` installs nothing that only these libraries need.
$(LIBRARIES)/.installed: tests/libraries/requirements.txt constraints.txt $(INSTALLED)
	@echo "installing TRL, sentence-transformers and setfit beside it"
	$(environment_beside)
	@$(PIP) --python $(LIBRARIES)/bin/python install -qq -c constraints.txt -r $<
	@touch $@

test-libraries: $(LIBRARIES)/.installed
	LITTRAINER_TEST_LIBRARIES=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(LIBRARIES)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile tests/libraries $(PYTEST_ARGS)

# As for the libraries. `make test` has TensorBoard, Weights & Biases, MLflow and Trackio; these are the others.
$(TRACKERS)/.installed: tests/tracking/services/requirements.txt $(INSTALLED)
	@echo "installing clients of experiment trackers beside it"
	$(environment_beside)
	@$(PIP) --python $(TRACKERS)/bin/python install -qq --no-deps -r $<
	@touch $@

test-trackers: $(TRACKERS)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(TRACKERS)/bin/python -m pytest -n $(PYTEST_WORKERS) tests/tracking/services $(PYTEST_ARGS)

# One after the other: peaks of memory are measured.
test-gpu: $(INSTALLED)
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

# Pages are made from the sources, of which nothing is imported: this environment needs neither torch nor the package.
$(DOCS)/.installed: docs/requirements.txt
	@echo "installing what builds the site into $(DOCS)"
	@rm -rf $(DOCS)
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-compile --no-deps -r $<
	@touch $@

# The variable keeps an announcement of the theme's successor out of the output.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict
	@echo "the site begins at site/index.html"

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --strict

$(PACKAGING)/.installed: tests/packaging/requirements.txt $(INSTALLED)
	@echo "installing what checks distributions beside it"
	$(environment_beside)
	@$(PIP) --python $(PACKAGING)/bin/python install -qq -c constraints.txt -r $<
	@touch $@

# `build` makes the wheel of the sdist, in an environment of its own, as an installer does.
package: $(PACKAGING)/.installed
	@rm -rf dist
	$(PACKAGING)/bin/python -m build
	$(PACKAGING)/bin/python -m twine check --strict dist/*

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) $(EARLIER)/.installed
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-short: $(INSTALLED)
	$(BIN)/python -m benchmarks --short $(BENCH_ARGS)

bench-record: $(INSTALLED) $(EARLIER)/.installed
	$(BIN)/python -m benchmarks --json docs/benchmarks/record.json $(BENCH_ARGS)
	@$(MAKE) --no-print-directory bench-docs

# Tables and curves show the figures of one file, so that none is copied by hand.
bench-docs: $(INSTALLED)
	$(BIN)/python -m benchmarks.tables docs/benchmarks/record.json
	$(BIN)/python -m benchmarks.growth docs/benchmarks/record.json

clean:
	rm -rf .venv site dist runs lightning_logs .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
