"The Combiner: several processes, frozen towers, interrupted runs, damaged files."

import json
import os
import subprocess
import sys
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from published_files import COMBINER, clip_tensors, tensors, use_small_rn50x4
from projects import ROOT
from safetensors.torch import load_file, save_file
from cis_nb import train as T
from cis_nb.data.roots import cirr_root
from cis_nb.api import configure
from cis_nb.core.store import project_root
from cis_nb.methods import combiner as C
from cis_nb.backbones.clip import pad_to_ratio
from cis_nb.backbones.loading import export_clip, load_backbone
from cis_nb.training.loop import last_checkpoint, train


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    torch.set_num_threads(1)
    return tmp_path / 'store'


def pictures(n=30):
    table, found = C.random_triplets(60, 64, images=n, conditions=6)
    return table, found


def judge(found, table):
    t = table.head(13)  # thirteen queries: no block is ever full
    return C.held_out(
        t.assign(target_image=[f'p{i}' for i in range(13)], reference_image=[f'p{i + 14}' for i in range(13)]),
        found,
        'toy',
        'none',
    )


def objective(tune='none', seed=0, start='sum', backbone=None, **kw):
    table, found = pictures()
    torch.manual_seed(seed)
    b = backbone or load_backbone('tiny', device='cpu')
    return C.CombinerTraining(
        b,
        C.Combiner(b.D, 8, 16, start=start),
        table,
        found,
        {'triplets': judge(found, table)},
        tune=tune,
        **kw,
    )


def fit(o, folder, steps=3, **kw):
    return train(
        o, Path(folder), **{**dict(steps=steps, batch_size=6, lr=1e-3, eval_every=2, log_every=1, device='cpu'), **kw}
    )


@pytest.mark.parametrize('tune', ['none', 'text', 'image', 'both'])
@pytest.mark.e2e
def test_a_frozen_half_keeps_every_bit_and_the_other_moves(tune, tmp_path):
    o = objective(tune)
    before = {n: p.clone() for n, p in o.backbone.model.state_dict().items()}
    net = {n: p.clone() for n, p in o.net.state_dict().items()}
    table = fit(o, tmp_path / 'run', steps=2, eval_every=0)
    moved = {C.tower_of(n) for n, p in o.backbone.model.state_dict().items() if not torch.equal(p, before[n])}
    assert moved == set(C.TRAINED_TOWERS[tune]) and np.isfinite(table.loss).all()
    assert any(not torch.equal(p, net[n]) for n, p in o.net.state_dict().items())
    assert (tmp_path / 'run' / 'model.safetensors').exists() == (tune != 'none')


@pytest.mark.parametrize('tune', ['none', 'both'])
@pytest.mark.e2e
def test_what_is_saved_is_read_again(tune, tmp_path):
    o = objective(tune)
    fit(o, tmp_path / 'run', steps=2, eval_every=0)
    m = C.load_combiner(tmp_path / 'run', 'cpu')
    b = m.backbone
    x, texts = torch.randn(4, b.D), ['red', 'on a boat', '', 'red']
    with torch.no_grad():
        mine = o.method().encode_query(x, texts)
    torch.testing.assert_close(
        m.encode_query(x, texts), mine, atol=1e-6 if tune == 'none' else 5e-3, rtol=0
    )  # a tuned backbone is stored in half precision
    again = objective(tune, seed=5)
    again.load(tmp_path / 'run')
    assert all(torch.equal(p, q) for p, q in zip(again.net.state_dict().values(), o.net.state_dict().values()))
    plain, other = load_backbone('tiny', device='cpu'), load_backbone('tiny', 'none', device='cpu')
    if tune == 'both':  # the tuned backbone comes from the run, whatever is handed in
        assert C.load_combiner(tmp_path / 'run', 'cpu', plain).backbone.fingerprint == b.fingerprint
        assert b.fingerprint != plain.fingerprint
    else:
        assert C.load_combiner(tmp_path / 'run', 'cpu', plain).backbone is plain
        with pytest.raises(ValueError, match='trained on tiny with the weights') as e:
            C.load_combiner(tmp_path / 'run', 'cpu', other)
        assert b.fingerprint in str(e.value) and other.fingerprint in str(e.value)


@pytest.mark.e2e
def test_cut_off_and_resumed_is_bit_identical(tmp_path):
    class Stops(C.CombinerTraining):
        calls = 0

        def loss(self, batch):
            type(self).calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().loss(batch)

    straight = fit(objective('text'), tmp_path / 'straight', steps=3, eval_every=1)
    o = objective('text')
    o.__class__ = Stops
    with pytest.raises(KeyboardInterrupt):
        fit(o, tmp_path / 'cut', steps=3, eval_every=1)
    assert last_checkpoint(tmp_path / 'cut').name == 'step-0000001'
    resumed = fit(objective('text'), tmp_path / 'cut', steps=3, eval_every=1)
    for name in ('combiner.safetensors', 'model.safetensors'):
        a, b = load_file(tmp_path / 'straight' / name), load_file(tmp_path / 'cut' / name)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert list(straight.loss) == list(resumed.loss)


def test_a_batch_of_one_and_a_query_alone(tmp_path):
    o = objective()
    for m in o.modules.values():
        m.train()
    loss = o.loss(o.prepare(np.array([3]), np.random.default_rng(0)))
    loss.backward()
    assert loss.item() == 0
    assert o.method().encode_query(torch.randn(1, o.backbone.D), ['red']).shape == (1, o.backbone.D)


def test_dropout_is_off_in_searches_and_on_in_training():
    o = objective()
    x, e = torch.randn(5, o.backbone.D), torch.randn(5, o.backbone.D)
    o.net.train()
    assert not torch.equal(o.net(x, e), o.net(x, e))
    m = o.method()
    assert torch.equal(m.encode_query(x, ['red'] * 5), m.encode_query(x, ['red'] * 5))


@pytest.mark.parametrize('negatives, columns', [('batch', 5), ('references', 10), ('distractors', 10), ('both', 15)])
def test_more_wrong_answers(negatives, columns):
    o, seen = objective(negatives=negatives), {}
    real = torch.nn.functional.cross_entropy

    def watch(S, own):
        seen['shape'] = tuple(S.shape)
        return real(S, own)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch.nn.functional, 'cross_entropy', watch)
        o.loss(o.prepare(np.arange(5), np.random.default_rng(0)))
    assert seen['shape'] == (5, columns)


def test_images_that_are_missing_are_counted_and_none_is_an_error():
    table, found = pictures()
    odd = table.copy()
    odd.loc[:9, 'target_image'] = 'gone.jpg'
    b = load_backbone('tiny', device='cpu')
    o = C.CombinerTraining(b, C.Combiner(b.D, 8, 8), odd, found, {'triplets': judge(found, table)})
    assert len(o.data) == 50 and o.counts == {'triplets without their images': 10}
    with pytest.raises(ValueError, match='none of 60 triplets'):
        C.index_triplets(table.assign(target_image='gone.jpg'), {f'p{i}': i for i in range(30)})
    with pytest.raises(ValueError, match='none of 0 triplets'):
        C.index_triplets(table[:0], {'p0': 0})
    assert C.held_out(table.assign(target_image='gone.jpg'), found, 'toy', '') is None
    assert C.held_out(table[:1], found, 'toy', '') is None  # one target: nothing to choose from


def damage(folder, how):
    f = folder / 'combiner.safetensors'
    if how == 'cut':
        f.write_bytes(f.read_bytes()[:200])
    if how == 'empty':
        f.write_bytes(b'')
    if how == 'other widths':
        t = load_file(f)
        t['text_layer.0.weight'] = t['text_layer.0.weight'][:3].contiguous()
        save_file(t, f)
    if how == 'a tensor is missing':
        t = load_file(f)
        t.pop('share.3.bias')
        save_file(t, f)
    if how == 'no json':
        f.with_suffix('.json').unlink()
    if how == 'odd json':
        f.with_suffix('.json').write_text('{"combiner": {"D": 160, "wings": 2}}')


@pytest.mark.parametrize('how', ['cut', 'empty', 'other widths', 'a tensor is missing', 'no json', 'odd json'])
def test_a_damaged_combiner_says_so(how, tmp_path):
    b = load_backbone('tiny', device='cpu')
    C.save_combiner(tmp_path / 'run', C.Combiner(b.D, 8, 8), b)
    damage(tmp_path / 'run', how)
    with pytest.raises(ValueError, match='damaged') as e:
        C.load_combiner(tmp_path / 'run', 'cpu')
    assert 'combiner.safetensors' in str(e.value) and 'train again' in str(e.value)


def test_running_means_rest_unless_asked():
    "A stand-in with a BatchNorm in its vision tower, as ResNets have them."

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.visual, self.transformer = (
                torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
                torch.nn.Linear(2, 2),
            )
            self.logit_scale = torch.nn.Parameter(torch.tensor(1.0))

    class Backbone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()

    for tune, mode, on in (
        ('both', 'eval', False),
        ('both', 'train', True),
        ('text', 'train', False),
        ('image', 'train', True),
    ):
        b = Backbone()
        C.PartiallyFrozen(b, tune, mode).train()
        assert (
            b.model.visual[1].training == on
            and b.model.transformer.training == (tune in ('both', 'text'))
            and not b.model.logit_scale.requires_grad
        )


TWO = '''
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from accelerate import debug_launcher
from cis_nb.methods.combiner import Combiner, query_target_loss

def both(folder):
    for how in (False, True): step(folder, how, how)

def step(folder, symmetric, more):
    "Gradients of one batch of eight, shared by however many processes there are."
    torch.set_num_threads(1); torch.manual_seed(0)
    many = torch.distributed.is_initialized()
    rank, n = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if many else (0, 1)
    net, tower = Combiner(6, 8, 10, dropout=0.), torch.nn.Linear(6, 6)
    x, e, t, d = torch.randn(4, 8, 6)
    mine = slice(rank*8//n, (rank+1)*8//n)
    asked, also = net(tower(x[mine]), e[mine]), tower(d[mine]) if more else None
    loss = query_target_loss(asked, tower(t[mine]), .1, also, symmetric)
    loss.backward()
    grads = {f'{i}': p.grad/n for i,p in enumerate([*net.parameters(), *tower.parameters()])}
    if many:
        for g in grads.values(): torch.distributed.all_reduce(g)
    if rank==0:
        save_file({k: g.contiguous() for k,g in grads.items()}, Path(folder)/f'{n}-{symmetric}-{more}.safetensors')

if __name__=='__main__':
    both(sys.argv[1])
    debug_launcher(both, (sys.argv[1],), 2)
'''


@pytest.mark.e2e
def test_two_processes_have_the_gradient_of_one(tmp_path):
    (tmp_path / 'two.py').write_text(TWO)
    env = dict(os.environ, PYTHONPATH=str(project_root()), OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    done = subprocess.run(
        [sys.executable, str(tmp_path / 'two.py'), str(tmp_path)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for how in ('False-False', 'True-True'):
        one, two = (load_file(tmp_path / f'{n}-{how}.safetensors') for n in (1, 2))
        assert one.keys() == two.keys() and sum(g.abs().sum() for g in one.values()) > 0
        for k in one:
            torch.testing.assert_close(two[k], one[k], rtol=1e-4, atol=1e-6)


@pytest.fixture
def cirr(tmp_path):
    "Twelve pictures in CIRR's layout; one of them cannot be found."
    rng, root = np.random.default_rng(0), tmp_path / 'data' / 'cirr'
    for split in ('train', 'val'):
        names = [f'{split}-{i}' for i in range(12)]
        for n in names[:11]:
            (root / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (80, 70, 3), dtype=np.uint8)).save(root / split / f'{n}.png')
        entries = [
            dict(
                pairid=i,
                reference=names[i],
                target_hard=names[(i + 1) % 6 + i // 6 * 6],
                caption=f'more of {i % 3}',
                img_set=dict(members=names[i // 6 * 6 : i // 6 * 6 + 6]),
            )
            for i in range(12)
        ]
        for path, what in (
            (f'captions/cap.rc2.{split}.json', entries),
            (f'image_splits/split.rc2.{split}.json', {n: f'./{split}/{n}.png' for n in names}),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(json.dumps(what))
    return tmp_path / 'data'


@pytest.mark.e2e
def test_cirr_teaches_and_judges(cirr, monkeypatch):
    monkeypatch.setenv('CIS_DATA', str(cirr))
    given = dict(method='combiner', data='photographs', triplets='cirr', device='cpu', dtype='float32')
    given |= dict(projection=8, hidden=8, steps=2, batch_size=5)
    for tune in ('none', 'image'):
        run = T.train_or_load(T.settings(given | dict(tune=tune)))
        assert {'cirr R@1', 'cirr R@5'} <= set(pd.read_csv(run / 'history.csv').columns)
        best = json.loads((run / 'best.json').read_text())
        assert 'cirr R@1' in best and C.read_combiner(run)[1]['tune'] == tune
    assert T.train_or_load(T.settings(given | dict(tune='image'))) == run
    with pytest.raises(ValueError, match='have no distractors'):
        T.make_objective(T.settings(given | dict(negatives='both')))


@pytest.mark.e2e
def test_mined_triplets_teach_and_the_page_has_its_parts(tmp_path):
    given = dict(method='combiner', world_images=120, cirr=30, samples=300, val_samples=20, steps=2, batch_size=8)
    given |= dict(device='cpu', dtype='float32')
    run, o = T.train_or_load(T.settings(given)), T.make_objective(T.settings(given))
    assert list(o.tasks) == ['cirr', 'triplets'] and o.metric == 'cirr R@1' and len(o.data) == 300
    before = o.evaluation()
    o.load(run)
    after = o.evaluation(seed=4, profile='x')
    results = after.rows
    assert set(results.benchmark) == {'cirr', 'triplets/world'} and set(results.seed) == {4}
    assert len(after.protocols) == 2 and set(results.profile) == {'x'}
    assert results[results.benchmark == 'cirr'].set_index('k').value[1] == pytest.approx(
        json.loads((run / 'best.json').read_text())['cirr R@1']
    )
    for picture in (after.examples.overview(before.examples), after.examples.strips()):
        assert picture.png().startswith(b'\x89PNG')
    assert T.train_or_load(T.settings(given | dict(seed=1))) != run
    only = T.make_objective(T.settings(given | dict(validation='triplets')))
    assert list(only.tasks) == ['triplets'] and only.metric == 'triplets R@1'
    with pytest.raises(ValueError, match="validation: 'genecis' is not allowed: .*'cirr' or 'triplets'"):
        T.settings(given | dict(validation='genecis'))
    with pytest.raises(ValueError, match="validation must be 'cirr' where triplets is 'cirr'"):
        T.settings(given | dict(triplets='cirr', validation='triplets'))


@pytest.mark.e2e
def test_how_triplets_are_drawn_is_asked_for_by_the_training():
    p = T.settings(
        dict(method='combiner', world_images=60, samples=80, val_samples=1, captions='all', validation='cirr')
    )

    def of(**change):
        return pd.read_parquet(C.triplet_folder(p.model_copy(update=change)) / 'triplets.parquet').condition

    plain = of()
    assert plain.str.len().sum() < of(modifiers=True).str.len().sum()

    def folder(**change):
        return C.triplet_folder(p.model_copy(update=change))

    assert folder(lookup='words') != folder() != folder(literal=True)
    given = dict(method='combiner', world_images=60, samples=80, val_samples=1, captions='all')
    assert (
        C.triplet_folder(T.settings(given)) == folder() != C.triplet_folder(T.settings(given | dict(rules='published')))
    )
    with pytest.raises(ValueError, match="lookup: 'lemma' is none of exact, words"):
        folder(lookup='lemma')


def test_published_rules_and_ratings_reach_the_training(monkeypatch):
    asked = {}
    monkeypatch.setattr(C, 'mine_triplets', lambda root, n, **how: asked.update(how))
    C.triplet_folder(T.settings(dict(method='combiner', rules='published', ratings='literal')))
    assert (asked['rules'], asked['ratings']) == ('published', 'literal')
    C.triplet_folder(T.settings(dict(method='combiner')))
    assert (asked['rules'], asked['ratings']) == ('own', 'auto')
    for backbone in ('rn50x4', 'vit_b16'):
        paper = yaml.safe_load((ROOT / f'params/paper/05_train.combiner.{backbone}.yaml').read_text())
        config = T.settings(paper)
        assert (config.rules, config.ratings) == ('published', 'literal')
    with pytest.raises(ValueError, match="rules: 'other' is not allowed"):
        T.settings(dict(method='combiner', rules='other'))


def test_cirr_lies_in_the_folder_or_beside_the_other_data_and_an_error_names_both(tmp_path, monkeypatch):
    mine, all_data = tmp_path / 'mine', tmp_path / 'all'
    (mine / 'cirr').mkdir(parents=True)
    (all_data / 'photos').mkdir(parents=True)
    monkeypatch.delenv('CIS_DATA', raising=False)
    assert cirr_root(str(mine), 30) == (mine / 'cirr').resolve()
    for data in (str(tmp_path / 'nowhere'), 'published'):
        with pytest.raises(
            FileNotFoundError,
            match=rf"data '{data}': CIRR is neither a folder cirr in it nor one in CIS_DATA \(not set\).*data: world",
        ):
            cirr_root(data, 30)
    monkeypatch.setenv('CIS_DATA', str(all_data))
    with pytest.raises(FileNotFoundError, match=r'in CIS_DATA \(.*all\)'):
        cirr_root('photos', 30)
    (all_data / 'cirr').mkdir()
    assert cirr_root('photos', 30) == (all_data / 'cirr').resolve()


def going_on(run, backbone, **given) -> C.Combiner:
    config = configure(C.CombinerConfig, dict(method='combiner', triplets='cirr', start=str(run)) | given)
    return C.started_combiner(backbone, config)


def test_a_training_goes_on_from_the_run_of_another(tmp_path):
    b, sizes = load_backbone('tiny_xs', device='cpu'), dict(projection=8, hidden=16)
    before = C.Combiner(b.D, **sizes, start='sum', normalise_inputs=True)
    C.save_combiner(tmp_path, before, b)
    after = going_on(tmp_path, b, **sizes, dropout=0.25, normalise_inputs=True)
    assert all(torch.equal(v, after.state_dict()[k]) for k, v in before.state_dict().items())
    assert after.settings == before.settings | dict(dropout=0.25)
    with pytest.raises(
        ValueError, match='other settings .projection: 64, there 8, normalise_inputs: False, there True'
    ):
        going_on(tmp_path, b, hidden=16)
    with pytest.raises(ValueError, match='this Combiner was trained on tiny_xs with the weights'):
        going_on(tmp_path, load_backbone('tiny', device='cpu'), **sizes, normalise_inputs=True)


def test_a_run_with_tuned_towers_is_no_start(tmp_path):
    b = load_backbone('tiny_xs', device='cpu')
    C.save_combiner(tmp_path, C.Combiner(b.D, 8, 16), b, tune='text')
    with pytest.raises(ValueError, match=r'has tuned towers \(tune: text\); name a run with tune: none'):
        going_on(tmp_path, b, projection=8, hidden=16)


@pytest.mark.parametrize('start', ['zero', '', 'store/run/none'])
def test_a_start_that_is_nothing_is_refused(start):
    with pytest.raises(ValueError, match='start.*must be random or sum, an experiment of 05_train, or the folder'):
        configure(C.CombinerConfig, dict(method='combiner', start=start))


# ---- published Combiners


def combined(t, x, e):
    "The Combiner of the facts, without dropout."

    def layer(name, v):
        return v @ t[f'{name}.weight'].T + t[f'{name}.bias']

    z = torch.cat([layer('text_projection_layer', e).relu(), layer('image_projection_layer', x).relu()], 1)
    s = layer('dynamic_scalar.3', layer('dynamic_scalar.0', z).relu()).sigmoid()
    v = layer('output_layer', layer('combiner_layer', z).relu())
    return torch.nn.functional.normalize(v + s * e + (1 - s) * x, dim=-1)


def test_the_published_combiner_is_read_and_exported(tmp_path):
    t = tensors(COMBINER)
    torch.save(t, tmp_path / 'combiner_best.pt')
    net = C.read_published_combiner(tmp_path / 'combiner_best.pt')
    assert sum(p.numel() for p in net.parameters()) == 59_003_521
    x, e = torch.randn(2, 3, 640, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(net(x, e), combined(t, x, e), atol=1e-5)
    again = C.read_published_combiner(C.export_combiner(net, tmp_path / 'again.safetensors'))
    assert torch.equal(again(x, e), net(x, e))
    with pytest.raises(ValueError, match=r'not the weights of a Combiner for D = 160: .* wrongly shaped'):
        C.published_combiner(tmp_path / 'again.safetensors', load_backbone('tiny', device='cpu'))


def test_a_combiner_that_normalises_its_inputs_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match='normalise_inputs: .* train with normalise_inputs: false'):
        C.export_combiner(C.Combiner(8, 8, 12, normalise_inputs=True), tmp_path / 'combiner.pt')
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize('inside', ['', 'Combiner'])
def test_a_cut_combiner_names_what_is_missing(tmp_path, inside):
    t = tensors(COMBINER)
    del t['dynamic_scalar.0.bias']
    torch.save({inside: t} if inside else t, tmp_path / 'cut.pt')
    with pytest.raises(ValueError, match='cut.pt: .* 1 missing: dynamic_scalar.0.bias$'):
        C.read_published_combiner(tmp_path / 'cut.pt')


@pytest.mark.parametrize('inside', ['CLIP', ''])
@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_a_combiner_over_its_fine_tuned_clip(tmp_path, monkeypatch, inside, prefix):
    """As in the documented line, a file in half precision and without `num_batches_tracked`; tuned further, it is
    exported in full precision."""
    use_small_rn50x4(monkeypatch)
    t, shapes = clip_tensors(prefix), {k: tuple({640: 16}.get(n, n // 40) or 1 for n in v) for k, v in COMBINER.items()}
    torch.save({'epoch': 3, inside: t} if inside else t, tmp_path / 'clip.pt')
    torch.save(tensors(shapes), tmp_path / 'combiner.pt')
    method = C.published_combiner(
        tmp_path / 'combiner.pt', load_backbone('rn50x4', pretrained=str(tmp_path / 'clip.pt'))
    )
    b = method.backbone
    state = b.model.state_dict()
    assert {k for k in state if not k.endswith('num_batches_tracked')} == {k.removeprefix('module.') for k in t}
    assert all(torch.equal(state[k.removeprefix('module.')].cpu(), v.float()) for k, v in t.items())
    x, texts = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)), ['is red', 'has two dogs']
    q = torch.as_tensor(method.encode_query(x, texts))
    assert torch.allclose(q.cpu(), combined(tensors(shapes), x, torch.as_tensor(b.encode_text(texts)).cpu()), atol=1e-5)
    with torch.no_grad():
        for p in b.parameters():
            p.mul_(1.0001)
    for ending in ('pt', 'safetensors'):
        file = export_clip(b, tmp_path / f'tuned.{ending}')
        again = load_backbone('rn50x4', pretrained=str(file)).model.state_dict()
        assert all(torch.equal(again[k], v) for k, v in b.model.state_dict().items())
    assert {k.removeprefix('module.') for k in t} <= set(torch.load(tmp_path / "tuned.pt", weights_only=True)['CLIP'])


def test_a_published_combiner_of_clip4cir_pads_images(tmp_path):
    b, wide = load_backbone('tiny', device='cpu'), Image.new('RGB', (200, 50), 'white')
    wide.paste('red', (0, 0, 50, 50))
    file = C.export_combiner(C.Combiner(b.D, 8, 12), tmp_path / 'combiner.pt')
    assert C.published_combiner(file, b).backbone is b
    padded = C.published_combiner(file, b, target_pad=1.25).backbone
    assert torch.equal(padded.encode_image([wide]), b.encode_image([pad_to_ratio(wide)]))
    assert not torch.equal(padded.encode_image([wide]), b.encode_image([wide]))
