"Domain conversion: damaged lists and folders, both recalls, impossible queries, real lists and PACS."

import io
import json
import os
import subprocess
import sys
import tarfile
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from projects import DATA, ROOT, needs_data
from cis_nb.benchmarks.domain_conversion import (
    audit_domains,
    best_possible,
    load_domains,
    domains_of,
    impossible,
    read_domains,
    read_folders,
    read_lists,
    set_recall,
    with_impossible,
)
from cis_nb.retrieval.protocol import evaluate, result_rows
from cis_nb.retrieval.metrics import recall_at_k
from cis_nb.methods.baselines import method

data = DATA
lists = needs_data('imgnet_lists/imgnet_targets.txt')
pacs = needs_data('pacs/pacs.tar')
QUERIES, TARGETS = (
    'imgnet/real/a.jpg 2 \nimgnet/real/b.jpg 3 \n',
    'imgnet/real/a.jpg 6002 \nimgnet/real/b.jpg 6003 \n'
    'imgnet/r/toy.jpg 2002 \nimgnet/r/toy2.jpg 2002 \nimgnet/r/c.jpg 3 \n',
)


def jpeg(shade=0):
    buf = io.BytesIO()
    Image.new('RGB', (8, 8), (shade, 90, 20)).save(buf, 'JPEG')
    return buf.getvalue()


def put(root, names):
    for n, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(n))
    return root


def write(root, queries=QUERIES, targets=TARGETS, names=None):
    (root / 'imgnet').mkdir(parents=True, exist_ok=True)
    for name, text in (('imgnet_real_query.txt', queries), ('imgnet_targets.txt', targets), ('domains.txt', names)):
        if text is not None:
            (root / 'imgnet' / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


@pytest.mark.parametrize(
    'change, why',
    [
        (dict(queries=''), 'is empty'),
        (dict(queries=b'\xff\xfe\x00'), 'is not UTF-8'),
        (dict(targets='imgnet/r/a.jpg'), 'line 1: expected "path label"'),
        (dict(targets=' 2002'), 'line 1: expected'),
        (dict(targets=TARGETS + '\nimgnet/x.jpg two'), 'line 6: expected'),
        (dict(targets=TARGETS + 'imgnet/x.jpg -1'), 'line 6: expected'),
        (dict(targets='imgnet/x.jpg 2.0'), 'line 1: expected'),
        (dict(targets='imgnet/x.jpg ²'), 'line 1: expected'),
        (dict(targets=TARGETS + '../x.jpg 2'), 'leaves the folder'),
        (dict(targets='imgnet/../../x.jpg 2'), 'leaves the folder'),
        (dict(targets='/x.jpg 2'), 'leaves the folder'),
        (dict(targets='C:\\x.jpg 2'), 'leaves the folder'),
        (dict(queries=QUERIES + 'imgnet/real/a.jpg 2'), 'line 3: .* was named before'),
        (dict(targets=TARGETS + 'imgnet/x.jpg 4001'), 'domain 4, which has no name'),
        (dict(queries='imgnet/real/a.jpg 2002'), 'is of domain toy; references must be real'),
        (dict(queries='imgnet/real/a.jpg 3'), 'is a reference of class 3, and has the label 6002'),
        (dict(queries='imgnet/r/toy.jpg 2'), 'has the label 2002'),
        (dict(names='0 wax\n6 real\n0 clay'), 'is repeated'),
        (dict(names='0 wax\n2 wax\n6 real'), 'is repeated'),
        (dict(names='0 wax'), 'number 6, has no name'),
        (dict(names='wax\n6 real'), 'line 1: expected a number'),
        (dict(names='0 wax\n6 real'), 'domain 2, which has no name'),
    ],
)
def test_damaged_lists_are_refused(tmp_path, change, why):
    with pytest.raises(ValueError, match=why) as e:
        read_lists(write(tmp_path, **change))
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize('gone', ('imgnet_targets.txt', 'imgnet_real_query.txt'))
def test_a_missing_list_says_where_to_get_it(tmp_path, gone):
    (write(tmp_path) / 'imgnet' / gone).unlink()
    with pytest.raises(FileNotFoundError, match=f'{gone} is missing.*composed_image_retrieval'):
        read_domains(tmp_path)


def test_lists_with_pictures_without_and_with_some(tmp_path):
    D = read_domains(write(tmp_path))
    assert (D.name, D.real, domains_of(D), len(D.places)) == ('imagenet-r', 'real', ['cartoon', 'toy'], 0)
    with pytest.raises(FileNotFoundError, match='ImageNet-R.*is missing'):
        load_domains(D)
    put(tmp_path, [line.split()[0] for line in TARGETS.splitlines()])
    b = load_domains(read_domains(tmp_path))
    assert {q.query_id: set(q.targets) for q in b.queries.itertuples()} == {
        'imgnet/real/b.jpg > cartoon': {'imgnet/r/c.jpg'},
        'imgnet/real/a.jpg > toy': {'imgnet/r/toy.jpg', 'imgnet/r/toy2.jpg'},
    }
    assert b.protocol.extra == 'impossible queries dropped: 1 for cartoon, 1 for toy of 2' and b.protocol.coverage == 1
    (tmp_path / 'imgnet/r/toy.jpg').unlink()
    fewer = load_domains(read_domains(tmp_path / 'imgnet'))  # the folder itself will do
    assert (
        '1 of 2 queries with fewer targets' in fewer.protocol.extra
        and 'partial' in str(fewer.protocol)
        and fewer.protocol.hash != b.protocol.hash
    )
    with pytest.raises(ValueError, match="domain: 'real' is none of cartoon, toy"):
        load_domains(D, ['real'])
    with pytest.raises(ValueError, match='reference: .* is none of'):
        load_domains(read_domains(tmp_path), reference='gone')


def test_nothing_to_ask_is_an_error(tmp_path):
    root = put(tmp_path, ['photo/cat/0.jpg', 'sketch/dog/0.jpg'])
    with pytest.raises(ValueError, match='no class of the photo images occurs in sketch'):
        load_domains(read_folders(root))


def test_folders_and_a_tar_with_dirt(tmp_path):
    names = [f'{d}/{c}/{n}.jpg' for d in ('photo', 'oil_paint') for c in ('cat', 'dog') for n in range(2)]
    put(tmp_path / 'plain', [*names, 'loose.jpg', 'photo/alone.jpg'])
    (tmp_path / 'plain/photo/notes.txt').write_text('x')
    (tmp_path / 'plain/.DS_Store').write_text('x')
    D = read_domains(tmp_path / 'plain')
    assert (
        D.left_out.counts() == {'file that is no image': 1, 'image that is not in a folder domain/class/': 2}
        and len(D.table) == 8
    )
    b = load_domains(D)
    assert (
        set(b.queries.condition) == {'oil paint'}
        and '3 files left out' in b.protocol.extra
        and b.load(names[0]).size == (8, 8)
    )
    (tmp_path / 'packed').mkdir()
    with tarfile.open(tmp_path / 'packed/set.tar', 'w') as t:
        for n, name in enumerate([*names, '../../evil/cat/x.jpg']):
            info = tarfile.TarInfo(name)
            blob = jpeg(n)
            info.size = len(blob)
            t.addfile(info, io.BytesIO(blob))
    P = read_domains(tmp_path / 'packed')
    assert P.left_out.counts() == {'tar member named outside its folder': 1} and sorted(P.table.image) == sorted(names)
    assert load_domains(P).load(names[3]).size == (8, 8)
    (tmp_path / 'packed/set.tar').write_bytes((tmp_path / 'packed/set.tar').read_bytes()[:11000])
    assert read_domains(tmp_path / 'packed').left_out.counts()['tar cut short or damaged'] == 1


@pytest.mark.parametrize(
    'names, real, why',
    [
        (['photo/cat/0.jpg'], '', "only one domain, 'photo'"),
        (['wax/cat/0.jpg', 'clay/cat/0.jpg'], '', 'which of clay, wax is the real domain'),
        (['wax/cat/0.jpg', 'clay/cat/0.jpg'], 'photo', "'photo' is none of clay, wax"),
        (['photo/cat/0.jpg', 'more/clay/cat/0.jpg'], '', 'more than one folder'),
        (['0.jpg'], '', 'no image in a folder domain/class/'),
    ],
)
def test_folders_that_are_no_domains(tmp_path, names, real, why):
    with pytest.raises(ValueError, match=why):
        read_folders(put(tmp_path / 'set', names), real)
    with pytest.raises(FileNotFoundError, match='is missing'):
        read_domains(tmp_path / 'nowhere')


@given(
    st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=12, unique=True), min_size=1, max_size=6),
    st.sampled_from((1, 5, 10, 50, 200)),
)
@settings(max_examples=150, deadline=None)
def test_both_recalls_are_the_slow_ones(places, k):
    width = max(map(len, places))
    R = np.array([[*p, *[0] * (width - len(p))] for p in places])
    first = [list(range(1, 101))[:k] for _ in places]
    assert set_recall(R, k) == pytest.approx([len(set(f) & set(p)) / len(p) for f, p in zip(first, places)])
    assert recall_at_k(R, k) == pytest.approx([float(bool(set(f) & set(p))) for f, p in zip(first, places)])
    assert (set_recall(R, k) <= recall_at_k(R, k)).all()


class Eye:
    "A backbone whose features tell images apart, and nothing else."

    name = fingerprint = 'eye'

    def features(self, images):
        array = np.random.default_rng(3).normal(size=(len(images.ids), 6)).astype(np.float32)
        return SimpleNamespace(array=array, index={i: n for n, i in enumerate(images.ids)})

    def encode_text(self, texts):
        return torch.ones(len(texts), 6)


def two_classes_of_wax(folder):
    "Three domains; half of the classes have no image in `wax`."
    counts = dict(photo=('abcd', 3), wax=('ab', 4), ice=('abcd', 2))
    files = [f'{d}/{c}/{n}.jpg' for d, (classes, size) in counts.items() for c in classes for n in range(size)]
    return read_folders(put(folder, files))


def test_impossible_queries_count_as_failures_where_asked(tmp_path):
    D = two_classes_of_wax(tmp_path / 's')
    assert (
        {d: len(impossible(D, d)) for d in domains_of(D)} == {'ice': 0, 'wax': 6}
        and best_possible(D, 'wax', 1) == pytest.approx(12.5)
        and best_possible(D, 'wax', 10) == pytest.approx(50)
    )
    b = load_domains(D, reference='kept')
    m = method('image_only', Eye())
    per_query, rows = evaluate(m, b, ks=(5,))
    assert all(q.reference == q.top[0] for q in per_query.itertuples())  # kept: it finds itself first
    both = with_impossible(per_query, D, b)
    assert (
        len(both) == 24
        and len(per_query) == 18
        and both.protocol.nunique() == 1
        and both.protocol[0] != b.protocol.id
        and both.query_id.is_unique
    )
    for metric in ('recall', 'set_recall'):
        ours, theirs = (result_rows(t, (5,), (metric,)).set_index('task').value for t in (per_query, both))
        assert (
            theirs['wax'] == pytest.approx(ours['wax'] / 2)
            and theirs['ice'] == pytest.approx(ours['ice'])
            and theirs['mean'] == pytest.approx((ours['wax'] / 2 + ours['ice']) / 2)
        )
    removed, _ = evaluate(m, load_domains(D), ks=(5,))
    assert not any(q.reference in q.top for q in removed.itertuples()) and set(removed.gallery_size) == {
        len(D.table) - 1
    }
    pd.testing.assert_frame_equal(
        with_impossible(per_query[per_query.task == 'ice'], D, b).drop(columns='protocol'),
        per_query[per_query.task == 'ice'].reset_index(drop=True).drop(columns='protocol'),
    )


WRITE = '''
import sys, hashlib
from pathlib import Path
from cis_nb.world.domains import write_composition, write_domains

root = Path(sys.argv[1])
write_domains(root, 1, 4)
write_composition(root, 9, 4)
files = [p for p in sorted(root.rglob('*')) if p.is_file()]
print(hashlib.sha256(b''.join(p.relative_to(root).as_posix().encode() + p.read_bytes() for p in files)).hexdigest())
'''


@pytest.mark.e2e
def test_the_same_bytes_in_another_process(tmp_path):
    one, two = (
        subprocess.run(
            [sys.executable, '-c', WRITE, str(tmp_path / f)],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ, PYTHONHASHSEED=seed),
        ).stdout
        for f, seed in (('a', '1'), ('b', '2'))
    )
    assert one == two and len(one) == 65


def printed():
    nb = json.loads((ROOT / 'nbs/02b_benchmarks/06_domain_conversion.ipynb').read_text())
    space = {}
    exec(
        next(''.join(c['source']) for c in nb['cells'] if ''.join(c['source']).startswith('columns =')).split(
            '\nshow_table'
        )[0],
        {},
        space,
    )
    return space['released']


def same(D, rows):
    found = audit_domains(D)
    return [
        tuple(round(float(v), 1) if isinstance(v, float) else v for v in row)
        for row in found.itertuples(index=False, name=None)
    ] == rows


@lists
def test_the_released_lists_hold_what_the_chapter_prints():
    D = read_domains(data)
    assert same(D, printed()['imagenet_r']) and len(D.queries) == 10_000 and len(D.table) == 16_983
    assert set(D.queries.image) == set(
        D.table.image[D.table.domain == 'real']
    )  # the same pictures ask and stand in the gallery
    named = D.table[D.table.domain != 'real']
    assert (
        named.image.str.split('/').str[-1].str.split('_').str[0] == named.domain
    ).all()  # a file's name says its domain


@pacs
def test_pacs_is_read_from_its_tar():
    D = read_domains(data / 'pacs')
    assert same(D, printed()['pacs']) and D.real == 'photo' and not D.left_out
    b = load_domains(D)
    assert (
        len(b) == 1050
        and set(b.queries.targets.map(len)) == {50}
        and b.load(b.images[0]).mode == 'RGB'
        and set(b.queries.condition) == {'art painting', 'cartoon', 'sketch'}
    )
