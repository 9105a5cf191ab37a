"Sweeps: a chapter of ablations runs with a single variant."

import pandas as pd
import pytest
import torch

from cis_nb.experiments import combiner_variants
from cis_nb.experiments.comparison import contradictions, corrected, format_difference, opposite
from cis_nb.experiments.corpora_and_masking import corpus_finding, masking_finding
from cis_nb.experiments.modality_gap import best_noise, corrected_beside
from cis_nb.experiments.supervision import phrases_table

torch.set_num_threads(1)


# ---- chapters with one of the two sets


@pytest.mark.parametrize(
    'chapter', ['07_ablations/supervision', '07_ablations/corpus', '08_scaling/pseudo_words_backbones']
)
@pytest.mark.parametrize('sets', [['circo'], ['full']])
@pytest.mark.e2e
def test_a_chapter_of_variants_runs_with_one_set(chapter, sets, monkeypatch):
    from cis_nb.core.experiment_files import code_cells, notebooks, read_notebook, tags

    monkeypatch.setenv('MPLBACKEND', 'Agg')
    small = {
        '07_ablations/supervision': dict(prompts=2, fashion=0),
        '07_ablations/corpus': dict(corpora=['world', 'talk'], lines=80),
        '08_scaling/pseudo_words_backbones': dict(backbones=['tiny_xs'], changes={'lincir': {}}),
    }[chapter]

    def run(sets):
        names = {}
        for cell in code_cells(read_notebook(notebooks()[chapter])):
            exec(compile(cell['source'], chapter, 'exec'), names)
            if 'parameters' in tags(cell):
                names.update(small, sets=sets, seeds=[0], shorter={'steps': 4})
        return names

    names = run(sets)
    assert list((names.get('run') or names['first']).sets) == sets
    with pytest.raises(ValueError, match="sets: 'states' is none of full, subset, circo"):
        run(['states'])


# ---- one comparison in two tables


def test_a_comparison_of_an_earlier_table_keeps_its_verdict():
    "Alone its p-value would survive; among those of the first table it does not."

    def comparison(key, p):
        return dict(key=key, p=p, diff=2.0, low=0.1, high=3.9, seeds=0, seed_intervals=[])

    first = corrected({i: comparison(f'k{i}', 0.03) for i in range(4)})
    second = corrected_beside({'again': comparison('k0', 0.03), 'new': comparison('n', 0.03)}, first)
    assert list(second) == ['again', 'new']
    assert second['again'] == first[0] and second['new']['family'] == 1
    pages = dict(page=dict(comparisons=[*first.values(), *second.values()]))
    assert contradictions(pages) == []
    alone = corrected({'again': comparison('k0', 0.03)})
    assert len(contradictions(pages | dict(other=dict(comparisons=[*alone.values()])))) == 1


# ---- one family for a table and its finding


def weak(diff=1.0, **more):
    "A difference whose interval excludes zero and that the correction of a large table undoes."
    return dict(diff=diff, low=diff - 0.5, high=diff + 0.5, p=0.02, seeds=0, by_seed=[], seed_intervals=[], key='k') | (
        dict(p_corrected=0.28, family=14) | more
    )


def scores(**of):  # method -> its score on CIRR
    "Rankings with scores, equal for all queries of a method."
    lines = [dict(method=m, task='full', draw=0, seed=0, query_id=q, score=s) for m, s in of.items() for q in range(9)]
    return pd.DataFrame(lines)


def test_a_finding_has_the_verdicts_of_its_table():
    found = {('rest', 'full'): weak(-1.0), ('word', 'full'): weak(-2.0)}
    titles, q = dict(runs='all', rest='rest', word='word'), scores(runs=3.0, rest=2.0, word=1.0)
    said = corpus_finding(found, dict(runs='captions', rest='lists'), ['full'])
    assert said == f'CIRR R@1: captions against lists {format_difference(opposite(found["rest", "full"]))}'
    assert said.endswith('(undecided by Holm)')
    said = masking_finding(q, found, titles, ['full'])
    assert said.count('undecided by Holm') == 2
    assert said.endswith('CIRR R@1: none of 3 maskings is better than each of the others')
    sure = {key: c | dict(p_corrected=0.01) for key, c in found.items()}
    assert masking_finding(q, sure, titles, ['full']).endswith('CIRR R@1: all is better than each of the others')


def test_the_best_noise_has_the_verdict_of_the_table():
    q, titles = scores(product=2.0, none=1.0), dict(product='noise', none='no noise')
    said = [best_noise(q, {('product', 'full'): weak(p_corrected=p)}, titles, 'full') for p in (0.28, 0.01)]
    assert [s.split(' is ')[0] for s in said] == ['none of 2 settings of the noise', 'noise']


def test_two_grammars_are_compared_after_the_correction():
    q, titles = scores(searle=2.0, searle_beside=1.0), dict(searle='SEARLE', searle_beside='beside')
    table = phrases_table(q, titles, {('searle', 'full'): weak()})
    assert table.difference.tolist() == ['+1.0 [+0.5, +1.5] (undecided by Holm)']


def test_the_best_size_has_the_verdict_of_the_table():
    over = {
        (combiner_variants.size_name(n, f), 'image_text_tuned', ''): weak(n / 10, b='image_text_tuned', p_corrected=p)
        for n, p in ((10, 0.001), (40, 0.06))
        for f in combiner_variants.FILTER_LABELS
    }
    said = combiner_variants.best_size([10, 40], over)
    assert said.startswith('The best of 4 trainings on these queries, 40 triplets') and 'is undecided by Holm' in said
    sure = {key: c | dict(p_corrected=0.02) for key, c in over.items()}  # and not corrected once more
    assert 'is better than' in combiner_variants.best_size([10, 40], sure)
