"Several processes: they learn what one learns, their errors arrive, nothing of them is left behind."

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
import pandas as pd
import pytest
import torch
from process_trees import is_running
from safetensors.torch import load_file
from cis_nb.core.store import project_root
from cis_nb.training.launch import launch
from cis_nb.training.loop import accelerator_for

pytestmark = pytest.mark.e2e

MODULE = '''
import os
from pathlib import Path
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from cis_nb.methods.contrastive import all_gather_with_grad
from cis_nb.training.checkpoints import weights
from cis_nb.training.loop import BaseObjective, train


class Regression(BaseObjective):
    "A small network; its loss is of the whole batch (gathered) or of this process's share."

    metric, ema = 'score', 0.9

    def __init__(self, gathered):
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)
        self.modules = {'net': torch.nn.Sequential(*layers), 'sometimes': torch.nn.Linear(3, 3)}
        self.modules['never'] = torch.nn.Linear(3, 3)
        self.gather = all_gather_with_grad if gathered else (lambda x: x)
        self.x, self.steps = torch.randn(120, 6), 0
        self.y, self.data = self.x[:, :3] * self.x[:, 3:], range(120)

    def prepare(self, ids, rng):
        return self.x[ids], self.y[ids]

    def predict(self, x):
        z = self.modules['net'](x)
        return z + self.modules['sometimes'](z) if self.steps % 2 else z

    def loss(self, batch):
        self.steps += 1
        return F.mse_loss(self.gather(self.predict(batch[0])), self.gather(batch[1]))

    def validate(self):
        return {'score': -F.mse_loss(self.predict(self.x), self.y).item()}

    def save(self, folder):
        save_file(weights(self.modules), folder / 'model.safetensors')


def fit(folder, gathered, steps=12):
    often = dict(eval_every=4, log_every=2, device='cpu')
    train(Regression(gathered), Path(folder), steps=steps, batch_size=16, lr=0.01, warmup=5, weight_decay=0.1, **often)


def fit_both(folder):
    print('threads', os.environ.get('OMP_NUM_THREADS'), 'of rank', os.environ.get('RANK'))
    for gathered in (True, False):
        fit(f'{folder}-{gathered}', gathered)
'''


LIGHT = '''
import os, signal, time
from pathlib import Path


def fails(how):
    import torch

    torch.distributed.init_process_group('gloo')
    if torch.distributed.get_rank() == 1:
        if how == 'raises':
            raise ValueError('item 17 is bad')
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(3))
    time.sleep(600)


def waits(folder):
    (Path(folder) / f"{os.environ['RANK']}.pid").write_text(f'{os.getpid()} {os.getppid()}')
    time.sleep(600)
'''


@pytest.fixture
def toys(tmp_path, monkeypatch):
    "The folder of modules that this process and new ones can import."
    (tmp_path / 'toys_of_launch.py').write_text(MODULE)
    (tmp_path / 'light_toys_of_launch.py').write_text(LIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('toys_of_launch', 'light_toys_of_launch'):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def agree(one: Path, two: Path, name='model.safetensors'):
    a, b = load_file(one / name), load_file(two / name)
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=1e-4, atol=1e-5)
    return a


def agree_by_norm(one: Path, two: Path, name: str):
    "Adam divides a gradient by its own size: where that is of the size of rounding, single weights move at random."
    a, b = load_file(one / name), load_file(two / name)
    assert a.keys() == b.keys()
    for k in a:
        assert (a[k] - b[k]).norm() <= 2e-5 * a[k].norm(), k


def test_two_processes_learn_what_one_learns(toys, capsys, monkeypatch):
    import toys_of_launch as toy

    toy.fit_both(toys / '1')
    capsys.readouterr()
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 6)
    launch('toys_of_launch:fit_both', 2, [str(toys / '2')])
    assert capsys.readouterr().out == 'threads 3 of rank 0\n'
    for gathered in (True, False):
        first, second = (toys / f'{n}-{gathered}' for n in (1, 2))
        learned, begun = agree(first, second), toy.Regression(gathered).modules
        assert torch.equal(learned['never.weight'], begun['never'].weight), 'a parameter without gradient has decayed'
        assert not torch.equal(learned['net.0.weight'], begun['net'][0].weight)
        assert not torch.equal(learned['sometimes.weight'], begun['sometimes'].weight)
        one, two = (pd.read_csv(folder / 'history.csv').drop(columns='items_per_s') for folder in (first, second))
        pd.testing.assert_frame_equal(one, two, rtol=1e-4)
    assert not list(toys.rglob('checkpoints')) and not list(toys.rglob('best.safetensors'))


def test_a_combiner_trained_by_two_processes_is_that_of_one(tmp_path, monkeypatch):
    from cis_nb.train import settings

    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    small = dict(steps=4, batch_size=8, samples=64, val_samples=8, world_images=60, cirr=30, eval_every=2, log_every=1)
    p = dict(method='combiner', dropout=0.0, device='cpu', dtype='float32', lr=1e-3, warmup=0, **small)
    given = settings(p).model_dump()
    for processes in (1, 2):
        launch('cis_nb.train:fit', processes, [str(tmp_path / str(processes)), given])
    agree_by_norm(tmp_path / '1', tmp_path / '2', 'combiner.safetensors')
    one, two = (pd.read_csv(tmp_path / n / 'history.csv').drop(columns='items_per_s') for n in '12')
    pd.testing.assert_frame_equal(one, two, rtol=1e-4)


def test_processes_on_two_nodes(toys):
    "Two torchruns that know each other's address, as on two machines."
    (toys / 'args.json').write_text(json.dumps([str(toys / 'nodes'), True]))
    command = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc-per-node=1']
    command += ['--master-addr=127.0.0.1', f'--master-port={29500 + os.getpid() % 1000}']
    env = dict(os.environ, PYTHONPATH=f'{project_root()}{os.pathsep}{toys}', OMP_NUM_THREADS='1')
    entry = ['-m', 'cis_nb.training.launch', 'toys_of_launch:fit', str(toys / 'args.json')]
    nodes = [subprocess.Popen([*command, f'--node-rank={n}', *entry], env=env) for n in (0, 1)]
    assert [n.wait(300) for n in nodes] == [0, 0]
    launch('toys_of_launch:fit', 1, [str(toys / 'one'), True])
    agree(toys / 'one', toys / 'nodes')


def test_the_error_of_a_process_arrives(toys):
    with pytest.raises(
        RuntimeError, match=r'light_toys_of_launch:fails: process 1 failed:(.|\n)*ValueError: item 17 is bad'
    ):
        launch('light_toys_of_launch:fails', 2, ['raises'])
    with pytest.raises(RuntimeError, match='process 1 ended by SIGKILL'):
        launch('light_toys_of_launch:fails', 2, ['dies'])
    with pytest.raises(ValueError, match="function 'toys_of_launch:missing' cannot be imported"):
        launch('toys_of_launch:missing', 2)


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launching_process(toys, how):
    code = (
        'import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n'
        f'from cis_nb.training.launch import launch; launch("light_toys_of_launch:waits", 2, [{str(toys)!r}])'
    )
    env = dict(os.environ, PYTHONPATH=f'{project_root()}{os.pathsep}{toys}', TMPDIR=str(toys))
    parent = subprocess.Popen([sys.executable, '-c', code], env=env, stderr=subprocess.PIPE)
    try:
        deadline = time.time() + 300
        while len(pids := ' '.join(f.read_text() for f in toys.glob('*.pid')).split()) < 4 and time.time() < deadline:
            time.sleep(0.1)
        assert len(pids) == 4
        parent.send_signal(how)
        parent.communicate(timeout=60)
        while (alive := [pid for pid in pids if is_running(int(pid))]) and time.time() < deadline:
            time.sleep(0.1)
        assert not alive
    finally:
        parent.kill()
    assert how == signal.SIGKILL or not list(toys.glob('cis-launch-*'))


def test_two_processes_from_a_notebook(tmp_path):
    "Papermill runs 05 with `-p processes 2`."
    env = dict(os.environ, CIS_STORE=str(tmp_path / 'store'), CIS_HOME=str(project_root()), OMP_NUM_THREADS='1')
    env |= dict(PYTHONPATH=str(project_root()), CUDA_VISIBLE_DEVICES='')
    values = dict(processes=2, steps=2, batch_size=4, samples=64, val_samples=4, warmup=0, eval_every=1, log_every=1)
    parameters = [x for k, v in values.items() for x in ('-p', k, str(v))]
    command = [sys.executable, '-m', 'papermill', 'nbs/05_train.ipynb', str(tmp_path / 'out.ipynb'), *parameters]
    done = subprocess.run(command, cwd=project_root(), env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = [r for r in (tmp_path / 'store' / 'run').iterdir() if not r.name.startswith('.')]
    assert len(pd.read_csv(run / 'history.csv')) == 2 and (run / 'model.safetensors').exists()


def test_more_processes_than_gpus_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='processes must be at most 1, the GPUs of this node, got 2'):
        accelerator_for('cuda')
