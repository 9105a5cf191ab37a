"Backbones and the feature store under conditions that do not read well in a notebook."
import copy, http.server, io, json, multiprocessing, os, resource, signal, subprocess, sys, threading, time
from pathlib import Path
import numpy as np, open_clip, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from safetensors.torch import save_file
from cis_nb.models import weights
from cis_nb.models.backbone import (Backbone, check_golden, golden_images, golden_texts, image_attention, load_backbone, save_backbone, tiny_folder)
from cis_nb.models.features import image_features, text_features
from cis_nb.book import read_params
from cis_nb.core import project_root
from cis_nb.models.weights import BACKBONES, Weights, build, model_shapes, register_tiny

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]

@pytest.fixture(scope='session')
def b(): return load_backbone('tiny', 'none', device='cpu')

@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path/'store'))
    return tmp_path

def picture(i): return Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8))

# --- other towers, for real (random weights)

@pytest.mark.parametrize('name', ['vit_b32', 'rn50x4'])
def test_published_architectures_encode(name):
    b = load_backbone(name, 'none', device='cpu')
    texts = ['a boat', '', 'a photo of $ that is red', 'word '*100]
    with torch.no_grad():
        f, g = b.encode_image(golden_images(100)), b.encode_text(texts, batch_size=2)
        padded = open_clip.get_tokenizer(BACKBONES[name].config)(texts)
        torch.testing.assert_close(g, b.model.encode_text(padded), atol=1e-4, rtol=1e-4)
        boat = b.model.token_embedding.weight[b.tokenize(['boat'])[0, 1]][None]
        torch.testing.assert_close(b.encode_pseudo('a photo of $ that is red', boat), b.encode_text(['a photo of boat that is red']), atol=1e-4, rtol=1e-4)
        if name=='vit_b32':
            x = torch.stack([b.preprocess(i) for i in golden_images(100)])
            t = b.image_tokens(x)
            for block in b.image_blocks: t = block(t)
            torch.testing.assert_close(b.image_head(t), f, atol=1e-4, rtol=1e-4)
            assert image_attention(b, x[:1], 0).shape==(1, 12, 50, 50)
    assert f.shape==(3, b.D) and g.shape==(4, b.D) and b.truncated==1
    assert b.record['activation']=='quick_gelu' and b.record['parameters']==sum(p.numel() for p in b.model.parameters())

@pytest.mark.parametrize('name', [n for n in BACKBONES if BACKBONES[n].hub])
def test_missing_weights_say_what_to_get(name, monkeypatch, tmp_path):
    monkeypatch.setattr(weights.constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(weights.constants, 'HF_HUB_CACHE', str(tmp_path))
    start = time.monotonic()
    with pytest.raises(FileNotFoundError) as e: load_backbone(name)
    w, text = BACKBONES[name], str(e.value)
    assert time.monotonic()-start<10
    for part in (name, w.hub, 'open_clip_model.safetensors', f'{w.gigabytes:.1f} GB', w.licence, str(tmp_path), 'pretrained'): assert part in text

# --- the three sources of published weights, with a small stand-in

SMALL = Weights('cis-tiny', 'demo', 'someone/demo', .04, 160, 128, 64, 'gelu')

def hub_cache(root, file):
    repo = root/'models--someone--demo'
    (repo/'snapshots'/('0'*40)).mkdir(parents=True)
    (repo/'refs').mkdir(); (repo/'refs'/'main').write_text('0'*40)
    (repo/'snapshots'/('0'*40)/weights.HUB_FILE).write_bytes(file.read_bytes())

@pytest.fixture
def published(b, tmp_path):
    save_file({k: v.contiguous() for k,v in b.model.state_dict().items()}, tmp_path/weights.HUB_FILE)
    return tmp_path/weights.HUB_FILE

def test_from_file_folder_and_cache(b, published, tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, 'demo', SMALL)
    hub_cache(tmp_path/'cache', published)
    monkeypatch.setattr(weights.constants, 'HF_HUB_CACHE', str(tmp_path/'cache'))
    monkeypatch.setattr(weights.constants, 'HF_HUB_OFFLINE', True)
    with torch.no_grad(): want = b.encode_text(golden_texts)
    for pretrained in (str(published), str(tmp_path), 'default'):
        got = load_backbone('demo', pretrained, device='cpu')
        with torch.no_grad(): torch.testing.assert_close(got.encode_text(golden_texts), want)
    assert got.source=='demo (someone/demo)'

class Hub(http.server.BaseHTTPRequestHandler):
    "As much of a hub as is needed to give one file away; it is too busy for the first caller."
    def do_HEAD(self, body=False):
        asked = self.path.startswith('/someone/demo/resolve/main/')
        self.server.calls += asked
        data = self.server.file.read_bytes() if asked and self.server.calls>1 else b''
        self.send_response(200 if data else 503)
        for k,v in {'ETag': '"abc"', 'X-Repo-Commit': '0'*40, 'Content-Length': len(data)}.items(): self.send_header(k, str(v))
        self.end_headers()
        if body: self.wfile.write(data)
    def do_GET(self): self.do_HEAD(True)
    def log_message(self, *a): pass

CHILD = '''
import time
from cis_nb.models import weights
from cis_nb.models.backbone import load_backbone
weights.BACKBONES['demo'] = weights.Weights('cis-tiny', 'demo', 'someone/demo', .04, 160, 128, 64, 'gelu')
for i in range(2):
    start = time.monotonic()
    try: print('loaded', load_backbone('demo', device='cpu').fingerprint)
    except FileNotFoundError as e: print('error', e, 'seconds', time.monotonic()-start)
'''

def test_from_the_hub_first_in_vain(b, published, tmp_path):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub); server.file, server.calls = published, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {**os.environ, 'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path/'hf'), 'PYTHONPATH': str(ROOT),
           'HF_HUB_DISABLE_XET': '1', 'NO_PROXY': '127.0.0.1', 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '0'}
    try: out = subprocess.run([sys.executable, '-c', CHILD], env=env, capture_output=True, text=True, timeout=600)
    finally: server.shutdown()
    assert out.returncode==0, out.stderr
    error, loaded = out.stdout.splitlines()
    assert 'error demo: its weights (demo) are not in the cache' in error and 'Get open_clip_model.safetensors' in error
    assert float(error.split('seconds ')[1])<20 and loaded==f'loaded {demo_fingerprint(b)}'

def demo_fingerprint(b):
    from cis_nb.core import fingerprint
    from cis_nb.models.backbone import weights_hash
    return fingerprint(['demo', weights_hash(b.model), b.model.visual.preprocess_cfg])

# --- wrong and damaged files

def test_checkpoint_of_another_backbone_names_both(tmp_path):
    save_file({k: torch.zeros(s, dtype=torch.int8) for k,s in model_shapes('vit_b16').items()}, tmp_path/'x.safetensors')
    with pytest.raises(ValueError, match='not weights of vit_b32: they are those of vit_b16'): load_backbone('vit_b32', str(tmp_path/'x.safetensors'))

def test_truncated_weights(b, tmp_path):
    run = save_backbone(b, tmp_path/'run')
    data = (run/'model.safetensors').read_bytes()
    (run/'model.safetensors').write_bytes(data[:len(data)//2])
    with pytest.raises(ValueError, match='cut short'): load_backbone('tiny', str(run))
    (run/'model.safetensors').write_bytes(b'')
    with pytest.raises(ValueError, match='cut short'): load_backbone('tiny', str(run))

def test_pickle_is_never_opened(tmp_path):
    (tmp_path/'w.pt').write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path/'pwned').encode())
    with pytest.raises(ValueError, match='can run code'): load_backbone('vit_b32', str(tmp_path/'w.pt'))
    assert not (tmp_path/'pwned').exists()

def test_not_finite_weights(b):
    bad = copy.deepcopy(b)
    with torch.no_grad():
        bad.model.visual.head.proj.weight.fill_(float('nan'))
        with pytest.raises(ValueError, match='3 of 3 image features are not finite'): bad.encode_image(golden_images())
        assert torch.isfinite(b.encode_image(golden_images())).all()     # the copy was deep

# --- the shipped backbone

@pytest.mark.parametrize('name, megabytes', [('tiny', 20), ('tiny_s', 9), ('tiny_xs', 5)])
def test_shipped_golden_features(name, megabytes):
    assert load_backbone(name, device='cpu', golden=True).source==f'{name}/model.safetensors'
    assert sum(p.stat().st_size for p in tiny_folder(name).iterdir())<megabytes*1e6

@pytest.mark.parametrize('name', ['tiny', 'tiny_s', 'tiny_xs'])
def test_shipped_weights_are_trained_and_say_how(name):
    about = json.loads((tiny_folder(name)/'backbone.json').read_text())['trained']
    asked = read_params(project_root()/about['experiment'])
    assert {k: about['params'][k] for k in ('backbone', 'samples', 'steps', 'batch_size', 'seed')}=={k: asked.get(k, 0) for k in ('backbone', 'samples', 'steps', 'batch_size', 'seed')}
    assert about['held_out']['close-up color']>80 and about['held_out']['close-up category']>50     # chance: 10 and 4

@pytest.mark.parametrize('name', ['tiny_s', 'tiny_xs'])
def test_a_missing_file_of_shipped_weights_is_said(name, monkeypatch, tmp_path):
    register_tiny(); monkeypatch.setattr('cis_nb.models.weights.tiny_folder', lambda name: tmp_path)
    with pytest.raises(FileNotFoundError, match='reinstall the package'): load_backbone(name, 'default', device='cpu')

def test_config_files_agree():
    config = json.loads((tiny_folder()/'open_clip_config.json').read_text())
    assert config['model_cfg']==json.loads((tiny_folder()/'cis-tiny.json').read_text())
    assert tuple(config['preprocess_cfg']['size'])==(64, 64)

# --- texts of any kind

@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=200) | st.sampled_from(['', '$', '* $', '<end_of_text> a', 'boat '*60, '\x00', '\ud800']), min_size=1, max_size=6))
def test_any_text_is_encoded_as_if_padded(b, texts):
    ids = b.tokenize(texts)
    assert ids.shape[1]<=b.context and ((ids==49407).sum(1)==1).all()
    full = torch.zeros(len(ids), b.context, dtype=torch.long); full[:, :ids.shape[1]] = ids
    with torch.no_grad(): torch.testing.assert_close(b.encode_text(texts, batch_size=2), b.model.encode_text(full), atol=1e-5, rtol=1e-4)

def test_plain_and_fused_attention_have_the_same_gradients(b):
    x = torch.stack([b.preprocess(i) for i in golden_images()])
    grads = []
    for f in (lambda: b.encode_image(x), lambda: b.model.encode_image(x)):
        b.zero_grad(); f().square().sum().backward(); grads.append(b.model.visual.trunk.blocks[0].attn.qkv.weight.grad.clone())
    b.zero_grad(set_to_none=True)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4*grads[0].abs().max().item())

def test_training_changes_the_fingerprint(b):
    c = copy.deepcopy(b)
    opt = torch.optim.AdamW(c.parameters(), fused=True)
    before = c.fingerprint
    c.encode_text(['a boat', 'a cat']).sum().backward(); opt.step()
    assert c.fingerprint!=before and b.fingerprint==before

# --- the feature store

@pytest.mark.parametrize('mode', ['L', 'P', 'RGBA', 'CMYK', 'LA', '1', 'I;16', 'F'])
def test_pictures_of_any_mode(b, store, mode):
    image = Image.fromarray(np.full((50, 80), 300, np.uint16)) if mode=='I;16' else picture(0).convert('L' if mode=='F' else mode).convert(mode)
    assert image_features(b, ['x'], lambda i: image, mode).counts==dict(encoded=1, skipped=0)

def bomb(side):
    f = io.BytesIO(); Image.new('1', (side, side)).save(f, 'png'); return f.getvalue()

def test_bad_pictures_are_skipped_counted_listed(b, store):
    ok = io.BytesIO(); picture(1).save(ok, 'png')
    files = dict(good=ok.getvalue(), cut=ok.getvalue()[:3000], empty=b'', page=b'<html>', large=bomb(9500), huge=bomb(14000))
    f = image_features(b, list(files)*3, lambda i: Image.open(io.BytesIO(files[i])), 'bad')
    assert f.ids==['good'] and f.counts==dict(encoded=1, skipped=5)
    reason = dict(zip(f.skipped.id, f.skipped.reason))
    assert 'DecompressionBomb' in reason['large'] and 'DecompressionBomb' in reason['huge'] and np.isnan(f.array[1:]).all()

def test_any_id(b, store):
    ids = [('a', 1), ('a', 2), ('a', 1)]
    f = image_features(b, ids, lambda i: picture(i[1]), 'tuples')
    assert f.index=={('a', 1): 0, ('a', 2): 1} and f[[('a', 2)]].shape==(1, 160)
    assert len(text_features(b, ['a', 'b', 'a']))==2

def killed_child(b, n):
    seen = []
    def load(i):
        seen.append(i)
        if len(seen)>n: os.kill(os.getpid(), signal.SIGKILL)
        return picture(i)
    image_features(b, list(range(50)), load, 'kill', block=8)

def test_kill_9_leaves_nothing_finished_and_work_goes_on(b, store):
    p = multiprocessing.get_context('fork').Process(target=killed_child, args=(b, 30)); p.start(); p.join(120)
    assert p.exitcode==-signal.SIGKILL
    assert not list((store/'store'/'features').glob('tiny-*'))
    seen = []
    f = image_features(b, list(range(50)), lambda i: seen.append(i) or picture(i), 'kill', block=8)
    assert min(seen)==24 and len(seen)==26
    with torch.no_grad(): torch.testing.assert_close(f[[0, 23, 24, 49]], b.encode_image([picture(i) for i in (0, 23, 24, 49)]), atol=1e-5, rtol=1e-4)

def test_full_disk_is_an_error_and_work_goes_on(b, store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match='disk full.*CIS_STORE'): image_features(b, list(range(50)), picture, 'full', block=8)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert image_features(b, list(range(50)), picture, 'full', block=8).counts==dict(encoded=50, skipped=0)

def test_not_finite_features_are_an_error(b, store):
    bad = copy.deepcopy(b)
    with torch.no_grad(): bad.model.visual.head.proj.weight[0, 0] = float('inf')
    with pytest.raises(ValueError, match='not finite'): image_features(bad, [1, 2], picture, 'nan')
