"Sweeps: a chapter of ablations runs with a single variant."

import pytest
import torch

from cis_nb.experiments.comparison import contradictions, corrected
from cis_nb.experiments.modality_gap import corrected_beside

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
