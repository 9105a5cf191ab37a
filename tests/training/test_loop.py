"The training loop: kills, several processes, damaged checkpoints, settings out of bounds."

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from cis_nb import train as training
from cis_nb.training import loop as T
from cis_nb.core import store
from cis_nb.core.store import project_root

TOY = '''
import sys, time, torch, torch.nn.functional as F, numpy as np
from safetensors.torch import save_file
from cis_nb.core.store import stored
from cis_nb.methods.contrastive import all_gather_with_grad
from cis_nb.training.loop import BaseObjective, train, weights

class Toy(BaseObjective):
    "A small network with dropout and noisy data; slow enough to be killed."
    name, metric, ema = 'toy', 'score', .9
    def __init__(self, wait=0., noise=.1, dropout=.2):
        torch.manual_seed(0); self.wait, self.noise = wait, noise
        layers = torch.nn.Linear(6,32), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(32,3)
        self.modules = {'net': torch.nn.Sequential(*layers)}
        self.x = torch.randn(120,6); self.y, self.data = self.x[:,:3]*self.x[:,3:], range(120)
    def prepare(self, ids, rng):
        noise = torch.tensor(rng.normal(size=(len(ids),6)), dtype=torch.float32)
        return self.x[ids]+self.noise*noise, self.y[ids]
    def loss(self, batch):
        time.sleep(self.wait)
        return F.mse_loss(all_gather_with_grad(self.modules['net'](batch[0])), all_gather_with_grad(batch[1]))
    also_best = {'rough': 'error'}
    def validate(self):
        error = F.mse_loss(self.modules['net'](self.x), self.y).item()
        return {'score': -error, 'error': error}
    def save(self, folder): save_file(weights(self.modules), folder/'model.safetensors')

def fit(folder, wait=0., steps=60, workers=1, **kw):
    often = dict(eval_every=4, log_every=2, workers=workers, device='cpu')
    return train(Toy(wait, **kw), folder, steps=steps, batch_size=16, lr=.01, warmup=5, weight_decay=.1, **often)
'''
KILLED = (
    TOY
    + '''
wait = float(sys.argv[1])
print(stored('run', 'toy', dict(steps=60), lambda folder: fit(folder, wait), resume=True))
'''
)


def python(code, *args, store, **kw):
    "A process of its own."
    env = dict(
        os.environ, PYTHONPATH=str(project_root()), CIS_STORE=str(store), OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''
    )
    return subprocess.Popen(
        [sys.executable, '-c', code, *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kw,
    )


def result(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return Path(out.strip().splitlines()[-1]) if out.strip() else None


def same(a, b):
    "Whether two runs have kept equal weights, those of `best` and those of the other selection."

    def equal(a, b):
        a, b = load_file(a / 'model.safetensors'), load_file(b / 'model.safetensors')
        return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

    return equal(a, b) and equal(a / 'rough', b / 'rough')


@pytest.mark.e2e
def test_killed_and_resumed_is_bit_identical(tmp_path):
    scope, threads, straight = {}, torch.get_num_threads(), tmp_path / 'straight'
    exec(TOY, scope)
    torch.set_num_threads(1)
    scope['fit'](straight)
    torch.set_num_threads(threads)
    store, chance, reached = tmp_path / 'killed', random.Random(7), []
    for kill in range(2):
        p = python(KILLED, 0.03, store=store)
        since = reached[-1] if reached else -1

        def newest():
            return max((int(c.name[5:]) for c in store.glob('run/.partial-*/checkpoints/step-*')), default=-1)

        deadline = time.time() + 240
        while newest() <= since and p.poll() is None and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        p.send_signal(signal.SIGKILL)
        p.communicate()
        reached.append(newest())
        assert not [f for f in (store / 'run').iterdir() if not f.name.startswith('.')], 'something looks finished'
    assert 0 < reached[0] < reached[1] < 60
    resumed = result(python(KILLED, 0, store=store))
    assert same(straight, resumed)
    a, b = (pd.read_csv(r / 'history.csv').drop(columns='items_per_s') for r in (straight, resumed))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert not (resumed / 'checkpoints').exists() and not list(resumed.rglob('.tmp-*'))


def small_training(place, monkeypatch) -> tuple:
    "The run of a training of two steps in the store `place`, and how many steps this call has made."
    monkeypatch.setenv('CIS_STORE', str(place))
    steps, update = [], T.update
    small = dict(samples=64, val_samples=8, steps=2, batch_size=8, eval_every=1, log_every=1)
    how = dict(method='contrastive', backbone='tiny_xs', pretrained='none', device='cpu', dtype='float32')
    with monkeypatch.context() as m:
        m.setattr(T, 'update', lambda *a, **k: (steps.append(1), update(*a, **k))[1])
        return training.train_or_load(training.settings(small | how)), len(steps)


def kill_at(moment, m):
    "Let the end of a training be cut there; a `KeyboardInterrupt` passes all that cleans up after an `Exception`."
    rmtree, replace = shutil.rmtree, os.replace

    def killed(*_, **__):
        raise KeyboardInterrupt(moment)

    def cut_rmtree(path, *a, **k):
        if not (Path(path).name.endswith('checkpoints') and Path(path).exists()):
            return rmtree(path, *a, **k)
        if moment == 'within the deletion':
            next(Path(path).rglob('model.safetensors')).unlink()
        killed()

    if moment == 'before the renaming':
        m.setattr(os, 'replace', lambda a, b: killed() if Path(a).name == 'checkpoints' else replace(a, b))
    elif moment == 'hashing':
        m.setattr(store, '_digest', killed)
    else:
        m.setattr(shutil, 'rmtree', cut_rmtree)


def test_a_kill_at_the_end_of_a_training_loses_nothing(tmp_path, monkeypatch):
    "Its models are saved: the next call makes no step, and its run has the files of an undisturbed one."
    straight, steps = small_training(tmp_path / 'straight', monkeypatch)
    assert steps == 2

    def content(run):
        files = {p.relative_to(run).as_posix(): p for p in run.rglob('*') if p.is_file()}
        kept = {n: p.read_bytes() for n, p in files.items() if n.startswith(('model', 'best'))}
        return {n for n in files if not n.startswith('tensorboard/')}, kept

    assert {'best.json', 'history.csv', 'manifest.json', 'model.safetensors'} <= content(straight)[0]
    for moment in ('before the renaming', 'before the deletion', 'within the deletion', 'hashing'):
        place = tmp_path / moment
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt, match=moment):
            kill_at(moment, m)
            small_training(place, monkeypatch)
        run, steps = small_training(place, monkeypatch)
        assert (run.name, steps) == (straight.name, 0), moment
        assert content(run) == content(straight), moment
        a, b = (pd.read_csv(r / 'history.csv').drop(columns='items_per_s') for r in (straight, run))
        pd.testing.assert_frame_equal(a, b, check_exact=True)


def test_batches_made_by_several_threads_are_the_same(tmp_path):
    scope = {}
    exec(TOY, scope)
    for workers in (1, 3):
        scope['fit'](tmp_path / str(workers), steps=8, workers=workers)
    assert same(tmp_path / '1', tmp_path / '3')


def test_one_training_keeps_the_best_weights_of_each_selection(tmp_path):
    scope = {}
    exec(TOY, scope)
    history = scope['fit'](tmp_path, steps=40)
    of = {name: json.loads((tmp_path / name / 'best.json').read_text()) for name in ('', 'rough')}
    checked = history.dropna(subset='score').set_index('step')
    assert of[''] == dict(step=checked.score.idxmax(), score=checked.score.max())
    assert of['rough'] == dict(step=checked.error.idxmax(), error=checked.error.max()) and of['rough'] != of['']
    toy = scope['Toy']()
    for name, best in of.items():
        T.load_weights(toy.modules, load_file(tmp_path / name / 'model.safetensors'))
        toy.modules['net'].eval()
        assert toy.validate()['error'] == pytest.approx(best.get('error', -best.get('score', 0)), rel=1e-5)
    assert not list(tmp_path.glob('*.safetensors'))[1:]  # the model alone: no weights of a run in progress


def test_a_selection_without_its_number_is_an_error(tmp_path):
    scope = {}
    exec(TOY, scope)
    toy = scope['Toy']()
    toy.also_best = dict(other='recall')
    with pytest.raises(KeyError, match="must return its metric 'recall'"):
        T.train(toy, tmp_path, steps=2, batch_size=4, device='cpu')


def test_half_written_checkpoint_is_passed_over(tmp_path):
    scope = {}
    exec(TOY, scope)
    toy = scope['Toy']()
    opt = T.adamw(toy.modules, 0.1)
    for step in (4, 8):
        good = T.save_checkpoint(tmp_path, toy.modules, opt, dict(step=step, best={}, rows=[], ema={}))
    (tmp_path / 'checkpoints' / '.tmp-step-0000012').mkdir()
    (tmp_path / 'checkpoints' / '.tmp-step-0000012' / 'model.safetensors').write_bytes(b'cut off')
    assert T.last_checkpoint(tmp_path) == good and [p.name for p in (tmp_path / 'checkpoints').glob('step*')] == [
        'step-0000008'
    ]


@pytest.mark.parametrize(
    'setting, message',
    [
        (dict(schedule='cosin'), 'cosin'),
        (dict(dtype='half'), 'half'),
        (dict(device='cuda:9'), 'cuda'),
        (dict(steps=0), 'steps'),
        (dict(batch_size=0), 'batch_size'),
    ],
)
def test_bad_settings_say_so(tmp_path, setting, message):
    scope = {}
    exec(TOY, scope)
    if setting.get('device') and torch.cuda.is_available():
        pytest.skip('this machine has a GPU')
    with pytest.raises(ValueError, match=message):
        T.train(scope['Toy'](), tmp_path, **{**dict(steps=2, batch_size=4, device='cpu'), **setting})
