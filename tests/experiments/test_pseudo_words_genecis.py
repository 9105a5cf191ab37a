"Pseudo-words on GeneCIS: what the claim on attribute tasks needs, on rankings with a known answer."

from types import SimpleNamespace

import pandas as pd
import pytest

from cis_nb.benchmarks.genecis import TASKS
from cis_nb.experiments.claims import judge_evidence
from cis_nb.experiments.pseudo_words import AS_PUBLISHED
from cis_nb.experiments.pseudo_words_genecis import attribute_lean, lean_evidence, lean_table


def ranked(shares: dict, n: int = 200):
    "A run in which each method (method -> share in attribute tasks, in object tasks) solves these shares of queries."
    rows = [
        dict(
            method=m + AS_PUBLISHED, task=t, seed=s, draw=0, query_id=f'{t}{i}', reference=f'{t}{i}', rank=1 + (i >= k)
        )
        for m, (attributes, objects) in shares.items()
        for t in TASKS
        for s in (0, 1, 2)
        for k in [n * (attributes if 'attribute' in t else objects)]
        for i in range(n)
    ]
    titles = {m + AS_PUBLISHED: m for m in shares}
    per_query = pd.DataFrame(rows).assign(gallery_size=15)
    return SimpleNamespace(per_query=per_query, titles=titles, entries=[])


@pytest.mark.parametrize(
    'lincir, pic2word, said',
    [
        ((0.5, 0.3), (0.3, 0.3), 'reproduced'),
        ((0.3, 0.1), (0.3, 0.3), 'undecided'),  # a loss on the object tasks is no gain on the others
        ((0.5, 0.3), (0.6, 0.5), 'not reproduced'),  # a gain over one of the two
        ((0.5, 0.6), (0.3, 0.3), 'not reproduced'),  # the larger gain is on the object tasks
    ],
)
def test_a_gain_that_sits_in_the_attribute_tasks_is_a_gain_there_over_both_rivals(lincir, pic2word, said):
    run = ranked(dict(lincir=lincir, searle=(0.3, 0.3), pic2word=pic2word))
    lean = attribute_lean(run)
    assert judge_evidence(lean_evidence(lean, run.titles)['N06']).verdict == said
    assert list(lean_table(lean, run.titles).iloc[:, 0]) == ['lincir against searle', 'lincir against pic2word']


def test_a_rival_without_a_training_leaves_the_claim_undecided():
    run = ranked(dict(lincir=(0.5, 0.3), searle=(0.3, 0.3)))
    lines = lean_evidence(attribute_lean(run), run.titles)['N06']
    assert lines[-1]['what'] == 'the gain over Pic2Word; not in this run'
    assert judge_evidence(lines).verdict == 'undecided'
    assert lean_evidence({}, run.titles) == {}
