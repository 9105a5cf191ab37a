# The CIS Book. The first call makes .venv and installs everything (about 8.5 GB); later calls only when the requirements change.
PYTHON  ?= python3
PROFILE ?= quick
DATA    ?=
VENV    := .venv
PY      := $(VENV)/bin/python
READY   := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE   # else each of the many processes compiles every package anew, some ten seconds
# an installer that reads other variables than pip does
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help book bench lab test export clean constraints
help:
	@echo "make book [PROFILE=quick] [DATA=folder]   run what has to run, and make reports/PROFILE/html/index.html"
	@echo "make test                                 all tests, with a small book from start to end"
	@echo "make lab                                  the chapters in JupyterLab"
	@echo "make bench                                the book of measured speeds"
	@echo "make export                               notebooks to modules, notebooks cleaned, README.md"
	@echo "make clean                                remove reports; finished work in store/ stays"

$(READY): settings.ini setup.py pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	@echo "Installing into $(VENV) (about 8.5 GB, half a minute to some minutes)"
	@{ $(PY) -m pip install --quiet --disable-pip-version-check uv && $(PY) -m uv pip install --quiet --python $(PY) -c constraints.txt -e '.[dev]'; } \
	  || { echo "uv could not do it; pip takes some minutes longer"; $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; }
	@$(PY) -c 'import papermill, cis_nb.composed, cis_nb.site'   # compiles what they load, once, where two chapters at a time would do it twice
	@touch $(READY)

book: $(READY)
	@$(PY) -m cis_nb.book make $(PROFILE) --data '$(DATA)'

bench: $(READY)
	@$(PY) -m cis_nb.book make bench

lab: $(READY)
	$(PY) -m jupyterlab nbs/

test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/nbdev_test --n_workers 2
	$(PY) -m pytest tests

export: $(READY)
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean
	$(PY) -m cis_nb.book readme

clean:
	rm -rf .snakemake .pytest_cache .hypothesis _proc build cis_nb.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	find reports -mindepth 1 -maxdepth 1 -not -name README.md -not -name reference -exec rm -rf {} +

constraints: $(READY)   # the versions that installations use; by hand, now and then
	$(PY) -m uv pip compile setup.py --extra dev --extra detect --universal --python-version 3.10 --no-header --no-annotate --quiet -o constraints.txt --upgrade
