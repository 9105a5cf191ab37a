"GeneCIS evaluation: shared features, missing images, wrong names, shown queries, missing annotations."

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
from cis_nb.backbones.features import Features
import torch
from PIL import Image
from rankings import rows
from cis_nb.experiments import comparison as cp, examples
from cis_nb.experiments import genecis as ev
from cis_nb.experiments.entries import Entry, read_cached
from cis_nb.experiments.matrix import rank_benchmark, rank_entries, unsolved_tasks
from cis_nb.retrieval.protocol import Benchmark, Protocol, Task, evaluate
from cis_nb.api import Unsolved
from cis_nb.benchmarks.genecis import TASK_GROUPS, TASKS
from cis_nb.methods import baselines as bl
from cis_nb.methods.task_specific import FocusAttribute, SharedObjects, TaskSpecific, unknown_names

COLOURS = dict(a=(255, 0, 0), b=(0, 255, 0), c=(0, 0, 255), d=(255, 255, 0), e=(255, 0, 255))


class Eyes:
    "A backbone whose image feature is a colour; what cannot be loaded is left out, as the feature store does."

    name, fingerprint, D = 'eyes', 'eyes', 3

    def __init__(self):
        self.seen = []

    def encode_text(self, texts):
        return torch.tensor([[0.0, 0.0, 3.0] if 'blue' in t else [3.0, 0.0, 0.0] for t in texts])

    def features(self, images):
        kept = [i for i in images.ids if images.load(i) is not None]
        self.seen += kept
        array = np.stack([np.asarray(images.load(i))[0, 0] / 255.0 for i in kept])
        return Features(array, list(kept), {i: n for n, i in enumerate(kept)})


eyes = Eyes()


def bench(task='focus_object', gallery=('c', 'b', 'd'), crop='whole image', load=None, n=1, key=None):
    rows = [(f'{task}-{i}', 'a', 'blue', [gallery[0]], list(gallery)) for i in range(n)]
    q = pd.DataFrame(rows, columns=['query_id', 'reference', 'condition', 'targets', 'gallery'])
    return Task(
        'toy',
        task,
        q,
        load or (lambda i: Image.new('RGB', (2, 2), COLOURS[i])),
        Protocol(f'toy/{task}', gallery=f'{len(gallery)} per query', crop=crop),
        key=key or task + crop,
    )


pytestmark = pytest.mark.usefixtures('store')


def ranked(name, task, draw=0):
    "The rankings of a task by a baseline."
    return rank_benchmark(Entry(bl.method(name, eyes)), Benchmark("toy", {task.task: task}, draw=draw))


def test_rankings_of_a_training_carry_its_seed_and_those_of_a_draw_its_number():
    trained = replace(bl.method('text_only', eyes), name='combiner')
    tasks = ev.draw_benchmarks({(d, 'focus_object'): bench() for d in (0, 2)}, {})
    found = read_cached(rank_entries([Entry(trained, 3, Path('run'))], tasks))
    assert set(found.seed) == {3} and set(found.method) == {'combiner'} and found.draw.tolist() == [0, 2]


def test_a_task_is_missing_in_the_draw_that_lacks_it():
    tasks = {(0, 'focus_object'): bench(), (0, 'change_object'): bench('change_object'), (1, 'focus_object'): bench()}
    first, second = ev.draw_benchmarks(tasks, dict(change_object='lost')).values()
    assert (list(first.tasks), first.missing, first.draw) == (['focus_object', 'change_object'], {}, 0)
    assert (list(second.tasks), second.missing, second.draw) == (['focus_object'], dict(change_object='lost'), 1)


# --- specific solutions


def test_a_name_that_nobody_knows_leaves_the_task_out():
    b = bench()
    lists = SharedObjects(backbone=SimpleNamespace(name='pond', names=['green']))
    assert unknown_names(lists, b).startswith("1 of 1 conditions are unknown to the solution, such as 'blue'")
    assert not unknown_names(FocusAttribute(types={'blue': []}, backbone=eyes), b)


def test_without_annotations_there_is_no_specific_solution(tmp_path):
    tasks = {(0, t): replace(bench(t), root=tmp_path) for t in ('focus_object', 'focus_attribute')}
    entry = Entry(TaskSpecific(backbone=eyes))
    refused = unsolved_tasks([entry], ev.draw_benchmarks(tasks, {})).set_index('task').why
    assert 'panoptic_val2017.json is missing' in refused.focus_object and 'VAW' in refused.focus_attribute
    with pytest.raises(Unsolved, match='task_specific can solve no task; leave it out of `methods`: genecis, focus_ob'):
        rank_entries([entry], ev.draw_benchmarks(tasks, {}))
    assert rank_entries([entry], {}) == []  # nothing was asked, so nothing was refused


# --- which queries are shown


def test_shown_queries_follow_their_rules():
    t = pd.concat(
        [
            rows(('c', 'a', 1, 1), ('c', 'a', 2, 1), ('c', 'a', 3, 4), ('c', 'a', 4, 2)),
            rows(('x', 'a', 1, 3), ('x', 'a', 2, 9), ('x', 'a', 3, 1), ('x', 'a', 4, 1)),
        ]
    )
    assert examples.won_by(t, 'c', ['x'], 'a').query_id.tolist() == [2, 1] and examples.failures(
        t, 'c', 'a'
    ).query_id.tolist() == [
        4,
        3,
    ]
    asked = t.assign(task='focus_object', condition=['p', 'q', 'q', 'r'] * 2, reference=['i', 'i', 'j', 'j'] * 2)
    assert examples.condition_lines(asked, 'c', TASK_GROUPS['object']).condition.tolist() == [
        'p',
        'q',
    ]  # both references have two; i has more right


def test_a_strip_of_several_right_answers_marks_them_all():
    b = bench(gallery=('c', 'b', 'd'))
    b.queries.at[0, 'targets'] = ['c', 'b']
    a = pd.Series(dict(query_id='focus_object-0', reference='a', condition='blue ' * 40, rank=1, top=['c', 'b', 'd']))
    s = examples.ranking_strip(b, a)
    assert s['outlines'] == ['reference', 'target', 'target', None] and len(s['title']) < 90


# --- running


def test_each_distinct_image_is_encoded_once():
    backbone = Eyes()
    tasks = {
        (0, 'focus_object'): bench('focus_object', ('c', 'b', 'd')),
        (0, 'change_object'): bench('change_object', ('c', 'd', 'e')),
        (0, 'focus_attribute'): bench('focus_attribute', ('c', 'b'), crop='box'),
    }
    m = bl.method('image_text', backbone)
    for task in ev.share_images(tasks).values():
        evaluate(m, task, ks=(1,))
    assert sorted(backbone.seen) == sorted('abcde' + 'abc')  # whole images once, crops of the same names on their own


def test_a_crop_and_a_whole_image_of_the_same_name_stay_apart():
    tasks = ev.share_images(
        dict(
            whole=bench(crop='whole image'),
            box=bench('focus_attribute', crop='box', load=lambda i: Image.new('RGB', (2, 2), (0, 0, 255))),
        )
    )
    whole, box = (eyes.features(tasks[k].source) for k in ('whole', 'box'))
    assert whole.array[whole.index['a']].tolist() == [1, 0, 0] and box.array[box.index['a']].tolist() == [0, 0, 1]


def test_answers_do_not_depend_on_the_order_of_the_gallery():
    other = replace(bench(), queries=bench().queries.assign(gallery=[['e', 'd', 'b', 'c']]), images=None, source=None)
    for m in ('image_text', 'text_only'):
        one, two = (ranked(m, b)['rank'].tolist() for b in (bench(gallery=('c', 'b', 'd', 'e')), other))
        assert one == two


def test_a_guess_is_new_on_every_task():
    tasks = [bench(t, gallery=('c', 'b', 'd', 'e'), n=50) for t in TASKS[:2]]
    first, second = (ranked('random_scores', task)['rank'].tolist() for task in tasks)
    assert first != second and set(first) == {1, 2, 3, 4}


def test_an_unreadable_image_makes_the_task_partial():
    b = bench(n=2)
    b.queries.at[1, 'gallery'] = ['c', 'e']
    b = replace(b, images=None, source=None, load=lambda i: None if i == 'e' else Image.new('RGB', (2, 2), COLOURS[i]))
    b.ks = (1,)  # of a gallery of two
    found = ranked('text_only', b)
    assert list(found.query_id) == ['focus_object-0']


def test_an_image_that_cannot_be_encoded_makes_the_protocol_partial():
    b = bench(gallery=('c', 'b', 'd'))
    q = pd.concat([b.queries, b.queries.assign(query_id='other', gallery=[['c', 'e']])], ignore_index=True)
    b = replace(
        b,
        queries=q,
        images=None,
        source=None,
        load=lambda i: None if i == 'e' else Image.new('RGB', (2, 2), COLOURS[i]),
    )
    found, missing = ev.readable({(0, 'focus_object'): b}, eyes)
    assert len(found[0, 'focus_object']) == 1 and 'partial' in str(found[0, 'focus_object'].protocol) and not missing
    blind = replace(b, source=None, load=lambda i: None if i in 'cd' else Image.new('RGB', (2, 2), COLOURS[i]))
    found, missing = ev.readable({(0, 'focus_object'): blind}, eyes)
    assert not found and 'no query has all of its own' in missing['focus_object']


def test_no_benchmark_gives_an_empty_table_and_an_empty_summary():
    found = read_cached(rank_entries([Entry(bl.method('image_only', eyes))], {}))
    assert found.empty and ev.summary(found, 'eyes').empty and cp.chance(found).empty


def test_unknown_names_are_errors():
    with pytest.raises(KeyError, match='image_only'):
        bl.method('image_txt', eyes)
    with pytest.raises(ValueError, match='the tasks are'):
        ev.load_genecis_tasks('.', ['focus_colour'])


# --- a folder of real images


def templates(n, first=0):
    return [
        dict(
            reference=dict(val_image_id=first),
            target=dict(val_image_id=first + 1),
            gallery=[dict(val_image_id=first + 2 + j) for j in range(14)],
            condition='tree',
        )
        for _ in range(n)
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'genecis').mkdir()
    (tmp_path / 'val2017').mkdir()
    (tmp_path / 'genecis' / 'focus_object.json').write_text(
        json.dumps([*templates(1), *templates(1, 20)], indent=4, sort_keys=True)
    )
    for i in range(16):
        Image.new('RGB', (8, 8), (i * 10, 0, 0)).save(tmp_path / 'val2017' / f'{i:012d}.jpg')
    return tmp_path


def test_released_templates_are_used_and_missing_images_make_them_partial(folder):
    found, missing = ev.load_genecis_tasks(folder, ['focus_object', 'change_object'], draws=3)
    b = found[0, 'focus_object']
    assert list(found) == [(0, 'focus_object')] and 'change_object' in missing  # no second draw of released templates
    assert len(b) == 1 and b.protocol.coverage == 0.5 and 'partial' in cp.protocol_line([b.protocol])


def test_without_a_usable_query_the_task_is_left_out_with_the_reason(folder):
    (folder / 'val2017' / '000000000003.jpg').unlink()
    found, missing = ev.load_genecis_tasks(folder, ['focus_object'])
    assert not found and 'no query has all of its own' in missing['focus_object']


def test_a_broken_file_is_an_error_and_not_a_missing_task(folder):
    (folder / 'genecis' / 'focus_object.json').write_text('[{"reference":')
    with pytest.raises(ValueError, match='not JSON'):
        ev.load_genecis_tasks(folder, ['focus_object'])


def test_neighbours_in_the_order_are_corrected_together(monkeypatch):
    "One of three differences with p = 0.03 is no order; of one alone it is."
    found = dict(low=0.1, high=2.0, p=0.03)
    monkeypatch.setattr(ev, 'compare', lambda per_query, a, b, **kw: dict(found))
    methods = ['image_text', 'image_text_tuned', 'image_only', 'text_only']
    results = pd.DataFrame([dict(method=m, k=1, value=40.0 - i, ci_low=35.0 - i) for i, m in enumerate(methods)])
    queries = pd.DataFrame(dict(task=['a'], gallery_size=[10]))
    said = [ev.order_line(queries, results.iloc[:n], {m: m for m in methods}) for n in (4, 2)]
    assert said[0].count(' ≈ ') == 3 and said[1].startswith('image_text 40.0 > image_text_tuned 39.0 > chance 10.0')


@pytest.mark.parametrize(
    'more, said',
    [
        (dict(p_corrected=0.01), 'is better than'),
        (dict(p_corrected=0.06), 'is undecided by Holm against'),
        (dict(p_corrected=0.06, low=-0.5, needed=90), 'has too few queries against'),
    ],
)
def test_a_sentence_has_each_verdict(more, said):
    c = dict(a='x', b='y', diff=1.0, low=0.5, high=2.0, n=9, p=0.01, seeds=3) | more
    assert ev.comparison_sentence(c, dict(x='X', y='Y')).startswith(f'X **{said}** Y: +1.0 [')
