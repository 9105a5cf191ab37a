"Where this project lies, and small projects to make books in."

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / 'tests' / 'fixtures'
DATA = Path(os.environ.get('CIS_DATA') or '/nowhere')  # real data, where there are any


def needs_data(*paths):
    "Marks a test that reads files or folders below $CIS_DATA; without them it is skipped."
    missing = [p for p in paths if not (DATA / p).exists()]
    skip = pytest.mark.skipif(bool(missing), reason=f'CIS_DATA has no {", ".join(missing)}')

    def mark(test):
        return pytest.mark.data(skip(test))

    return mark


def receipt_of(**fields) -> dict:
    "A receipt with all that a reader asks for, empty but for some fields."
    tables = dict.fromkeys(('params', 'counts', 'versions'), {})
    machine = dict(cpu='', cores=1, gpu='', os='')
    empty = dict(experiment='', headline='', created='2026-01-31', runs=[], machine=machine)
    return empty | tables | fields


class Project:
    "A copy of the library with a few notebooks of its own."

    def __init__(self, home: Path):
        self.home = home
        (home / 'nbs').mkdir(parents=True)
        shutil.copytree(ROOT / 'cis_nb', home / 'cis_nb', ignore=shutil.ignore_patterns('__pycache__', '*.safetensors'))
        shutil.copy(ROOT / 'Snakefile', home)
        shutil.copy(FIXTURES / 'index.ipynb', home / 'nbs')

    def chapter(self, name: str, params='n: 2\n', profile='quick', variant=''):
        "Add a fixture notebook under its name, its number aside, or in a folder; with a parameter file."
        place = self.home / 'nbs' / f'{name}.ipynb'
        place.parent.mkdir(exist_ok=True)
        shutil.copy(FIXTURES / f'{re.sub("^[0-9]+[a-z]?_", "", place.stem)}.ipynb', place)
        if params is not None:
            self.write(f'params/{profile}/{name}{variant}.yaml', params)

    def write(self, path: str, text: str):
        (self.home / path).parent.mkdir(parents=True, exist_ok=True)
        (self.home / path).write_text(text)

    @property
    def env(self):
        return dict(
            os.environ,
            CIS_HOME=str(self.home),
            CIS_STORE=str(self.home / 'store'),
            PYTHONPATH=str(self.home),
            OMP_NUM_THREADS='1',
        )

    def start(self, *words, **kw):
        return subprocess.Popen(
            [sys.executable, '-m', 'cis_nb.book.command_line', *words],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **kw,
        )

    def book(self, *words):
        "Run a command of the book; its exit code and all that it said."
        p = self.start(*(words or ('make', 'quick')))
        said = p.communicate()[0]
        return p.returncode, said

    def report(self, name, profile='quick'):
        return self.home / 'reports' / profile / name

    def made(self, *names):
        return {n: (self.report(n) / 'receipt.json').stat().st_mtime_ns for n in names}
