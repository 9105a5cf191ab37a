# The CIS Book. The first call makes .venv and installs everything (about 8.5 GB); later calls only when the
# requirements change.
PYTHON  ?= python3
PROFILE ?= quick
DATA    ?=
VENV    := .venv
PY      := $(VENV)/bin/python
READY   := $(VENV)/.ready
CHECKED := nbs tests setup.py                  # what ruff reads; modules are written from notebooks
OLD     := Python 3.10 or newer is needed: make PYTHON=python3.11
PIP     := -m pip install --quiet --disable-pip-version-check
PARALLEL := -n 2 --dist loadfile               # tests of one file share what they set up
unexport PYTHONDONTWRITEBYTECODE   # else each of the many processes compiles every package anew, some ten seconds
# an installer that reads other variables than pip does
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help book bench lab check test test-changed test-chapter export clean constraints
help:
	@echo "make book [PROFILE=quick] [DATA=folder]   run what has to run, and make reports/PROFILE/html/index.html"
	@echo "make check                                layers, style, exports and quick tests, below 90 seconds"
	@echo "make test-changed                         the notebooks and tests that a change reaches"
	@echo "make test-chapter NB=04b_methods/05_lincir  one notebook and the tests of its module"
	@echo "make test                                 all notebooks and all tests, with a small book from start to end"
	@echo "make lab                                  the chapters in JupyterLab"
	@echo "make bench                                the book of measured speeds"
	@echo "make export                               notebooks to modules, notebooks cleaned, README.md"
	@echo "make clean                                remove reports; finished work in store/ stays"

$(READY): settings.ini setup.py pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "$(OLD)")'
	@echo "Installing into $(VENV) (about 8.5 GB, half a minute to some minutes)"
	@{ $(PY) $(PIP) uv \
	  && $(PY) -m uv pip install --quiet --python $(PY) -c constraints.txt -e '.[dev]'; } \
	  || { echo "uv could not do it; pip takes some minutes longer"; $(PY) $(PIP) -c constraints.txt -e '.[dev]'; }
	@# compiles what they load, once, where two chapters at a time would do it twice
	@$(PY) -c 'import papermill, cis_nb.train, cis_nb.book.site'
	@touch $(READY)

book: $(READY)
	@$(PY) -m cis_nb.book.command_line make $(PROFILE) --data '$(DATA)'

bench: $(READY)
	@$(PY) -m cis_nb.book.command_line make bench

lab: $(READY)
	$(PY) -m jupyterlab nbs/

check test test-changed test-chapter: export OMP_NUM_THREADS = 1   # two processes at a time, a thread each

check: $(READY)
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/ruff check $(CHECKED)
	$(VENV)/bin/ruff format --check $(CHECKED)
	$(VENV)/bin/ruff check --select F821 cis_nb   # what a page imports for its examples alone
	$(PY) -m pytest $(PARALLEL) -q -m 'not e2e and not data and not browser and not gpu'

test-changed: $(READY)
	$(PY) -m cis_nb.book.checks changed

test-chapter: $(READY)
	$(PY) -m cis_nb.book.checks chapter '$(NB)'

test: $(READY)   # pytest names what was skipped, also where a notebook has failed
	@failed=0; $(VENV)/bin/nbdev_test --n_workers 2 || failed=1; \
	  $(PY) -m pytest $(PARALLEL) -rfEs || failed=1; exit $$failed

export: $(READY)
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean
	$(PY) -m cis_nb.book.command_line readme

clean:
	rm -rf .snakemake .pytest_cache .ruff_cache .import_linter_cache .hypothesis _proc build cis_nb.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	find reports -mindepth 1 -maxdepth 1 -not -name README.md -not -name reference -exec rm -rf {} +

constraints: $(READY)   # the versions that installations use; by hand, now and then
	$(PY) -m uv pip compile setup.py --all-extras --universal --python-version 3.10 \
	  --no-header --no-annotate --quiet -o constraints.txt --upgrade
