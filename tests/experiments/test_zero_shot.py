"What is zero-shot: units of texts, parts that have seen them, nouns that are held out, groups of queries."

from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest

from cis_nb.experiments import zero_shot as z
from cis_nb.experiments.comparison import by_own_p, verdict
from cis_nb.experiments.entries import training_config
from cis_nb.methods.compodiff import benchmark_splits
from cis_nb.mining.captions import read_captions
from cis_nb.train import settings
from cis_nb.world.captions import WorldPairs
from cis_nb.world.composed import WORLD_TEST_NOUNS, composed_root
from cis_nb.world.layouts import world_root
from cis_nb.world.scenes import COLORS, THINGS, is_held_out

pytestmark = pytest.mark.usefixtures('store')


def combinations(text):
    return {u for kind, u in z.named_units(text) if kind == 'combination'}


@pytest.mark.parametrize(
    'text, named',
    [
        ('a small red striped boat', {'small boat', 'red boat', 'striped boat'}),
        ('a red table lamp and a mug', {'red lamp'}),
        ('the boat is red', set()),
        ('a red thing near a cat', set()),
        ('make the upside down kitty blue', {'upside-down cat'}),
        ('', set()),
    ],
)
def test_a_combination_is_an_attribute_directly_before_its_noun(text, named):
    assert combinations(text) == named


def test_a_caption_names_only_what_its_scene_shows():
    stream = WorldPairs(400, 3, 'train')
    for i in range(400):
        scene, text = stream.scene_and_caption(i)
        named = {u for u in z.named_units(text) if u[0] in ('noun', 'combination')}
        assert named <= z.shown_units(scene), text


def test_no_stream_shows_a_held_out_noun_and_no_twin_becomes_one():
    stream = WorldPairs(600_000, 1, 'train', held_out=WORLD_TEST_NOUNS)
    for i in range(599_000, 599_600):
        scene, text = stream.scene_and_caption(i)
        assert not {t.category for t in scene.things} & {*WORLD_TEST_NOUNS}
        assert not {u for kind, u in z.named_units(text) if kind == 'noun'} & {*WORLD_TEST_NOUNS}


def test_captions_of_a_world_without_some_nouns_never_name_them():
    root = world_root(coco=0, vaw=0, captions=60, held_out=('cat', 'boat')) / 'captions'
    part = z.counted('captions', [text for *_, text in read_captions(root, 'all')[0]])
    assert part.counts['noun', 'cat'] == part.counts['noun', 'boat'] == 0 < part.counts['noun', 'house']
    assert root != world_root(coco=0, vaw=0, captions=60) / 'captions'


@pytest.mark.parametrize('name', ['tiny'])
def test_a_shipped_backbone_has_not_seen_what_its_generator_refuses(name):
    part = z.backbone_part(name, 1500)
    held = {f'{color} {c}' for c in THINGS for color in COLORS if is_held_out(color, c)}
    assert not [u for u in held if part.counts['combination', u]]
    seen = {c for c in THINGS if part.counts['noun', c]}
    assert seen == {*THINGS} - ({*WORLD_TEST_NOUNS} if name == 'tiny_unseen' else set())


@pytest.mark.parametrize('name', ['vit_l', 'tiny_products'])
def test_what_another_backbone_has_read_is_not_known(name):
    with pytest.raises(ValueError, match=f"backbone: '{name}' was not trained on the images of the world"):
        z.backbone_part(name, 10)


def test_a_training_on_sentences_cannot_do_without_a_noun():
    with pytest.raises(ValueError, match='held_out: combiner on cirr triplets cannot do without a noun'):
        z.without_nouns(training_config('cirr'), ['cat'])
    with pytest.raises(ValueError, match="held_out: 'dragon' is none of"):
        z.without_nouns(training_config('lincir'), ['dragon'])


def part_with(*units):
    return z.Part('a part', 1, Counter(dict.fromkeys(units, 1)))


def made_up_task(*conditions):
    q = pd.DataFrame(dict(query_id=[str(i) for i in range(len(conditions))], condition=conditions))
    return SimpleNamespace(task='full', queries=q)


def test_a_query_is_unseen_if_no_part_has_seen_a_noun_or_a_combination():
    task = made_up_task('add a cat', 'a red cat', 'a red boat', 'a tilted thing')
    one, two = part_with(('noun', 'cat')), part_with(('combination', 'red cat'))
    assert [*z.seen_groups(task, [one]).values()] == [(), ('red cat',), ('boat', 'red boat'), ()]
    assert [*z.seen_groups(task, [one, two]).values()] == [(), (), ('boat', 'red boat'), ()]
    assert [z.unseen_kinds(task, p) for p in ([one], [one, part_with(('noun', 'boat'))])] == [
        'combinations and nouns',
        'combinations',
    ]


def test_few_units_give_no_verdict_and_several_are_drawn_anew():
    def planted(units):  # forty queries, each of a reference of its own; `a` solves those of every second unit
        lines = [(m, i, 1 if i >= 40 or m == 'a' and i % units % 2 == 0 else 2) for i in range(80) for m in 'ab']
        t = pd.DataFrame(lines, columns=['method', 'query_id', 'rank'])
        asked = {i: (f'unit {i % units}',) if i < 40 else () for i in range(80)}
        t = t.assign(seed=-1, draw=0, task='full', reference=t.query_id.astype(str), gallery_size=9)
        return z.group_leads(t, asked, [('a', 'b')])['a', 'b', 'unseen']

    few, more = planted(2), planted(8)
    assert few['low'] > 0 and verdict(by_own_p(few)) == 'too few combinations' and few['units'] == 2
    assert more['diff'] == few['diff'] == 50 and more['units'] == 8 and verdict(by_own_p(more)) == 'better'
    assert more['high'] - more['low'] > 1.5 * (few['high'] - few['low'])  # eight units vary more than forty references


def test_the_audit_counts_units_and_queries():
    task = made_up_task('a cat', 'a red cat', 'a boat', 'a boat')
    table = z.audit_table({'made up': task}, [part_with(('noun', 'cat'), ('attribute', 'red'))]).set_index('units')
    assert table['in the test'].to_dict() == dict(words=4, nouns=2, attributes=1, combinations=1)
    found = table['unseen by a part'].to_dict()
    assert found == dict(words='4 (100 %)', nouns='1 (50 %)', attributes='0', combinations='1 (25 %)')


def test_the_first_drawing_of_cirr_has_edits_alone():
    roots = {s: composed_root(cirr=90, sentences=s) for s in ('mixed', 'edits')}
    kinds = {s: set(pd.read_json(root / 'cirr/kinds.train.json', typ='series')) for s, root in roots.items()}
    assert 'shows' in kinds['mixed'] and 'shows' not in kinds['edits'] and {'move', 'swap', 'place'} & kinds['edits']
    with pytest.raises(ValueError, match="sentences: 'orders' is none of mixed, edits"):
        composed_root(cirr=18, sentences='orders')


def test_a_training_has_read_what_the_one_before_it_has_read(monkeypatch):
    known = {
        '05_train.first': SimpleNamespace(method='made_up', start='', texts=dict(captions=['a cat', 'a cup'])),
        '05_train.second': SimpleNamespace(
            method='made_up', start='05_train.first', texts=dict(captions=['a cup', 'a hat'], sentences=['add a bus'])
        ),
    }
    monkeypatch.setattr(z, 'training_config', known.get)
    monkeypatch.setitem(z.TEXTS_READ, 'made_up', lambda c: c.texts)
    assert z.training_texts(known['05_train.first']) == dict(captions=['a cat', 'a cup'])
    both = dict(captions=['a cat', 'a cup', 'a hat'], sentences=['add a bus'])
    assert z.training_texts(known['05_train.second']) == both


def test_only_parts_that_have_seen_the_same_share_a_column():
    texts = ['a red cat'], ['a red cat'], ['a red cat'] * 2, ['a blue cat']
    parts = z.merged_parts([z.counted(name, some) for name, some in zip('abcd', texts)])
    assert [p.title for p in parts] == ['a; b', 'c', 'd']


def test_the_sentences_of_fashioniq_are_all_those_of_its_training_split():
    config = settings(dict(method='compodiff', stage='finetune', start='none', triplets='fashioniq', fashioniq=60))
    sentences = z.training_texts(config)['sentences']
    queries = [t.queries for t in benchmark_splits(config, 'train').values()]
    assert len(sentences) == sum(len(some) for q in queries for some in q.texts) > sum(map(len, queries))
