"CompoDiff: text states, the mixture of tasks, masks, stages that follow each other, resuming, published settings."

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from denoiser_files import released_file
from PIL import Image
from projects import ROOT

from cis_nb import api
from cis_nb import train as T
from cis_nb.api import Queries, configure
from cis_nb.backbones.denoiser import RELEASED_DENOISER, Denoiser, DenoiserShape, denoiser_names
from cis_nb.backbones.features import Features, l2_normalize
from cis_nb.backbones.loading import load_backbone
from cis_nb.core.experiment_files import read_params
from cis_nb.data.image_sources import ImageSource
from cis_nb.methods import compodiff as C
from cis_nb.methods.combiner import Combiner, save_combiner
from cis_nb.methods.diffusion import DIFFUSION_STEPS, add_noise
from cis_nb.mining.scene_edits import KeywordTexts
from cis_nb.training.loop import train

SMALL = dict(depth=1, heads=2, cross_heads=2, head_dim=8)
BASE = dict(method='compodiff', backbone='tiny_xs', world_images=40, device='cpu', dtype='float32', **SMALL)
BASE |= dict(steps=3, batch_size=8, val_samples=4, sampling_steps=2, samples=60, inpainted=8, cirr=36, eval_every=0)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope='module', autouse=True)
def store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_STORE', str(tmp_path_factory.mktemp('store')))
        yield


@pytest.fixture(scope='module')
def xs():
    return load_backbone('tiny_xs', device='cpu')


def settings(**given):
    return T.settings(BASE | given)


def dots(n=4, name='dots'):
    "Images of one colour each, wider than high."

    def load(i):
        return Image.new('RGB', (40, 32), (60 * int(i), 90, 30))

    return ImageSource([str(i) for i in range(n)], load, name)


def method(backbone, **more) -> C.CompoDiffMethod:
    torch.manual_seed(0)
    net = Denoiser(DenoiserShape(backbone.D, 1, 2, 2, 8, backbone.W)).eval()
    return C.CompoDiffMethod(name='compodiff', title='CompoDiff', backbone=backbone, net=net, **dict(steps=3) | more)


def made_up(n=6, D=8, seed=0) -> C.FeatureRows:
    array = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    ids = [f'i{k}' for k in range(n)]
    return C.FeatureRows(Features(array, ids, {i: k for k, i in enumerate(ids)}), ids)


TEXTS = [(f'a thing of {"very " * (k % 4)}number {k}',) for k in range(6)]


@pytest.mark.parametrize('padding', C.PADDINGS)
def test_kept_text_states_are_those_of_each_text_alone(xs, padding):
    texts = [t for (t,) in TEXTS] + ['', 'word ' * 60]
    states, kept = C.TextStates(xs, padding), C.StoredStates(xs, texts, padding)
    size = states.mebibytes(texts)
    assert size == pytest.approx(kept.states.nbytes / 2**20, rel=1e-6)
    assert not states.keep([texts], 0.99 * size) and states.keep([texts[:3], texts], 1.01 * size)
    assert states.kept[texts[2]] is not states.kept[texts[3]] and {*states.kept} == {*texts}
    found, mask = states(texts)
    for k, text in enumerate(texts):
        alone, one = C.token_states(xs, [text], padding)
        torch.testing.assert_close(found[k, : alone.shape[1]], alone[0], atol=1e-5, rtol=0)
        assert mask is None or (mask[k, : alone.shape[1]].all() and not mask[k, alone.shape[1] :].any())
    assert found.shape[1] == xs.context and (mask is None) == (padding == 'literal')


def test_texts_longer_than_the_context_and_texts_that_are_none(xs):
    assert C.token_states(xs, ['word ' * 60])[0].shape[1] == xs.context
    with pytest.raises(TypeError, match='number 1 is None'):
        C.token_states(xs, ['a', None])

    class NoTower:
        name = 'made-up'

    with pytest.raises(ValueError, match="padding: 'literal' needs a CLIP with a text tower, not made-up; use masked"):
        C.token_states(NoTower(), ['a'], 'literal')


def test_the_rows_of_a_single_task_are_those_asked_for():
    data = C.DiffusionData([C.DiffusionTask('text to image', TEXTS, made_up())], dropout=0.0)
    b = data.draw([4, 1], np.random.default_rng(0))
    assert b.texts == [TEXTS[4][0], TEXTS[1][0]] and torch.equal(b.target, made_up()[np.array([4, 1])])
    assert not b.reference.any() and not b.mask.any() and len(data) == 6
    assert data.texts == [sorted({'', *(t for (t,) in TEXTS)})]


def test_what_a_mixture_draws_belongs_together():
    masks = np.zeros((6, 64, 64), bool)
    masks[np.arange(6), np.arange(6)] = True  # the row that is marked is the number of the sample
    tasks = [
        C.DiffusionTask('text to image', TEXTS, made_up()),
        C.DiffusionTask('inpainting', TEXTS, made_up(seed=1), made_up(seed=2), C.pack_masks(masks)),
    ]
    b = C.DiffusionData(tasks, (0.25, 0.75), dropout=0.0).draw(np.arange(600), np.random.default_rng(0))
    assert np.bincount(b.task) / 600 == pytest.approx([0.25, 0.75], abs=0.05)
    number = {t: k for k, (t,) in enumerate(TEXTS)}
    for task, text, target, reference, mask in zip(b.task, b.texts, b.target, b.reference, b.mask):
        k = np.array([number[text]])
        assert torch.equal(target, tasks[task].targets[k][0])
        assert torch.equal(reference, tasks[1].references[k][0]) if task else not reference.any()
        assert mask[k[0]].all() == bool(task) and mask.sum() == 64 * task
    assert 0 <= b.t.min() and b.t.max() < DIFFUSION_STEPS and abs(b.noise.std() - 1) < 0.05


def keyword_shards(n: int):
    "What is read of image triplets: every second one has a written instruction."
    rows = [
        dict(removed=f'old{k}', added=f'new{k}', instruction=f'said{k}', route=('keyword', 'edits')[k % 2])
        for k in range(n)
    ]
    return SimpleNamespace(table=pd.DataFrame(rows))


def test_keyword_triplets_have_a_new_template_in_each_draw_and_are_turned_half_of_the_time():
    texts, turned = (KeywordTexts(keyword_shards(6), 6, 47, back) for back in (False, True))
    task = C.DiffusionTask('triplets', texts, made_up(), made_up(seed=1), turned=turned)
    data, seen = C.DiffusionData([task], dropout=0.0), []
    for seed in range(1500):
        b = data.draw([2, 3], np.random.default_rng(seed))
        assert b.texts[1] == 'said3' and torch.equal(b.target[1:], task.targets[[3]])
        back = b.texts[0] in turned[2]
        first, second = (task.references, task.targets) if back else (task.targets, task.references)
        assert torch.equal(b.target[:1], first[[2]]) and torch.equal(b.reference[:1], second[[2]])
        seen.append(b.texts[0])
    assert {*seen} == {*texts[2], *turned[2]} and len({*seen}) == 90  # 45 different templates
    assert np.mean([s in turned[2] for s in seen]) == pytest.approx(0.5, abs=0.05)
    assert len(set(data.texts[0])) == 1 + 3 * 90 + 3


@pytest.mark.parametrize('rival', [dict(method='combiner', triplets='synthetic'), dict(method='artemis')])
def test_rivals_read_the_redrawn_instructions_of_stage_two(xs, rival):
    given = dict(backbone='tiny_xs', world_images=40, samples=60, edits=0.0, cirr=36, device='cpu', redrawn=47)
    c, two = T.settings(given | rival), settings(stage='2', start='none', edits=0.0, redrawn=47)
    mine, other = (api.get('method', x.method).objective(xs, x) for x in (c, two))
    triplets = other.data.tasks[-1]
    assert {t for row in triplets.texts for t in row} == {t for row in mine.drawn.texts for t in row}
    rows, seen = np.zeros(300, np.int64), mine.image_inputs.array
    images, texts = mine.prepare(rows, np.random.default_rng(0))
    said, turned = triplets.drawn_texts(rows, np.random.default_rng(0))
    assert texts == said and 90 < turned.sum() < 210
    reference, target = seen[mine.data.rows[0, :2]]
    ref, to = images.chunk(2)
    for k, back in enumerate(turned):
        assert torch.equal(ref[k], torch.from_numpy(np.array(target if back else reference)))
        assert torch.equal(to[k], torch.from_numpy(np.array(reference if back else target)))
    first = mine.loss(mine.prepare(np.arange(8), np.random.default_rng(1)))
    assert torch.isfinite(first) and not mine.encode_texts(['a cup']).requires_grad
    stored = api.get('method', c.method).objective(xs, T.settings(given | rival | dict(redrawn=0)))
    assert stored.drawn is None and torch.is_tensor(stored.prepare(np.arange(4), np.random.default_rng(0))[1])


def test_only_synthetic_triplets_are_drawn_anew():
    with pytest.raises(ValueError, match="redrawn must be 0 where triplets is 'cirr'"):
        T.settings(dict(method='combiner', triplets='cirr', redrawn=2))


def test_published_trainings_on_synthetic_triplets_read_the_same_instructions():
    names = ('05_train.compodiff.stage2', '05_train.combiner_synthetic.vit_l', '05_train.artemis.vit_l')
    read = [read_params(ROOT / 'params' / 'paper' / f'{name}.yaml') for name in names]
    assert {(p['shards'], p['redrawn']) for p in read} == {('synthtriplets18m', 47)}


def test_few_templates_differ_between_triplets():
    texts = KeywordTexts(keyword_shards(94), 94, 2)
    forms = {t.replace(f'old{k}', 'A').replace(f'new{k}', 'B') for k in range(0, 94, 2) for t in texts[k]}
    assert len(forms) == 45 and all(len(texts[k]) == 2 for k in range(0, 94, 2))
    with pytest.raises(IndexError):
        texts[94]


@pytest.mark.parametrize('shares', [(1.0,), (0.5, 0.6), (-0.5, 1.5), (float('nan'), 1.0)])
def test_shares_that_are_none(shares):
    task = C.DiffusionTask('text to image', TEXTS, made_up())
    with pytest.raises(ValueError, match='task_mix: .* must be 2 shares from 0 to 1 whose sum is 1'):
        C.DiffusionData([task, task], shares)


def test_an_image_without_a_feature_is_named():
    rows = made_up()
    with pytest.raises(KeyError, match="the first: 'gone'"):
        C.FeatureRows(rows.features, ['i0', 'gone'])


class Constant(torch.nn.Module):
    "Predicts 2 everywhere, and remembers what it was given."

    device, shape = torch.device('cpu'), DenoiserShape(D=8)

    def forward(self, x, t, text, ref, mask, text_mask):
        self.seen = dict(x=x, t=t, text=text, ref=ref, mask=mask, text_mask=text_mask)
        return torch.full_like(x, 2.0)


@pytest.mark.parametrize('memory', [0, 100])
def test_the_loss_is_the_squared_error_of_the_clean_embedding(xs, memory):
    task = C.DiffusionTask('triplets', TEXTS, made_up(), made_up(seed=1))
    o = C.CompoDiffTraining(xs, Constant(), C.DiffusionData([task], dropout=0.0), {}, scale=3.0, text_memory=memory)
    batch = o.prepare(np.arange(6), np.random.default_rng(0))
    assert (batch.states is not None) == bool(memory)
    z, seen = 3 * made_up()[np.arange(6)], o.net
    torch.testing.assert_close(o.errors(batch), (z - 2).square().mean(1))
    torch.testing.assert_close(o.loss(batch), (z - 2).square().mean())
    torch.testing.assert_close(seen.seen['x'], add_noise(z, batch.t, batch.noise))
    torch.testing.assert_close(seen.seen['ref'], 3 * made_up(seed=1)[np.arange(6)])
    states, mask = C.token_states(xs, batch.texts)
    torch.testing.assert_close(seen.seen['text'] * mask[..., None], states * mask[..., None], atol=1e-5, rtol=0)
    assert torch.equal(seen.seen['text_mask'], mask)
    o.predicts = 'noise'
    torch.testing.assert_close(o.errors(batch), (batch.noise - 2).square().mean(1))


@pytest.mark.e2e
def test_what_the_denoiser_predicts_is_kept_with_the_run(xs):
    config = settings(stage='1', predicts='noise')
    run = T.train_or_load(config)
    m = T.load_method(run, 'cpu')
    assert (m.predicts, m.first) == ('noise', 899) and T.make_objective(config).predicts == 'noise'
    assert T.train_or_load(settings(stage='1')) != run
    with pytest.raises(ValueError, match="other settings .predicts: 'x0', there 'noise'"):
        T.make_objective(settings(stage='2', start=str(run)))


def test_features_that_are_no_numbers_end_the_training_at_their_step(xs, tmp_path):
    rows = made_up(D=xs.D)
    rows.features.array[5, 2] = np.inf
    torch.manual_seed(0)
    net = Denoiser(DenoiserShape(xs.D, 1, 2, 2, 8, xs.W))
    o = C.CompoDiffTraining(xs, net, C.DiffusionData([C.DiffusionTask('text to image', TEXTS, rows)]), {})
    with pytest.raises(ValueError, match="features are not finite .the first: 'i5'.; delete this folder"):
        train(o, tmp_path, steps=1, batch_size=6, device='cpu')


def ask(m, texts, references, ids=None, **more):
    return m.encode_queries(Queries(ids or list('abcdef')[: len(texts)], texts, references, dots(), **more))


def test_a_result_does_not_depend_on_the_block_or_on_the_queries_beside_it(xs):
    m, texts = method(xs, samples=2, eta=1.0), [['a'], ['a red hat on a table'], ['', 'b'], [], ['c'], ['d']]
    refs, masks = ['0', '1', None, '2', None, '3'], torch.zeros(6, 64, 64, dtype=torch.bool)
    masks[1, :, :30] = masks[4, 5] = True
    q = Queries(list('abcdef'), texts, refs, dots(), ['', 'a cat', '', None, 'snow', ''], masks)
    whole = m.encode_queries(q)
    torch.testing.assert_close(m.encode_queries(q, block=2), whole, atol=2e-5, rtol=0)
    for k in range(6):
        torch.testing.assert_close(m.encode_queries(q.part(slice(k, k + 1))), whole[k : k + 1], atol=2e-5, rtol=0)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(6))


def test_queries_without_any_reference_need_no_images(xs):
    m = method(xs)
    q = m.encode_queries(Queries(['a', 'b'], [['a red hat'], ['a cat']], [None, None]))
    torch.testing.assert_close(q, ask(m, [['a red hat'], ['a cat']], [None, None]), atol=1e-5, rtol=0)
    other = replace(m, w_image=0.0).encode_queries(Queries(['a', 'b'], [['a red hat'], ['a cat']], [None, None]))
    torch.testing.assert_close(q, other, atol=1e-5, rtol=0)  # the weight of an image that is not there


def test_an_empty_text_and_a_negative_text_that_is_the_text(xs):
    m = method(xs)
    by_image = ask(replace(m, w_text=0.0), [['a cat'], ['']], ['0', '1'])
    torch.testing.assert_close(ask(m, [['']], ['1'], ['b']), by_image[1:], atol=1e-4, rtol=0)
    torch.testing.assert_close(ask(m, [[]], ['1'], ['b']), by_image[1:], atol=1e-4, rtol=0)
    cancelled = [ask(replace(m, w_text=w), [['a cat']], ['0'], negative=['a cat']) for w in (0.0, 7.5)]
    torch.testing.assert_close(*cancelled, atol=1e-4, rtol=0)
    assert (cancelled[0] - by_image[:1]).norm() > 1e-3  # the negative text takes the place of the empty one


@pytest.mark.parametrize('w_image', [0.0, 1.0, 1.5])
@pytest.mark.parametrize('w_text', [0.0, 1.0, 7.5])
def test_every_weight_and_a_single_step_give_a_unit_vector(xs, w_image, w_text):
    m = method(xs, steps=1, w_image=w_image, w_text=w_text)
    assert ask(m, [['a cat']], ['0']).norm() == pytest.approx(1.0, abs=1e-5)


def test_masks_of_another_size_or_type(xs):
    m, good = method(xs), torch.zeros(2, 64, 64, dtype=torch.bool)
    for wrong, words in (
        (good[:, :32], r'got bool \(2, 32, 64\)'),
        (good.float(), r'got float32 \(2, 64, 64\)'),
        (good.to(torch.uint8) * 255, 'got uint8'),
        (good.numpy(), 'got ndarray'),
    ):
        with pytest.raises(ValueError, match=rf'mask: must be a tensor \(2, 64, 64\) of bool.*{words}'):
            ask(m, [['a'], ['b']], ['0', '1'], mask=wrong)
    with pytest.raises(ValueError, match='2 ids.*1 mask'):
        ask(m, [['a'], ['b']], ['0', '1'], mask=good[:1])


def test_a_whole_mask_leaves_nothing_of_the_reference(xs):
    m, whole = method(xs), torch.ones(2, 64, 64, dtype=torch.bool)
    ref = m.masked_references(Queries(['a', 'b'], [['x']] * 2, ['0', '3'], dots(), mask=whole), torch.zeros(2, xs.D))
    nothing = xs.encode_image(torch.zeros(1, 3, 64, 64)).detach()
    torch.testing.assert_close(ref, nothing.expand(2, -1), atol=1e-5, rtol=0)


def test_masked_references_are_encoded_once_and_again_for_another_mask(xs):
    half = torch.zeros(2, 64, 64, dtype=torch.bool)
    half[:, :32], loaded, images = True, [], dots(name='masked once')
    counted = replace(images, load=lambda i: loaded.append(i) or images.load(i))

    def ask_with(mask):
        given = Queries(['a', 'b'], [['x']] * 2, ['0', '3'], counted, mask=mask)
        return method(xs).masked_references(given, torch.zeros(2, xs.D))

    first, again = ask_with(half), ask_with(half.clone())
    assert torch.equal(first, again) and loaded == ['0', '3']
    one = half.clone()
    one[0] = False  # no mask: its row is not touched, the other one is that of before
    other = ask_with(one)
    assert loaded == ['0', '3', '3'] and torch.equal(other[0], torch.zeros(xs.D))
    torch.testing.assert_close(other[1], first[1], atol=1e-5, rtol=0)


def test_the_fingerprint_holds_network_settings_and_reader(xs):
    m = method(xs)
    assert m.fingerprint == method(xs).fingerprint
    other = [replace(m, **{k: v}) for k, v in dict(steps=4, samples=2, w_text=1.0, eta=1.0, seed=1, scale=2.0).items()]
    other += [replace(m, states=C.TextStates(xs, 'literal'))]
    changed = method(xs)
    with torch.no_grad():
        changed.net.out.weight[0, 0] += 1.0
    assert len({x.fingerprint for x in [m, *other, changed]}) == len(other) + 2


def test_settings_that_are_refused():
    for given, words in (
        (dict(stage='2'), "start must name a run or an experiment of stage '1'"),
        (dict(stage='finetune'), "start must name a run or an experiment of stage '2'"),
        (dict(start='05_train.compodiff.stage1'), "start must be empty where stage is '1'"),
        (dict(stage='third'), "stage: 'third' is not allowed"),
        (dict(task_mix=[1.0]), 'task_mix: .* is not allowed: give three shares'),
        (dict(condition_dropout=1.5), 'condition_dropout: 1.5 is not allowed'),
        (dict(head_dim=2), 'head_dim: 2 is not allowed'),
    ):
        with pytest.raises(ValueError, match=words):
            settings(**given)


@pytest.fixture(scope='module')
def stages():
    "Runs of the three stages, each from the one before."
    first = T.train_or_load(settings())
    second = T.train_or_load(settings(stage='2', start=str(first)))
    return first, second, T.train_or_load(settings(stage='finetune', start=str(second)))


@pytest.mark.e2e
def test_each_stage_goes_on_from_the_one_before(stages, xs):
    first, second, third = stages
    for run, stage, before in ((second, '2', first), (third, 'finetune', second)):
        config = settings(stage=stage, start=str(before))
        assert T.train_or_load(config) == run
        begun = T.make_objective(config)
        assert all(
            torch.equal(v, begun.net.state_dict()[k]) for k, v in C.read_compodiff(before)[0].state_dict().items()
        )
        begun.load(run)
        m = T.load_method(run, 'cpu')
        torch.testing.assert_close(ask(m, [['a']], ['0']), ask(begun.method(), [['a']], ['0']), atol=1e-6, rtol=0)
        assert begun.metric == 'cirr R@1' and begun.metric in pd.read_csv(run / 'history.csv')
    assert T.make_objective(settings(stage='2', start=str(first))).counts.keys() == {
        'text to image',
        'inpainting',
        'triplets',
    }


@pytest.mark.e2e
def test_a_start_that_does_not_fit(stages, xs, tmp_path, monkeypatch):
    first, second, _ = stages
    for given, words in (
        (dict(stage='finetune', start=str(first)), "a run of stage '1', and stage 'finetune' goes on from stage '2'"),
        (dict(stage='2', start=str(second)), "a run of stage '2', and stage '2' goes on from stage '1'"),
        (dict(stage='2', start=str(first), depth=2), r'other settings \(depth: 2, there 1\); give the same here'),
        (dict(stage='2', start=str(first), scale=2.0), r'other settings \(scale: 2.0, there 1.0\)'),
        (dict(stage='2', start=str(first), padding='literal'), "padding: 'literal', there 'masked'"),
        (dict(stage='2', start=str(first), backbone='tiny'), 'this denoiser was trained on tiny_xs with the weights'),
        (dict(stage='2', start=str(first), pretrained='none'), 'this denoiser was trained on tiny_xs with the weights'),
    ):
        config = T.settings(BASE | dict(pretrained='default') | given)
        with pytest.raises(ValueError, match=words):
            C.started_denoiser(config, load_backbone(config.backbone, config.pretrained, device='cpu'))
    monkeypatch.setattr(C, 'states_encoder', lambda names, backbone: load_backbone('tiny_xs', 'none', device='cpu'))
    for load in (
        lambda: C.load_compodiff(first, 'cpu'),
        lambda: C.started_denoiser(settings(stage='2', start=str(first)), xs),
    ):
        with pytest.raises(ValueError, match='this denoiser read texts by tiny_xs with the weights .*, and here are'):
            load()
    monkeypatch.undo()
    combiner = save_combiner(tmp_path / 'combiner', Combiner(xs.D, 8, 8), xs)
    with pytest.raises(FileNotFoundError, match='compodiff.safetensors is missing: .*not a run of `method: compodiff`'):
        C.started_denoiser(settings(stage='2', start=str(combiner)), xs)
    with pytest.raises(FileNotFoundError, match='run the experiment 05_train.nowhere of the same profile first'):
        C.started_denoiser(settings(stage='2', start='05_train.nowhere'), xs)
    free = C.started_denoiser(settings(stage='2', start='none'), xs).state_dict()
    assert all(torch.equal(v, free[k]) for k, v in C.started_denoiser(settings(), xs).state_dict().items())


@pytest.mark.e2e
def test_a_stage_begins_anew_from_another_start(stages, xs, monkeypatch):
    first, *_ = stages
    plugin, config = C.CompoDiffPlugin(), settings(stage='2', start=str(first))
    before = plugin.inputs(xs, config)
    assert before == plugin.inputs(xs, config) and before[0] == first.name
    other = first.with_name('tiny_xs-compodiff-world-0123')
    monkeypatch.setattr(C, 'start_run', lambda start: other)
    assert plugin.inputs(xs, config) != before
    assert plugin.inputs(xs, settings(stage='2', start='x', task_mix=[0.5, 0.0, 0.5])) != before


@pytest.mark.e2e
def test_a_training_in_half_precision_learns_from_what_its_key_names(stages, xs):
    "Features, triplets and kept states are those of full precision."
    config = settings(stage='2', start=str(stages[0]), steps=100)
    plain = C.CompoDiffPlugin().objective(xs, config)
    with torch.autocast('cpu', torch.bfloat16):
        half = C.CompoDiffPlugin().objective(xs, config)
    assert plain.states.kept
    for a, b in zip(plain.data.tasks, half.data.tasks):
        assert a.texts == b.texts and a.targets.features.path == b.targets.features.path
    assert {s.folder for s in plain.states.kept.values()} == {s.folder for s in half.states.kept.values()}


class Killed(Exception):
    pass


@pytest.mark.e2e
def test_a_killed_training_ends_as_an_uninterrupted_one(stages, xs, tmp_path, monkeypatch):
    "Every draw is a function of seed and step."
    config, how = settings(stage='2', start=str(stages[0])), dict(steps=6, batch_size=8, eval_every=3, device='cpu')

    def objective():
        return C.CompoDiffPlugin().objective(xs, config)

    train(objective(), tmp_path / 'whole', **how)
    calls = []

    def after_step(self):
        calls.append(0)
        if len(calls) == 5:
            raise Killed

    monkeypatch.setattr(C.CompoDiffTraining, 'after_step', after_step)
    with pytest.raises(Killed):
        train(objective(), tmp_path / 'cut', **how)
    monkeypatch.undo()
    torch.manual_seed(123)
    train(objective(), tmp_path / 'cut', **how)
    a, b = (C.read_compodiff(tmp_path / name)[0].state_dict() for name in ('whole', 'cut'))
    assert all(torch.equal(a[k], b[k]) for k in a)
    histories = [pd.read_csv(tmp_path / n / 'history.csv').drop(columns='items_per_s') for n in ('whole', 'cut')]
    pd.testing.assert_frame_equal(*histories)


@pytest.mark.e2e
def test_fashioniq_has_several_tasks_and_one_metric(xs):
    config = settings(stage='finetune', start='none', triplets='fashioniq', fashioniq=60)
    o = C.CompoDiffPlugin().objective(xs, config)
    assert [t.name for t in o.data.tasks] == [*C.CATEGORIES] == [*o.tasks]
    assert o.data.shares == pytest.approx([len(t) / len(o.data) for t in o.data.tasks])
    found = o.validate()
    k = o.metric.removeprefix('mean R@')
    assert found[o.metric] == pytest.approx(np.mean([found[f'{c} R@{k}'] for c in C.CATEGORIES]))
    assert C.CompoDiffPlugin().variant(config) == 'compodiff_fashioniq'


@pytest.mark.e2e
def test_shards_cut_short_and_data_without_triplets_or_masks(stages, xs, tmp_path):
    config = settings(stage='2', start='none')
    folder = C.synthetic_shards(xs, config).folder
    copy = tmp_path / 'shards'
    copy.mkdir()
    for f in folder.iterdir():
        (copy / f.name).write_bytes(f.read_bytes())
    given = settings(stage='2', start='none', shards=str(copy))
    assert C.synthetic_shards(xs, given).key == C.synthetic_shards(xs, config).key
    tar = next(copy.glob('*.tar'))
    tar.write_bytes(tar.read_bytes()[:-2000])
    with pytest.raises(ValueError, match='1 of 1 shards cannot be used.*shard cut short'):
        C.CompoDiffPlugin().objective(xs, given)
    photos = settings(stage='2', start='none', data=str(C.captions_root('world', 40)))
    with pytest.raises(ValueError, match='has no synthetic triplets; give a folder of shards'):
        C.synthetic_shards(xs, photos)
    with pytest.raises(ValueError, match="masks: 'auto' has none for data .*or leave inpainting out"):
        C.stage_two_tasks(xs, photos)


def random_clipseg(folder: Path):
    "A CLIPSeg with random weights, whose tokens are letters."
    import json

    from open_clip.tokenizer import bytes_to_unicode
    from transformers import (
        CLIPSegConfig,
        CLIPSegForImageSegmentation,
        CLIPSegProcessor,
        CLIPTokenizer,
        ViTImageProcessor,
    )

    letters = list(bytes_to_unicode().values())
    vocabulary = [*letters, *(f'{c}</w>' for c in letters), '<|startoftext|>', '<|endoftext|>']
    folder.mkdir()
    (folder / 'vocab.json').write_text(json.dumps({t: i for i, t in enumerate(vocabulary)}))
    (folder / 'merges.txt').write_text('#version: 0.2\n')
    n, small = len(vocabulary), dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = dict(small, vocab_size=n, bos_token_id=n - 2, eos_token_id=n - 1, pad_token_id=n - 1)
    vision = dict(small, image_size=32, patch_size=8)
    head = dict(extract_layers=[0, 1], reduce_dim=8, decoder_num_attention_heads=2, decoder_intermediate_size=16)
    torch.manual_seed(0)
    model = CLIPSegForImageSegmentation(
        CLIPSegConfig(text_config=text, vision_config=vision, projection_dim=16, **head)
    )
    model.save_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=77)
    CLIPSegProcessor(ViTImageProcessor(size=dict(height=32, width=32)), tokenizer).save_pretrained(folder)


@pytest.mark.e2e
def test_clipseg_masks_a_term_of_each_caption(xs, tmp_path, monkeypatch):
    pytest.importorskip('transformers')
    random_clipseg(tmp_path / 'clipseg')
    segment, images = C.ClipSeg(str(tmp_path / 'clipseg'), 'cpu'), [dots().load(i) for i in '0123']
    masks = segment(images, ['cat', 'hat', 'a long term', 'x'])
    assert masks.shape == (4, 64, 64) and masks.dtype == bool
    assert (segment(images[2:3], ['a long term'])[0] == masks[2]).mean() > 0.99  # one image is a batch, too
    asked = []

    def half(self, images, words):
        asked.extend(words)
        found = np.zeros((len(words), 64, 64), bool)
        found[:, :20] = [[w != 'sheep'] for w in words] if 'sheep' in words else True
        return found

    monkeypatch.setattr(C.ClipSeg, '__call__', half)
    root = str(C.captions_root('world', 40))
    found = C.masked_images(xs, root, 0, 8, str(tmp_path / 'clipseg'), parser='world')
    assert len(found.ids) == 8 and all(any(w in t for t in found.texts) for w in asked) and len(asked) == 8
    task = C.inpainting_task(xs, root, 0, found)
    assert task.masks.shape == (8, 512) and len(task) == 8 and not torch.equal(task.references[[0]], task.targets[[0]])
    monkeypatch.setattr(C.ClipSeg, '__call__', lambda self, images, words: np.ones((len(words), 64, 64), bool))
    with pytest.raises(ValueError, match='none of 7 images of .* has a mask of an object term'):
        C.masked_images(xs, root, 0, 7, str(tmp_path / 'clipseg'), parser='world')


STAGES = {'stage1': 'stage1', 'stage2': 'stage2', 'finetune': 'fine-tuning'}


@pytest.mark.parametrize('stage', STAGES)
def test_the_published_settings_are_those_of_the_paper(stage):
    printed = pd.read_csv(ROOT / 'cis_nb/paper/compodiff_hyperparameters.csv', dtype=str)
    printed = printed[printed.setting == f'stage={STAGES[stage]}'].set_index('metric').value
    c = T.settings(read_params(ROOT / f'params/paper/05_train.compodiff.{stage}.yaml') | dict(device='cpu'))
    numbers = dict(
        diffusion_steps=DIFFUSION_STEPS,
        sampling_steps=c.sampling_steps,
        dropout=c.dropout,
        weight_decay=c.weight_decay,
        batch_size=c.batch_size,
        iterations=c.steps,
        learning_rate=c.lr,
        ema_decay=C.ema_decay(c.steps, c.ema),
        denoiser_depth=c.depth,
        denoiser_heads=c.heads,
        denoiser_head_channels=c.head_dim,
    )
    assert {k: float(printed[k]) for k in numbers} == numbers
    assert c.cross_heads == c.heads and c.schedule == 'constant'
    assert printed.image_encoder == printed.text_encoder == 'CLIP-L/14' and c.backbone == 'vit_l'
    assert printed.sampling_variance_method == 'DDIM' and C.SamplerSettings().noise_share == 0
    assert printed.noise_schedule == 'cosine'
    assert (c.task_mix == [0.3, 0.3, 0.4], c.condition_dropout) == (True, 0.1)
    known = {*numbers, 'image_encoder', 'text_encoder', 'sampling_variance_method', 'noise_schedule'}
    elsewhere = {'conditions'}  # the next test
    assert {*printed.index} - known - elsewhere == {'optimizer', 'input_tokens', 'training_dataset'}


def test_the_released_file_is_a_method_over_its_two_backbones(tmp_path):
    given = released_file(tmp_path / 'model.safetensors')
    image, text = SimpleNamespace(name='vit_l', D=768), SimpleNamespace(name='vit_g', W=1280)
    m = C.published_compodiff(tmp_path / 'model.safetensors', 'cpu', image, text)
    assert (m.net.shape, m.backbone, m.states.backbone, m.states.padding) == (RELEASED_DENOISER, image, text, 'literal')
    own = m.net.state_dict()
    assert all(torch.equal(own[name], given[k]) for k, name in denoiser_names(m.net).items())
    for place, width in dict(image=768, text=1280).items():
        both = dict(image=image, text=text) | {place: SimpleNamespace(name='other', D=512, W=512)}
        with pytest.raises(ValueError, match=f'{place}: other has width 512, and the denoiser of .* reads {width}'):
            C.published_compodiff(tmp_path / 'model.safetensors', 'cpu', **both)


@pytest.mark.e2e
@pytest.mark.parametrize('stage', STAGES)
def test_the_tasks_of_a_stage_give_the_conditions_of_the_paper(stage, xs):
    printed = pd.read_csv(ROOT / 'cis_nb/paper/compodiff_hyperparameters.csv', dtype=str)
    (asked,) = printed.value[(printed.setting == f'stage={STAGES[stage]}') & (printed.metric == 'conditions')]
    named = dict(z_cT='text', z_iR='reference', z_cM='mask')
    o = C.CompoDiffPlugin().objective(xs, settings(stage=stage.removeprefix('stage'), start='none'))
    given = set().union(*({*C.conditions_of(t).split(', ')} for t in o.data.tasks))
    assert given == {named[condition] for condition in asked.split(', ')}


def test_trained_on_is_said_in_words():
    plugin = C.CompoDiffPlugin()
    said = [plugin.trained_on(settings(stage=s, start='none').model_dump())[0] for s in ('1', '2', 'finetune')]
    assert said == ['captions of world', 'captions, masks and synthetic triplets of world', 'cirr triplets']
    assert [plugin.variant(settings(stage=s, start='none')) for s in ('1', '2', 'finetune')] == [
        'compodiff_stage1',
        'compodiff',
        'compodiff_cirr',
    ]
    assert configure(C.CompoDiffConfig, dict(pretrained='default')).ema == 0.9999


def test_a_query_read_by_its_features_alone(xs):
    m = method(xs)
    ref = torch.randn(2, xs.D)
    q = m.encode_query(ref, ['a cat', 'a hat'])
    torch.testing.assert_close(q, l2_normalize(q))
    torch.testing.assert_close(m.encode_query(ref[:1], ['a cat']), q[:1], atol=1e-5, rtol=0)


def tiny_t5(folder, words=('a', 'red', 'cup', 'on', 'the', 'table')):
    "A T5 encoder with random weights and a tokenizer of some words, as `save_pretrained` writes it."
    transformers = pytest.importorskip('transformers')
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(('<pad>', '</s>', '?', *words))}, unk_token='?'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.post_processor = processors.TemplateProcessing('$A </s>', special_tokens=[('</s>', 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', eos_token='</s>')
    fast.save_pretrained(folder)
    config = transformers.T5Config(vocab_size=20, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    return f'{C.T5_PREFIX}{folder}'


def test_clip_and_a_language_model_are_joined_by_position(tmp_path, xs):
    t5 = tiny_t5(tmp_path)
    both = C.states_encoder(f'tiny_xs+{t5}', xs)
    own, texts = both.backbones[1], ['a red cup', 'the cup on the red table', '']
    assert (both.W, own.W) == (xs.W + 24, 24) and C.states_encoder(t5, xs) is own
    (joined, mask), (clip, first), (t5_states, second) = (C.token_states(b, texts) for b in (both, xs, own))
    assert second.sum(1).tolist() == [4, 7, 1] and first.sum(1).tolist() == [5, 8, 2]  # CLIP has a start token more
    assert torch.equal(mask[:, : first.shape[1]], first | F.pad(second, (0, first.shape[1] - second.shape[1])))
    assert torch.equal(joined[..., : xs.W][first], clip[first])
    assert torch.equal(joined[:, : second.shape[1], xs.W :][second], t5_states[second])
    assert not joined[0, 4:, xs.W :].any()  # where the language model has no token
    literal, none = C.token_states(both, texts, 'literal')
    assert literal.shape == (3, max(xs.text_tower.context, C.T5_TOKENS), both.W) and none is None
    long = C.token_states(own, ['red cup ' * 100])[0]
    assert long.shape[1] == C.T5_TOKENS  # cut, as published
    other = C.T5Texts(str(tmp_path))
    assert other.fingerprint == own.fingerprint != C.JoinedTexts([xs, own]).fingerprint


def test_a_stage_is_trained_and_loaded_with_two_tokenizers(tmp_path, xs):
    t5 = tiny_t5(tmp_path)
    run = T.train_or_load(settings(text_encoder=f'tiny_xs+{t5}'))
    m = C.load_compodiff(run, 'cpu', xs)
    assert m.net.shape.text_width == xs.W + 24 and m.states.backbone.name == f'tiny_xs+{t5}'
    assert torch.isfinite(m.encode_query(torch.zeros(2, xs.D), ['a red cup', 'cup'])).all()


def test_a_language_model_that_is_not_there_is_an_error(tmp_path, xs):
    pytest.importorskip('transformers')
    with pytest.raises((OSError, ValueError)):
        C.states_encoder(f't5:{tmp_path}', xs)


@pytest.mark.skipif(find_spec('sentencepiece') is not None, reason='sentencepiece is installed')
def test_a_language_model_whose_words_need_another_package_names_it(tmp_path, xs):
    pytest.importorskip('transformers')
    (tmp_path / 'config.json').write_text('{"model_type": "t5"}')
    (tmp_path / 'spiece.model').write_bytes(b'\x0a\x05\x0a\x03cup')
    with pytest.raises(ImportError, match='needs sentencepiece: pip install'):
        C.states_encoder(f't5:{tmp_path}', xs)
