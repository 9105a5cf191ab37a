"Image triplets: edits of scenes, attention sharing, filters, shards that are damaged or continued."

import gc
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from photo_folders import image, write_tar

from cis_nb.backbones.features import image_features, l2_normalize
from cis_nb.core.store import fingerprint
from cis_nb.mining import synthetic as S
from cis_nb.mining import triplet_images as T
from cis_nb.world.scenes import Scene, Thing, render

SCENE = Scene('lake', 0, (Thing('ball', 'red', x=16, px=20), Thing('tent', 'red', 'striped', x=48, px=24)))


def triplet(removed='ball', added='boat', source='a red ball near a red tent', **more):
    target = source.replace(removed, added, 1) if removed else source
    values = dict(id='train00000003', instruction=f'replace {removed} with {added}', template=0, route='keyword')
    return T.CaptionTriplet(source=source, target=target, removed=removed, added=added, **(values | more))


class ColorBackbone:
    "Features of images: mean colours of a grid of patches. Features of texts: pseudo-random, from the letters."

    name, D, fingerprint, dtype = 'colors', 48, 'colors', torch.float32

    def preprocess(self, image):
        return (
            torch.from_numpy(np.asarray(image.convert('RGB').resize((4, 4), Image.BOX)).copy()).permute(2, 0, 1) / 255
        )

    def encode_image(self, pixels):
        return pixels.flatten(1) - 0.5

    def encode_text(self, texts):
        seeds = [int(hashlib.sha256(t.encode()).hexdigest()[:8], 16) for t in texts]
        return torch.stack([torch.randn(self.D, generator=torch.Generator().manual_seed(s)) for s in seeds])


class NoisePairs:
    "Pairs of random pixels; every fifth caption triplet has no pair, every second a mask."

    record = dict(generator='noise')

    def __init__(self, fail_at=None):
        self.fail_at, self.calls = fail_at, 0

    def generate(self, triplets, seeds):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        return [self.pair(t, s) for t, s in zip(triplets, seeds)]

    def pair(self, t, seed):
        rng = np.random.default_rng(seed)
        if int(t.id) % 5 == 4:
            return 'every fifth'
        images = [Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(2)]
        return T.ImagePair(*images, rng.random((64, 64)) < 0.5 if int(t.id) % 2 else None)


ALL_PASS = T.PairThresholds(*[-1.0] * 5)
NUMBERED = [triplet(id=str(i), instruction=f'instruction {i}', template=i % 2 or None) for i in range(23)]


def write(folder, triplets=NUMBERED, generator=None, thresholds=ALL_PASS, **more):
    generator = generator or NoisePairs()
    settings = dict(per_shard=5, batch=2) | more
    return T.write_triplet_shards(folder, triplets, generator, ColorBackbone(), thresholds, **settings)


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in ('.tar', '.json')}


# --- the drawn world


@pytest.mark.parametrize(
    'removed, added, reason',
    [
        ('grandmother', 'boat', 'removed term that the world cannot draw'),
        ('ball', 'two boats', 'added term that the world cannot draw'),
        ('cat', 'boat', 'removed term that the scene does not show'),
        ('kitchen', 'desert', 'removed term that the scene does not show'),
        ('ball', 'desert', 'terms of different kinds'),
        ('lake', '', 'terms of different kinds'),
        ('ball', 'green', 'terms of different kinds'),
        ('', 'green', 'terms of different kinds'),
        ('red', '', 'removal that leaves no scene to draw'),
        ('blue', 'green', 'removed term that the scene does not show'),
    ],
)
def test_an_edit_that_cannot_be_drawn_has_a_reason(removed, added, reason):
    with pytest.raises(T.CannotDraw, match=reason):
        T.edit_scene(SCENE, triplet(removed, added))


def test_a_term_that_fits_several_things_is_refused_if_the_caption_names_none():
    with pytest.raises(T.CannotDraw, match='fits several objects'):
        T.edit_scene(SCENE, triplet('red', 'blue', source='a red thing'))
    with pytest.raises(T.CannotDraw, match='leaves no scene'):
        T.edit_scene(replace(SCENE, things=SCENE.things[:1]), triplet('ball', ''))


@pytest.mark.parametrize(
    'removed, added, facts',
    [
        ('tent', 'kitty', dict(category='cat')),
        ('striped', 'dotted', dict(pattern='dotted')),
        ('striped tent', 'green parasol', dict(category='umbrella', color='green')),
        ('large', 'small', dict(size='small', px=24 * 5 // 7)),
        ('upright', 'upside down', dict(pose='upside down', angle=180)),
    ],
)
def test_an_edit_changes_the_named_facts_alone(removed, added, facts):
    source = f'a {removed} tent' if 'tent' not in removed else f'a {removed}'
    after, where = T.edit_scene(SCENE, triplet(removed, added, source=source))
    assert where == [1]
    assert after == replace(SCENE, things=(SCENE.things[0], replace(SCENE.things[1], **facts)))


def test_a_domain_and_a_place_are_edits_of_the_whole_scene():
    assert T.edit_scene(SCENE, triplet('lake', 'snow')) == (replace(SCENE, place='winter'), 'place')
    night = replace(SCENE, domain='night')
    assert T.edit_scene(night, triplet('moonlight', 'mosaic')) == (replace(SCENE, domain='mosaic'), 'domain')


def test_the_mask_is_what_the_segments_say():
    _, segments = render(SCENE, 128, with_segments=True)
    blocks = segments.reshape(64, 2, 64, 2).swapaxes(1, 2).reshape(64, 64, 4)
    for where, hit in (([1], blocks == 2), ([0, 1], blocks > 0), ('place', blocks < 0)):
        assert (T.edit_mask(segments, where) == (hit.sum(-1) >= 2)).all()
    assert T.edit_mask(segments, 'domain').all()


def test_the_world_gives_pairs_reasons_and_the_same_again():
    world = T.WorldGenerator(side=64)
    scene = T.caption_scene('train00000003')
    first = scene.things[0].category
    there = triplet(first, 'guitar' if first != 'guitar' else 'boat')
    cases = [there, replace(there, added=first), replace(there, id='somewhere/7'), replace(there, added='virtue')]
    pair, *reasons = world.generate(cases, [5] * 4)
    assert reasons == [
        'edit that changes nothing',
        'caption of no drawn scene',
        'added term that the world cannot draw',
    ]
    again, other = world.generate([there, there], [5, 6])
    assert np.array_equal(pair.reference, again.reference) and np.array_equal(pair.target, again.target)
    assert not np.array_equal(pair.reference, other.reference)
    assert pair.mask.any() and not pair.mask.all()
    with pytest.raises(ValueError):
        world.generate(cases, [1])


# --- attention sharing


def test_alignment_keeps_the_weight_of_replaced_tokens():
    r = random.Random(0)
    for _ in range(50):
        source = [r.randrange(6) for _ in range(12)]
        target = [r.randrange(6) if r.random() < 0.3 else t for t in source]
        maps, own = T.align_tokens(source, target)
        assert ((maps.sum(1) > 0) != (own > 0)).all()  # a token has a map of the source, or its own
        assert set(np.round(maps.sum(0), 5)) <= {0, 1}  # all of a source token's weight arrives, or none
    assert (T.align_tokens([1, 2, 3], [1, 2, 3])[0] == np.eye(3)).all()


def test_shared_maps_by_hand():
    sharing = T.AttentionSharing()
    sharing.begin([[0, 1, 2], [0, 1, 2]], [[0, 2, 1], [0, 1, 2]], 'cpu')
    p = torch.rand(8, 1, 2, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    cross, own = sharing.share(p, True), sharing.share(p, False)
    assert torch.equal(own[5], p[4]) and torch.equal(own[7], p[6]) and torch.equal(own[:4], p[:4])
    assert torch.equal(cross[7], p[6]) and torch.equal(cross[4], p[4])
    maps, kept = T.align_tokens([0, 1, 2], [0, 2, 1])
    for h in range(2):
        expected = [sum(maps[t, s] * float(p[4, 0, h, s]) for s in range(3)) for t in range(3)]
        expected = [e + kept[t] * float(p[5, 0, h, t]) for t, e in enumerate(expected)]
        assert np.allclose(cross[5, 0, h], np.array(expected) / sum(expected), atol=1e-6)


@pytest.mark.parametrize('name, share', [('cross_share', -0.1), ('self_share', 2)])
def test_a_share_outside_its_range_is_refused(name, share):
    with pytest.raises(ValueError, match=f'{name} must be a share'):
        T.AttentionSharing(**{name: share})


def test_without_diffusers_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'diffusers', None)
    with pytest.raises(ImportError, match=r"pip install 'cis_nb\[synthesis\]'"):
        T.load_diffusion('somewhere')


@pytest.fixture(scope='module')
def diffusion(tmp_path_factory):
    return T.write_random_diffusion(tmp_path_factory.mktemp('diffusion'))


def sampled(folder, prompt, seed, steps=4):
    "One prompt by the pipeline of diffusers as it is."
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline([prompt], num_inference_steps=steps, generator=torch.Generator().manual_seed(seed))
    return np.asarray(made.images[0], int)


def pair_of(generator, cross, own, *triplets, seeds=None):
    generator.sharing.cross_share, generator.sharing.self_share = cross, own
    pairs = generator.generate(list(triplets), seeds or [3] * len(triplets))
    return [(np.asarray(p.reference, int), np.asarray(p.target, int)) for p in pairs]


@pytest.mark.e2e
def test_sharing_lies_between_two_samplings_and_one(diffusion):
    generator = T.DiffusersGenerator(str(diffusion), steps=4, device='cpu')
    t, same = triplet(), triplet('ball', 'ball')
    alone = [sampled(diffusion, text, 3) for text in (t.source, t.target)]
    ((reference, target),) = pair_of(generator, 0.0, 0.0, t)
    assert abs(reference - alone[0]).max() <= 1 and abs(target - alone[1]).max() <= 1
    assert abs(alone[0] - alone[1]).max() > 1
    ((reference, equal),) = pair_of(generator, 1.0, 1.0, same)
    assert np.array_equal(reference, equal) and abs(reference - alone[0]).max() <= 1
    targets = [pair_of(generator, c, s, t)[0][1] for c, s in ((0.5, 0.0), (0.0, 0.5), (1.0, 1.0))]
    for k, made in enumerate([alone[0], alone[1], *targets]):
        assert all(abs(made - other).max() > 1 for other in targets[max(0, k - 1) :])


def test_a_layer_reads_the_targets_values_by_the_sources_map():
    from diffusers.models.attention_processor import Attention

    sharing = T.AttentionSharing()
    sharing.begin([[0, 1, 2]], [[0, 1, 2]], 'cpu')
    layer = Attention(query_dim=8, cross_attention_dim=6, heads=2, dim_head=4, processor=T.SharedAttention(sharing))
    x, words = torch.randn(2, 5, 8), torch.randn(2, 3, 6)
    with torch.no_grad():
        out = layer(x, encoder_hidden_states=words)[1]
        expected = torch.zeros(5, 8)
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            scores = layer.to_q(x[0])[:, part] @ layer.to_k(words[0])[:, part].T / 2  # of the source
            expected[:, part] = scores.softmax(-1) @ layer.to_v(words[1])[:, part]  # of the target
        assert torch.allclose(out, layer.to_out[0](expected), atol=1e-6)
        sharing.done = 0.9
        assert not torch.allclose(layer(x, encoder_hidden_states=words)[1], out, atol=1e-3)


@pytest.mark.e2e
@pytest.mark.parametrize('more', [dict(guidance=1.0), dict(dtype='bfloat16')])
def test_sharing_without_guidance_and_in_half_precision(diffusion, more):
    generator = T.DiffusersGenerator(str(diffusion), steps=3, device='cpu', **more)
    ((reference, target),) = pair_of(generator, 1.0, 1.0, triplet('ball', 'ball'))
    assert np.array_equal(reference, target)
    ((reference, shared),), ((_, alone),) = (pair_of(generator, s, s, triplet()) for s in (1.0, 0.0))
    assert abs(shared - alone).max() > 1 and abs(shared - reference).max() > 1


@pytest.mark.e2e
def test_pairs_of_a_batch_do_not_see_each_other(diffusion):
    generator = T.DiffusersGenerator(str(diffusion), steps=3, device='cpu')
    two = [triplet(), triplet('tent', 'guitar')]
    together = pair_of(generator, 0.7, 0.4, *two, seeds=[1, 2])
    apart = [pair_of(generator, 0.7, 0.4, t, seeds=[s])[0] for t, s in zip(two, (1, 2))]
    assert max(abs(a - b).max() for x, y in zip(together, apart) for a, b in zip(x, y)) <= 1
    assert generator.generate([], []) == []
    assert json.loads(json.dumps(generator.record)) == generator.record


@pytest.mark.e2e
def test_an_unsafe_image_is_a_reason(diffusion, monkeypatch):
    generator = T.DiffusersGenerator(str(diffusion), steps=1, device='cpu')
    pipeline = generator.pipeline
    assert generator.record['safety_checker'] is False  # the tiny model has none

    def flagged(*a, **kw):
        made = pipeline(*a, **kw)
        made.nsfw_content_detected = [False, False, False, True]
        return made

    flagged.tokenizer, flagged.device = pipeline.tokenizer, pipeline.device
    monkeypatch.setattr(generator, 'pipeline', flagged)
    first, second = generator.generate([triplet(), triplet()], [0, 1])
    assert isinstance(first, T.ImagePair) and second == 'image that the safety checker rejects'


@pytest.mark.e2e
def test_weights_that_are_no_safetensors_are_refused(diffusion, tmp_path):
    with pytest.raises(OSError, match='no Stable Diffusion in safetensors'):
        T.load_diffusion(str(tmp_path))
    pickled = tmp_path / 'pickled'
    shutil.copytree(diffusion, pickled)
    weights = pickled / 'unet/diffusion_pytorch_model.safetensors'
    torch.save({}, weights.with_suffix('.bin'))
    weights.unlink()
    with pytest.raises(OSError, match='no Stable Diffusion in safetensors'):
        T.load_diffusion(str(pickled))
    with pytest.raises(ValueError, match='dtype'):
        T.load_diffusion(str(diffusion), dtype='int8')


def test_attention_of_another_kind_is_refused():
    class Other:
        attn_processors = {'mid.attentions.0.processor': None}

    with pytest.raises(ValueError, match='attention of another kind'):
        T.share_attention(Other(), T.AttentionSharing())


# --- filters


def test_scores_are_those_of_one_pair_at_a_time():
    b, generator = ColorBackbone(), NoisePairs()
    some = [replace(t, route=('keyword', 'llm')[k % 2]) for k, t in enumerate(NUMBERED[:4])]
    pairs = generator.generate(some, range(4))
    scores = T.pair_scores(some, pairs, b)

    def text(words):
        return l2_normalize(b.encode_text([words]))[0]

    for k, (t, p) in enumerate(zip(some, pairs)):
        i, j = (l2_normalize(b.encode_image(b.preprocess(x)[None]))[0] for x in (p.reference, p.target))
        di, dt = l2_normalize(j - i), l2_normalize(text(t.target) - text(t.source))
        expected = [i @ j, min(i @ text(t.source), j @ text(t.target)), di @ dt]
        expected += [min(i @ text(t.removed), j @ text(t.added)) if t.route == 'keyword' else np.nan]
        expected += [j @ text(t.instruction) if t.route == 'llm' else np.nan]
        assert np.allclose(scores.iloc[k], np.array(expected, float), atol=1e-5, equal_nan=True)


def test_equal_images_and_unknown_routes():
    b, t = ColorBackbone(), NUMBERED[0]
    pair = NoisePairs().pair(t, 0)
    assert T.pair_scores([t], [replace(pair, target=pair.reference)], b).directional[0] == 0
    with pytest.raises(ValueError, match='route'):
        T.pair_scores([replace(t, route='human')], [pair], b)
    assert list(T.pair_scores([], [], b).columns) == list(T.PAIR_FILTERS)


def test_a_funnel_counts_as_a_loop_does():
    rng = np.random.default_rng(0)
    scores = pd.DataFrame(rng.random((200, 5)), columns=T.PAIR_FILTERS)
    scores.loc[::2, 'keyword'], scores.loc[1::2, 'instruction'] = np.nan, np.nan
    passed = T.passed_filters(scores, T.PairThresholds(0.2, 0.3, 0.1, 0.5, 0.4))
    for row in T.filter_funnel(passed).itertuples():
        k = T.PAIR_FILTERS.index(row.filter)
        lines = passed.to_numpy().tolist()
        assert row.removed == sum(not p[k] for p in lines)
        assert row[3] == sum(not p[k] and sum(p) == 4 for p in lines)
        assert row.left == sum(all(p[: k + 1]) for p in lines)


def test_quantiles_remove_their_share_and_a_score_at_the_threshold_passes():
    scores = pd.DataFrame(np.random.default_rng(0).random((1001, 5)), columns=T.PAIR_FILTERS)
    passed = T.passed_filters(scores, T.quantile_thresholds(scores, 0.2))
    assert (passed.sum() == 801).all()
    none = scores.assign(keyword=np.nan)
    assert T.quantile_thresholds(none, 0.2).keyword == T.PairThresholds().keyword
    with pytest.raises(ValueError, match='directional must be a cosine'):
        T.PairThresholds(directional=float('nan'))


# --- writing shards


def test_shards_hold_what_was_generated(tmp_path, store):
    manifest = write(tmp_path / 'a')
    assert [r['count'] for r in manifest['shards']] == [4, 4, 4, 4, 3]
    assert sum(r['dropped'].get('every fifth', 0) for r in manifest['shards']) == 4
    shards = T.TripletShards(tmp_path / 'a')
    kept = [k for k in range(23) if k % 5 != 4]
    assert shards.ids == [f'{k:09d}' for k in kept] and len(shards) == 19 and not shards.skipped
    assert shards.texts == [f'instruction {k}' for k in kept]
    assert [shards.triplet(i) for i in shards.ids] == [NUMBERED[k] for k in kept]
    assert shards.table.seed.tolist() == [T.pair_seed(0, k) for k in kept]
    for i, k in zip(shards.ids, kept):
        pair = NoisePairs().pair(NUMBERED[k], T.pair_seed(0, k))
        for source, made in ((shards.references, pair.reference), (shards.targets, pair.target)):
            assert abs(np.asarray(source.load(i), int) - np.asarray(made, int)).mean() < 8  # JPEG of noise
        mask = pair.mask if pair.mask is not None else np.zeros((64, 64), bool)
        assert np.array_equal(shards.masks([i])[0], mask)
    assert shards.masks(shards.ids).shape == (19, 64, 64) and shards.masks([]).shape == (0, 64, 64)
    assert shards.references.key != shards.targets.key
    squares, index = shards.targets.pixels(16)
    assert squares.shape == (19, 3, 16, 16) and list(index) == shards.ids


def test_the_shards_are_webdataset(tmp_path):
    from webdataset import WebDataset

    write(tmp_path)
    samples = list(WebDataset(str(tmp_path / '000000000.tar'), shardshuffle=False))
    assert [s['__key__'] for s in samples] == [f'{k:09d}' for k in range(4)]
    about = json.loads(samples[1]['json'])
    assert about['instruction'] == 'instruction 1' and set(about['scores']) == set(T.PAIR_FILTERS) - {'instruction'}
    assert Image.open(io.BytesIO(samples[1]['mask.png'])).size == (64, 64) and 'mask.png' not in samples[0]


def test_rejected_pairs_are_counted_by_the_first_filter(tmp_path, store):
    manifest = write(tmp_path, thresholds=replace(ALL_PASS, image_image=1.0, keyword=1.0))
    assert [r['count'] for r in manifest['shards']] == [0] * 5
    assert sum(r['dropped']['filter image_image'] for r in manifest['shards']) == 19
    with pytest.raises(ValueError, match='no image triplets in 5 shards'):
        T.TripletShards(tmp_path)


def test_appending_and_a_kill_at_any_batch_give_the_same_files(tmp_path):
    write(tmp_path / 'once')
    expected = content(tmp_path / 'once')
    for k in range(1, 14):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / str(k), generator=NoisePairs(fail_at=k))
        left = content(tmp_path / str(k))
        assert len(left) == len([n for n in left if n.endswith('.tar')]) + (k > 3)  # three batches are a shard
        write(tmp_path / str(k))
        assert content(tmp_path / str(k)) == expected
    write(tmp_path / 'grown', NUMBERED[:10])
    write(tmp_path / 'grown')
    assert content(tmp_path / 'grown') == expected
    calls = NoisePairs()
    write(tmp_path / 'grown', generator=calls)
    assert calls.calls == 0


def test_a_list_that_ends_within_a_shard_is_continued_by_a_new_one(tmp_path):
    write(tmp_path, NUMBERED[:7])
    manifest = write(tmp_path)
    assert [(r['start'], r['stop']) for r in manifest['shards']] == [
        (0, 5),
        (5, 7),
        (7, 12),
        (12, 17),
        (17, 22),
        (22, 23),
    ]


def test_a_kill_between_shard_and_manifest_costs_that_shard(tmp_path):
    write(tmp_path)
    expected = content(tmp_path)
    manifest = json.loads(expected['manifest.json'])
    manifest['shards'].pop()
    (tmp_path / 'manifest.json').write_text(json.dumps(manifest))
    (tmp_path / '000000020.part').write_bytes(b'half')
    write(tmp_path)
    assert content(tmp_path) == expected


def test_missing_and_short_shards_are_made_again(tmp_path):
    write(tmp_path)
    expected = content(tmp_path)
    (tmp_path / '000000005.tar').unlink()
    (tmp_path / '000000010.tar').write_bytes(expected['000000010.tar'][:1000])
    write(tmp_path)
    assert content(tmp_path) == expected


@pytest.mark.parametrize(
    'change, says',
    [
        (dict(seed=1), 'was made with seed 0, now 1'),
        (dict(thresholds=T.PairThresholds()), 'was made with filters'),
        (dict(triplets=NUMBERED[:8]), 'made from other caption triplets at 5 to 10'),
        (dict(triplets=NUMBERED[1:]), 'made from other caption triplets at 0 to 5'),
        (dict(per_shard=0), 'per_shard and batch must be at least 1, got 0'),
        (dict(batch=-1), 'per_shard and batch must be at least 1'),
    ],
)
def test_a_folder_is_not_continued_in_another_way(tmp_path, change, says):
    write(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ValueError, match=says):
        write(tmp_path, **change)
    assert content(tmp_path) == before
    other = NoisePairs()
    other.record = dict(generator='other noise')
    with pytest.raises(ValueError, match='was made with generator'):
        write(tmp_path, generator=other)


# --- from caption shards to image shards


def caption_shards(folder, portion=6) -> S.CaptionTriplets:
    "The numbered caption triplets in shards of a folder."
    folder.mkdir(exist_ok=True)
    lines = []
    for k in range(0, len(NUMBERED), portion):
        rows = [asdict(t) for t in NUMBERED[k : k + portion]]
        lines.append(S.write_json_lines(folder / f'triplets-{k:06d}.jsonl.gz', rows, read=len(rows), skipped={}))
    S.write_shard_list(folder, lines)
    return S.CaptionTriplets(folder)


def test_a_folder_of_caption_shards_is_a_sequence(tmp_path):
    for portion in (1, 6, 23, 40):
        found = caption_shards(tmp_path / str(portion), portion)
        assert len(found) == 23 and list(found) == NUMBERED and found[-1] == NUMBERED[-1]
        for at in (slice(None), slice(4, 9), slice(5, 6), slice(20, 99), slice(9, 4), slice(None, None, -4)):
            assert found[at] == NUMBERED[at]
        for beyond in (23, -24):
            with pytest.raises(IndexError):
                found[beyond]


class WatchedPairs(NoisePairs):
    "Notes how many caption triplets are in memory, and which image shards are listed, at each batch."

    def __init__(self, folder):
        super().__init__()
        self.folder, self.alive, self.listed = folder, [], []

    def generate(self, triplets, seeds):
        mine = set(map(id, NUMBERED))
        self.alive.append(sum(type(o) is T.CaptionTriplet and id(o) not in mine for o in gc.get_objects()))
        file = self.folder / 'manifest.json'
        self.listed.append(len(json.loads(file.read_text())['shards']) if file.exists() else 0)
        return super().generate(triplets, seeds)


def test_image_shards_are_written_while_caption_shards_are_read(tmp_path):
    write(tmp_path / 'list')
    watched = WatchedPairs(tmp_path / 'folder')
    write(tmp_path / 'folder', caption_shards(tmp_path / 'captions'), generator=watched)
    assert content(tmp_path / 'folder') == content(tmp_path / 'list')
    assert max(watched.alive) <= 6 + 5  # a caption shard, and what an image shard is made of
    assert watched.listed == [k // 3 for k in range(len(watched.listed))]  # three batches are a shard


def test_a_stop_between_caption_shards_gives_the_same_files(tmp_path):
    write(tmp_path / 'list')
    expected = content(tmp_path / 'list')
    for k in range(1, 14):
        folder = tmp_path / str(k)
        with pytest.raises(KeyboardInterrupt):
            write(folder, caption_shards(tmp_path / 'captions'), generator=NoisePairs(fail_at=k))
        write(folder, S.CaptionTriplets(tmp_path / 'captions'))
        assert content(folder) == expected


@pytest.mark.parametrize('number', range(4))
def test_a_cut_caption_shard_ends_the_run_with_its_name_and_is_gone_on_from(tmp_path, store, number):
    write(tmp_path / 'list')
    triplets = caption_shards(tmp_path / 'captions')
    path = tmp_path / 'captions' / triplets.shards[number]['file']
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f'{path.name} is damaged'):
        write(tmp_path / 'a', triplets)
    listed = T.read_shard_manifest(tmp_path / 'a')['shards'] if number else []
    assert [r['stop'] for r in listed] == [n for n in (5, 10, 15, 20) if n <= 6 * number]
    assert not number or T.TripletShards(tmp_path / 'a').ids[-1] < f'{6 * number:09d}'
    path.write_bytes(whole)
    write(tmp_path / 'a', triplets)
    assert content(tmp_path / 'a') == content(tmp_path / 'list')


def test_a_cut_image_shard_in_the_middle_is_made_again_alone(tmp_path):
    triplets = caption_shards(tmp_path / 'captions')
    write(tmp_path / 'a', triplets)
    expected, calls = content(tmp_path / 'a'), NoisePairs()
    (tmp_path / 'a' / '000000010.tar').write_bytes(expected['000000010.tar'][:1000])
    write(tmp_path / 'a', triplets, generator=calls)
    assert content(tmp_path / 'a') == expected and calls.calls == 3


def test_a_caption_shard_whose_list_disagrees_is_refused(tmp_path):
    caption_shards(tmp_path / 'captions')
    file = tmp_path / 'captions' / 'shards.json'
    found = json.loads(file.read_text())
    found['shards'][1]['lines'] = 5
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match='000006.jsonl.gz has 6 lines, shards.json says 5'):
        write(tmp_path / 'a', S.CaptionTriplets(tmp_path / 'captions'))


@pytest.mark.e2e
@pytest.mark.skipif(os.name != 'posix', reason='kill -9 needs a POSIX system')
def test_a_killed_run_over_caption_shards_goes_on(tmp_path):
    write(tmp_path / 'list')
    caption_shards(tmp_path / 'captions')
    program = (
        'import sys, time; from pathlib import Path; import test_triplet_images as M; home = Path(sys.argv[1])\n'
        'class Slow(M.NoisePairs):\n'
        '    def generate(self, *given): time.sleep(0.2); return super().generate(*given)\n'
        "M.write(home / 'a', M.S.CaptionTriplets(home / 'captions'), generator=Slow())"
    )
    paths = os.pathsep.join([*sys.path, os.path.dirname(__file__)])
    run = subprocess.Popen([sys.executable, '-c', program, str(tmp_path)], env=dict(os.environ, PYTHONPATH=paths))
    end = time.time() + 120
    while not (tmp_path / 'a' / '000000005.tar').exists() and run.poll() is None and time.time() < end:
        time.sleep(0.02)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    left = [n for n in content(tmp_path / 'a') if n.endswith('.tar')]
    assert 2 <= len(left) < 5
    write(tmp_path / 'a', S.CaptionTriplets(tmp_path / 'captions'))
    assert content(tmp_path / 'a') == content(tmp_path / 'list')


# --- reading shards


def rewritten(folder, name='000000000.tar', change=None, **line):
    "Write the shards, then change the members of one of them and let the manifest agree."
    write(folder)
    path = folder / name
    with tarfile.open(path) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]
    write_tar(path, change(members) if change else members)
    data = path.read_bytes()
    manifest = json.loads((folder / 'manifest.json').read_text())
    for r in manifest['shards']:
        if r['name'] == name:
            r.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), **line)
    (folder / 'manifest.json').write_text(json.dumps(manifest))
    return folder


def with_member(name, data=b'{}'):
    return lambda members: [*members, (name, data)]


def replaced(part, data):
    "Members with other data in the second sample's file."
    return lambda members: [(n, data if n == f'000000001.{part}' else d) for n, d in members]


def record(**fields) -> bytes:
    "The JSON of a sample with other fields."
    return json.dumps(dict(asdict(NUMBERED[0]), seed=0, scores={}) | fields).encode()


ODD = record(instruction=5)


@pytest.mark.parametrize(
    'change, says',
    [
        (with_member('../000000009.json'), 'tar member named outside its folder'),
        (with_member('/000000009.json'), 'tar member named outside its folder'),
        (with_member('000000000.json'), 'unknown or second member'),
        (with_member('000000000.exe'), 'unknown or second member'),
        (with_member('000000009.json'), 'sample without 000000009.source.jpg'),
        (lambda members: members[3:], 'shard with 3 image triplets, where the manifest says 4'),
        (replaced('json', b'{'), '000000001.json is no image triplet'),
        (replaced('json', b'[]'), '000000001.json is no image triplet'),
        (replaced('json', b'{"id": "1"}'), '000000001.json is no image triplet'),
        (replaced('json', ODD), 'instruction is 5, not str'),
        (replaced('json', record(scores=dict(image_image=float('nan')))), 'NaN is no number of JSON'),
        (replaced('json', record(scores=dict(image_image='high'))), "scores.image_image is 'high', not float"),
        (replaced('json', record(template=-1)), 'template is -1'),
        (replaced('json', record(route='other')), "route is 'other'"),
        (replaced('json', record(seed=2**70)), 'integer of more than 64 bits'),
        (replaced('json', record(id='\ud800')), 'surrogates not allowed'),
        (replaced('json', record()[:-1] + b', "id": "2"}'), "'id' occurs twice"),
        (replaced('json', b'\xff\xfe'), '000000001.json is no image triplet'),
    ],
)
def test_a_faulty_shard_is_an_error_or_is_left_out(tmp_path, store, change, says):
    folder = rewritten(tmp_path / 'shards', change=change)
    with pytest.raises(ValueError, match='1 of 5 shards cannot be used; the first is 000000000.tar') as e:
        T.TripletShards(folder)
    assert says in str(e.value)
    rest = T.TripletShards(folder, damaged='skip')
    assert len(rest) == 15 and list(rest.skipped.values()) == [['000000000.tar']]
    assert rest.references.load(rest.ids[0]).size == (16, 16)


def test_a_tampered_short_or_missing_shard_is_found(tmp_path, store):
    write(tmp_path)
    good = T.TripletShards(tmp_path)
    first, second, third = (tmp_path / f'{k:09d}.tar' for k in (0, 5, 10))
    data = first.read_bytes()
    first.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    second.write_bytes(second.read_bytes()[:-2000])
    third.unlink()
    rest = T.TripletShards(tmp_path, damaged='skip')
    why = {name: reason for reason, names in rest.skipped.items() for name in names}
    assert why['000000000.tar'] == 'shard that disagrees with its SHA-256 in the manifest'
    assert why['000000005.tar'].startswith('shard cut short: ')
    assert why['000000010.tar'] == 'shard that is missing'
    assert len(rest) == 7 and rest.key != good.key
    for path in (first, second, third):
        path.unlink(missing_ok=True)
    write(tmp_path)
    mended = T.TripletShards(tmp_path)
    assert (len(mended), mended.key) == (19, good.key)


def test_a_tar_that_ends_too_soon_is_damaged_even_if_the_manifest_agrees(tmp_path, store):
    folder = rewritten(tmp_path / 'shards')
    path = folder / '000000000.tar'
    path.write_bytes(path.read_bytes()[:3000])
    manifest = json.loads((folder / 'manifest.json').read_text())
    manifest['shards'][0].update(bytes=3000, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    (folder / 'manifest.json').write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match='tar cut short or damaged'):
        T.TripletShards(folder)


def test_a_key_in_two_shards_is_refused(tmp_path, store):
    write(tmp_path)
    data = (tmp_path / '000000000.tar').read_bytes()
    (tmp_path / '000000005.tar').write_bytes(data)
    manifest = json.loads((tmp_path / 'manifest.json').read_text())
    manifest['shards'][1].update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (tmp_path / 'manifest.json').write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match='key that another shard has too'):
        T.TripletShards(tmp_path)


@pytest.mark.parametrize('data', [b'no image', b'', image()[:300], image(fmt='TIFF')])
def test_a_damaged_image_is_an_error_and_is_left_out_of_features(tmp_path, store, data):
    shards = T.TripletShards(rewritten(tmp_path / 'shards', change=replaced('target.jpg', data)))
    with pytest.raises(ValueError, match=r'000000000\.tar: 000000001\.target is a damaged image'):
        shards.targets.load('000000001')
    assert shards.references.load('000000001').size == (16, 16)
    found = image_features(ColorBackbone(), shards.targets.ids, shards.targets.load, shards.targets.key)
    assert found.counts == dict(encoded=18, skipped=1)
    assert found.skipped.id.tolist() == ['000000001'] and 'damaged image' in found.skipped.reason[0]


def test_a_mask_of_another_size_or_that_is_no_image_is_refused(tmp_path, store):
    small = rewritten(tmp_path / 'small', change=replaced('mask.png', image(size=(32, 64), fmt='PNG')))
    with pytest.raises(ValueError, match=r'000000001\.mask has \(64, 32\) pixels'):
        T.TripletShards(small).masks(['000000001'])
    none = rewritten(tmp_path / 'none', change=replaced('mask.png', b'PNG'))
    with pytest.raises(ValueError, match=r'000000001\.mask is a damaged image'):
        T.TripletShards(none).masks(['000000001'])


@pytest.mark.parametrize(
    'text, says',
    [
        ('{', 'is not JSON.*it is no manifest of cis-image-triplets-1: get the file again'),
        ('[]', 'is list, not an object; it is no manifest'),
        ('{"format": "other", "shards": []}', "format is 'other'"),
        (f'{{"format": "{T.SHARD_FORMAT}"}}', "has no 'shards'"),
        (f'{{"format": "{T.SHARD_FORMAT}", "shards": [{{"name": "a.tar"}}]}}', r"shards\[0\]: has no 'start'"),
        (f'{{"format": "{T.SHARD_FORMAT}", "shards": [3]}}', r'shards\[0\]: is int, not an object'),
    ],
)
def test_a_broken_manifest_is_refused_by_reader_and_writer(tmp_path, text, says):
    (tmp_path / 'manifest.json').write_text(text)
    for use in (T.TripletShards, write):
        with pytest.raises(ValueError, match=says):
            use(tmp_path)


def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path):
    write(tmp_path / 'shards')
    manifest = json.loads((tmp_path / 'shards/manifest.json').read_text())
    for name in ('../shards/000000000.tar', '/000000000.tar', '..'):
        manifest['shards'][0]['name'] = name
        (tmp_path / 'shards/manifest.json').write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match='named outside its folder'):
            T.TripletShards(tmp_path / 'shards')


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, store):
    write(tmp_path)
    for name, says in {
        '000000005.tar': 'is a pipe, not a regular file',
        'manifest.json': 'manifest.json is a pipe',
    }.items():
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=says):
            T.TripletShards(tmp_path)


def test_no_folder_and_an_unknown_choice(tmp_path):
    with pytest.raises(FileNotFoundError, match='manifest.json is missing; write shards'):
        T.TripletShards(tmp_path / 'nowhere')
    with pytest.raises(ValueError, match="damaged: 'ignore' is none of error, skip"):
        T.TripletShards(tmp_path, damaged='ignore')


def test_a_folder_may_move_and_features_stay(tmp_path, store):
    write(tmp_path / 'here')
    before = T.TripletShards(tmp_path / 'here')
    (tmp_path / 'here').rename(tmp_path / 'there')
    after = T.TripletShards(tmp_path / 'there')
    assert before.key == after.key and before.references.key == after.references.key
    assert after.targets.load(after.ids[3]).size == (16, 16)
    assert fingerprint(before.ids) == fingerprint(after.ids)
