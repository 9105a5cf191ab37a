"Sweeps: a chapter of ablations runs with a single variant."

import pytest
import torch

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
    with pytest.raises(ValueError, match="sets: 'states' is none of full, circo, subset"):
        run(['states'])
