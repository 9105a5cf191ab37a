"Long work is killed at random moments: nothing finished is wrong, the outputs are as undisturbed, nobody is left."

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pandas as pd
import pytest
from photo_folders import folder
from process_trees import left_after, make_book

from cis_nb.core.store import temporary_folder
from cis_nb.world.layouts import world_root

pytestmark = [
    pytest.mark.faults,
    pytest.mark.e2e,
    pytest.mark.skipif(not Path('/proc/self/environ').exists(), reason='looks for processes in /proc'),
]
KILLS = dict(make=10, training=6, features=6, world=6, packing=6, corpus=6, relations=6)

WORK = {  # the code of each kind of work; it says when it begins, and which folder it has made
    'training': """
        from cis_nb.train import settings, train_or_load
        config = settings(dict(method='contrastive', backbone='tiny_xs', pretrained='none', samples=200, val_samples=20,
                               steps=60, batch_size=8, eval_every=5, log_every=5, device='cpu', dtype='float32'))
        work = lambda: train_or_load(config)
        """,
    'features': """
        import numpy as np
        from PIL import Image
        from cis_nb.backbones.features import image_features
        from cis_nb.backbones.loading import load_backbone
        backbone = load_backbone('tiny_xs', device='cpu')
        def load(i):
            return Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8))
        work = lambda: image_features(backbone, list(range(3000)), load, 'killed', block=50)
        """,
    'world': """
        from cis_nb.world.layouts import world_root
        work = lambda: world_root(coco=120, vaw=60, captions=200)
        """,
    'packing': """
        from cis_nb.data.packed import packed_folder
        work = lambda: packed_folder('photos', 64, workers=1)
        """,
    'corpus': """
        from cis_nb.mining.corpora import corpus_folder
        work = lambda: corpus_folder('captions.txt', 'world', portion=150, processes=2)
        """,
    'relations': """
        from cis_nb.mining.captions import relation_shards
        work = lambda: relation_shards('captions.txt', 'world', per_shard=150, processes=2)
        """,
}
RUN = '\nimport time; print("begins", flush=True); start = time.monotonic(); work(); print(time.monotonic() - start)'
OWN = ('cis-*', 'pymp-*')  # names of temporary folders of the book and of multiprocessing
VARYING = {'manifest.json', 'about.json', 'tensorboard'}  # they say when, how fast and where something was made


def files_of(path: Path) -> dict:
    "The hashes of the files in a finished folder, by their names."
    found = (p for p in sorted(path.rglob('*')) if p.is_file() and not {p.name, p.parent.name} & VARYING)
    return {p.relative_to(path).as_posix(): digest(p) for p in found}


def digest(path: Path) -> str:
    "The hash of a file; of a history without its times."
    content = path.read_bytes()
    if path.name == 'history.csv':
        table = pd.read_csv(path)
        content = table[[c for c in table if 'second' not in c and '_s' not in c]].to_csv().encode()
    return hashlib.sha256(content).hexdigest()


def finished(store: Path) -> dict:
    "What looks finished in a store: name -> hashes of its files."
    return {p.parent.name: files_of(p.parent) for p in store.glob('*/[!.]*/manifest.json')}


class Work:
    "One kind of work in a folder of its own, with a run store that is emptied when it has arrived."

    def __init__(self, name: str, home: Path):
        self.home, self.store, self.code = home, home / 'store', textwrap.dedent(WORK[name])
        self.temporary = Path(tempfile.mkdtemp(prefix='kills-'))  # a short name, for sockets

    def start(self) -> subprocess.Popen:
        env = os.environ | dict(CIS_STORE=str(self.store), OMP_NUM_THREADS='1', TMPDIR=str(self.temporary))
        command = [sys.executable, '-c', self.code + RUN]
        p = subprocess.Popen(command, cwd=self.home, env=env, stdout=subprocess.PIPE, text=True)
        assert p.stdout.readline() == 'begins\n'
        return p

    def seconds(self) -> float:
        "Let it arrive."
        p = self.start()
        said = p.communicate()[0]
        assert p.returncode == 0
        return float(said)


def prepare(home: Path):
    "What the kinds of work read."
    lines = [f'{i:03}.jpg,photo number {i}' for i in range(600)]
    folder(home / 'photos', 600, 'captions.csv', '\n'.join(['image,caption', *lines]))
    with gzip.open(world_root(coco=0, vaw=0, captions=600) / 'captions' / 'captions.jsonl.gz', 'rt') as f:
        text = [caption for line in f for caption in json.loads(line)['captions']]
    (home / 'captions.txt').write_text('\n'.join(text) + '\n')
    os.utime(home / 'captions.txt', (1e9, 1e9))


@pytest.mark.parametrize('name', WORK)
def test_work_that_is_killed_at_random_moments(name, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'read'))
    prepare(tmp_path)
    work, rng = Work(name, tmp_path), random.Random(name)
    usual = work.seconds()
    right, kills, wrong, left = finished(work.store), 0, 0, {}
    assert right and all(right.values())
    shutil.rmtree(work.store)
    for _ in range(5 * KILLS[name]):
        p = work.start()
        time.sleep(rng.uniform(0, usual))
        p.kill()
        kills += p.wait() == -signal.SIGKILL
        left |= left_after(work.store, 10)
        wrong += any(right.get(k) != files for k, files in finished(work.store).items())
        if p.returncode == 0:
            shutil.rmtree(work.store)
        if kills == KILLS[name]:
            break
    work.seconds()
    monkeypatch.setattr(tempfile, 'tempdir', str(work.temporary))
    with temporary_folder('check'):  # deletes what killed processes have left, if finished work needed no folder
        pass
    differ, rest = finished(work.store) != right, [p.name for n in OWN for p in work.temporary.glob(n)]
    record_property('faults', counts(name, kills, wrong, left, differ))
    assert (kills, wrong, left, differ, rest) == (KILLS[name], 0, {}, False, [])


def counts(what: str, kills: int, wrong: int, left: dict, differ: bool) -> dict:
    "A row of the table."
    row = {'kills': kills, 'wrongly finished': wrong, 'processes left': len(left), 'outputs that differ': int(differ)}
    return dict(group='kills', what=what, **row)


# ---- a whole book


def results(project) -> dict:
    "What the experiments of a small book have found: headline, parameters and table of each."
    receipts = sorted((project.home / 'reports' / 'quick').rglob('receipt.json'))
    found = [(p, json.loads(p.read_text())) for p in receipts if 'html' not in p.parts and '.site' not in p.parts]
    tables = {p: p.with_name('results.parquet') for p, _ in found}
    rows = {p: pd.read_parquet(t).to_json() if t.exists() else '' for p, t in tables.items()}
    return {r['experiment']: (r['headline'], r['params'], rows[p]) for p, r in found}


def test_a_book_that_is_killed_at_random_moments(project, record_property):
    project.env['TMPDIR'] = str(temporary := Path(tempfile.mkdtemp(prefix='k')))  # short: it holds a socket
    for name in ('01_honest', '02_with_data', '03_page', '04_imports_show'):
        project.chapter(name, '' if 'page' in name else 'n: 2\n')
    project.write('params/chapters.yaml', 'chapters:\n  04_imports_show: {needs: [01_honest]}\n')
    start = time.monotonic()
    assert make_book(project).wait() == 0
    usual, right = time.monotonic() - start, results(project)
    rng, kills, wrong, left = random.Random('make'), 0, 0, {}
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]
    shutil.rmtree(project.home / 'reports')
    for _ in range(5 * KILLS['make']):
        p = make_book(project, start_new_session=True)
        time.sleep(rng.uniform(0, usual))
        p.send_signal(rng.choice(signals))
        left |= left_after(project.home / 'store', 10)
        kills += p.wait() != 0
        wrong += any(right[k] != r for k, r in results(project).items())
        if p.returncode == 0 or len(results(project)) == len(right):
            shutil.rmtree(project.home / 'reports')
        if kills == KILLS['make']:
            break
    p = make_book(project)
    said = p.communicate()[0]
    differ = p.returncode != 0 or results(project) != right
    record_property('faults', counts('make', kills, wrong, left, differ))
    rest = [p.name for n in (*OWN, '*.json') for p in temporary.glob(n)]  # connection files of kernels among them
    shutil.rmtree(temporary)
    assert (kills, wrong, left, differ, rest) == (KILLS['make'], 0, {}, False, []), said
