"FashionIQ: released annotations, damaged files, orders of captions, protocols against a slow reference."

import hashlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from projects import DATA, ROOT, needs_data

from cis_nb.api import Queries
from cis_nb.benchmarks.fashioniq import (
    CATEGORIES,
    ORDERS,
    FASHIONIQ_SPLITS,
    audit_fashioniq,
    fashioniq_benchmark,
    load_fashioniq,
    macro_mean,
    read_fashioniq,
    shared_images,
    wordings,
)
from cis_nb.retrieval.protocol import evaluate_benchmark
from cis_nb.backbones.loading import load_backbone
from cis_nb.methods.baselines import method
from cis_nb.methods.pseudo_words import Phi, PseudoWord

data = DATA
real = needs_data('fashioniq/captions/cap.dress.val.json')


# The released files


def printed(name):
    "A table that the chapter prints as released."
    nb = json.loads((ROOT / 'nbs/02b_benchmarks/04_fashioniq.ipynb').read_text())
    cell = next(''.join(c['source']) for c in nb['cells'] if ''.join(c['source']).startswith(f'{name} ='))
    space = {'pd': __import__('pandas')}
    exec(cell.split('\nshow_table')[0], space)
    return space[name]


@real
def test_the_released_annotations_hold_what_the_chapter_prints():
    rows = printed('released')
    for n, (s, c) in enumerate(((s, c) for s in ('val', 'test') for c in CATEGORIES), 1):
        found = audit_fashioniq(data, c, s).set_index('what')['count']
        said = {row[0]: row[n] for row in rows if row[n] is not None}
        assert {k: round(float(found[k]), 1) for k in said} == said and set(said) == set(found.index)


@real
def test_the_sizes_that_papers_print():
    sets = {(c, s): read_fashioniq(data, c, s) for c in CATEGORIES for s in FASHIONIQ_SPLITS}

    def n(what, *splits):
        return sum(len(getattr(f, what)) for (_, s), f in sets.items() if s in splits)

    assert [len(sets[c, 'train'].entries) for c in CATEGORIES] == [5985, 5988, 6027] and [
        len(sets[c, 'train'].names) for c in CATEGORIES
    ] == [11452, 19036, 16121]
    found = [
        n('names', *FASHIONIQ_SPLITS),
        len({i for f in sets.values() for i in f.names}),
        n('entries', *FASHIONIQ_SPLITS),
        n('names', 'train'),
        n('names', 'val'),
        n('entries', 'train'),
        n('entries', 'val', 'test'),
    ]
    assert found == [row[2] for row in printed('printed')] and n('names', 'val') + 2 == n('names', 'test')
    audits = [audit_fashioniq(data, c, s).set_index('what')['count'] for c in CATEGORIES for s in FASHIONIQ_SPLITS]
    assert (
        sum(a['empty captions'] for a in audits) == 17
        and sum(a['captions with blanks at an end'] for a in audits) == 1679
        and not any(a['queries with two empty captions'] for a in audits)
    )


@real
def test_only_shirts_and_tops_share_images():
    found = {(r.list, r[2]): r[3] for r in shared_images(data).itertuples()}
    table = printed('crossed').set_index('shirt')
    assert found == {
        (f'shirt {s}', f'toptee {t}'): table.loc[s, f'toptee, {t}'] for s in FASHIONIQ_SPLITS for t in FASHIONIQ_SPLITS
    }


@real
def test_the_released_queries_in_each_gallery_and_order():
    for c, whole, used in zip(CATEGORIES, (3817, 6346, 5373), (2628, 3089, 2902)):
        b = load_fashioniq(data, c, images=False)
        assert (
            len(b.shared_gallery) == whole
            and len(load_fashioniq(data, c, gallery='queries', images=False).shared_gallery) == used
        )
        assert all(
            1 <= len(t.split('\n')) <= 2 and all(line.strip() for line in t.split('\n')) for t in b.queries.condition
        )
        with pytest.raises(ValueError, match=f'the test split of {c} has no public targets'):
            load_fashioniq(data, c, 'test', images=False)
    assert '2 of 1961 queries have one caption' in b.protocol.extra
    with pytest.raises(FileNotFoundError, match='FashionIQ images'):
        load_fashioniq(data)


# Files made by hand

NAMES = [f'B{n}' for n in range(30)]
QUERIES = [
    dict(candidate='B0', target='B1', captions=['is red', 'has dots']),
    dict(candidate='B0', target='B2', captions=[' longer. ', '']),
    dict(candidate='B3', target='B4', captions=['same', 'same']),
]


def files(folder, queries=QUERIES, names=NAMES, category='dress', split='val'):
    for file, content in (
        (f'captions/cap.{category}.{split}.json', queries),
        (f'image_splits/split.{category}.{split}.json', names),
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def but(**change):
    return [{k: v for k, v in {**QUERIES[0], **change}.items() if v is not ...}, *QUERIES[1:]]


DAMAGED = [
    (dict(queries='[{"candidate": "B0"'), 'cap.dress.val.json is not JSON'),
    (dict(names='["B0",'), 'split.dress.val.json is not JSON'),
    (dict(queries=''), 'not JSON'),
    (dict(queries=[]), 'cap.dress.val.json: expected a list that is not empty'),
    (dict(queries={'a': 1}), 'is dict, not list'),
    (dict(names=[]), 'split.dress.val.json: expected a list that is not empty'),
    (dict(names={'B0': './B0.png'}), 'is dict, not list'),
    (dict(names='null'), 'is NoneType, not list'),
    (dict(queries=['B0']), 'entry 0: is str, not an object'),
    (dict(queries=but(candidate=...)), "entry 0: has no 'candidate'"),
    (dict(queries=but(target=...)), "entry 0: has no 'target'"),
    (dict(queries=but(captions=...)), "entry 0: has no 'captions'"),
    (dict(queries=but(candidate=7)), 'candidate is 7, not str'),
    (dict(queries=but(target=None)), 'target is None, not str'),
    (dict(queries=but(captions='is red')), "captions is 'is red', not list"),
    (dict(queries=but(captions=['a'])), 'captions must be two sentences'),
    (dict(queries=but(captions=['a', 'b', 'c'])), 'captions must be two sentences'),
    (dict(queries=but(captions=['a', None])), r'captions[1] is None, not str'),
    (dict(queries=but(captions=['', ' . '])), 'entry 0: captions are both empty'),
    (dict(queries=but(target='B99')), "entry 0: target 'B99' is not in the list of images"),
    (dict(queries=but(candidate='B99')), "entry 0: candidate 'B99' is not in the list of images"),
    (dict(queries=but(target='B0')), 'the target is the candidate itself'),
    (dict(names=[*NAMES, 'B7', 'B8']), "'B7' is repeated; 2 such"),
    (dict(names=[*NAMES, 5]), 'entry 30: is int, not str'),
]
OUTSIDE = ['../../etc/passwd', '/etc/passwd', 'a/b', 'a\\b', 'C:a', '..', '.', '', 'a\n', 'a.jpg', 'é']


@pytest.mark.parametrize('change, why', DAMAGED)
def test_what_is_damaged_is_refused_by_name(tmp_path, change, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        read_fashioniq(files(tmp_path, **change))


@pytest.mark.parametrize('name', OUTSIDE)
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match='is not an image name'):
        read_fashioniq(files(tmp_path, names=[*NAMES, name]))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match='cap.dress.val.json is missing; Get it from https://github.com/XiaoxiaoGuo'
    ):
        read_fashioniq(tmp_path)
    (files(tmp_path) / 'image_splits/split.dress.val.json').unlink()
    with pytest.raises(FileNotFoundError, match='split.dress.val.json is missing'):
        read_fashioniq(tmp_path)
    for wrong in (dict(category='hat'), dict(split='dev')):
        with pytest.raises(ValueError, match='is none of'):
            read_fashioniq(files(tmp_path), **wrong)
    for wrong in (dict(order='ba'), dict(gallery='references'), dict(reference='away')):
        with pytest.raises(ValueError):
            load_fashioniq(tmp_path, images=False, **wrong)


def test_the_three_places_where_a_set_may_lie(tmp_path):
    for place in ('fashioniq', 'FashionIQ', '.'):
        assert read_fashioniq(files(tmp_path / place.strip('.') / 'x', names=NAMES).parent / 'x').names == NAMES
    for place in ('fashioniq', 'FashionIQ'):
        files(tmp_path / f'at{place}' / place)
        assert len(read_fashioniq(tmp_path / f'at{place}').entries) == 3


def test_the_audit_counts_what_the_reader_refuses(tmp_path):
    damaged = [
        *QUERIES,
        QUERIES[0],
        dict(candidate='B5', target='B5', captions=['', ' ']),
        dict(candidate='B98', target='B99', captions=['a', 'a.']),
        dict(candidate='B1', target='B0', captions=['a', 'b']),
    ]
    found = audit_fashioniq(files(tmp_path, damaged, [*NAMES, 'B3'])).set_index('what')['count']
    assert [
        found[k]
        for k in (
            'queries',
            'different candidates',
            'images in the list',
            'of these, used by a query',
            'names that are repeated in the list',
            'candidates that are not in the list',
            'targets that are not in the list',
            'queries whose target is the candidate',
            'repeated pairs',
        )
    ] == [7, 5, 31, 6, 1, 1, 1, 1, 1]
    assert [
        found[k]
        for k in (
            'empty captions',
            'queries with two empty captions',
            'captions with blanks at an end',
            'queries whose captions are the same',
            'queries whose pair also occurs in reverse',
        )
    ] == [3, 1, 2, 3, 3]


def test_a_test_split_is_asked_only_where_its_answers_are(tmp_path):
    secret = [{k: v for k, v in q.items() if k != 'target'} for q in QUERIES]
    files(tmp_path, secret, split='test')
    assert (
        read_fashioniq(tmp_path, split='test').targets == [] and audit_fashioniq(tmp_path, split='test').iloc[0, 1] == 3
    )
    with pytest.raises(ValueError, match='has no public targets; evaluate on val'):
        load_fashioniq(tmp_path, split='test', images=False)
    targets = tmp_path / 'captions/targets.dress.test.json'
    for wrong, why in (
        (['B1'], 'expected a list of 3 targets'),
        ({'0': 'B1'}, 'is dict, not list'),
        (['B1', 'B2', 'B99'], 'targets.dress.test.json, entry 2: target'),
        (['B0', 'B2', 'B4'], 'entry 0: the target is the candidate'),
    ):
        targets.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=why):
            read_fashioniq(tmp_path, split='test')
    targets.write_text(json.dumps(['B1', 'B2', 'B4']))
    assert load_fashioniq(tmp_path, split='test', images=False).queries.targets.tolist() == [['B1'], ['B2'], ['B4']]


def test_missing_pictures_are_counted_and_both_formats_are_read(tmp_path):
    (files(tmp_path) / 'images').mkdir()
    with pytest.raises(FileNotFoundError, match='many of them dead'):
        load_fashioniq(tmp_path)
    for n, name in enumerate(NAMES):
        if name not in ('B4', 'B9'):
            Image.new('RGB', (8, 8), (n, 0, 0)).save(tmp_path / f'images/{name}.{"png" if n % 2 else "jpg"}')
    (tmp_path / 'images/B4.txt').write_text('no picture')
    b = load_fashioniq(tmp_path)
    assert (len(b), len(b.shared_gallery), b.load('B3').size) == (2, 28, (8, 8)) and b.load('B3').getpixel((0, 0)) == (
        3,
        0,
        0,
    )
    for said in (
        'partial: 93.3 %',
        '2 of 30 images missing',
        '1 of 3 queries left out',
        '1 of 3 queries have one caption',
    ):
        assert said in str(b.protocol)
    before = b.key
    Image.new('RGB', (9, 9)).save(tmp_path / 'images/B3.png')
    assert load_fashioniq(tmp_path).key != before
    for name in ('B1', 'B2', 'B3'):
        (tmp_path / f'images/{name}.{"jpg" if name == "B2" else "png"}').unlink()
    with pytest.raises(ValueError, match='no query has all of its own'):
        load_fashioniq(tmp_path)


# Orders, and the metric


def test_every_order_of_every_kind_of_pair():
    expected = {
        ('a', 'b'): dict(forward='a and b', reverse='b and a', both='a and b\nb and a', first='a', second='b'),
        (' A, ', 'b  c.'): dict(
            forward='A and b c', reverse='b c and A', both='A and b c\nb c and A', first='A', second='b c'
        ),
        ('', 'b'): dict.fromkeys(ORDERS, 'b'),
        ('a', '?'): dict.fromkeys(ORDERS, 'a'),
        ('a', 'a'): dict(forward='a and a', reverse='a and a', both='a and a', first='a', second='a'),
    }
    for captions, said in expected.items():
        assert {o: '\n'.join(wordings(captions, o)) for o in ORDERS} == said


def random_world(tmp_path, seed=0):
    "Random features and queries of three categories of different sizes."
    rng, sizes = np.random.default_rng(seed), dict(dress=40, shirt=70, toptee=55)
    for c, n in sizes.items():
        names = [f'{c}{i}' for i in range(n)]
        queries = [
            dict(
                zip(('candidate', 'target'), map(str, rng.choice(names, 2, replace=False))),
                captions=[f'w{rng.integers(9)} w{rng.integers(9)}', f'w{rng.integers(9)}' if i % 5 else ''],
            )
            for i in range(n // 2)
        ]
        files(tmp_path, queries, names, c)
    features = {f'{c}{i}': rng.normal(size=12).astype(np.float32) for c, n in sizes.items() for i in range(n)}
    features['dress3'] = features['dress4'] = features['dress5']  # ties
    return features, Random(features)


class Random:
    "A backbone with features from a table, and of texts by their hash."

    name = fingerprint = 'random'

    def __init__(self, table):
        self.table = table

    def features(self, images):
        array = np.stack([self.table[i] for i in images.ids])
        return SimpleNamespace(array=array, index={i: n for n, i in enumerate(images.ids)})

    def encode_text(self, texts):
        seeds = [int(hashlib.sha256(t.encode()).hexdigest()[:8], 16) for t in texts]
        return torch.tensor(np.stack([np.random.default_rng(s).normal(size=12).astype(np.float32) for s in seeds]))


def slow_rank(b, q, features, texts, ks_removed):
    def unit(v):
        return v / np.linalg.norm(v)

    lines = [b.protocol.prompt.replace('{condition}', line) for line in q.condition.split('\n')]
    total = sum(unit(features[q.reference] + texts([t])[0].numpy()) for t in lines)
    mine = {
        i: float(unit(total) @ unit(features[i])) for i in b.shared_gallery if not (ks_removed and i == q.reference)
    }
    target = q.targets[0]
    return 1 + sum(s >= mine[target] - 1e-7 for i, s in mine.items() if i != target)


@pytest.mark.parametrize(
    'choice',
    [dict(order=o) for o in ORDERS]
    + [dict(gallery='queries'), dict(reference='removed'), dict(prompt='a photo that {condition}')],
)
def test_recall_is_the_slow_one_in_every_protocol(tmp_path, choice):
    features, reader = random_world(tmp_path)
    benchmark = fashioniq_benchmark(tmp_path, images=False, ks=(3, 10), **choice)
    benches = benchmark.tasks
    per_query, rows = evaluate_benchmark(method('image_text', reader), benchmark)
    slow = {
        c: np.array(
            [
                slow_rank(b, q, features, reader.encode_text, choice.get('reference') == 'removed')
                for q in b.queries.itertuples()
            ]
        )
        for c, b in benches.items()
    }
    assert per_query['rank'].tolist() == np.concatenate(list(slow.values())).tolist()
    value = {(r.task, r.metric, r.k): (r.value, r.n) for r in rows.itertuples()}
    by = {(c, k): 100 * (r <= k).mean() for c, r in slow.items() for k in (3, 10)}
    for (c, k), v in by.items():
        assert value[c, 'recall', k] == (pytest.approx(v), len(slow[c]))
    for k in (3, 10):
        assert value['mean', 'recall', k][0] == pytest.approx(np.mean([by[c, k] for c in CATEGORIES]))
    assert value['mean', 'mean_recall', 10] == (pytest.approx(np.mean(list(by.values()))), sum(map(len, slow.values())))
    assert len(rows) == 9 and ((rows.ci_low <= rows.value) & (rows.value <= rows.ci_high)).all()


def test_an_interval_redraws_candidates_with_all_their_queries(tmp_path):
    import pandas as pd

    ranks = np.tile([1, 99], 150)
    alone = pd.DataFrame(
        dict(task=np.repeat(CATEGORIES, 100), rank=ranks, reference=[f'r{i}' for i in range(300)], protocol='p')
    )
    wide, narrow = (
        macro_mean(alone.assign(reference=[f'r{i // 10}.{r}' for i, r in enumerate(ranks)])),
        macro_mean(alone),
    )
    assert (
        narrow.value.item() == 50
        and (wide.ci_high - wide.ci_low).item() > 1.5 * (narrow.ci_high - narrow.ci_low).item()
    )
    with pytest.raises(ValueError, match='shirt, toptee is not there'):
        macro_mean(alone[alone.task == 'dress'])


def test_two_texts_are_asked_one_by_one_and_averaged(tmp_path):
    random_world(tmp_path)
    b = load_fashioniq(tmp_path, images=False, prompt='a photo that {condition}')
    asked = b.as_queries().texts
    assert {len(texts) for texts in asked} == {1, 2} and b.protocol.hash != load_fashioniq(
        tmp_path, images=False
    ).protocol.hash
    for texts, condition in zip(asked, b.queries.condition):
        assert texts == [f'a photo that {line}' for line in condition.split('\n')]
    tiny = load_backbone('tiny', device='cpu')
    torch.manual_seed(0)
    word = PseudoWord(name='lincir', title='LinCIR', backbone=tiny, phi=Phi(tiny.D, tiny.W).eval())
    ref = torch.randn(2, tiny.D)
    word.reference_features = lambda queries: ref
    q = word.encode_queries(Queries(['x', 'y'], [['is red', 'is blue'], ['a']], [None, None]))
    one, other = (word.encode_query(ref, [t] * 2) for t in ('is red', 'is blue'))
    assert torch.allclose(q[0], torch.nn.functional.normalize(one[0] + other[0], dim=0), atol=1e-5)
    assert torch.allclose(q[1], word.encode_query(ref, ['a', 'a'])[1], atol=1e-5)
