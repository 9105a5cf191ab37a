"Prompts of pseudo-words: every page of results chooses among the same ones."

from projects import ROOT

from cis_nb.core.experiment_files import defaults, read_notebook

LONG = 'a {condition} of $'  # behind the long descriptions of CIRCO its `$` is beyond the context


def test_every_page_chooses_among_the_same_prompts():
    lists = {}
    for file in sorted((ROOT / 'nbs' / '06_evaluation').glob('*.ipynb')):
        prompts = (defaults(read_notebook(file)) or {}).get('prompts')
        if isinstance(prompts, list) and any('$' in p for p in prompts):
            lists[file.stem] = prompts
    assert {'compodiff', 'matrix', 'pseudo_words_circo_cirr', 'pseudo_words_genecis', 'zero_shot'} <= set(lists)
    assert len({tuple(p for p in prompts if p != LONG) for prompts in lists.values()}) == 1, lists
