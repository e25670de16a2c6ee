# Needs Python 3.10+ and make. Every target but help and clean makes .venv first, and again when the versions change.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
REHEARSAL := .venv/.rehearsal$(if $(ALL),-all)
comma := ,
# constraints-oldest.txt has the oldest versions that are supported; for a .venv of its own.
CONSTRAINTS ?= constraints.txt

# Where it is set, every rank of every run compiles all sources at its start: 0.6 s each, of which the tests have thousands.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help rehearsal docs docs-site test smoke test-all mutants simulate simulate-today lint check-deploy perf clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 22

define CHECK_PYTHON
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
  echo "make: $(PYTHON) is `$(PYTHON) --version 2>&1`; Python 3.10 or newer is needed: make PYTHON=/path/to/python3.12 ..." >&2; \
  exit 1; }
endef

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(CHECK_PYTHON)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,lora,vision]'
	@touch $@

# A rehearsal needs neither linters nor, unless ALL=1, what the criteria lora and vision need. pip shows its progress.
$(REHEARSAL): pyproject.toml $(CONSTRAINTS)
	@$(CHECK_PYTHON)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.$(if $(ALL),[lora$(comma)vision])'
	@touch $@

rehearsal: $(REHEARSAL) ## the acceptance suite on two CPU ranks: no GPU needed, nothing is accepted by it; ALL=1: lora and vision, too
	@OMP_NUM_THREADS=1 $(PY) -m pytest_gpucluster run -- --gpucluster-device=cpu --junitxml=report.xml \
	  $(if $(ALL),,-k 'not lora and not vision')

docs: $(STAMP) ## write every file that is made from the code: pages, JSON Schemas, acceptance/criteria.txt
	$(PY) docs/generate.py

docs-site: $(STAMP) ## the documentation as a site with search, in build/site
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[site]'
	$(PY) -m sphinx -q -W docs build/site

test: $(STAMP) ## run the project's own tests: all that pip alone can run, warnings being errors
	$(PY) tests/halves.py -m "not extended" --durations=6 --durations-min=10

smoke: $(STAMP) ## one short run of each real service, Slurm, ssh, a browser, and of the self-test
	$(PY) -m pytest tests/deploy tests/runners tests/reports tests/selftest -m smoke

test-all: $(STAMP) ## all tests, those of real services and of perf/ too, and 30 rounds of faults
	$(PY) tests/halves.py --durations=12 --durations-min=10
	$(PY) perf/soak.py --rounds 30 --at-once 2

mutants: $(STAMP) ## change one place of the product at a time: do the tests notice? MUTANTS="--count 20 --only units"
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[mutants]'
	$(PY) tests/mutants.py $(MUTANTS)

lint: $(STAMP) ## check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

check-deploy: $(STAMP) ## look at all of deploy/: shell, images, workflows, manifests; needs npm and kubectl 1.27 or newer
	$(PY) tests/deploy/check_deploy.py

simulate: $(STAMP) ## run the suite on simulated clusters, healthy ones and each fault; goes on where it stopped
	$(PY) perf/simulate.py

simulate-today: $(STAMP) ## a healthy simulated cluster, and two faults that change with the date
	$(PY) perf/simulate.py --today

perf: $(STAMP) ## print all tables of perf/: what the suite costs, how faithful and how large it can be; simulate the rules
	$(PY) perf/tables.py

clean: ## remove caches and build output; .venv and the reports stay, for reports are evidence
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
