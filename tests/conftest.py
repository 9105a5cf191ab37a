"Small projects to make books in, and the small book of this project itself."

import os
import shutil
import pytest
import torch
from projects import ROOT, Project

for name in ('MAKELEVEL', 'MAKEFLAGS', 'MFLAGS'):  # a `make` in a test is no part of the `make test` that runs it
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def seeded():
    "Weights that a test draws are the same in each run, whatever ran before it."
    torch.manual_seed(0)


@pytest.fixture
def store(tmp_path, monkeypatch):
    "A run store for this test alone, below the folder that is returned."
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    return tmp_path


@pytest.fixture
def project(tmp_path, monkeypatch):
    p = Project(tmp_path / 'project')
    monkeypatch.setenv('CIS_HOME', str(p.home))
    monkeypatch.setenv('CIS_STORE', str(p.home / 'store'))
    return p


@pytest.fixture(scope='session')
def smoke(tmp_path_factory):
    "The profile `smoke` of this project, made in a copy from nothing: home, exit code, what was said, seconds."
    import time

    home = tmp_path_factory.mktemp('smoke') / 'project'
    skip = shutil.ignore_patterns(
        '.venv', '.git', 'store', 'reports', '.snakemake', '__pycache__', '.pytest_cache', '.hypothesis', '*.egg-info'
    )
    shutil.copytree(ROOT, home, ignore=skip)
    p = Project.__new__(Project)
    p.home = home
    t = time.time()
    rc, said = p.book('make', 'smoke')
    p.rc, p.said, p.seconds = rc, said, time.time() - t
    return p
