"Ablations of the Combiner: what runs share, what must not change, the arithmetic of slopes."

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
import cis_nb.experiments.combiner_ablations as A
import cis_nb.experiments.combiner_variants as V
from cis_nb.retrieval.protocol import RESULT_COLUMNS
from cis_nb.experiments.comparison import compare, contrast, difference_cell, hits, task_mean
from cis_nb.backbones.loading import load_backbone, save_backbone
from cis_nb.methods.combiner import CombinerConfig
from cis_nb.train import settings

torch.set_num_threads(1)
SMALL = dict(samples=200, val_samples=20, steps=2, batch_size=16, projection=8, hidden=8, lr=1e-3, device='cpu')


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_STORE', str(tmp_path_factory.mktemp('store')))
        yield
        A.corpus.cache_clear()
        A._drawn.cache_clear()


@pytest.fixture(scope='module')
def c(store):
    return A.corpus('world', 150)


@pytest.fixture(scope='module')
def tiny():
    return load_backbone('tiny', device='cpu')


# ---- slopes and differences


def ranks(seed, methods, n=60, seeds=(0,)):
    "Random answers of several methods to the same queries of two tasks."
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        [
            dict(
                method=m,
                seed=s,
                draw=0,
                task=t,
                query_id=f'{t}{q}',
                reference=f'r{q // 3}',
                rank=int(rng.integers(1, 4)),
            )
            for m in methods
            for s in seeds
            for t in 'ab'
            for q in range(n)
        ]
    )


def test_sizes_are_judged_by_one_set_of_corrected_comparisons():
    "Gains by the filter, slopes and last steps have one verdict in table, figure and receipt."
    sizes, seeds = [10, 40, 160], [0, 1]
    names = [V.size_name(n, f) for f in V.FILTER_LABELS for n in sizes]
    q = pd.concat([ranks(0, names, seeds=seeds), ranks(1, [*V.BASELINES, 'combiner_start'], seeds=[-1])])
    gains, trends, over = V.filter_gains(q, sizes), V.size_trends(q, sizes, seeds), V.size_leads(q, sizes)
    table = V.triplet_number_table(q, sizes, 320, over, gains)
    assert [c['family'] for c in gains.values()] == [3] * 3
    assert table['gain by the filter'].tolist() == [*map(difference_cell, gains.values()), '–', '–']
    assert table['triplets'].tolist()[3:] == ['none: before training', 'none: Image + Text, tuned']
    found = V.trend_comparisons(trends)
    assert [c['family'] for c in found.values()] == [4] * 4
    slopes, steps = [*found.values()][:2], [*found.values()][2:]
    shown = V.trend_table(trends)
    assert shown['points for four times as many triplets'].tolist() == [*map(difference_cell, slopes)]
    assert shown['the last step alone'].tolist() == [*map(difference_cell, steps)]
    assert {c['family'] for c in over.values()} == {len(V.BASELINES)}  # as on every page with these late fusions


@pytest.mark.parametrize('seed', range(5))
def test_a_slope_is_the_slope_of_the_least_squares_line(seed):
    x = dict(zip('uvwz', np.random.default_rng(seed).normal(size=4)))
    t = ranks(seed, x, seeds=(0, 1))
    found = contrast(t, A.slope(x), seed=seed)
    line = np.polyfit(list(x.values()), [task_mean(hits(t)[m]) for m in x], 1)[0]
    assert found['diff'] == pytest.approx(line) and found['low'] <= found['diff'] <= found['high']
    assert sum(A.slope(x).values()) == pytest.approx(0)


def test_two_methods_make_the_difference_that_the_book_knows():
    t = ranks(3, 'uv')
    assert {k: contrast(t, dict(u=1, v=-1))[k] for k in ('diff', 'low', 'high', 'n')} == pytest.approx(
        {k: compare(t, 'u', 'v')[k] for k in ('diff', 'low', 'high', 'n')}
    )


def test_families_are_drawn_whole():
    t = ranks(4, 'uv', n=300).assign(reference='one')
    assert [contrast(t, dict(u=1, v=-1))[k] for k in ('low', 'high')] == [
        -100,
        100,
    ]  # one reference says nothing about others
    wide, narrow = (contrast(ranks(4, 'uv', n=300), dict(u=1, v=-1), families=f) for f in (True, False))
    assert wide['diff'] == narrow['diff'] and wide['low'] != narrow['low']


def test_no_slope_without_a_distance():
    with pytest.raises(ValueError, match='have the same value'):
        A.slope(dict(u=2.0, v=2.0))


def test_methods_with_different_queries_are_refused():
    t = ranks(5, 'uv')
    with pytest.raises(ValueError, match='same queries'):
        contrast(t.drop(0), dict(u=1, v=-1))


def test_effects_are_result_rows(tiny):
    rows = A.effects(dict(slope=dict(diff=1.0, low=0.5, high=2.0, n=9)), 'tiny', [])
    assert list(rows) == RESULT_COLUMNS and rows.metric.tolist() == ['effect'] and rows.value.tolist() == [1.0]


# ---- controls


def test_the_network_before_training_is_a_question_of_its_own():
    "Its difference does not change the verdicts on late fusions, and it is no variant of the ablations."
    trained = ranks(0, ['combiner', 'back_start', 'no_filter'], seeds=[0, 1])
    q = pd.concat([trained, ranks(1, [*V.BASELINES, *V.START_LABELS], seeds=[-1])])
    over = V.recipe_leads(q)
    starts = {a: b for a, b, _ in over if b in V.START_LABELS}
    assert starts == dict(combiner='combiner_start', back_start='published_start')
    assert [c['family'] for c in over.values()] == [len(V.BASELINES)] * 3 + [1] + [len(V.BASELINES)] * 3 + [1]
    assert V.recipe_table(q, over, {}).variant.tolist()[2:] == [*V.START_LABELS.values()]
    found = V.variant_leads(q, V.ablation_labels(q), V.rival_of)
    assert [*found] == ['no_filter'] and found['no_filter']['family'] == 1
    assert V.ablation_table(q, found)[''].iloc[-1] == V.START_LABELS['combiner_start']


@pytest.mark.parametrize('change', [dict(partner='random'), dict(negatives='batch'), dict(filter='none')])
@pytest.mark.e2e
def test_triplets_and_loss_leave_the_start_as_it_is(c, tiny, change):
    nets = [load_file(A.train_variant(c, SMALL | x, start=True) / 'combiner.safetensors') for x in ({}, change)]
    assert all(torch.equal(nets[0][k], v) for k, v in nets[1].items())
    drawn = A.make_combiner(tiny.D, settings(A.OURS | SMALL | change)).state_dict()
    assert all(torch.equal(v, nets[0][k]) for k, v in drawn.items())


# ---- the published recipe and the paper's table


def test_all_steps_back_are_the_published_recipe():
    usual, ours = CombinerConfig(), settings(A.OURS)
    assert A.PUBLISHED_COMBINER == {k: getattr(usual, k) for k in A.PUBLISHED_COMBINER}
    assert all(getattr(ours, k) != v for k, v in A.PUBLISHED_COMBINER.items())


def test_the_papers_table_has_six_rows():
    assert A.paper_ablations().index.is_unique and len(A.paper_ablations()) == 6


# ---- triplets


@pytest.mark.parametrize(
    'change',
    [{}, dict(filter='none'), dict(partner='random'), dict(captions='first'), dict(attributes=False), dict(seed=3)],
)
@pytest.mark.e2e
def test_a_small_set_is_the_beginning_of_a_large_one(c, change):
    p = settings(A.OURS | dict(samples=300) | change)
    assert A.sampled_triplets(c, p.model_copy(update=dict(samples=75))).equals(A.sampled_triplets(c, p).head(75))


@pytest.mark.e2e
def test_first_captions_are_one_per_photograph(c):
    first = A.relations_for(c, 'first', True)
    assert first.groupby('image').caption.nunique().max() == 1 and set(first.split) == {'train'}


# ---- runs


@pytest.mark.e2e
def test_the_same_question_is_the_same_run(c, tiny):
    run = A.train_variant(c, SMALL)
    assert A.train_variant(c, SMALL) == run and A.train_variant(c, SMALL | dict(device='auto')) == run
    assert (
        len(
            {
                run,
                A.train_variant(c, SMALL | dict(seed=1)),
                A.train_variant(c, SMALL | dict(partner='random')),
                A.train_variant(c, SMALL, after=run),
            }
        )
        == 4
    )


@pytest.mark.e2e
def test_a_variant_is_kept_by_the_same_rule_as_every_training(c, monkeypatch):
    "Backbone, corpus and the run it goes on from are its inputs; the code of its plugin and backbone is in its key."
    asked = []
    monkeypatch.setattr('cis_nb.train.stored', lambda kind, variant, params, build, **kept: asked.append(kept))
    for after in (None, Path('runs/first')):
        A.train_variant(c, SMALL, after)
    alone, then = asked
    assert alone['inputs'][1:3] == [c.name, c.images.key] and then['inputs'] == [*alone['inputs'], Path('runs/first')]
    assert [type(alone['code'][0]), alone['code'][1]] == [A.OnCorpus, type(load_backbone('tiny', device='cpu'))]


@pytest.mark.e2e
def test_the_text_tower_of_a_variant_is_compiled_if_asked(c, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module, **how: compiled.append(how['backend']))
    A.train_variant(c, SMALL | dict(compile='eager', steps=1))
    assert compiled == ['eager']


@pytest.mark.e2e
def test_a_run_goes_on_from_another(c, tiny):
    run = A.train_variant(c, SMALL)
    still = A.train_variant(c, SMALL | dict(lr=0.0, seed=5), after=run)
    before, now = (load_file(r / 'combiner.safetensors') for r in (run, still))
    assert all(torch.equal(before[k], now[k]) for k in before)


@pytest.mark.parametrize('tune, kept', [('text', 'visual'), ('image', 'transformer')])
@pytest.mark.e2e
def test_the_half_at_rest_keeps_every_bit(c, tiny, tune, kept):
    "The features of pictures are used again where only the words' half has trained."
    before = {k: v.clone() for k, v in tiny.model.state_dict().items()}
    run = A.train_variant(c, SMALL | dict(tune=tune, batch_size=8), after=A.train_variant(c, SMALL))
    now = load_backbone('tiny', str(run), device='cpu').model.state_dict()
    same = {k: torch.equal(v, now[k]) for k, v in before.items()}
    assert all(v for k, v in same.items() if k.split('.')[0] == kept) and not all(same.values())
    assert all(
        torch.equal(v, tiny.model.state_dict()[k]) for k, v in before.items()
    )  # the backbone handed in is untouched


# ---- the small siblings of tiny


@pytest.mark.parametrize('name, W', [('tiny_s', 64), ('tiny_xs', 32)])
def test_small_backbones(name, W, tmp_path):
    b = load_backbone(name, 'none', device='cpu')
    assert (b.D, b.W, b.image_size, b.context) == (160, W, 64, 32)
    save_backbone(b, tmp_path / 'run')
    assert (
        load_backbone(name, str(tmp_path / 'run'), device='cpu', golden=True).record['parameters']
        == b.record['parameters']
    )
    with pytest.raises(ValueError, match=f'holds weights of {name}, not of tiny'):
        load_backbone('tiny', str(tmp_path / 'run'))


def test_a_table_says_which_verdicts_the_correction_undoes():
    q = ranks(0, ['combiner', 'no_filter'])
    lost = dict(diff=-1.0, low=-2.0, high=-0.1, p=0.03, p_corrected=0.06, family=2)
    table = V.ablation_table(q, dict(no_filter=lost))  # its last row is the network before training
    assert table[' '].tolist() == ['', 'undecided by Holm', '']
