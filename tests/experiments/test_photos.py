"The chapters on a folder of photographs: a small damaged folder, order of experiments, parameters."

import json
from contextlib import nullcontext

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from PIL import Image, ImageDraw
from projects import receipt_of
from cis_nb.retrieval.protocol import RESULT_COLUMNS
from cis_nb.core.experiment_files import notebooks, read_params
from cis_nb.core.store import project_root
from cis_nb.mining.parsers import find_parser
from cis_nb.train import settings, train_or_load
from cis_nb.world.captions import CLOSEUP_PATTERNS, SCENE_PATTERNS, WorldPairs, caption


pytestmark = pytest.mark.usefixtures('store')


# ---- the chapter

COLOURS = ['red', 'green', 'blue', 'orange', 'purple', 'black']


def small_folder(root, n=80):
    "Coloured discs and boxes with captions, a table of them, and three faults."
    root.mkdir()
    lines = ['image,caption,split']
    for i in range(n):
        img = Image.new('RGB', (80, 60), '#dddddd')
        c, s = COLOURS[i % 6], ('disc', 'box')[i // 6 % 2]
        getattr(ImageDraw.Draw(img), 'ellipse' if s == 'disc' else 'rectangle')([20, 10, 60, 50], fill=c)
        img.save(root / f'{i}.jpg')
        where = ('on the grass', 'in the snow')[i // 12 % 2]
        lines += [
            f'{i}.jpg,a {c} {s} is lying {where},{"test" if i < 60 else "train"}',
            f'{i}.jpg,the {s} near a wall,{"test" if i < 60 else "train"}',
        ]
    (root / '3.jpg').write_bytes(b'nothing')
    (root / '7.jpg').write_bytes((root / '7.jpg').read_bytes()[:200])
    lines.append('gone.jpg,not there,test')
    (root / 'captions.csv').write_text('\n'.join(lines) + '\n')
    return root


def run_chapter(tmp_path, monkeypatch, **params):
    import papermill

    report = tmp_path / 'reports' / 'photos' / '06_evaluation/photos'
    report.mkdir(parents=True)
    for k, v in dict(
        CIS_BOOK=tmp_path / 'reports' / 'photos',
        CIS_REPORT=report,
        CIS_EXPERIMENT='06_evaluation/photos',
        CIS_PROFILE='photos',
        PYTHONPATH=project_root(),
        IPYTHONDIR=tmp_path / 'ipython',
    ).items():
        monkeypatch.setenv(k, str(v))
    papermill.execute_notebook(
        str(project_root() / 'nbs' / '06_evaluation/photos.ipynb'),
        str(report / 'notebook.ipynb'),
        dict(shown_queries=2, index_sizes=[1000], **params),
        kernel_name='python3',
        progress_bar=False,
    )
    nb = json.loads((report / 'notebook.ipynb').read_text())
    return (
        json.loads((report / 'receipt.json').read_text()),
        pd.read_parquet(report / 'results.parquet'),
        [o for c in nb['cells'] for o in c.get('outputs', [])],
    )


@pytest.mark.e2e
def test_the_chapter_on_a_small_dirty_folder_with_the_run_of_another_experiment(tmp_path, monkeypatch):
    from cis_nb.core.store import stored
    from cis_nb.backbones.loading import load_backbone, save_backbone

    run = stored('run', 'pretended', {}, lambda folder: save_backbone(load_backbone('tiny', 'none', 'cpu'), folder))
    other = tmp_path / 'reports' / 'photos' / '05_train.photos'
    other.mkdir(parents=True)
    (other / 'receipt.json').write_text(json.dumps(receipt_of(experiment=other.name, runs=[f'run/{run.name}'])))
    receipt, results, outputs = run_chapter(
        tmp_path, monkeypatch, data=str(small_folder(tmp_path / 'pictures')), weights=['05_train.photos', 'none']
    )
    assert f'run/{run.name}' in receipt['runs'] and receipt['params']['weights'] == ['05_train.photos', 'none']
    assert receipt['counts'] == {
        'images': 78,
        'caption of an image that is not there': 1,
        'file that is no image': 1,
        'damaged image': 1,
    }
    assert list(results.columns) == RESULT_COLUMNS and {'captions/pictures', 'composed/pictures'} == set(
        results.benchmark
    )
    assert (
        load_backbone('tiny', str(run), 'cpu').record in receipt['backbone']
    )  # the page stands on the weights of that run
    assert {'trained here', 'random weights'} <= set(results.method)
    assert not [o for o in outputs if o['output_type'] == 'error' or o.get('name') == 'stderr'], [
        o for o in outputs if o.get('name') == 'stderr'
    ]
    assert sum('image/png' in o.get('data', {}) for o in outputs) >= 6


def test_a_run_is_named_by_its_experiment(tmp_path, monkeypatch):
    from cis_nb.core.store import store_root
    from cis_nb.train import trained_weights

    monkeypatch.setenv('CIS_BOOK', str(tmp_path / 'photos'))
    assert [trained_weights(w) for w in ('default', 'none', 'auto', str(tmp_path))] == [
        'default',
        'none',
        'auto',
        str(tmp_path),
    ]
    with pytest.raises(FileNotFoundError, match='run the experiment 05_train.photos of the same profile first'):
        trained_weights('05_train.photos')
    other = tmp_path / 'photos' / '05_train.photos'
    other.mkdir(parents=True)
    (other / 'receipt.json').write_text(json.dumps(receipt_of(experiment=other.name, runs=['run/a', 'run/b'])))
    assert trained_weights('05_train.photos') == str(store_root() / 'run' / 'a')


def test_the_profile_has_known_parameters():
    from cis_nb.core.experiment_files import experiments

    found = experiments('photos', '/some/where')
    assert {'05_train.photos', '06_evaluation/photos'} <= set(found)
    assert all(e.params['data'] == '/some/where' for e in found.values() if 'data' in e.defaults)


# ---- triplets from real captions


def test_the_chapters_run_after_what_they_name():
    from cis_nb.core.experiment_files import experiments

    found = experiments('photos')
    assert found['05_train.combiner'].needs == ('05_train.photos',) and found[
        '06_evaluation/photos_combiner'
    ].needs == ('05_train.photos',)


def test_the_one_combiner_is_one_of_the_twelve():
    from cis_nb.core.experiment_files import experiments

    found = experiments('photos')
    one, q = found['05_train.combiner'].params, found['06_evaluation/photos_combiner']
    twelve = {**q.defaults, **q.params}
    assert (
        one['partner'] in twelve['partners']
        and one['attributes'] in twelve['attributes']
        and found['05_train.combiner'].defaults['seed'] in twelve['seeds']
    )
    assert {k: one[k] for k in one if k in twelve and k != 'attributes'} == {
        k: twelve[k] for k in one if k in twelve and k != 'attributes'
    }
    assert (one['warmup'], one['eval_every']) == (twelve['steps'] // 10, twelve['steps'] // 4)


# ---- few photographs

TINY = dict(backbone='tiny_xs', device='cpu', steps=2, batch_size=16)
NETS = dict(samples=20, projection=8, hidden=16)
TRAININGS = {name: TINY | dict(val_samples=8, warmup=0, eval_every=1, log_every=1) for name in ('photos', 'scratch')}
TRAININGS |= dict(combiner=TRAININGS['photos'] | NETS | dict(pretrained='default', parser='world'))
PAGES = {
    '06_evaluation/photos': dict(backbone='tiny_xs', device='cpu', shown_queries=2, index_sizes=[100]),
    '06_evaluation/photos_combiner': TINY | NETS | dict(val_samples=10, queries=20, seeds=[0]),
    '06_evaluation/photos_lincir': TINY | dict(queries=20, width=8, seeds=[0]),
    '03_mining/03_triplets': dict(n=30, n_val=10, captions='all', attributes=False),
    '03_mining/01_captions': dict(more=[]),
}
RUNS_ON = {  # the fewest of 5, 20 and 140 photographs on which each of them runs
    'photos': 5,
    'scratch': 5,
    'combiner': 140,
    '06_evaluation/photos': 5,
    '06_evaluation/photos_combiner': 140,
    '06_evaluation/photos_lincir': 140,
    '03_mining/03_triplets': 140,
    '03_mining/01_captions': 5,
}
TOO_FEW = r'(no subject is seen in 5 images .* are too few|there are no held-out triplets).*; use more images'


def captioned(root, n):
    "Photographs without a split, each with five captions of the world."
    root.mkdir()
    pairs, lines = WorldPairs(5 * n, 5, 'val'), []
    for i in range(n):
        Image.new('RGB', (80, 60), (i * 37 % 255, i * 91 % 255, i * 13 % 255)).save(root / f'{i:03}.jpg')
        items = [pairs.item(5 * i + k) for k in range(5)]
        texts = [
            caption(
                s, pairs.random(5 * i + k, 9), s.things[j], m, SCENE_PATTERNS if kind == 'scene' else CLOSEUP_PATTERNS
            )
            for k, (kind, s, j, m) in enumerate(items)
        ]
        lines.append(json.dumps(dict(image=f'{i:03}.jpg', captions=texts)))
    (root / 'captions.jsonl').write_text('\n'.join(lines))
    return root


def run_cells(page, given):
    "Run the code cells of a page in this process, with other parameters."
    space = {'__name__': '__main__'}
    for cell in json.loads(notebooks()[page].read_text())['cells']:
        if cell['cell_type'] == 'code':
            exec(compile(''.join(cell['source']), page, 'exec'), space)
            space |= given if 'parameters' in cell['metadata'].get('tags', []) else {}


def train_on(name, data):
    params = read_params(project_root() / 'params' / 'photos' / f'05_train.{name}.yaml')
    train_or_load(settings(params | TRAININGS[name] | dict(data=data)))


@pytest.mark.e2e
@pytest.mark.data
@pytest.mark.parametrize('n', [5, 20, 140])
@pytest.mark.parametrize('name', RUNS_ON)
def test_few_photographs_are_enough_or_are_said_to_be_too_few(tmp_path, monkeypatch, name, n):
    try:
        find_parser()
    except OSError:
        pytest.skip('no English spaCy pipeline is installed and CIS_DATA has none')
    monkeypatch.setattr(plt, 'show', plt.close)
    monkeypatch.setenv('CIS_REPORT', str(tmp_path / 'report'))
    monkeypatch.setenv('CIS_EXPERIMENT', name)
    (tmp_path / 'report').mkdir()
    data = str(captioned(tmp_path / 'pictures', n))
    expected = nullcontext() if n >= RUNS_ON[name] else pytest.raises(ValueError, match=TOO_FEW)
    with expected:
        train_on(name, data) if name in TRAININGS else run_cells(name, PAGES[name] | dict(data=data))
    plt.close('all')
