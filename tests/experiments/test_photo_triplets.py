"Kinds of conditions, and what captions state of a photograph."

import pandas as pd
import pytest
from cis_nb.experiments.photo_triplets import caption_words, condition_kind, format_points, names_word
from cis_nb.experiments.photo_triplets import recall_by_seed, recall_difference, target_recall

CAPTIONS = {'a': ['A dog , in the Snow .', 'snowy hills'], 'b': ['Snow !', 'snow']}


@pytest.mark.parametrize(
    'relation, kind, about',
    [
        ('next to', 'relation', 'where'),
        ('In', 'relation', 'where'),
        ('wearing', 'relation', 'has'),
        ('jumps over', 'relation', 'does'),
        ('is', 'attribute', 'is'),
    ],
)
def test_the_first_word_says_the_kind_of_a_condition(relation, kind, about):
    assert condition_kind(relation, kind) == about


def test_a_caption_names_whole_words():
    assert caption_words(CAPTIONS['b']) == 'snow snow'
    assert names_word(CAPTIONS['a'], 'snow') and not names_word(CAPTIONS['a'], 'hill')
    assert [sum(names_word([c], 'Snow') for c in CAPTIONS[k]) for k in 'ab'] == [1, 2]


def test_seeds_of_a_training_are_averaged_query_by_query():
    ranks = dict(sum=[1, 20, 1, 20], s0=[1, 1, 1, 20], s1=[1, 20, 1, 1])
    lines = [
        dict(method=m, seed=s, draw=0, task='is', partners='similar', query_id=str(q), reference=f'p{q}', rank=r)
        for m, s, key in (('sum', -1, 'sum'), ('learned', 0, 's0'), ('learned', 1, 's1'))
        for q, r in enumerate(ranks[key])
    ]
    ranked = pd.DataFrame(lines)
    assert target_recall(ranked, 'similar', 'learned') == 75
    assert recall_by_seed(ranked, 'similar', 'learned') == '75.0 75.0'
    assert recall_by_seed(ranked, 'similar', 'sum') == ''
    found = recall_difference(ranked, 'similar', 'learned', 'sum')
    assert found['diff'] == 25 and found['n'] == 4
    assert format_points(found).startswith('+25.0 [')
