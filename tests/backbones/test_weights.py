"Weights: published architectures, downloads, damaged files, and the backbones that come with the book."

import copy
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import pytest
import torch
from safetensors.torch import save_file
from projects import ROOT
from published_files import COMBINER, MAPPER, PHI, SMALL_RESNET, clip_tensors, resnet_clip, tensors, use_small_rn50x4
from cis_nb.backbones import weights
from cis_nb.backbones.clip import golden_images, golden_texts
from cis_nb.backbones.loading import load_backbone, load_clip, save_backbone
from cis_nb.backbones.weights import tiny_folder
from cis_nb.backbones.conditional_vit import read_condvit
from cis_nb.backbones.denoiser import read_denoiser
from cis_nb.core.experiment_files import read_params
from cis_nb.core.store import project_root
from cis_nb.backbones.weights import BACKBONES, Weights, model_shapes, register_tiny
from cis_nb.methods.combiner import published_combiner, read_published_combiner
from cis_nb.methods.compodiff import published_compodiff
from cis_nb.methods.condvit import published_condvit
from cis_nb.methods.pseudo_words import published_pseudo_word, read_published_net

torch.set_num_threads(1)


@pytest.fixture(scope='session')
def b():
    return load_backbone('tiny', 'none', device='cpu')


# --- published weights that are not there


@pytest.mark.parametrize('name', [n for n in BACKBONES if BACKBONES[n].hub])
def test_missing_weights_say_what_to_get(name, monkeypatch, tmp_path):
    monkeypatch.setattr(weights.constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(weights.constants, 'HF_HUB_CACHE', str(tmp_path))
    start = time.monotonic()
    with pytest.raises(FileNotFoundError) as e:
        load_backbone(name)
    w, text = BACKBONES[name], str(e.value)
    assert time.monotonic() - start < 10
    for part in (
        name,
        w.hub,
        'open_clip_model.safetensors',
        f'{w.gigabytes:.1f} GB',
        w.licence,
        str(tmp_path),
        'pretrained',
    ):
        assert part in text


# --- the three sources of published weights, with a small stand-in

SMALL = Weights('cis-tiny', 'demo', 'someone/demo', 0.04, 160, 128, 64, 'gelu')


def hub_cache(root, file):
    repo = root / 'models--someone--demo'
    (repo / 'snapshots' / ('0' * 40)).mkdir(parents=True)
    (repo / 'refs').mkdir()
    (repo / 'refs' / 'main').write_text('0' * 40)
    (repo / 'snapshots' / ('0' * 40) / weights.HUB_FILE).write_bytes(file.read_bytes())


@pytest.fixture
def published(b, tmp_path):
    save_file({k: v.contiguous() for k, v in b.model.state_dict().items()}, tmp_path / weights.HUB_FILE)
    return tmp_path / weights.HUB_FILE


def test_from_file_folder_and_cache(b, published, tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, 'demo', SMALL)
    hub_cache(tmp_path / 'cache', published)
    monkeypatch.setattr(weights.constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(weights.constants, 'HF_HUB_OFFLINE', True)
    with torch.no_grad():
        want = b.encode_text(golden_texts)
    for pretrained in (str(published), str(tmp_path), 'default'):
        got = load_clip('demo', pretrained, device='cpu')
        with torch.no_grad():
            torch.testing.assert_close(got.encode_text(golden_texts), want)
    assert got.source == 'demo (someone/demo)'


class Hub(http.server.BaseHTTPRequestHandler):
    "As much of a hub as is needed to give one file away; it is too busy for the first caller."

    def do_HEAD(self, body=False):
        asked = self.path.startswith('/someone/demo/resolve/main/')
        self.server.calls += asked
        data = self.server.file.read_bytes() if asked and self.server.calls > 1 else b''
        self.send_response(200 if data else 503)
        for k, v in {'ETag': '"abc"', 'X-Repo-Commit': '0' * 40, 'Content-Length': len(data)}.items():
            self.send_header(k, str(v))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def do_GET(self):
        self.do_HEAD(True)

    def log_message(self, *a):
        pass


CHILD = '''
import time
from cis_nb.backbones import weights
from cis_nb.backbones.loading import load_clip
weights.BACKBONES['demo'] = weights.Weights('cis-tiny', 'demo', 'someone/demo', .04, 160, 128, 64, 'gelu')
for i in range(2):
    start = time.monotonic()
    try: print('loaded', load_clip('demo', device='cpu').fingerprint)
    except FileNotFoundError as e: print('error', e, 'seconds', time.monotonic()-start)
'''


@pytest.mark.e2e
def test_from_the_hub_first_in_vain(b, published, tmp_path):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.file, server.calls = published, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}',
        'HF_HOME': str(tmp_path / 'hf'),
        'PYTHONPATH': str(ROOT),
        'HF_HUB_DISABLE_XET': '1',
        'NO_PROXY': '127.0.0.1',
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '0',
    }
    try:
        out = subprocess.run([sys.executable, '-c', CHILD], env=env, capture_output=True, text=True, timeout=600)
    finally:
        server.shutdown()
    assert out.returncode == 0, out.stderr
    error, loaded = out.stdout.splitlines()
    assert 'error demo: its weights (demo) are not in the cache' in error and 'Get open_clip_model.safetensors' in error
    assert float(error.split('seconds ')[1]) < 20 and loaded == f'loaded {demo_fingerprint(b)}'


def demo_fingerprint(b):
    from cis_nb.core.store import fingerprint
    from cis_nb.backbones.clip import weights_hash

    return fingerprint(['demo', weights_hash(b.model), b.model.visual.preprocess_cfg])


# --- wrong and damaged files


def test_checkpoint_of_another_backbone_names_both(tmp_path):
    save_file(
        {k: torch.zeros(s, dtype=torch.int8) for k, s in model_shapes('vit_b16').items()}, tmp_path / 'x.safetensors'
    )
    with pytest.raises(ValueError, match='not weights of vit_b32: they are those of vit_b16'):
        load_backbone('vit_b32', str(tmp_path / 'x.safetensors'))


def test_truncated_weights(b, tmp_path):
    run = save_backbone(b, tmp_path / 'run')
    data = (run / 'model.safetensors').read_bytes()
    (run / 'model.safetensors').write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match='cut short'):
        load_backbone('tiny', str(run))
    (run / 'model.safetensors').write_bytes(b'')
    with pytest.raises(ValueError, match='cut short'):
        load_backbone('tiny', str(run))


def test_pickle_is_never_opened(tmp_path):
    (tmp_path / 'w.pt').write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / 'pwned').encode())
    with pytest.raises(ValueError, match='can run code'):
        load_backbone('vit_b32', str(tmp_path / 'w.pt'))
    assert not (tmp_path / 'pwned').exists()


def test_not_finite_weights(b):
    bad = copy.deepcopy(b)
    with torch.no_grad():
        bad.model.visual.head.proj.weight.fill_(float('nan'))
        with pytest.raises(ValueError, match='3 of 3 image features are not finite'):
            bad.encode_image(golden_images())
        assert torch.isfinite(b.encode_image(golden_images())).all()  # the copy was deep


# --- the shipped backbone


@pytest.mark.parametrize('name, megabytes', [('tiny', 20), ('tiny_s', 9), ('tiny_xs', 5), ('tiny_products', 5)])
def test_shipped_golden_features(name, megabytes):
    assert load_backbone(name, device='cpu', golden=True).source == f'{name}/model.safetensors'
    assert sum(p.stat().st_size for p in tiny_folder(name).iterdir()) < megabytes * 1e6


# chance: 10, 4, 1
@pytest.mark.parametrize(
    'name, least',
    [(name, {'close-up color': 80, 'close-up category': 50}) for name in ('tiny', 'tiny_s', 'tiny_xs')]
    + [('tiny_products', {'image to caption': 95})],
)
def test_shipped_weights_are_trained_and_say_how(name, least):
    about = json.loads((tiny_folder(name) / 'backbone.json').read_text())['trained']
    asked = read_params(project_root() / about['experiment'])
    assert {k: about['params'][k] for k in ('backbone', 'samples', 'steps', 'batch_size', 'seed')} == {
        k: asked.get(k, 0) for k in ('backbone', 'samples', 'steps', 'batch_size', 'seed')
    }
    assert all(about['held_out'][what] > percent for what, percent in least.items())


@pytest.mark.parametrize('name', ['tiny_s', 'tiny_xs'])
def test_a_missing_file_of_shipped_weights_is_said(name, monkeypatch, tmp_path):
    register_tiny()
    monkeypatch.setattr('cis_nb.backbones.weights.tiny_folder', lambda name: tmp_path)
    with pytest.raises(FileNotFoundError, match='reinstall the package'):
        load_backbone(name, 'default', device='cpu')


def test_config_files_agree():
    config = json.loads((tiny_folder() / 'open_clip_config.json').read_text())
    assert config['model_cfg'] == json.loads((tiny_folder() / 'cis-tiny.json').read_text())
    assert tuple(config['preprocess_cfg']['size']) == (64, 64)


# --- published CLIPs with a ResNet


def test_the_names_by_hand_are_those_of_rn50x4():
    needed = {k: shape for k, shape in model_shapes('rn50x4').items() if not k.endswith('num_batches_tracked')}
    assert resnet_clip(640, 80, (4, 6, 10, 6), 288, 640, 12) == needed


@pytest.mark.parametrize('ending', ['pt', 'safetensors'])
@pytest.mark.parametrize('key', ['visual.layer2.1.bn2.running_mean', 'ln_final.bias'])
def test_a_fault_of_a_clip_names_the_file_that_was_given(tmp_path, store, monkeypatch, ending, key):
    use_small_rn50x4(monkeypatch)

    def said(t) -> str:
        file = tmp_path / f'mine.{ending}'
        torch.save({'CLIP': t}, file) if ending == 'pt' else save_file(t, file)
        with pytest.raises(ValueError) as e:
            load_backbone('rn50x4', pretrained=str(file))
        assert str(e.value).startswith(f'{file}: ')
        return str(e.value)

    t = clip_tensors()
    assert f'not weights of rn50x4: {key} is missing in the file' in said({k: v for k, v in t.items() if k != key})
    assert 'more is (2,) in the file and missing in the model' in said(t | dict(more=torch.zeros(2)))
    assert f'{key} is (3,) in the file' in said(t | {key: torch.zeros(3)})


# --- files of other methods, damaged files


def small():
    return load_backbone('tiny', 'none', device='cpu')


READERS = dict(
    lincir=lambda file: published_pseudo_word(file, 'lincir', small()),
    searle=lambda file: published_pseudo_word(file, 'searle', small()),
    pic2word=lambda file: published_pseudo_word(file, 'pic2word', small()),
    combiner=lambda file: published_combiner(file, small()),
    clip=lambda file: load_backbone('tiny', pretrained=str(file)),
    condvit=read_condvit,
    compodiff=read_denoiser,
)
PHI_CALL = "LinCIR or SEARLE, which published_pseudo_word(FILE, 'lincir'), or 'searle', reads"
FILES = {  # a kind of file: its entry, names of its tensors, what is said, its own readers
    'phi': ('Phi', PHI, PHI_CALL, {'lincir', 'searle'}),
    'mapper': (
        'state_dict_img2text',
        MAPPER,
        "Pic2Word, which published_pseudo_word(FILE, 'pic2word') reads",
        {'pic2word'},
    ),
    'combiner': ('', COMBINER, 'a Combiner (GeneCIS, CLIP4Cir), which published_combiner(FILE) reads', {'combiner'}),
    'clip': ('CLIP', resnet_clip(**SMALL_RESNET), 'a CLIP, which load_backbone(NAME, pretrained=FILE) reads', {'clip'}),
    'condvit': (
        '',
        dict.fromkeys(('class_embedding', 'conv1.weight', 'proj')),
        'a CondViT, which published_condvit(FILE) reads',
        {'condvit'},
    ),
    'compodiff': (
        '',
        dict.fromkeys(('model.net.to_text_embeds.0.weight', 'model.net.transformer.norm.g')),
        'CompoDiff, which published_compodiff(FILE) reads',
        {'compodiff'},
    ),
}


def test_a_tensor_under_two_names_is_refused(tmp_path):
    t = {'layers.0.weight': torch.ones(2, 2), 'module.layers.0.weight': torch.zeros(2, 2)}
    save_file(t, tmp_path / 'net.safetensors')
    torch.save({'Phi': t}, tmp_path / 'net.pt')
    for file in ('net.safetensors', 'net.pt'):
        with pytest.raises(ValueError, match=f'{file}: there are two tensors layers.0.weight, with module. before'):
            weights.read_tensors(tmp_path / file, 'phi')


@pytest.mark.parametrize('reader', READERS)
@pytest.mark.parametrize('kind', FILES)
def test_the_file_of_another_method_is_named(tmp_path, store, kind, reader):
    entry, names, said, own = FILES[kind]
    t = {k: torch.zeros(2) for k in names}
    files = [tmp_path / 'net.safetensors', tmp_path / 'net.pt']
    save_file(t, files[0])
    torch.save({entry: {f'module.{k}': v for k, v in t.items()}, 'epoch': 3} if entry else t, files[1])
    for file in files:
        with pytest.raises(ValueError) as e:
            READERS[reader](file)
        text = str(e.value)
        assert text.startswith(f'{file}: ') and (f'this is a file of {said}' in text) == (reader not in own), text


@pytest.mark.parametrize(
    'read',
    [
        lambda file: published_pseudo_word(file, 'lincir', 'no backbone'),
        lambda file: published_combiner(file, 'no backbone'),
        lambda file: published_condvit(file, 'cpu'),
        lambda file: published_compodiff(file, 'cpu'),
    ],
    ids=['pseudo_word', 'combiner', 'condvit', 'compodiff'],
)
def test_a_file_that_is_missing_is_told_before_the_backbone_is_loaded(tmp_path, read):
    (tmp_path / 'model.pt').touch()
    with pytest.raises(FileNotFoundError, match=r'/mdel.pt: no such file; .*; did you mean /.*/model.pt\?$'):
        read(tmp_path / 'mdel.pt')
    with pytest.raises(FileNotFoundError, match='/zzz: no such file; give the .safetensors or .pt file of the model$'):
        read(tmp_path / 'zzz')
    (tmp_path / 'folder.pt').mkdir()
    with pytest.raises(FileNotFoundError, match='/folder.pt: not a file but a folder or device; give the'):
        read(tmp_path / 'folder.pt')


def test_weights_that_are_not_there_are_told_with_the_call_that_reads_them(monkeypatch, tmp_path):
    monkeypatch.setattr(weights.constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(weights.constants, 'HF_HUB_OFFLINE', True)
    with pytest.raises(FileNotFoundError) as e:
        load_backbone('vit_l', device='cpu')
    for said in ("in Python load_backbone('vit_l', pretrained=PATH) in place of the name", "pretrained='none'"):
        assert said in str(e.value)


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize(
    'inside, shapes, key, read',
    [
        ('Phi', PHI, 'layers.3.bias', lambda file: read_published_net(file, 'phi', 768, 768)),
        ('state_dict_img2text', MAPPER, 'fc_out.weight', lambda file: read_published_net(file, 'mapper', 768, 768)),
        ('Combiner', COMBINER, 'output_layer.bias', read_published_combiner),
        (
            'CLIP',
            resnet_clip(**SMALL_RESNET),
            'ln_final.bias',
            lambda file: load_backbone('rn50x4', pretrained=str(file)),
        ),
    ],
    ids=['phi', 'mapper', 'combiner', 'clip'],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path, store, monkeypatch, inside, shapes, key, read, value):
    use_small_rn50x4(monkeypatch)
    t = tensors(shapes)
    t[key].view(-1)[1] = value
    torch.save({inside: t}, tmp_path / 'net.pt')
    save_file(t, tmp_path / 'net.safetensors')
    for name in ('net.pt', 'net.safetensors'):
        with pytest.raises(ValueError, match=f'{name}: {key} holds NaN or infinite numbers'):
            read(tmp_path / name)
