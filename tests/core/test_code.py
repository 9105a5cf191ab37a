"Keys of the store: what a change of the code changes."

import os
import shutil
import subprocess
import sys
import pytest
from projects import ROOT
from cis_nb.core.code import import_closure

KEY = '''
import sys
from cis_nb.core.code import code_version
from cis_nb.core.report import finish

print(code_version(finish), sys.modules["cis_nb"].__file__)
'''


@pytest.fixture
def package(tmp_path):
    "A copy of the library's modules."
    return shutil.copytree(ROOT / 'cis_nb', tmp_path / 'cis_nb', ignore=shutil.ignore_patterns('__pycache__', 'tiny*'))


def key(package) -> str:
    "The key of a function of the copy, told by a process of its own."
    env = dict(os.environ, PYTHONPATH=str(package.parent))
    said = subprocess.run([sys.executable, '-c', KEY], cwd=package, env=env, capture_output=True, text=True, check=True)
    version, file = said.stdout.split()
    assert file == str(package / '__init__.py')
    return version


def append(file, text):
    file.write_text(file.read_text() + text)


@pytest.mark.e2e
def test_a_helper_that_changes_changes_the_key_and_an_unrelated_module_does_not(package):
    before = key(package)
    append(package / 'book' / 'site.py', '\nnew = 1\n')
    append(package / 'core' / 'store.py', '\n# a comment\n\n')
    assert key(package) == before
    append(package / 'core' / 'store.py', '\nnew = 1\n')  # `finish` is in core.report, which imports it
    assert key(package) != before


@pytest.mark.parametrize(
    'module, helpers',
    [
        ('benchmarks.genecis_construction', 'benchmarks.genecis'),
        ('data.packed', 'data.image_folders'),
        ('backbones.clip', 'backbones.weights backbones.tokenizer'),
        ('methods.lincir', 'methods.pseudo_words backbones.tokenizer mining.corpora'),
    ],
)
def test_the_closure_of_a_builder_holds_its_helpers(module, helpers):
    closure = import_closure([f'cis_nb.{module}'])
    assert {f'cis_nb.{h}' for h in helpers.split()} <= set(closure) and 'cis_nb.book.site' not in closure


OUTSIDE = '''
import outside_package.first.rules as first, outside_package.second.rules as second
from cis_nb.core.code import code_version

print(code_version(first.rule))
'''


def test_every_file_of_a_package_from_outside_counts(tmp_path):
    "Two files of one name in two folders are two files."
    for folder in ('first', 'second'):
        (tmp_path / 'outside_package' / folder).mkdir(parents=True)
        (tmp_path / 'outside_package' / folder / 'rules.py').write_text('def rule(a, b):\n    return a + b\n')
    (tmp_path / 'outside_package/__init__.py').write_text('')

    def version():
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
        return subprocess.run(
            [sys.executable, '-c', OUTSIDE], env=env, capture_output=True, text=True, check=True
        ).stdout

    before = version()
    assert version() == before
    for folder in ('first', 'second'):
        append(tmp_path / 'outside_package' / folder / 'rules.py', 'WEIGHT = 2\n')
        assert version() != before
        before = version()
