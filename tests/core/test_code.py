"Keys of the store: what a change of the code changes."

import os
import shutil
import subprocess
import sys
from functools import partial
import numpy as np
import pytest
import torch
from projects import ROOT
from cis_nb.core import code
from cis_nb.core.code import code_version, held_state, import_closure

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


# --- what code is given and reads


WEIGHTS = {}


def by_global(a, b):
    return a + WEIGHTS['w'] * b


class ByGlobal:
    def __call__(self, a, b):
        return a + WEIGHTS['w'] * b


def of_global(thing, w) -> str:
    "The version of a thing that reads a global dictionary."
    WEIGHTS['w'] = w
    return code_version(thing)


def rule(a, b, w):
    return a + w * b


def closure(weights):
    return lambda a, b: a + weights['w'] * b


def with_attribute(weights):
    return type('Rule', (), {'W': weights, '__call__': rule, '__module__': __name__})


@pytest.mark.parametrize(
    'version',
    [
        lambda w: of_global(by_global, w),
        lambda w: of_global(ByGlobal, w),
        lambda w: code_version(partial(rule, w=w)),
        lambda w: code_version(partial(partial(rule, w=w), b=1)),
        lambda w: code_version(closure({'w': w})),
        lambda w: code_version(closure({'w': partial(rule, w=[w])})),
        *(lambda w, wrap=wrap: code_version(with_attribute(wrap(w))) for wrap in (list, set, dict)),
        lambda w: held_state(with_attribute([w])()),
    ],
)
def test_what_code_is_given_and_reads_is_part_of_its_key(version):
    weights = [((0.2, 1),), ((0.8, 1),)]  # what a list, a set and a dictionary can be made of
    assert version(weights[0]) == version(weights[0]) != version(weights[1])


def test_what_cannot_be_read_is_an_error_that_says_what_to_do():
    with pytest.raises(TypeError, match='list_iterator .* give it numbers, texts, paths, arrays'):
        code_version(closure({'w': iter([1])}))


def test_a_collection_that_holds_its_reader_is_read_once():
    def reads(a):
        return held['reads'], a

    held = {'reads': reads}
    assert code_version(reads) == code_version(reads)


def test_big_weights_are_hashed_again_only_after_a_change(monkeypatch):
    weights, real, hashed = torch.zeros(600, 600), code.hashlib.sha256, []
    monkeypatch.setattr(code.hashlib, 'sha256', lambda content: hashed.append(1) or real(content))
    before = held_state(weights)
    assert held_state(weights) == before and len(hashed) == 1
    for change in (lambda: weights.add_(1), lambda: weights.data.mul_(2), lambda: weights.numpy().fill(3)):
        change()
        assert held_state(weights) != before
        before = held_state(weights)
    assert before == held_state(torch.full((600, 600), 3.0)) == held_state(np.full((600, 600), 3, np.float32))


def test_a_list_that_code_only_writes_to_decides_nothing():
    seen, weights = [], [0.2]

    def noted(x):
        seen.append(x)
        return weights[0] * x

    before = code_version(noted)
    noted(1)
    assert code_version(noted) == before
    weights[0] = 0.8
    assert code_version(noted) != before

    def counted(x):
        seen.append(x)
        return len(seen)

    before = code_version(counted)
    counted(1)
    assert code_version(counted) != before
