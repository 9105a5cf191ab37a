"Task-specific solutions: wrong vocabularies, ties, windows at the border, a detector from a folder, a small world."

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from cis_nb.benchmarks.genecis_construction import Rules
from cis_nb.retrieval.metrics import ranks
from cis_nb.retrieval.protocol import Benchmark, evaluate, evaluate_benchmark, task_methods
from cis_nb.benchmarks.genecis import TASKS, read_templates
from cis_nb.experiments.genecis import load_genecis_tasks, share_images
from cis_nb.api import Unsolved
from cis_nb.methods import task_specific as sp
from cis_nb.backbones.loading import load_backbone
from cis_nb.methods.baselines import method
from cis_nb.backbones.features import TextMemory, l2_normalize
from cis_nb.world.layouts import world_root

torch.set_num_threads(1)
bags = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=8)


@pytest.fixture(scope='module')
def tiny():
    return load_backbone('tiny', device='cpu')


@pytest.fixture(scope='module')
def small():
    return world_root(coco=150, vaw=200, captions=60)


@pytest.fixture(scope='module')
def tasks(small):
    return {
        t: b
        for (_, t), b in load_genecis_tasks(small, n=20, rules=Rules(min_categories=6, min_shared=4, far=1))[0].items()
    }


# --- lists of objects


@settings(deadline=None)
@given(bags)
def test_similarity_agrees_with_sets(rows):
    X, sets = torch.tensor(rows), [{j for j, v in enumerate(r) if v} for r in rows]
    for distance, f in dict(
        cosine=lambda a, b: len(a & b) / max(1, (len(a) * len(b)) ** 0.5),
        jaccard=lambda a, b: len(a & b) / max(1, len(a | b)),
    ).items():
        S = sp.bag_similarity(X, X, distance)
        assert np.allclose(S, [[f(a, b) for b in sets] for a in sets], atol=1e-6)
        assert S.max() <= 1 + 1e-6 and torch.allclose(S, S.T)


@settings(deadline=None)
@given(bags, st.integers(0, 5))
def test_an_image_without_the_condition_never_stands_before_one_with_it(rows, asked):
    gal = torch.tensor(rows).float() * 0.9
    d = SimpleNamespace(name='d', names=list('abcdef'))
    m = sp.SharedObjects(backbone=d)
    S = m.score(m.encode_query(gal[:1], [d.names[asked]]), gal)[0]
    shown = gal[:, asked] > 0.2
    assert (S[~shown] == -1).all() and (S[shown] >= 0).all()


def test_a_target_that_the_detector_misses_is_last_however_similar():
    m = sp.SharedObjects(backbone=SimpleNamespace(name='d', names=['boat', 'sky']))
    gal = torch.tensor([[0.2, 0.9], [0.1, 0.9], [0.0, 0.0]])  # 0.2 is not above 0.2
    S = m.score(m.encode_query(torch.tensor([[0.9, 0.9]]), ['boat']), gal)
    assert ranks(S.numpy(), [0])[0, 0] == 3


def test_own_and_shared_galleries_agree():
    g, d = torch.Generator().manual_seed(0), SimpleNamespace(name='d', names=list('abcdefgh'))
    m = sp.SharedObjects(distance='jaccard', backbone=d)
    ref, gal = torch.rand(5, 8, generator=g), torch.rand(11, 8, generator=g)
    q = m.encode_query(ref, list('abcde'))
    assert torch.equal(m.score(q, gal), m.score(q, gal.expand(5, 11, 8)))


def test_an_object_outside_the_vocabulary_names_the_detector():
    m = sp.SharedObjects(backbone=SimpleNamespace(name='pond', names=['boat']))
    with pytest.raises(KeyError, match="pond does not detect 'zebra'"):
        m.encode_query(torch.zeros(1, 1), ['zebra'])


# --- attributes


def test_each_query_is_classified_among_the_attributes_of_its_own_type(tiny):
    types = dict(color=['red', 'blue'], pattern=['striped', 'dotted'])
    with torch.no_grad():
        V = {t: l2_normalize(tiny.encode_text(v)) for t, v in types.items()}
        ref = torch.stack([3 * V['color'][1] + V['pattern'][0], V['color'][0] + 5 * V['pattern'][1]])
    m = sp.FocusAttribute(types=types, backbone=tiny)
    q = m.encode_query(ref[[0, 0, 1, 1]], ['color', 'pattern', 'pattern', 'color'])
    alone = torch.cat(
        [m.encode_query(ref[i : i + 1], [t]) for i, t in ((0, 'color'), (0, 'pattern'), (1, 'pattern'), (1, 'color'))]
    )
    assert torch.allclose(q, alone, atol=1e-5)
    assert torch.allclose(q[0], V['color'][1], atol=1e-5) and torch.allclose(q[2], V['pattern'][1], atol=1e-5)


def test_an_unknown_type_is_an_error_that_lists_the_known_ones(tiny):
    with pytest.raises(KeyError, match="1 queries have the type 'mood'.*known types: color"):
        sp.FocusAttribute(types=dict(color=['red']), backbone=tiny).encode_query(torch.ones(1, 160), ['mood'])


@pytest.mark.data
def test_the_public_taxonomy_knows_all_released_types_but_one():
    root = os.environ.get('CIS_DATA')
    if not root or not Path(root, 'genecis/focus_attribute.json.gz').exists():
        pytest.skip('the released templates are not here (set CIS_DATA to the folder that holds genecis/ and vaw/)')
    asked = {t['condition'] for t in read_templates(Path(root) / 'genecis/focus_attribute.json.gz')}
    assert asked - set(sp.attribute_types(root)) == {'hair status'}


def test_a_task_that_cannot_be_solved_says_why(tmp_path, tasks, tiny):
    m = sp.TaskSpecific(backbone=tiny)
    with pytest.raises(Unsolved, match='attribute_types.json is missing'):
        m.for_task(replace(tasks['focus_attribute'], root=tmp_path))
    with pytest.raises(Unsolved, match='panoptic_val2017.json is missing'):
        m.for_task(replace(tasks['focus_object'], root=tmp_path))
    with pytest.raises(Unsolved, match='genecis/focus_object: `root` is missing'):
        m.for_task(replace(tasks['focus_object'], root=None))
    with pytest.raises(Unsolved, match='has no solution; there are solutions of focus_attribute'):
        m.for_task(replace(tasks['focus_object'], task='subset'))


def test_a_name_that_nobody_knows_leaves_its_task_out_and_says_so(tasks, tiny):
    m, asked = sp.TaskSpecific(backbone=tiny, annotated=True), tasks['focus_object'].queries.condition.to_list()
    strange = replace(
        tasks['focus_object'], queries=tasks['focus_object'].queries.assign(condition=['pond', *asked[1:]])
    )
    b = Benchmark('genecis', dict(focus_object=strange, change_object=tasks['change_object']))
    with pytest.warns(
        UserWarning,
        match="leaves out 1 of 2 tasks: focus_object: 1 of 20 conditions are unknown to the solution, such as 'pond'",
    ):
        per_query, rows = evaluate_benchmark(m, b)
    assert set(rows.task) == set(per_query.task) == {'change_object'}
    del b.tasks['change_object']
    with pytest.raises(Unsolved, match='task_specific_annotations can solve no task of genecis: focus_object: 1 of 20'):
        evaluate_benchmark(m, b)


def test_other_labels_are_another_solution(small, tasks, tiny):
    b = Benchmark('genecis', tasks)
    one, other = (task_methods(sp.TaskSpecific(backbone=tiny, annotated=True), b)[0] for _ in range(2))
    assert {t: m.fingerprint for t, m in one.items()} == {t: m.fingerprint for t, m in other.items()}
    assert len({m.fingerprint for m in one.values()}) == 3  # the object tasks share theirs
    predicted = sp.TaskSpecific(backbone=tiny).for_task(tasks['focus_attribute'])
    assert predicted.fingerprint != one['focus_attribute'].fingerprint
    labels = sp.Labels(small)
    labels.positive[0] = ~labels.positive[0]
    changed = replace(one['focus_attribute'], labels=labels)
    assert changed.fingerprint != one['focus_attribute'].fingerprint


def test_labels_tell_the_attribute_of_the_type_and_the_object(small, tasks, tiny):
    b, said = tasks['change_attribute'], []
    m = sp.TaskSpecific(backbone=tiny, annotated=True).for_task(b)

    class Ear(TextMemory):
        def __call__(self, texts):
            said.extend(texts)
            return super().__call__(texts)

    m.read = Ear(tiny)
    m.encode_queries(b.as_queries())
    x = sp.read_vaw(small)
    name = {
        sp.image_key(dict(image_id=r.image_id, instance_bbox=r.instance_bbox)): r.object_name
        for r in x.table.itertuples()
    }
    wanted = {f'{c} {name[r]}' for r, c in zip(b.queries.reference, b.queries.condition)}
    assert wanted <= set(said)


# --- windows


@settings(deadline=None, max_examples=30)
@given(st.integers(16, 200), st.sampled_from([0.3, 0.5, 0.75, 1.0]), st.integers(1, 6))
def test_windows_stay_inside_and_reach_the_rims(side, share, n):
    w, at = sp.window_corners(side, share, n)
    assert len(at) == n * n and all(0 <= x and x + w <= side and 0 <= y and y + w <= side for x, y in at)
    if n > 1:
        assert min(x for x, _ in at) == 0 and max(x for x, _ in at) == side - w


@pytest.mark.e2e
def test_a_thing_in_a_corner_is_found_and_what_is_not_there_is_not(tiny, small):
    from cis_nb.world.scenes import Scene, Thing, render

    d, things = sp.window_detector(tiny, *sp.vocabulary(small)), ['cat', 'car', 'umbrella', 'guitar']
    conf = d.detect(
        [
            Image.fromarray(render(Scene('beach', 0, (Thing(c, px=30, x=x, y=y),), 256, 'plain'), 128))
            for c in things
            for x, y in ((18, 18), (46, 46))
        ]
    )
    seen = conf[:, [d.names.index(c) for c in things]].view(4, 2, 4)
    assert (seen.argmax(2) == torch.arange(4)[:, None]).all()  # each is what it is rather than another of the four
    assert (conf[:, d.names.index('sand')] > 0.2).all() and (conf[:, d.names.index('tile wall')] < 0.2).all()


@pytest.mark.parametrize(
    'names, why',
    [
        ([], 'categories is .*at least 1 item'),
        (['sand', 'sand-merged'], "categories: 1 and 2 are one condition, 'sand'"),
    ],
)
def test_a_vocabulary_of_no_name_or_of_one_name_twice_is_refused(tmp_path, names, why):
    (path := tmp_path / 'annotations/panoptic_val2017.json').parent.mkdir()
    listed = [dict(id=i, name=n, isthing=i % 2) for i, n in enumerate(names, 1)]
    path.write_text(json.dumps(dict(images=[], annotations=[], categories=listed)))
    with pytest.raises(ValueError, match=f'{path.name}.*{why}'):
        sp.vocabulary(tmp_path)


def test_pictures_of_any_shape_and_mode_are_looked_at(tiny):
    d = sp.WindowDetector(tiny, ['cat', 'car'])
    conf = d.detect(
        [
            Image.new('RGB', (300, 90)),
            Image.new('L', (5, 40)),
            Image.new('CMYK', (64, 64)),
            Image.new('RGBA', (128, 128)),
        ]
    )
    assert conf.shape == (4, 2) and torch.isfinite(conf).all()


def test_the_batch_does_not_change_confidences(tiny, small):
    d = sp.WindowDetector(tiny, *sp.vocabulary(small))
    x = torch.stack([d.preprocess(Image.open(p)) for p in sorted((small / 'coco/val2017').glob('*.jpg'))[:5]])
    with torch.no_grad():
        assert torch.allclose(d.encode_image(x, batch=2), d.encode_image(x), atol=1e-5)


def test_whatever_decides_confidences_decides_the_fingerprint(tiny):
    names = ['cat', 'car', 'sky', 'sea']
    made = [
        sp.WindowDetector(tiny, n, s, **kw)
        for n, s, kw in (
            (names, [], {}),
            (names[::-1], [], {}),
            (names, ['sky', 'sea'], {}),
            (names, [], dict(sharpness=1.0)),
            (names, [], dict(windows={0.5: 2, 1.0: 1})),
            (names, [], dict(power=[1, 1, 1, 2])),
        )
    ]
    assert len({d.fingerprint for d in made}) == 6
    with pytest.raises(ValueError, match='is in the vocabulary twice'):
        sp.WindowDetector(tiny, ['cat', 'cat'])


# --- the line


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.booleans()), min_size=2, max_size=30))
def test_no_other_line_has_a_higher_f1(pairs):
    c, there = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    if not there.any():
        return

    def f1(t):
        return 2 * (there & (c > t)).sum() / ((c > t).sum() + there.sum())

    assert np.isclose(f1(sp.best_threshold(c, there)), max(f1(t) for t in [0, *c]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.booleans()), min_size=2, max_size=30))
def test_powers_move_the_line_and_keep_the_order(pairs):
    c, there = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    if not there.any():
        return
    g = sp.calibration_powers(c[:, None], there[:, None])
    assert g[0] > 0
    moved, line = c ** g[0], sp.best_threshold(c, there)
    clear = abs(c - line) > 1e-3
    assert ((moved > 0.2) == (c > line))[clear].all() and (np.diff(moved[np.argsort(c)]) >= 0).all()


def test_calibration_scenes_are_not_those_of_the_benchmark(small):
    pictures, _ = sp.training_scenes(20)
    seen = {
        np.asarray(Image.open(p).convert('RGB').resize((16, 16))).tobytes()
        for p in (small / 'coco/val2017').glob('*.jpg')
    }
    assert not seen & {np.asarray(Image.fromarray(p).resize((16, 16))).tobytes() for p in pictures}


# --- a detector from a folder


def small_owlv2(folder, names):
    "An OWLv2 with random weights and a vocabulary of whole words, saved as the hub lays it out."
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import Owlv2Config, Owlv2ForObjectDetection, PreTrainedTokenizerFast

    words = ['!', '<end>', '<start>', 'a', 'photo', 'of', *sorted({w for n in names for w in n.split()})]
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='!'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.post_processor = processors.TemplateProcessing(
        single='<start> $A <end>', special_tokens=[('<start>', 2), ('<end>', 1)]
    )
    PreTrainedTokenizerFast(tokenizer_object=t, pad_token='!', eos_token='<end>', bos_token='<start>').save_pretrained(
        folder
    )
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    text = dict(sizes, vocab_size=len(words), max_position_embeddings=8, pad_token_id=0, bos_token_id=2, eos_token_id=1)
    config = Owlv2Config(text_config=text, vision_config=dict(sizes, image_size=48, patch_size=16), projection_dim=32)
    model = Owlv2ForObjectDetection(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder)
    from transformers import Owlv2ImageProcessor

    Owlv2ImageProcessor(size=dict(height=48, width=48)).save_pretrained(folder)
    return model


def owlv2_boxes(model, folder, pixels, texts, side):
    "The best box of each text by the forward pass of the package, for an image padded to a square of `side` pixels."
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)
    read = words(texts, padding='max_length', max_length=8, return_tensors='pt')
    with torch.no_grad():
        out = model(pixel_values=pixels[None], input_ids=read['input_ids'], attention_mask=read['attention_mask'])
    x, y, w, h = (side * out.pred_boxes[0, out.logits[0].argmax(0)]).numpy().T
    return np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1)


def test_owlv2_is_refused_without_its_files(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match='config.json is missing; Get it from .*owlv2-base-patch16-ensemble.*'
        'licence: Apache-2.0; size: about 620 MB',
    ):
        sp.OpenDetector(tmp_path, ['cat'])


def test_owlv2_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    for f in ('config.json', 'model.safetensors', 'preprocessor_config.json'):
        (tmp_path / f).write_bytes(b'{}')
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ImportError, match='pip install transformers'):
        sp.OpenDetector(tmp_path, ['cat'])


def test_owlv2_from_a_folder_gives_the_confidences_of_the_package(tmp_path, monkeypatch):
    pytest.importorskip('transformers', reason='the package transformers is not installed')
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    names = ['cat', 'red boat', 'sky']
    model = small_owlv2(tmp_path, names)
    d = sp.OpenDetector(tmp_path, names, device='cpu')
    g = np.random.default_rng(0)
    pictures = [
        Image.fromarray(g.integers(0, 255, (h, w, 3), dtype=np.uint8))
        for h, w in ((48, 48), (30, 70), (90, 40), (48, 48), (60, 60))
    ]
    conf = d.detect(pictures)
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(tmp_path)(
        [f'a photo of a {n}' for n in names], padding='max_length', max_length=8, return_tensors='pt'
    )
    with torch.no_grad():
        own = torch.cat(
            [
                model(
                    input_ids=read['input_ids'],
                    attention_mask=read['attention_mask'],
                    pixel_values=d.preprocess(p)[None],
                )
                .logits.sigmoid()
                .amax(1)
                for p in pictures
            ]
        )
    assert conf.shape == (5, 3) and torch.allclose(conf, own, atol=1e-5)
    assert (conf.std(0) > 1e-4).all() and (conf.std(1) > 1e-4).all()  # they depend on the picture and on the name
    again = sp.OpenDetector(tmp_path, names, device='cpu')
    assert (
        again.fingerprint == d.fingerprint
        and sp.OpenDetector(tmp_path, names, prompt='{}', device='cpu').fingerprint != d.fingerprint
    )


def test_owlv2_finds_the_boxes_of_the_package(tmp_path, monkeypatch):
    pytest.importorskip('transformers', reason='the package transformers is not installed')
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    model = small_owlv2(tmp_path, ['cat', 'sky'])
    d = sp.OpenDetector(tmp_path, ['cat', 'sky'], device='cpu')
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 70, 3), dtype=np.uint8))
    found = d.locate(wide, ['cat', 'sky'])
    assert found.shape == (2, 4) and (found >= 0).all() and (found <= [70, 30, 70, 30]).all()
    own = owlv2_boxes(model, tmp_path, d.preprocess(wide), ['cat', 'sky'], 70)
    assert np.allclose(found, own.clip(0, [70, 30, 70, 30]), atol=1e-3)


# --- end to end


def test_every_task_has_a_solution_and_lists_that_are_told_solve_the_object_tasks(small, tasks, tiny):
    told = sp.TaskSpecific(backbone=tiny, annotated=True)
    found = {t: evaluate(told.for_task(tasks[t]), tasks[t])[0] for t in TASKS}
    assert {t: len(f) for t, f in found.items()} == {t: 20 for t in TASKS}
    for t in ('focus_object', 'change_object'):
        assert (found[t]['rank'] == 1).mean() >= 0.9


def test_what_the_detector_does_not_see_the_solution_does_not_find(small, tasks, tiny):
    told = sp.TaskSpecific(backbone=tiny, annotated=True).for_task(tasks['focus_object'])
    told.backbone.there[:] = 0
    assert (evaluate(told, tasks['focus_object'])[0]['rank'] == 15).all()


@pytest.mark.e2e
def test_the_windows_of_tiny_beat_the_sum_on_objects(small, tasks, tiny):
    shared = share_images({t: tasks[t] for t in TASKS[2:]})  # each image once, for both tasks
    specific = task_methods(sp.TaskSpecific(backbone=tiny), Benchmark('genecis', shared))[0]

    def first(m, t):
        return (evaluate(m, shared[t])[0]['rank'] == 1).mean()

    summed = method('image_text', tiny)
    assert np.mean([first(specific[t], t) for t in specific]) > np.mean([first(summed, t) for t in specific])


def test_images_without_labels_cost_their_queries(small, tasks, tiny):
    told = sp.Annotations(small)
    keep = told.scenes.ids != int(tasks['focus_object'].queries.targets[0][0])
    told.scenes.ids, told.there = told.scenes.ids[keep], told.there[keep]
    found, _ = evaluate(sp.SharedObjects(backbone=told), tasks['focus_object'])
    assert 'focus_object-0000' not in set(found.query_id) and 0 < len(found) < 20
