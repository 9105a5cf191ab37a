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
# As typed: neither make nor a shell reads what is in them. make itself drops blanks in front of a value on its command
# line; those in the environment (DATA=' x' make book) stay.
export BOOK_PROFILE := $(value PROFILE)
export BOOK_DATA    := $(value DATA)
unexport PROFILE DATA
# the command replaces the shell and knows the process of make, so that it ends with it
BOOK    := BOOK_MAKE=$$PPID exec $(PY) -m cis_nb.book.command_line
# an installer that reads other variables than pip does
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help book bench lab check test test-changed test-chapter test-faults export clean clean-store verify constraints
help:
	@echo "make book [PROFILE=quick] [DATA=folder]   run what has to run, and make reports/PROFILE/html/index.html"
	@echo "make check                                layers, style, exports and quick tests, below 90 seconds"
	@echo "make test-changed                         the notebooks and tests that a change reaches"
	@echo "make test-chapter NB=04b_methods/05_lincir  one notebook and the tests of its module"
	@echo "make test                                 all notebooks and all tests, with a small book from start to end"
	@echo "make lab                                  the chapters in JupyterLab"
	@echo "make bench                                the book of measured speeds"
	@echo "make export                               notebooks to modules, notebooks cleaned, README.md"
	@echo "make test-faults                          kills and hostile input, about ten minutes"
	@echo "make clean-store [YES=1]                  list unfinished work of older code in store/, and delete it"
	@echo "make verify                               hash all finished work in store/ and say what has changed"
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
	@$(BOOK) --data="$$BOOK_DATA" -- make "$$BOOK_PROFILE"

bench: $(READY)
	@$(BOOK) make bench

lab: $(READY)
	$(PY) -m jupyterlab nbs/

check test test-changed test-chapter test-faults: export OMP_NUM_THREADS = 1   # two processes at a time, a thread each

check: $(READY)
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/ruff check $(CHECKED)
	$(VENV)/bin/ruff format --check $(CHECKED)
	$(VENV)/bin/ruff check --select F821 cis_nb   # what a page imports for its examples alone
	$(PY) -m pytest $(PARALLEL) -q -m 'not e2e and not data and not browser and not gpu and not faults'

test-changed: $(READY)
	$(PY) -m cis_nb.book.checks changed

test-chapter: $(READY)
	$(PY) -m cis_nb.book.checks chapter '$(NB)'

test: $(READY)   # pytest names what was skipped, also where a notebook has failed
	@failed=0; $(VENV)/bin/nbdev_test --n_workers 2 || failed=1; \
	  $(PY) -m pytest $(PARALLEL) -rfEs || failed=1; exit $$failed

test-faults: $(READY)   # the counts are a table at the end, and a file where $$FAULTS_FILE names one
	$(PY) -m pytest $(PARALLEL) -q -m faults tests/faults

export: $(READY)
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean
	$(PY) -m cis_nb.book.command_line readme

clean:
	rm -rf .snakemake .pytest_cache .ruff_cache .import_linter_cache .hypothesis _proc build cis_nb.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	find reports -mindepth 1 -maxdepth 1 -not -name README.md -not -name reference -exec rm -rf {} +

clean-store: $(READY)
	@$(BOOK) clean-store $(if $(YES),--yes)

verify: $(READY)
	@$(BOOK) verify

constraints: $(READY)   # the versions that installations use; by hand, now and then
	$(PY) -m uv pip compile setup.py --all-extras --universal --python-version 3.10 \
	  --no-header --no-annotate --quiet -o constraints.txt --upgrade
