"Keys of the store: what a change of the code changes."

import collections
import operator
import os
import random
import shutil
import subprocess
import sys
import threading
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from projects import ROOT
from cis_nb.core import code
from cis_nb.core.code import code_version, held_state, import_closure, loader_version
from cis_nb.core.store import fingerprint

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
    env.pop('PYTHONDONTWRITEBYTECODE', None)
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


def facts_file(package) -> Path:
    [file] = (package / '__pycache__').glob('modules-*.json')
    return file


@pytest.mark.parametrize('text', ['', '[]', '3', '{"cis_nb.api": 3}', '{"cis_nb.api": [1, 2]}', '[' * 100_000])
def test_damaged_facts_of_modules_are_none(tmp_path, monkeypatch, text):
    (tmp_path / 'modules.json').write_text(text)
    monkeypatch.setattr(code, '_kept_file', lambda: tmp_path / 'modules.json')
    assert code._kept.__wrapped__() == {}


@pytest.mark.e2e
@pytest.mark.parametrize('damage', ['cut', 'removed', 'stale'])
def test_kept_facts_of_modules_never_decide_a_key(package, damage):
    before = key(package)
    file = facts_file(package)
    if damage == 'cut':
        file.write_text(file.read_text()[:1000])
    if damage == 'removed':
        file.unlink()
    if damage == 'stale':  # of the time and size that the module had before it changed
        append(package / 'core' / 'store.py', '\nnew = 1\n')
    assert (key(package) == before) == (damage != 'stale')
    assert facts_file(package).stat().st_size > 1000 and not list(file.parent.glob('modules-*.[0-9]*'))


def test_kept_facts_are_those_of_the_source(monkeypatch):
    kept = code.module_facts('cis_nb.api')
    monkeypatch.setattr(code, '_kept', lambda held={}: held)  # of a process that finds none
    monkeypatch.setattr(code, '_keep', lambda file: None)
    assert code.module_facts('cis_nb.api') == kept and kept['places']['every method']


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


OUTSIDE_HELPER = {
    'module': 'import aa_helper\n\ndef rule(a, b):\n    return aa_helper.fuse(a, b)\n',
    'class': 'from aa_helper import Net\n\ndef rule(a, b):\n    return Net()(a, b)\n',
    'function': 'from aa_helper import fuse\n\ndef rule(a, b):\n    return fuse(a, b)\n',
    'inside': 'def rule(a, b):\n    import aa_helper\n    return aa_helper.fuse(a, b)\n',
    'through another': 'import aa_middle\n\ndef rule(a, b):\n    return aa_middle.fuse(a, b)\n',
}
HELPER = 'def fuse(a, b):\n    return a + b\n\nclass Net:\n    def __call__(self, a, b):\n        return fuse(a, b)\n'


@pytest.mark.parametrize('how', OUTSIDE_HELPER)
@pytest.mark.parametrize('home', ['file', 'notebook'])
def test_a_helper_in_another_module_from_outside_counts(how, home, tmp_path):
    (tmp_path / 'aa_rules.py').write_text(OUTSIDE_HELPER[how])
    (tmp_path / 'aa_middle.py').write_text('from aa_helper import fuse\n')
    start = OUTSIDE_HELPER[how] if home == 'notebook' else 'from aa_rules import rule\n'

    def version(text):
        (tmp_path / 'aa_helper.py').write_text(text)
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
        source = start + 'from cis_nb.core.code import code_version\nprint(code_version(rule))'
        return subprocess.run(
            [sys.executable, '-c', source], env=env, capture_output=True, text=True, check=True
        ).stdout

    before = version(HELPER)
    assert before == version(HELPER + '# a comment\n') != version(HELPER.replace('a + b', 'a - b'))


# --- the code of a loader


def through(crop, state=None):
    return lambda i: (crop(i), state)


def whole(i):
    return i


def half(i):
    return i // 2


class CropOfDict(dict):
    def __init__(self, crop):
        self.crop = crop

    def load(self, i):
        return self.crop(i)


class CropOfSlot:
    __slots__ = ('crop',)
    __init__, load = CropOfDict.__init__, CropOfDict.load


def through_attribute(crop):
    def load(i):
        return load.crop(i)

    load.crop = crop
    return load


class Reader:
    def __init__(self, crop):
        self.crop = crop

    def load(self, i):
        return self.crop(i)


LOADERS = [
    through,
    lambda crop: partial(through(crop)),
    lambda crop: partial(max, key=crop),
    lambda crop: Reader(crop).load,
    lambda crop: through(Reader(crop).load),
    lambda crop: through({i: crop for i in range(9)}.get),
    lambda crop: through(lru_cache(crop)),
    lambda crop: through([through(crop)]),
    lambda crop: CropOfDict(crop).load,
    lambda crop: CropOfSlot(crop).load,
    through_attribute,
]


@pytest.mark.parametrize('make', LOADERS)
def test_the_functions_of_a_loader_count(make):
    assert loader_version(make(whole)) == loader_version(make(whole)) != loader_version(make(half))


@pytest.mark.parametrize('states', [(1, 2), (Path('a'), Path('b')), ({1: 2}, {3: 4}), (np.zeros(3), np.ones(3))])
def test_the_data_of_a_loader_are_counted_by_the_key_of_its_source(states):
    one, other = (through(whole, state) for state in states)
    assert loader_version(one) == loader_version(other)


def test_the_data_of_a_loader_are_not_hashed(monkeypatch):
    monkeypatch.setattr(code, '_content', lambda *_: pytest.fail('an array of pixels is hashed'))
    monkeypatch.setattr(code, 'path_hash', lambda *_: pytest.fail('a file is hashed'))
    loader_version(through(whole, {i: Path(f'{i}') for i in range(9)} | {'pixels': np.zeros(9)}))


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


UNREADABLE = dict(
    list_iterator=lambda: iter([1]),
    generator=lambda: (i for i in [1]),
    lock=threading.Lock,
    sparse=lambda: torch.eye(2).to_sparse(),
    meta=lambda: torch.zeros(2, device='meta'),
)


@pytest.mark.parametrize('kind', UNREADABLE)
def test_what_cannot_be_read_is_an_error_that_says_what_to_do(kind):
    with pytest.raises(TypeError, match=f'{kind}.* give it numbers, texts, paths, arrays'):
        held_state(closure({'w': UNREADABLE[kind]()}))


class WithWeight:
    def __init__(self, w):
        self.w = w

    def __call__(self, a, b):
        return a + self.w * b


class DictRule(WithWeight, dict):
    pass


class ListRule(WithWeight, list):
    pass


class SetRule(WithWeight, set):
    pass


class NumberRule(float):
    __call__ = WithWeight.__call__


class Slots:
    __slots__ = ('w',)
    __init__ = WithWeight.__init__


class MoreThanSlots(Slots):
    pass


class ReadsGlobal:
    def __call__(self, a, b):
        return a + HELD.w * b


HELD = SimpleNamespace(w=0)


def attribute_of(thing, w):
    thing.w = w
    return thing


def class_of_closure(w):
    held = SimpleNamespace(w=w)

    class Rule:
        def __init__(self, a, b):
            self.value = a + held.w * b

    return Rule


def class_with_object(w):
    return type('Rule', (), dict(held=SimpleNamespace(w=w), __call__=lambda self: self.held, __module__=__name__))


def reads_global(w):
    HELD.w = w
    return ReadsGlobal()


RULES = dict(
    dictionary=DictRule,
    list=ListRule,
    set=SetRule,
    number=lambda w: attribute_of(NumberRule(1), w),
    slots=Slots,
    inherited_slots=MoreThanSlots,
    bound_builtin=lambda w: {'w': w}.get,
    bound_tensor=lambda w: torch.full((2,), w).lerp,
    method_wrapper=lambda w: w.__mul__,
    function_attribute=lambda w: attribute_of(lambda a, b: a, w),
    partial_attribute=lambda w: attribute_of(partial(rule), w),
    class_of_closure=class_of_closure,
    class_with_object=class_with_object,
    partial_as_method=lambda w: type('Rule', (), dict(__call__=partial(rule, w=w), __module__=__name__))(),
    reads_global=reads_global,
    function_of_torch=lambda w: torch.vmap(lambda a: a * w),
    random=lambda w: random.Random(int(10 * w)),
    generator=lambda w: np.random.default_rng(int(10 * w)),
    default=lambda w: collections.defaultdict(lambda: w),
    getter=lambda w: operator.itemgetter(int(10 * w)),
    masked=lambda w: np.ma.array([1, 2], mask=[w > 0.5, False]),
    order=lambda w: dict(sorted([('a', 1), ('b', 2)], reverse=w > 0.5)),
    bfloat16=lambda w: torch.full((2,), w, dtype=torch.bfloat16),
    scalar=lambda w: torch.tensor(w, dtype=torch.bfloat16),
    eight_bits=lambda w: torch.full((2,), w).to(torch.float8_e4m3fn),
)


@pytest.mark.parametrize('make', RULES)
def test_two_rules_have_two_keys_wherever_they_keep_their_weight(make):
    states = [held_state(RULES[make](w)) for w in (0.2, 0.2, 0.8)]
    assert states[0] == states[1] != states[2]
    assert len({fingerprint(state) for state in states}) == 2


def test_types_of_numbers_have_keys_of_their_own():
    states = [held_state(torch.ones(2, dtype=t)) for t in (torch.float32, torch.bfloat16, torch.float16)]
    assert len({fingerprint(state) for state in states}) == 3


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


class WithPath:
    def __init__(self, path):
        self.path = path


@pytest.mark.parametrize('wrap', [lambda p: p, lambda p: [p], lambda p: {p}, lambda p: {'p': p}])
def test_a_path_counts_by_its_content_as_in_the_store(wrap, tmp_path):
    one, same, other = (tmp_path / name for name in ('one', 'same', 'other'))
    for path, text in ((one, 'a'), (same, 'a'), (other, 'b')):
        path.write_text(text)
    state = [held_state(WithPath(wrap(p))) for p in (one, same, other)]
    assert state[0] == state[1] != state[2] and fingerprint(one) == fingerprint(same) != fingerprint(other)
    one.write_text('b')
    assert held_state(WithPath(wrap(one))) == state[2]


CACHES = dict(
    cached_property=cached_property,
    lru_cache=lru_cache(maxsize=None),
    property_of_cache=lambda f: property(lru_cache(f)),
    static=lambda f: staticmethod(lru_cache(f)),
)


@pytest.mark.parametrize('cache', CACHES)
def test_methods_behind_a_cache_count(cache):
    def version(function):
        return code_version(type('Made', (), {'value': CACHES[cache](function), '__module__': __name__}))

    assert version(whole) == version(whole) != version(half)


def with_hook(register, function):
    net = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(net.weight)
    if register:
        getattr(net, register)(function)
    return held_state(net)


def doubled(net, *args):
    return 2 * args[-1]


def tripled(net, *args):
    return 3 * args[-1]


@pytest.mark.parametrize('register', ['register_forward_hook', 'register_forward_pre_hook'])
def test_hooks_of_a_network_count(register):
    versions = [with_hook(register, f) for f in (doubled, doubled, tripled)] + [with_hook('', None)]
    assert versions[0] == versions[1] and len({str(v) for v in versions}) == 3


@pytest.mark.parametrize('name', ['use_hook', '_hooks', 'fish_hooks'])
def test_an_attribute_of_ones_own_counts_whatever_its_name(name):
    def state(value, cls):
        thing = cls()
        setattr(thing, name, value)
        return held_state(thing)

    for cls in (type('Plain', (), {'__module__': __name__}), torch.nn.Identity):
        assert state(0.2, cls) == state(0.2, cls) != state(0.8, cls)
