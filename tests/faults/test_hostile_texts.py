"Texts of captions, ratings and parameters, each file changed in every way."

import gzip
import json

import pytest
from hostile import attack, gz_changes, text_changes

from cis_nb.core.experiment_files import read_params
from cis_nb.core.parameters import checked
from cis_nb.methods.searle import read_concepts
from cis_nb.mining.captions import read_captions
from cis_nb.mining.concreteness import read_ratings
from cis_nb.data.roots import WORLD
from cis_nb.mining.corpora import corpus_folder
from cis_nb.mining.synthetic import read_edits

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures('store')]


def corpus_of(path):
    "What a corpus of a source of captions holds, and what was left out."

    def read():
        about = json.loads((corpus_folder(path, WORLD, processes=1) / 'corpus.json').read_text())
        return about['captions'], about['left']

    return read


def rows_of(path):
    def read():
        rows, skipped = read_captions(path)
        return rows, skipped.counts()

    return read


HALF = 'cut in half'  # a shorter text
TEXTS = {  # name -> content, changes
    'captions.txt': (''.join(f'a red cat{" in a park" * (i % 2)}\n' for i in range(40)), text_changes),
    'captions.tsv': (''.join(f'{i}.jpg\ttrain\t{i % 5}\ta cat\n' for i in range(40)), text_changes),
    'captions.txt.gz': ('a red cat\n' * 40, gz_changes),
}


@pytest.mark.parametrize('reader', [corpus_of, rows_of])
@pytest.mark.parametrize('name', TEXTS)
def test_texts_of_captions(tmp_path, name, reader):
    text, changes = TEXTS[name]
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == '.gz' else text.encode())
    assert attack('texts of captions', path, reader(path), [changes], valid_too=HALF) == []


def edit_changes(data: bytes):
    "(name, bytes): lines that are no edits."
    lines = data.decode().split('\n')
    for name, line in (
        ('a list', '[1]'),
        ('a number', '3'),
        ('no output', '{"input": "a", "edit": "b"}'),
        ('a number for a text', '{"input": 3, "edit": "b", "output": "c"}'),
        ('deep', '[' * 3000),
        ('a lone surrogate', '{"input": "\\ud800", "edit": "b", "output": "c"}'),
        ('a huge integer', '{"input": 1' + '0' * 5000 + ', "edit": "b", "output": "c"}'),
    ):
        yield name, '\n'.join([*lines[:2], line, *lines[2:]]).encode()


def test_edited_captions(tmp_path):
    path = tmp_path / 'edits.jsonl'
    path.write_text(''.join(json.dumps(dict(input=f'a {i}', edit=f'b {i}', output=f'c {i}')) + '\n' for i in range(9)))
    assert attack('edited captions', path, lambda: read_edits(path), [edit_changes, text_changes], valid_too=HALF) == []


def rating_changes(data: bytes):
    "(name, bytes): lines that are no ratings."
    lines = data.decode().split('\n')
    for name, line in (
        ('text for a number', 'cat\t0\tx\t0\t0\t0\t0\t0\t0'),
        ('not a number', 'cat\t0\tnan\t0\t0\t0\t0\t0\t0'),
        ('too large', 'cat\t0\t7.5\t0\t0\t0\t0\t0\t0'),
        ('negative', 'cat\t0\t-1\t0\t0\t0\t0\t0\t0'),
        ('too few columns', 'cat\t0\t3.5'),
        ('no word', '\t0\t3.5\t0\t0\t0\t0\t0\t0'),
        ('a word rated twice', lines[1]),
    ):
        yield name, '\n'.join([*lines[:3], line, *lines[3:]]).encode()


def test_ratings(tmp_path):
    path = tmp_path / 'ratings.txt'
    head = 'Word\tBigram\tConc.M\tConc.SD\tUnknown\tTotal\tPercent_known\tSUBTLEX\tDom_Pos\n'
    path.write_text(head + ''.join(f'w{i}\t0\t{1 + i % 4}.5\t0\t0\t0\t0\t0\t0\n' for i in range(9)))
    assert attack('ratings', path, lambda: (read_ratings(path), {}), [text_changes, rating_changes]) == []


VOCABULARIES = {  # name -> content
    'names.txt': ''.join(f'name {i}\n' for i in range(9)),
    'names.csv': 'LabelName,DisplayName\n' + ''.join(f'/m/{i},name {i}\n' for i in range(9)),
}


def name_changes(data: bytes):
    "(name, bytes): lines that are no names."
    lines = data.decode().split('\n')
    for name, line in (
        ('a byte of zero', lines[3].replace('name', 'na\0me')),
        ('a line twice', f'{lines[3]}\n{lines[3]}'),
        ('a blank line', f'{lines[3]}\n\n'),
        *([] if ',' not in lines[0] else [('a cell more', lines[3] + ',x'), ('a cell less', lines[3].split(',')[0])]),
        *([] if ',' not in lines[0] else [('an open quote', lines[3].replace(',', ',"'))]),
    ):
        yield name, '\n'.join([*lines[:3], line, *lines[4:]]).encode()
    if ',' in lines[0]:
        for name, head in (('no DisplayName', 'LabelName,Name'), ('DisplayName twice', 'DisplayName,DisplayName')):
            yield name, '\n'.join([head, *lines[1:]]).encode()


@pytest.mark.parametrize('name', VOCABULARIES)
def test_vocabularies(tmp_path, name):
    path = tmp_path / name
    path.write_text(VOCABULARIES[name])
    read = lambda: (read_concepts(str(path)), {})  # noqa: E731
    assert attack('vocabularies', path, read, [name_changes, text_changes], valid_too=HALF) == []


YAML = {
    'an alias': 'a: &x [1]\nsteps: *x\n',
    'deep': 'steps: ' + '[' * 4000,
    'deep and closed': 'steps: ' + '[' * 400 + ']' * 400,
    'a key twice': 'steps: 1\nsteps: 2\n',
    'a list': '- 1\n',
    'text': 'steps',
    'no day': 'steps: 2026-13-45\n',
    'a day': 'steps: 2026-01-01\n',
    'an octal number': 'steps: 0100\n',
    'a number of base 60': 'steps: 1:30\n',
    'a float of base 60': 'lr: 1:30.5\n',
    'a day in a list': 'more: [2026-01-01]\n',
    'an empty integer': 'steps: !!int ""\n',
    'an unknown truth value': 'steps: !!bool x\n',
    'a false time stamp': 'steps: !!timestamp x\n',
    'a tag on a name': '!!int "": 1\n',
    'a tag of its own': 'tasks: !x [full]\n',
    'a letter beyond Unicode': 'name: "\\UFFFFFFFF"\n',
    'half of a surrogate pair': 'name: "\\ud800"\n',
    'a program': 'steps: !!python/object/apply:os.getcwd []\n',
    'huge integer': 'steps: 1' + '0' * 5000 + '\n',
    'integer of 70 bits': f'steps: {2**70}\n',
    'infinite': 'lr: .inf\n',
    'an integer of 401 digits for a float': 'lr: 1' + '0' * 400 + '\n',
    'not a number in an object': 'shape: {depth: .nan}\n',
    'negative in an object': 'shape: {depth: -1}\n',
    'huge in a list without a default': 'more: [1' + '0' * 400 + ']\n',
    'not a number': 'lr: .nan\n',
    'negative': 'steps: -1\n',
    'zero': 'steps: 0\n',
    'true': 'steps: true\n',
    'text for a number': 'lr: 1e-4\n',
    'a list for a number': 'steps: [1]\n',
    'a number for a list': 'tasks: 3\n',
    'text for a list': 'tasks: full\n',
    'an empty list': 'tasks: []\n',
    'a list of other things': 'tasks: [1]\n',
    'a negative seed in a list': 'seeds: [-1]\n',
    'another device': 'device: gpu\n',
    'device with a number too large': 'device: cuda:100\n',
    'an unknown name': 'step: 1\n',
    'a number as a name': '1: 2\n',
    'a list as a name': '[1]: 2\n',
    'a tab': 'steps:\t1\n\tlr: 2\n',
    'no value': 'steps:\n',
    'binary': 'steps: !!binary aGFsbG8=\n',
    'a set': 'tasks: !!set {full, half}\n',
}


def test_parameters(tmp_path):
    path = tmp_path / 'a.yaml'
    path.write_text('steps: 3\ntasks: [full]\n')
    known = dict(steps=24, lr=1e-3, tasks=['full', 'subset'], seeds=[0, 1], device='auto', name='tiny')
    known |= dict(shape=dict(depth=2), more=[])

    def changes(_):
        yield from ((name, text.encode()) for name, text in YAML.items())

    def read():
        return checked(read_params(path), known, str(path), {'seeds'}), {}

    too = 'empty|cut in half'  # fewer parameters
    assert attack('parameters', path, read, [changes, text_changes], valid_too=too, errors=(TypeError,)) == []
