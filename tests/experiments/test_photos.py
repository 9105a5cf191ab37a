"The chapters on a folder of photographs: a small damaged folder, order of experiments, parameters."

import json
import pandas as pd
import pytest
from PIL import Image, ImageDraw
from projects import receipt_of
from cis_nb.retrieval.protocol import RESULT_COLUMNS
from cis_nb.core.store import project_root


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
    (other / 'receipt.json').write_text(json.dumps(receipt_of(runs=[f'run/{run.name}'])))
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
    (other / 'receipt.json').write_text(json.dumps(receipt_of(runs=['run/a', 'run/b'])))
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
