"Training runs: a folder of photographs, defaults, names of runs, missing weights, fine-tuning of another run."

import json
import os
import re
import subprocess
import sys
import pandas as pd
import pytest
import torch
from photo_folders import folder
from projects import ROOT, receipt_of
from PIL import Image
from cis_nb import train as T
from cis_nb.api import Queries, Unsolved
from cis_nb.backbones.conditional_vit import CondViT, ViTShape, write_condvit
from cis_nb.backbones.loading import load_backbone
from cis_nb.core.experiment_files import defaults, read_notebook, read_params, texts_in
from cis_nb.core.store import project_root, store_root
from cis_nb.data.image_sources import image_folder
from cis_nb.data.roots import DATA_PARAMETERS
from cis_nb.experiments.entries import training_config
from cis_nb.methods.baselines import method
from cis_nb.methods.condvit import published_condvit
from cis_nb.methods.contrastive import validation_data
from cis_nb.retrieval.protocol import rank_folder


@pytest.fixture
def photos(tmp_path):
    "Forty photos with captions."
    lines = [f'{i:03}.jpg,photo number {i}' for i in range(40)]
    return folder(tmp_path / 'photos', 40, 'captions.csv', '\n'.join(['image,caption', *lines]))


@pytest.mark.e2e
def test_trains_on_a_folder_of_photos(photos, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    p = dict(
        backbone='tiny',
        pretrained='none',
        method='contrastive',
        data=str(photos),
        samples=1,
        val_samples=100,
        steps=2,
        batch_size=4,
        lr=1e-4,
        warmup=1,
        schedule='cosine',
        weight_decay=0.05,
        clip=1.0,
        eval_every=0,
        log_every=1,
        seed=0,
        dtype='float32',
        device='cpu',
    )
    run = T.train_or_load(T.settings(p))
    before, asked = (run / 'model.safetensors').stat().st_mtime_ns, validation_data(str(photos), 100, 64)
    assert len(pd.read_csv(run / 'history.csv')) == 2 and 0 < len(asked['pairs'][1]) < 20
    assert (
        T.train_or_load(T.settings(p)) == run and (run / 'model.safetensors').stat().st_mtime_ns == before
    )  # asked again: from the store


def test_the_parameters_cell_holds_the_defaults():
    cell = defaults(read_notebook(project_root() / 'nbs' / '05_train.ipynb'))
    fields = {k: f.default for k, f in T.TrainingConfig.model_fields.items()}
    assert cell == fields and {k: type(v) for k, v in cell.items()} == {k: type(v) for k, v in fields.items()}


def test_a_run_is_named_by_what_its_method_uses(monkeypatch):
    "Parameters of another method are refused, and those that change no result are no part of the name."
    asked = []
    monkeypatch.setattr(T, 'stored', lambda kind, variant, params, build, **kw: asked.append((variant, params)))
    for more in ({}, dict(device='cpu', processes=2, log_every=1, workers=3), dict(samples=9)):
        T.train_or_load(T.settings(dict(method='contrastive', **more)))
    assert asked[0] == asked[1] != asked[2] and 'tau' not in asked[0][1]
    for other in (dict(tau=0.5), dict(world_images=7), dict(tune='both')):
        with pytest.raises(ValueError, match=f"unknown parameter '{next(iter(other))}'"):
            T.settings(dict(method='contrastive', **other))
    assert set(T.settings(dict(method='combiner')).model_dump()) > {'tau', 'tune', 'steps'}
    with pytest.raises(ValueError, match="unknown parameter 'temprature'"):
        T.settings(dict(method='combiner', temprature=1))
    with pytest.raises(ValueError, match='known: image_only, .*contrastive, combiner'):
        T.settings(dict(method='combine'))
    with pytest.raises(ValueError, match=r"method: \['lincir'\] is not a name; known: "):
        T.settings(dict(method=['lincir']))


@pytest.mark.parametrize('method', ['lincir', 'pic2word', 'searle'])
@pytest.mark.parametrize('name', ['samples', 'val_samples'])
def test_a_method_that_reads_all_of_its_data_has_no_number_of_samples(method, name):
    with pytest.raises(ValueError, match=f"unknown parameter '{name}'"):
        T.settings({'method': method, name: 7})


def test_runs_of_two_precisions_have_two_keys(monkeypatch):
    "`dtype: auto` is bfloat16 on CUDA and float32 elsewhere; the key of the run says which."
    asked = {}
    for kind in ('cpu', 'cuda'):
        monkeypatch.setattr(T, 'pick_device', lambda device, kind=kind: torch.device(kind))
        for dtype in ('auto', 'float32', 'bfloat16'):
            found = T.settings(dict(method='contrastive', dtype=dtype)).model_dump()
            asked[kind, dtype] = {k: v for k, v in found.items() if k not in T.FREE}
    assert asked['cpu', 'auto'] == asked['cpu', 'float32'] == asked['cuda', 'float32']
    assert asked['cuda', 'auto'] == asked['cuda', 'bfloat16'] == asked['cpu', 'bfloat16']
    assert asked['cpu', 'auto'] != asked['cuda', 'auto']


@pytest.mark.parametrize(
    'given, said',
    [
        (dict(method='combinr'), "method: 'combinr' is not registered; known: .*; did you mean 'combiner'"),
        (dict(method='image_text'), "method: 'image_text' has no training; methods with a training: "),
        (dict(device='cuda'), "device 'cuda' is not available: .*; use auto or cpu"),
        (dict(STEPS=500), "unknown parameter 'STEPS'; did you mean 'steps'"),
        (
            dict(method='combiner', triplets='cirr', validation='triplets'),
            "triplets: 'cirr', validation: 'triplets' is not allowed: validation must be 'cirr' where",
        ),
        (
            dict(method='condvit', condition='none', gallery_token=True),
            "condition: 'none', gallery_token: True is not allowed: gallery_token must be false",
        ),
        (dict(seed=-1), 'seed: -1 is not allowed: input should be greater than or equal to 0'),
        (dict(seed=2**32), 'seed: 4294967296 is not allowed: input should be less than or equal to 4294967295'),
        (
            dict(seed=2**64),
            'seed: 18446744073709551616 is not allowed: input should be less than or equal to 429496729',
        ),
        (
            dict(steps=10**30),
            'steps: 10+ is not allowed: input should be an integer of 64 bits, at most 92233720368547',
        ),
        (dict(method='combiner', projection=10**5000), 'projection: an integer of thousands of digits is not allowed'),
        (dict(log_every=0), 'log_every: 0 is not allowed: input should be greater than or equal to 1'),
    ],
)
def test_a_mistake_names_its_file(given, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    for source, at in (('mine.yaml', 'mine.yaml: '), ('', '')):
        with pytest.raises(ValueError, match=f'^{at}{said}'):
            T.settings(given, source)


PUBLISHED = sorted((ROOT / 'params' / 'paper').glob('05_train.*.yaml'))
READ = ('data', 'corpus', 'triplets', 'shards', 'stage', 'condition')  # what a training reads, and as what
MINED, CIRR = dict(data='cc3m', triplets='mined'), dict(data='published', triplets='cirr')
SYNTHETIC = dict(data='laion2b', shards='synthtriplets18m')
CAPTIONS = 'captions/cc3m.txt.gz + captions/stable_diffusion_prompts.txt.gz'
LINCIR = dict(data='published', corpus=CAPTIONS)
PRODUCTS = {kind: dict(data='lrvsf', condition=kind) for kind in ('category', 'text', 'none')}
BY_HAND = {  # file: method, backbone, what it reads; from the papers
    'artemis.vit_l': ('artemis', 'vit_l', SYNTHETIC),
    'cirr.rn50x4': ('combiner', 'rn50x4', CIRR),
    'clip4cir_products.vit_b16': ('combiner_products', 'vit_b16', PRODUCTS['text']),
    'clip4cir_products.vit_b32': ('combiner_products', 'vit_b32', PRODUCTS['text']),
    'combiner.rn50x4': ('combiner', 'rn50x4', MINED),
    'combiner.vit_b16': ('combiner', 'vit_b16', MINED),
    'combiner_synthetic.vit_l': ('combiner', 'vit_l', SYNTHETIC | dict(triplets='synthetic')),
    'combiner_synthetic_cirr.vit_l': ('combiner', 'vit_l', CIRR),
    'compodiff.finetune': ('compodiff', 'vit_l', CIRR | dict(stage='finetune')),
    'compodiff.finetune_fashioniq': (
        'compodiff',
        'vit_l',
        dict(data='published', triplets='fashioniq', stage='finetune'),
    ),
    'compodiff.stage1': ('compodiff', 'vit_l', dict(data='laion2b', stage='1')),
    'compodiff.stage2': ('compodiff', 'vit_l', SYNTHETIC | dict(stage='2')),
    'condvit.vit_b16': ('condvit', 'vit_b16', PRODUCTS['category']),
    'condvit.vit_b32': ('condvit', 'vit_b32', PRODUCTS['category']),
    'condvit_text.vit_b16': ('condvit', 'vit_b16', PRODUCTS['text']),
    'condvit_text.vit_b32': ('condvit', 'vit_b32', PRODUCTS['text']),
    'lincir.vit_g': ('lincir', 'vit_g', LINCIR),
    'lincir.vit_h': ('lincir', 'vit_h', LINCIR),
    'lincir.vit_l': ('lincir', 'vit_l', LINCIR),
    'pic2word.vit_g': ('pic2word', 'vit_g', dict(data='cc3m')),
    'pic2word.vit_h': ('pic2word', 'vit_h', dict(data='cc3m')),
    'pic2word.vit_l': ('pic2word', 'vit_l', dict(data='cc3m')),
    'searle.vit_g': ('searle', 'vit_g', dict(data='cc3m')),  # in the place of ImageNet's test split
    'searle.vit_h': ('searle', 'vit_h', dict(data='cc3m')),
    'searle.vit_l': ('searle', 'vit_l', dict(data='cc3m')),
    'vit_b32': ('contrastive', 'vit_b32', dict(data='flickr8k')),  # no paper's
    'vit_products.vit_b16': ('condvit', 'vit_b16', PRODUCTS['none']),
    'vit_products.vit_b32': ('condvit', 'vit_b32', PRODUCTS['none']),
}
LENGTHS = {  # beginning of a file's name: steps, batch size, learning rate of the papers; 0: rounded or not published
    'combiner.': (28_000, 256, 1e-6),
    'lincir.': (20_000, 512, 1e-4),
    'pic2word.': (0, 1024, 1e-4),
    'searle.': (0, 256, 1e-4),
    'condvit.vit_b32': (30 * 756, 360, 1e-5),  # 272,451 products, 180 on each of 2 GPUs
    'condvit_text.vit_b32': (30 * 756, 360, 1e-5),
    'vit_products.vit_b32': (30 * 756, 360, 1e-5),
    'condvit.vit_b16': (30 * 648, 420, 1e-5),  # 35 on each of 12
    'condvit_text.vit_b16': (30 * 648, 420, 1e-5),
    'vit_products.vit_b16': (30 * 648, 420, 1e-5),
    'compodiff.stage1': (1_000_000, 4096, 1e-4),
    'compodiff.stage2': (200_000, 2048, 1e-5),
    'compodiff.finetune': (50_000, 2048, 1e-5),
}


def published_config(name: str) -> dict:
    "The settings of a file of published parameters, defaults too."
    file = ROOT / 'params' / 'paper' / f'05_train.{name}.yaml'
    return T.settings(read_params(file) | dict(device='cpu')).model_dump()


def test_every_published_training_has_a_row():
    assert {p.stem.removeprefix('05_train.') for p in PUBLISHED} == set(BY_HAND)
    assert all(any(name.startswith(begin) for name in BY_HAND) for begin in LENGTHS)


@pytest.mark.parametrize('name', BY_HAND)
def test_a_published_training_is_that_of_its_paper(name):
    config = published_config(name)
    unused = {'triplets'} if config.get('stage') in ('1', '2') else ()  # of the fine-tuning alone
    read = {k: config[k] for k in READ if config.get(k) and k not in unused}
    assert (config['method'], config['backbone'], read) == BY_HAND[name]
    for begin, (steps, *rest) in LENGTHS.items():
        if name.startswith(begin):
            assert (config['steps'] if steps else 0, config['batch_size'], config['lr']) == (steps, *rest)


@pytest.mark.parametrize('file', PUBLISHED, ids=lambda p: p.stem)
def test_a_published_training_leaves_neither_method_nor_data_to_a_default(file):
    "Else it trains on the drawn world where a default changes."
    given = read_params(file)
    config = T.settings(given | dict(device='cpu')).model_dump()
    read = [k for k in DATA_PARAMETERS if texts_in(config.get(k)) not in ([], [''])]
    assert {'method', 'data', *read} <= set(given)
    assert 'world' not in [config[k] for k in read]


@pytest.mark.parametrize(
    'given',
    [
        dict(method='lincir', corpus='captions.txt', parser='world'),
        dict(method='pic2word'),
        dict(method='searle'),
        dict(method='combiner', validation='cirr', parser='world'),
        dict(method='compodiff', stage='2', start='none'),
    ],
    ids=lambda given: given['method'],
)
def test_the_validation_set_is_looked_for_before_the_training_data_are_read(tmp_path, store, monkeypatch, given):
    "Captions and images are there, and would be read for hours."
    folder(tmp_path / 'data' / 'photos', 6, 'captions.csv', 'image,caption\n000.jpg,a dog')
    (tmp_path / 'data' / 'captions.txt').write_text('a dog in the snow\n')
    monkeypatch.setenv('CIS_DATA', str(tmp_path / 'data'))
    with pytest.raises(FileNotFoundError, match='CIRR is neither .*Get it from .*; licence: .*; size: about'):
        T.train_or_load(T.settings(dict(data='photos', **given)))
    assert {p.name for p in store_root().glob('*')} <= {'synthetic', 'phrases'}


def test_all_missing_data_of_a_training_are_told_at_once(tmp_path, store, monkeypatch):
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    with pytest.raises(FileNotFoundError) as e:
        T.train_or_load(T.settings(dict(method='lincir', corpus='captions/cc3m.txt.gz', data='flickr8k')))
    assert re.findall(r'^(\S+): Get it from .*; licence: ', str(e.value), re.M) == ['flickr8k', 'captions/cc3m.txt.gz']
    assert not store_root().exists()


@pytest.mark.e2e
@pytest.mark.parametrize(
    'backbone, words',
    [
        ('vit_h', ['vit_h', 'open_clip_model.safetensors', 'GB']),
        (
            'vit_b31',
            ["nbs/05_train.ipynb: backbone: 'vit_b31' is not allowed: known: tiny_xs", "did you mean 'vit_b32'"],
        ),
    ],
)
def test_papermill_says_what_to_do_where_a_backbone_or_its_weights_are_not_there(tmp_path, backbone, words):
    env = dict(
        os.environ,
        HF_HUB_OFFLINE='1',
        HF_HOME=str(tmp_path),
        HF_HUB_CACHE=str(tmp_path / 'hub'),
        CIS_STORE=str(tmp_path / 'store'),
        OMP_NUM_THREADS='1',
        PYTHONPATH=str(project_root()),
    )
    done = subprocess.run(
        [sys.executable, '-m', 'papermill', 'nbs/05_train.ipynb', '-p', 'backbone', backbone],
        cwd=project_root(),
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    for said in words:
        assert said in done.stderr


ASKED_TWICE = """
from cis_nb.train import settings, train_or_load

train_or_load(settings(dict(samples=64, val_samples=4, steps=1, batch_size=4, eval_every=1, device='cpu')))
"""


@pytest.mark.e2e
def test_under_a_torchrun_of_ones_own_a_run_is_refused_until_it_is_finished(tmp_path):
    (tmp_path / 'ask.py').write_text(ASKED_TWICE)
    env = dict(os.environ, CIS_STORE=str(tmp_path / 'store'), OMP_NUM_THREADS='1', PYTHONPATH=str(project_root()))
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']

    def ask(*before):
        command = [sys.executable, *before, str(tmp_path / 'ask.py')]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    refused = ask(*torchrun)
    assert refused.returncode
    assert 'call train_or_load in a single process with `processes: 2`' in refused.stderr
    assert ask().returncode == 0
    found = ask(*torchrun)
    assert found.returncode == 0, found.stderr


@pytest.mark.e2e
def test_a_training_begins_where_another_experiment_has_ended(tmp_path, monkeypatch):
    import papermill

    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    monkeypatch.setenv('CIS_HOME', str(project_root()))
    small = dict(
        steps=1,
        batch_size=4,
        samples=64,
        val_samples=4,
        warmup=0,
        eval_every=1,
        log_every=1,
        device='cpu',
        dtype='float32',
    )
    first, second = T.train_or_load(T.settings(small)), tmp_path / '05_train.second'
    second.mkdir()
    (tmp_path / '05_train.first').mkdir()
    made = receipt_of(experiment='05_train.first', runs=[f'run/{first.name}'])
    (tmp_path / '05_train.first' / 'receipt.json').write_text(json.dumps(made))
    monkeypatch.setenv('CIS_BOOK', str(tmp_path))
    monkeypatch.setenv('CIS_REPORT', str(second))
    monkeypatch.setenv('CIS_EXPERIMENT', '05_train.second')
    monkeypatch.setenv('CIS_PROFILE', 'mine')
    papermill.execute_notebook(
        str(project_root() / 'nbs' / '05_train.ipynb'),
        str(second / 'notebook.ipynb'),
        small | dict(pretrained='05_train.first'),
        kernel_name='python3',
        progress_bar=False,
    )
    receipt = json.loads((second / 'receipt.json').read_text())
    assert receipt['params']['pretrained'] == '05_train.first'
    assert json.loads((tmp_path / 'store' / receipt['runs'][0] / 'manifest.json').read_text())['params'][
        'pretrained'
    ] == str(first)


@pytest.mark.parametrize('training', ['lincir', 'mined'])  # a pseudo-word and a Combiner
def test_the_code_of_the_readme_ranks_a_folder(training, store, monkeypatch):
    code, published = re.findall(r'```python\n(.*?)```', (project_root() / 'README.md').read_text(), re.S)
    run = T.train_or_load(training_config(training))
    for name in ('lincir', 'condvit_category'):  # the names in the code; one training for both
        report = store / f'reports/quick/05_train.{name}'
        report.mkdir(parents=True)
        (report / 'receipt.json').write_text(json.dumps(dict(runs=[run.relative_to(store_root()).as_posix()])))
    write_condvit(CondViT(ViTShape(64, 32, 64, 2, 32).build()), store / 'condvit-b16-cat.safetensors')
    (store / 'pictures/more').mkdir(parents=True)
    colors = {'one.png': 'green', 'two.png': 'red', 'more/three.png': 'blue'}
    for name, color in colors.items():
        Image.new('RGB', (40, 60), color).save(store / 'pictures' / name)
    monkeypatch.chdir(store)
    names = {}
    exec(code, names)
    there = [
        line for line in published.splitlines() if line.startswith(('from ', 'condvit'))
    ]  # the other files are not
    exec('\n'.join(there), names)
    others = sorted({*colors} - {'one.png'})  # without the reference
    hands = names['rank_folder'](names['condvit'], 'pictures', 'one.png', 'Hands')
    assert sorted(names['ranked']) == sorted(names['hands']) == sorted(hands) == others
    m, images = T.load_method(run), image_folder('pictures')
    query = m.encode_queries(Queries(['one'], [['is red']], ['one.png'], images))[0]
    gallery = m.encode_gallery(images)
    cosine = {i: float(torch.nn.functional.cosine_similarity(query, gallery[[i]])) for i in others}
    assert names['ranked'] == sorted(cosine, key=cosine.get, reverse=True)


@pytest.fixture
def three(tmp_path):
    "A folder with a red, a green and a blue image."
    (tmp_path / 'three' / 'more').mkdir(parents=True)
    for name, colour in {'one.jpg': 'red', 'two.png': 'green', 'more/three.jpg': 'blue'}.items():
        Image.new('RGB', (40, 60), colour).save(tmp_path / 'three' / name)
    return tmp_path / 'three'


@pytest.fixture
def category_model(tmp_path):
    return published_condvit(write_condvit(CondViT(ViTShape(64, 32, 64, 2, 32).build()), tmp_path / 'c.safetensors'))


def test_a_damaged_image_of_a_folder_is_counted_named_and_left_out(three, store, category_model):
    (three / 'broken.jpg').write_bytes((three / 'one.jpg').read_bytes()[:100])
    for m, condition in ((method('image_text', load_backbone('tiny')), 'is red'), (category_model, 'Head')):
        with pytest.warns(UserWarning, match=r'three: 1 of 4 images cannot be read .*: broken.jpg \(\w+Error: '):
            assert sorted(rank_folder(m, three, 'one.jpg', condition)) == ['more/three.jpg', 'two.png']
        with pytest.raises(ValueError, match='reference: .*/three/broken.jpg cannot be read'):
            rank_folder(m, three, 'broken.jpg', condition)


@pytest.mark.parametrize(
    'reference, said',
    [
        ('oen.jpg', "reference: 'oen.jpg' is no image below .*three; did you mean 'one.jpg'"),
        ('ONE.JPG', "did you mean 'one.jpg'"),
        ('three.jpg', "did you mean 'more/three.jpg'"),
        ('q', "'q' is no image below .*three; the first of 3 is 'more/three.jpg'"),
        (None, 'None is no image below'),
    ],
)
def test_a_reference_that_is_not_in_the_folder_is_refused_with_close_names(reference, said, three):
    with pytest.raises(ValueError, match=said):
        rank_folder(method('image_text', load_backbone('tiny')), three, reference, 'is red')


@pytest.mark.parametrize('condition', [None, '', '  ', ['is red']])
def test_a_condition_has_words(condition, three, store, category_model):
    for m in (method('image_text', load_backbone('tiny')), category_model):
        with pytest.raises(ValueError, match=re.escape(f'condition: {condition!r} is no text; give words')):
            rank_folder(m, three, 'one.jpg', condition)


def test_a_category_in_small_letters_is_refused_with_its_name(three, store, category_model):
    with pytest.raises(Unsolved, match="'hands' is no category of this model; .*; did you mean 'Hands'?"):
        rank_folder(category_model, three, 'one.jpg', 'hands')
    with pytest.raises(Unsolved) as refused:
        rank_folder(category_model, three, 'one.jpg', 'zzz')
    assert 'did you mean' not in str(refused.value)
