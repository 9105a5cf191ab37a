"What of the training loop does not read well in a notebook: real kills, several processes, folders of photos, the command line."
import json, os, random, signal, subprocess, sys, time
from pathlib import Path
import numpy as np, pandas as pd, pytest, torch
from PIL import Image
from safetensors.torch import load_file
from cis_nb import train as T
from cis_nb.book import defaults, read_notebook
from cis_nb.core import project_root
from cis_nb.models.contrastive import questions

TOY = '''
import sys, time, torch, torch.nn.functional as F, numpy as np
from safetensors.torch import save_file
from cis_nb.core import stored
from cis_nb.models.contrastive import everyone
from cis_nb.train import train, weights

class Toy:
    "A small network with dropout and noisy data; slow enough to be killed."
    name, metric, ema = 'toy', 'score', .9
    def __init__(self, wait=0., noise=.1, dropout=.2):
        torch.manual_seed(0); self.wait, self.noise = wait, noise
        self.modules = {'net': torch.nn.Sequential(torch.nn.Linear(6,32), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(32,3))}
        self.x = torch.randn(120,6); self.y, self.data = self.x[:,:3]*self.x[:,3:], range(120)
    def prepare(self, ids, rng): return self.x[ids]+self.noise*torch.tensor(rng.normal(size=(len(ids),6)), dtype=torch.float32), self.y[ids]
    def objective(self, batch):
        time.sleep(self.wait)
        return F.mse_loss(everyone(self.modules['net'](batch[0])), everyone(batch[1]))
    def validate(self): return {'score': -F.mse_loss(self.modules['net'](self.x), self.y).item()}
    def after_step(self): pass
    def save(self, folder): save_file(weights(self.modules), folder/'model.safetensors')

def fit(folder, wait=0., steps=60, workers=0, **kw):
    return train(Toy(wait, **kw), folder, steps=steps, batch_size=16, lr=.01, warmup=5, weight_decay=.1, eval_every=4, log_every=2, workers=workers, device='cpu')
'''
KILLED = TOY + '''
wait = float(sys.argv[1])
print(stored('run', 'toy', dict(steps=60), lambda folder: fit(folder, wait), resume=True))
'''
TWO = TOY + '''
from pathlib import Path
from accelerate import debug_launcher
def half(folder): fit(Path(folder), steps=12, noise=0., dropout=0.)
debug_launcher(half, (sys.argv[1],), 2)
'''

def python(code, *args, store, **kw):
    "A process of its own."
    env = dict(os.environ, PYTHONPATH=str(project_root()), CIS_STORE=str(store), OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)

def result(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode==0, err[-3000:]
    return Path(out.strip().splitlines()[-1]) if out.strip() else None

def same(a, b):
    a, b = load_file(a/'model.safetensors'), load_file(b/'model.safetensors')
    return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def test_killed_and_resumed_is_bit_identical(tmp_path):
    scope, threads, straight = {}, torch.get_num_threads(), tmp_path/'straight'; exec(TOY, scope)
    torch.set_num_threads(1); scope['fit'](straight); torch.set_num_threads(threads)
    store, chance, reached = tmp_path/'killed', random.Random(7), []
    for kill in range(2):
        p = python(KILLED, .03, store=store)
        since = reached[-1] if reached else -1
        def newest(): return max((int(c.name[5:]) for c in store.glob('run/.partial-*/checkpoints/step-*')), default=-1)
        deadline = time.time()+240
        while newest()<=since and p.poll() is None and time.time()<deadline: time.sleep(.01)
        time.sleep(chance.uniform(0, .3))
        p.send_signal(signal.SIGKILL); p.communicate()
        reached.append(newest())
        assert not [f for f in (store/'run').iterdir() if not f.name.startswith('.')], 'something looks finished'
    assert 0<reached[0]<reached[1]<60
    resumed = result(python(KILLED, 0, store=store))
    assert same(straight, resumed)
    a, b = (pd.read_csv(r/'history.csv').drop(columns='items_per_s') for r in (straight, resumed))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert not (resumed/'checkpoints').exists() and not list(resumed.rglob('.tmp-*'))

def test_two_processes_learn_what_one_learns(tmp_path):
    scope = {}; exec(TOY, scope)
    scope['fit'](tmp_path/'one', steps=12, noise=0., dropout=0.)
    result(python(TWO, tmp_path/'two', store=tmp_path))
    one, two = (load_file(tmp_path/n/'model.safetensors') for n in ('one', 'two'))
    for k in one: torch.testing.assert_close(one[k], two[k], rtol=1e-4, atol=1e-5)

def test_batches_made_by_processes_are_the_same(tmp_path):
    scope = {}; exec(TOY, scope)
    for workers in (0, 2): scope['fit'](tmp_path/str(workers), steps=8, workers=workers)
    assert same(tmp_path/'0', tmp_path/'2')

def test_half_written_checkpoint_is_passed_over(tmp_path):
    scope = {}; exec(TOY, scope)
    toy = scope['Toy'](); opt = T.adamw(toy.modules, .1)
    for step in (4, 8):
        good = T.save_checkpoint(tmp_path, toy.modules, opt, dict(step=step, best=None, rows=[], ema={}))
    (tmp_path/'checkpoints'/'.tmp-step-0000012').mkdir()
    (tmp_path/'checkpoints'/'.tmp-step-0000012'/'model.safetensors').write_bytes(b'cut off')
    assert T.last_checkpoint(tmp_path)==good and [p.name for p in (tmp_path/'checkpoints').glob('step*')]==['step-0000008']

@pytest.mark.parametrize('setting, message', [(dict(schedule='cosin'), 'cosin'), (dict(dtype='half'), 'half'), (dict(device='cuda:9'), 'cuda'), (dict(steps=0), 'steps'), (dict(batch_size=0), 'batch_size')])
def test_bad_settings_say_so(tmp_path, setting, message):
    scope = {}; exec(TOY, scope)
    if setting.get('device') and torch.cuda.is_available(): pytest.skip('this machine has a GPU')
    with pytest.raises(ValueError, match=message): T.train(scope['Toy'](), tmp_path, **{**dict(steps=2, batch_size=4, device='cpu'), **setting})

@pytest.fixture
def photos(tmp_path):
    "Forty photos of plain colours with captions."
    rng, folder, lines = np.random.default_rng(0), tmp_path/'photos', ['image,caption']
    folder.mkdir()
    for i in range(40):
        c = rng.integers(0, 256, 3)
        Image.fromarray(np.broadcast_to(c, (70,90,3)).astype(np.uint8)).save(folder/f'p{i}.png')
        lines.append(f'p{i}.png,a wall of colour {c[0]//64} {c[1]//64} {c[2]//64}')
    (folder/'captions.csv').write_text('\n'.join(lines))
    return folder

def test_trains_on_a_folder_of_photos(photos, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path/'store'))
    p = dict(backbone='tiny', pretrained='none', method='contrastive', data=str(photos), samples=0, val_samples=100, steps=2, batch_size=4, lr=1e-4, warmup=1, schedule='cosine',
             weight_decay=.05, clip=1., eval_every=0, log_every=1, seed=0, dtype='float32', device='cpu')
    run = T.trained(p)
    before, asked = (run/'model.safetensors').stat().st_mtime_ns, questions(str(photos), 100, 64)
    assert len(pd.read_csv(run/'history.csv'))==2 and 0<len(asked['pairs'][1])<20
    assert T.trained(p)==run and (run/'model.safetensors').stat().st_mtime_ns==before   # asked again: from the store

def test_the_parameters_cell_holds_the_defaults():
    cell = defaults(read_notebook(project_root()/'nbs'/'05_train.ipynb'))
    assert cell==T.DEFAULTS and {k: type(v) for k,v in cell.items()}=={k: type(v) for k,v in T.DEFAULTS.items()}

def test_a_run_is_named_by_what_its_method_uses(monkeypatch):
    "Parameters of another method, and those that change no result, are no part of the name."
    asked = []
    monkeypatch.setattr(T, 'stored', lambda kind, variant, params, build, **kw: asked.append((variant, params)))
    for more in ({}, dict(tau=.5, photos=7, tune='both'), dict(device='cpu', processes=2, log_every=1, workers=3), dict(samples=9)): T.trained(dict(method='contrastive', **more))
    assert asked[0]==asked[1]==asked[2]!=asked[3] and 'tau' not in asked[0][1]
    assert set(T.settings(dict(method='combiner'))) > {'tau', 'tune', 'steps'}
    with pytest.raises(ValueError, match="unknown parameter 'temprature'"): T.trained(dict(method='combiner', temprature=1))
    with pytest.raises(ValueError, match='known: contrastive, combiner'): T.trained(dict(method='combine'))

def test_a_big_backbone_without_weights_says_what_to_do(tmp_path):
    env = dict(os.environ, HF_HUB_OFFLINE='1', HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path/'hub'), CIS_STORE=str(tmp_path/'store'), OMP_NUM_THREADS='1', PYTHONPATH=str(project_root()))
    done = subprocess.run([sys.executable, '-m', 'papermill', 'nbs/05_train.ipynb', '-p', 'backbone', 'vit_h'], cwd=project_root(), env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode!=0
    for said in ('vit_h', 'open_clip_model.safetensors', 'GB'): assert said in done.stderr

def test_a_training_begins_where_another_experiment_has_ended(tmp_path, monkeypatch):
    import papermill
    monkeypatch.setenv('CIS_STORE', str(tmp_path/'store')); monkeypatch.setenv('CIS_HOME', str(project_root()))
    small = dict(steps=1, batch_size=4, samples=64, val_samples=4, warmup=0, eval_every=1, log_every=1, device='cpu', dtype='float32')
    first, second = T.trained(small), tmp_path/'05_train.second'
    second.mkdir(); (tmp_path/'05_train.first').mkdir()
    (tmp_path/'05_train.first'/'receipt.json').write_text(json.dumps(dict(runs=[f'run/{first.name}'])))
    monkeypatch.setenv('CIS_REPORT', str(second)); monkeypatch.setenv('CIS_EXPERIMENT', '05_train.second'); monkeypatch.setenv('CIS_PROFILE', 'mine')
    papermill.execute_notebook(str(project_root()/'nbs'/'05_train.ipynb'), str(second/'notebook.ipynb'), small|dict(pretrained='05_train.first'), kernel_name='python3', progress_bar=False)
    receipt = json.loads((second/'receipt.json').read_text())
    assert receipt['params']['pretrained']=='05_train.first'
    assert json.loads((tmp_path/'store'/receipt['runs'][0]/'manifest.json').read_text())['params']['pretrained']==str(first)
