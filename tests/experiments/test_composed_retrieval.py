"Composed retrieval: planted methods, missing data sets, several seeds, submissions."

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgba
from PIL import Image
from cis_nb.experiments import comparison as cp
from cis_nb.experiments import composed_retrieval as cm
from cis_nb.benchmarks.cirr import check_cirr_submission, read_cirr
from cis_nb.backbones.features import image_features
from cis_nb.core.plotting import color
from cis_nb.experiments import matrix
from cis_nb.experiments.entries import Entry, known_as
from cis_nb.methods import baselines as bl
from cis_nb.methods.late_fusion import BASELINES
from cis_nb.world.composed import STATE_ADJECTIVES


pytestmark = pytest.mark.usefixtures('store')


N, SIDE = 60, 4  # images of the split, in ten sets of six


def colour(i):
    return (37 * i % 256, 91 * i % 256, 13 * i % 256)


@pytest.fixture
def root(tmp_path):
    "A CIRR of single-coloured images whose sentence names the target's number, and MIT-States of two nouns."
    folder = tmp_path / 'data'
    cirr = folder / 'cirr'
    for f in ('captions', 'image_splits'):
        (cirr / f).mkdir(parents=True)
    for split, prefix in (('val', 'dev'), ('test1', 'test1')):
        names = [f'{prefix}-{i}-0-img0' for i in range(N)]
        (folder / prefix).mkdir()
        [Image.new('RGB', (SIDE, SIDE), colour(i)).save(folder / prefix / f'{n}.png') for i, n in enumerate(names)]
        E = [
            dict(
                pairid=i,
                reference=names[i],
                target_hard=names[i - i % 6 + (i + 1) % 6],
                target_soft={},
                caption=str(i - i % 6 + (i + 1) % 6),
                img_set=dict(id=i // 6, members=names[i - i % 6 : i - i % 6 + 6]),
            )
            for i in range(N)
        ]
        if split == 'test1':
            (cirr / 'targets.test1.json').write_text(json.dumps({str(e['pairid']): e['target_hard'] for e in E}))
            E = [{k: v for k, v in e.items() if k not in ('target_hard', 'target_soft')} for e in E]
        (cirr / f'captions/cap.rc2.{split}.json').write_text(json.dumps(E))
        (cirr / f'image_splits/split.rc2.{split}.json').write_text(
            json.dumps({n: f'./{prefix}/{n}.png' for n in names})
        )
    (cirr / 'kinds.val.json').write_text(json.dumps({str(i): ('add', 'remove')[i % 2] for i in range(N)}))
    for n in ('wall', 'tea'):
        for k, a in enumerate(('red', 'old', 'wet')):
            (f := folder / 'mit-states/images' / f'{a} {n}').mkdir(parents=True)
            for j in range(4):
                Image.new('RGB', (SIDE, SIDE), (60 * k, 30 * j, 200 if n == 'tea' else 20)).save(f / f'{j}.jpg')
    return folder


class Eyes:
    "Sees an image's colour; reads a number as the colour of that image, any other word as nothing."

    name, D, dtype, device, source = 'eyes', 3, torch.float32, 'cpu', 'none'
    fingerprint = 'eyes'

    def preprocess(self, im):
        return torch.tensor(np.asarray(im.convert('RGB'))[0, 0] / 255.0).float()

    def encode_image(self, x):
        return (x if torch.is_tensor(x) else torch.stack(list(x))) - 0.5

    def encode_text(self, ts):
        return torch.tensor([[v / 255 for v in colour(int(t))] if t.isdigit() else [0.5] * 3 for t in ts]).float() - 0.5

    def features(self, images):
        return image_features(self, images.ids, images.load, images.key)


def params(root, **kw):
    return dict(
        dict(
            data=str(root),
            cirr=0,
            mitstates=0,
            split='val',
            text='adjective',
            state_queries=0,
            seed=0,
            world_seed=0,
            methods=['image_only', 'text_only'],
            trainings=[],
            seeds=[0],
            device='cpu',
            backbone='tiny',
            pretrained='default',
        ),
        **kw,
    )


@pytest.fixture
def run(root):
    found, missing = cm.load_sets(params(root))
    entries = [Entry(bl.method(m, Eyes())) for m in ('image_only', 'text_only')]
    tasks = {name: task for b in found.values() for name, task in b.tasks.items()}
    return SimpleNamespace(benchmarks=found, tasks=tasks, missing=missing, entries=entries, root=root)


def rank(entry, run):
    "Rankings and rows of all benchmarks."
    ranked = [(b, matrix.rank_benchmark(entry, b)) for b in run.benchmarks.values()]
    found = [(per_query, matrix.result_rows_of(entry, b, per_query)) for b, per_query in ranked]
    return tuple(pd.concat(tables, ignore_index=True) for tables in zip(*found))


def test_words_that_name_the_target_find_it_and_the_image_does_not(run):
    assert not run.missing
    image, text = (rank(e, run)[1].set_index(['task', 'k']).value for e in run.entries)
    assert text['full', 1] == text['subset', 1] == text['average', 1] == 100 and image['full', 1] < 50
    assert set(text.index) == {
        ('full', 1),
        ('full', 5),
        ('full', 10),
        ('full', 50),
        ('subset', 1),
        ('subset', 2),
        ('subset', 3),
        ('average', 1),
        ('average', 5),
        ('states', 1),
        ('states', 5),
        ('states', 10),
    }


def test_a_method_is_asked_once_and_then_remembered(run, monkeypatch):
    e = run.entries[0]
    cirr = run.benchmarks['cirr']
    first = matrix.cached_benchmark_rankings(e, cirr)
    monkeypatch.setattr(matrix, 'rank_benchmark', lambda *a: pytest.fail('ranked again'))
    assert (
        matrix.cached_benchmark_rankings(e, cirr) == first
        and first.name.startswith('cirr-eyes-image_only-')
        and [p.name for p in first.glob('*.parquet')] == ['rankings.parquet']
    )


def test_rows_of_a_training_carry_its_seed_and_name(run):
    e = replace(run.entries[1], seed=2, run=Path('r'))
    per_query, rows = rank(e, run)
    assert set(rows.seed) == {2} and set(per_query.seed) == {2} and known_as(e) == 'eyes-text_only-s2'
    plain = rank(run.entries[0], run)
    both = pd.concat([per_query.assign(method='combiner'), plain[0]])
    assert cp.seeds(both, 'combiner') == [2] and cp.compare(both, 'combiner', 'image_only', tasks=['full'])['diff'] > 50


def test_a_set_that_is_not_there_is_left_out_with_the_reason(root):
    import shutil

    shutil.rmtree(root / 'mit-states')
    sets, missing = cm.load_sets(params(root))
    assert [list(b.tasks) for b in sets.values()] == [['full', 'subset']] and 'MIT-States' in missing['states']
    (root / 'cirr/captions/cap.rc2.val.json').write_text('[{')
    with pytest.raises(ValueError, match='not JSON'):
        cm.load_sets(params(root))


def test_without_images_a_set_is_missing_and_not_wrong(root):
    for f in (root / 'dev').iterdir():
        f.unlink()
    sets, missing = cm.load_sets(params(root))
    assert 'cirr' not in sets and 'CIRR images' in missing['full']


def test_kinds_are_counted_apart(run):
    found = pd.concat([rank(e, run)[0] for e in run.entries])
    table = cm.by_kind(found, cm.kinds_of(run.root, 'val'))
    assert dict(table.groupby('kind').n.first()) == dict(add=30, remove=30) and set(
        table.value[table.method == 'text_only']
    ) == {100.0}
    assert cm.kinds_of(run.root / 'nowhere', 'val') == {} and cm.by_kind(found, {}).empty


def test_guesses_count_several_right_answers(run):
    g = cm.chance_recalls(run.tasks)
    assert (
        g['subset'] == pytest.approx({1: 20, 2: 40, 3: 60})
        and g['full'][1] == pytest.approx(100 / 59)
        and g['full'][50] == pytest.approx(5000 / 59)
    )
    assert g['states'][1] == pytest.approx(400 / 11)  # tea is a test noun: four of its other eleven photographs


def test_the_submission_is_what_the_server_takes(run):
    folder, listed = cm.submission(run.entries[1], 'cirr', run.root)
    c = read_cirr(run.root, 'test1')
    assert [s.split(',')[0] for s in listed.score] == ['R@1 100.0', 'R@1 100.0']
    for kind, n in (('recall', 50), ('recall_subset', 3)):
        s = check_cirr_submission(folder / f'test1.{kind}.json', c)
        assert (
            s['metric'] == kind
            and all(len(s[str(e['pairid'])]) == n for e in c.entries)
            and s['0'][0] == c.targets['0']
        )


def test_every_trained_method_has_bars_beside_all_late_fusions():
    methods = ['image_only', *BASELINES, 'lincir', 'searle', 'pic2word']
    trained = [-1] * (1 + len(BASELINES)) + [0] * 3
    run = SimpleNamespace(
        titles={m: m.upper() for m in methods}, per_query=pd.DataFrame(dict(method=methods, seed=trained))
    )
    assert list(cm.trainings_and_fusions(run)) == methods[1:]
    plain = SimpleNamespace(titles=dict(image_only='I', image_text='S'), per_query=run.per_query[:2])
    assert cm.trainings_and_fusions(plain) == plain.titles
    edits = pd.DataFrame(
        [('add', m, 50.0, 40.0, 60.0, 12) for m in methods], columns=[*'kind method value low high n'.split()]
    )
    ax = cm.edit_bars(edits, cm.trainings_and_fusions(run)).axes[0]
    bars = [b for b in ax.patches if b.get_height() == 50]
    assert [b.get_facecolor() for b in bars] == [to_rgba(color(m)) for m in methods[1:]]
    assert all(a.get_x() + a.get_width() < b.get_x() for a, b in zip(bars, bars[1:]))
    assert ax.get_ylim() == (0, 100) and ax.get_legend() is None and ax.figure.legends


def test_the_worlds_mit_states_has_as_many_adjectives_as_its_page_says():
    assert len(STATE_ADJECTIVES) == 16


def test_a_kind_of_edit_is_shown_in_words():
    lines = [('shows', 'image_text', 50.0, 40.0, 60.0, 12), ('like', 'image_text', 30.0, 20.0, 40.0, 11)]
    edits = pd.DataFrame(lines, columns=[*'kind method value low high n'.split()])
    words = ['description of the target', 'attribute of another object']
    assert [*cm.edit_table(edits, dict(image_text='Sum'))['edit or description']] == words
    assert [t.get_text() for t in cm.edit_bars(edits, dict(image_text='Sum')).axes[0].get_xticklabels()] == words


def test_the_finding_has_the_score_of_the_rival_that_is_judged(monkeypatch):
    titles = dict(image_text='Sum', image_text_tuned='Image + Text, tuned', lincir='LinCIR')
    lines = [('image_text', -1, 10.0), ('image_text_tuned', -1, 20.0), ('lincir', 0, 24.0), ('lincir', 1, 26.0)]
    results = pd.DataFrame(lines, columns=['method', 'seed', 'value']).assign(task='full', k=1)
    run = SimpleNamespace(sets=['full'], results=results, titles=titles)
    lead = dict(a='lincir', b='image_text_tuned', diff=5.0, low=1.0, high=9.0, seed_intervals=[])
    monkeypatch.setattr(cm, 'judged', lambda *_: [lead])
    said = 'Image + Text, tuned 20.0; LinCIR 25.0 ± 1.4, better than Image + Text, tuned (+5.0 [+1.0, +9.0])'
    assert cm.composed_finding(run, {}) == f'CIRR R@1: {said}'
