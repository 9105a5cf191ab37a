"Small projects to make books in, and the small book of this project itself."
import os, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = Path(__file__).parent/'fixtures'

class Project:
    "A copy of the library with a few notebooks of its own."
    def __init__(self, home:Path):
        self.home = home; (home/'nbs').mkdir(parents=True)
        shutil.copytree(ROOT/'cis_nb', home/'cis_nb', ignore=shutil.ignore_patterns('__pycache__', '*.safetensors'))
        shutil.copy(ROOT/'Snakefile', home); shutil.copy(FIXTURES/'index.ipynb', home/'nbs')
    def chapter(self, name:str, params='n: 2\n', profile='quick', variant=''):
        "Add a fixture notebook under its numbered name, with a parameter file."
        shutil.copy(FIXTURES/f'{name.split("_", 1)[1]}.ipynb', self.home/'nbs'/f'{name}.ipynb')
        if params is not None: self.write(f'params/{profile}/{name}{variant}.yaml', params)
    def write(self, path:str, text:str):
        (self.home/path).parent.mkdir(parents=True, exist_ok=True); (self.home/path).write_text(text)
    @property
    def env(self): return dict(os.environ, CIS_HOME=str(self.home), CIS_STORE=str(self.home/'store'), PYTHONPATH=str(self.home), OMP_NUM_THREADS='1')
    def start(self, *words, **kw): return subprocess.Popen([sys.executable, '-m', 'cis_nb.book', *words], cwd=self.home, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kw)
    def book(self, *words):
        "Run a command of the book; its exit code and all that it said."
        p = self.start(*(words or ('make', 'quick'))); said = p.communicate()[0]
        return p.returncode, said
    def report(self, name, profile='quick'): return self.home/'reports'/profile/name
    def made(self, *names): return {n: (self.report(n)/'receipt.json').stat().st_mtime_ns for n in names}

@pytest.fixture
def project(tmp_path, monkeypatch):
    p = Project(tmp_path/'project')
    monkeypatch.setenv('CIS_HOME', str(p.home)); monkeypatch.setenv('CIS_STORE', str(p.home/'store'))
    return p

@pytest.fixture(scope='session')
def smoke(tmp_path_factory):
    "The profile `smoke` of this project, made in a copy from nothing: home, exit code, what was said, seconds."
    import time
    home = tmp_path_factory.mktemp('smoke')/'project'
    skip = shutil.ignore_patterns('.venv', '.git', 'store', 'reports', '.snakemake', '__pycache__', '.pytest_cache', '.hypothesis', '*.egg-info')
    shutil.copytree(ROOT, home, ignore=skip)
    p = Project.__new__(Project); p.home = home
    t = time.time(); rc, said = p.book('make', 'smoke')
    p.rc, p.said, p.seconds = rc, said, time.time()-t
    return p
