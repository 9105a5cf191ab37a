"Triplet mining: faulty input and invariants."

import json
import sys
from collections import Counter
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from projects import needs_data
from cis_nb.mining import triplets as T
from cis_nb.mining.captions import read_shards
from cis_nb.mining.concreteness import FILTERS, world_ratings

quick = settings(max_examples=25, deadline=None)
RATINGS = {f's{i}': 5.0 for i in range(6)} | {f'o{i}': (5.0, 4.9, 4.8, 4.7, 3.0, 1.0)[i] for i in range(6)}


def table(rows):
    "A relation table from (image, subject, object)."
    t = pd.DataFrame(rows, columns=['image', 'subject', 'object']).astype(str)
    return t.assign(
        split='train',
        caption='',
        relation='on',
        subject_words=t.subject,
        object_words='big ' + t.object,
        kind='relation',
    )


def random_table(seed, n=120, images=30):
    rng = np.random.default_rng(seed)
    return table(
        [
            (f'i{rng.integers(images)}', f's{min(rng.geometric(0.4), 6) - 1}', f'o{min(rng.geometric(0.35), 6) - 1}')
            for _ in range(n)
        ]
    )


# ---- what is drawn


@quick
@given(st.integers(0, 10**6), st.sampled_from(FILTERS), st.sampled_from(['random', 'similar']))
def test_every_triplet_keeps_the_rule(seed, filter, partner):
    t = random_table(seed).set_index(np.random.default_rng(seed).permutation(1000)[:120])  # any row labels
    try:
        found, dropped = T.sample_triplets(t, 300, seed, RATINGS, filter, 4.7, partner=partner)
    except ValueError as e:
        assert 'no subject' in str(e)
        return
    r, g, d = (t.loc[found[c]].reset_index(drop=True) for c in ('reference', 'target', 'distractor'))
    assert (
        (r.subject == g.subject).all()
        and (r.object != g.object).all()
        and (r.image != g.image).all()
        and (d.object == g.object).all()
    )
    assert (
        (found.reference_image == r.image).all()
        and (found.target_image == g.image).all()
        and (found.condition == 'on ' + g.object).all()
    )
    s, o = ([p[c].map(RATINGS) for p in (r, g, d)] for c in ('subject', 'object'))
    six, four = sum(s + o) / 6, (s[0] + o[0] + s[1] + o[1]) / 4
    own = pd.concat([s[0] + o[0], s[1] + o[1]]) / 2
    assert (
        (six > 4.7).all()
        if filter == 'six'
        else (four >= 4.7).all()
        if filter == 'four'
        else (own >= 4.7).all()
        if filter == 'relation'
        else True
    )
    allowed = (
        t[[(RATINGS[a] + RATINGS[b]) / 2 >= 4.7 for a, b in zip(t.subject, t.object)]] if filter == 'relation' else t
    )
    assert set(r.subject) <= set(T.candidate_subjects(allowed).index) and len(found) + sum(dropped.values()) == 300


@quick
@given(st.integers(0, 10**6), st.integers(20, 400), st.sampled_from(['random', 'similar']))
def test_portions_change_nothing(seed, chunk, partner):
    t = random_table(3)
    whole, one = (
        T.sample_triplets(t, 400, seed, RATINGS, partner=partner),
        T.sample_triplets(t, 400, seed, RATINGS, partner=partner, chunk=chunk),
    )
    pd.testing.assert_frame_equal(whole[0], one[0])
    assert whole[1] == one[1]
    assert not whole[0].equals(T.sample_triplets(t, 400, seed + 1, RATINGS, partner=partner)[0])


def compare(a, b):
    "Two-sample chi-square of two lists of outcomes, centred and scaled to about ±1."
    a, b = Counter(a), Counter(b)
    n, m = a.total(), b.total()
    keys = [k for k in a.keys() | b.keys() if a[k] + b[k] >= 20]
    x, y = np.array([a[k] for k in keys]), np.array([b[k] for k in keys])
    expected = (x + y) * n / (n + m)
    chi2 = ((x - expected) ** 2 / expected + (x - expected) ** 2 / (x + y - expected)).sum()
    return (chi2 - len(keys) + 1) / np.sqrt(2 * (len(keys) - 1))


@pytest.mark.parametrize(
    'filter, threshold, lookup',
    [('six', 4.8, 'exact'), ('four', 4.8, 'words'), ('relation', 4.85, 'exact'), ('none', 0, 'exact')],
)
def test_fast_and_slow_obey_one_law(filter, threshold, lookup):
    t = random_table(7, 150, 12)
    fast, d = T.sample_triplets(t, 40_000, 5, RATINGS, filter, threshold, lookup)
    slow, e = T.sample_one_by_one(T.group_relations(t, RATINGS, filter, threshold, lookup), 3000, 9)
    both = [fast[['reference', 'target', 'distractor']].to_numpy(), slow]
    for heads in (['subject', 'object'],):
        names = t[heads].agg(' '.join, axis=1).to_numpy()
        assert abs(compare(*([tuple(names[r]) for r in rows] for rows in both))) < 4
    for k in range(3):
        assert abs(compare(*(rows[:, k].tolist() for rows in both))) < 4
    assert abs(sum(d.values()) / 40_000 - sum(e.values()) / 3000) < 0.02


def test_a_wrong_sampler_would_be_noticed():
    t = random_table(7, 150, 12)
    g = T.group_relations(t, RATINGS, 'none', 0)
    right, _ = T.sample_triplets(t, 40_000, 5, RATINGS, 'none', 0)
    g.objects = t.groupby('subject').object.agg(list)  # objects by their rows, and not evenly: the usual mistake
    wrong, _ = T.sample_one_by_one(g, 3000, 9)
    assert compare(right.target.tolist(), wrong[:, 1].tolist()) > 10


def test_similar_changes_the_picture_only():
    t = random_table(11, 600, 80)
    a, b = (T.sample_triplets(t, 2000, 2, RATINGS, partner=p)[0] for p in ('random', 'similar'))
    said = t.object.to_numpy()
    assert (
        (a.reference == b.reference).all()
        and (said[a.target] == said[b.target]).all()
        and (a.distractor == b.distractor).all()
        and (a.target != b.target).any()
    )
    facts = {i: set(zip(g.subject, g.object)) for i, g in t.groupby('image')}

    def alike(f):
        return np.array(
            [
                len(
                    (facts[r.reference_image] & facts[r.target_image])
                    - {(t.subject[r.reference], said[r.reference]), (t.subject[r.target], said[r.target])}
                )
                for r in f.itertuples()
            ]
        )

    assert (alike(b) >= alike(a)).all() and alike(b).mean() > 1.3 * alike(a).mean()
    index = T.RelationIndex(t, RATINGS, 'none')
    assert (T.ImageFacts(index).shared(b.reference.to_numpy(), b.target.to_numpy()) == alike(b)).all()


def test_categories_and_strings_are_alike():
    t = random_table(3)
    c = t.astype(dict(subject='category', object='category', relation='category', kind='category', image='category'))
    pd.testing.assert_frame_equal(T.sample_triplets(t, 200, 0, RATINGS)[0], T.sample_triplets(c, 200, 0, RATINGS)[0])


def test_conditions():
    t = table([('a', 's0', 'o0'), ('b', 's0', 'red')]).assign(kind=['relation', 'attribute'])
    assert T.condition_texts(t, [0, 1]).tolist() == ['on o0', 'red'] and T.condition_texts(
        t, [0], modifiers=True
    ).tolist() == ['on big o0']


# ---- what cannot work

one_image = table([('a', 's0', f'o{i}') for i in range(4)])


@pytest.mark.parametrize(
    'change, says',
    [
        (dict(relations=one_image), 'no subject is seen in 5 images'),
        (dict(relations=one_image[:0]), 'relation table is empty'),
        (dict(n=0), 'n must be at least 1'),
        (dict(n=-3), 'n must be'),
        (dict(filter='mean'), "filter: 'mean' is none of six, four, relation, none"),
        (dict(threshold=5.1), 'threshold 5.1 is above 5'),
        (dict(lookup='lemma'), "lookup: 'lemma' is none of exact, words"),
        (dict(partner=''), "partner: '' is none of random, similar"),
        (dict(relations=table([(f'i{i}', 's0', 'o0') for i in range(9)])), 'with 2 objects'),
        (dict(threshold=5.0), 'no subject can reach'),
        (dict(filter='relation', threshold=5.0, ratings={}), 'no subject is seen'),
    ],
)
def test_what_cannot_work_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        T.sample_triplets(**dict(relations=random_table(3), n=10, ratings=RATINGS) | change)


def test_samples_that_never_pass_are_counted():
    t = table([(f'i{i}', 's0', f'o{i % 2}') for i in range(10)] + [(f'j{i}', 's1', 'o5') for i in range(10)])
    low = dict(
        s0=4.9, s1=5.0, o0=5.0, o1=4.4, o5=1.0
    )  # the best that could be is above the threshold, and nothing that can be drawn is
    found, dropped = T.sample_triplets(t, 50, 0, low, threshold=4.86)
    assert (
        len(found) == 0
        and dropped == {T.NOT_CONCRETE: 50}
        and list(found.columns)[:3] == ['reference', 'target', 'distractor']
    )


# ---- mining


def said(root, n=60):
    "A folder of tiny photos whose captions have relations."
    from PIL import Image

    root.mkdir()
    things, places = ('boat', 'tent', 'cat'), ('sand', 'grass', 'snow', 'road')
    for i in range(n):
        Image.new('RGB', (8, 8)).save(root / f'{i:03}.jpg')
    rows = [
        dict(
            image=f'{i:03}.jpg',
            split='val' if i % 4 == 3 else 'train',
            captions=[f'a {things[i % 3]} on the {places[i // 3 % 4]}', f'a red {things[i % 3]} near a lighthouse'],
        )
        for i in range(n)
    ]
    (root / 'captions.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return root


@pytest.mark.e2e
def test_mined_keeps_splits_apart_and_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    root = said(tmp_path / 'photos')
    ask = dict(n=400, captions='all', parser='world', n_val=50, attributes=True)
    folder = T.mine_triplets(root, **ask)
    found, relations, counts = T.read_triplets(folder)
    split = dict(zip(relations.image, relations.split))
    assert found.split.value_counts().to_dict() == {'train': 400, 'val': 50} and counts['splits']['val'] == dict(
        asked=50, kept=50, dropped={}
    )
    for who in ('reference', 'target', 'distractor'):
        assert (found[f'{who}_image'].map(split) == found.split).all() and (
            relations.image.loc[found[who]].to_numpy() == found[f'{who}_image']
        ).all()
    assert (
        T.mine_triplets(root, **ask) == folder
        and T.mine_triplets(root, **ask | dict(seed=1)) != folder
        and T.mine_triplets(root, **ask | dict(filter='none')) != folder
    )
    assert {p.stem for p in root.glob('*.jpg')} >= set(found.target_image)


@pytest.mark.e2e
def test_a_small_validation_split_costs_no_training_triplets(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    folder = T.mine_triplets(said(tmp_path / 'photos', 24), 100, captions='all', parser='world', n_val=10)
    found, _, counts = T.read_triplets(folder)
    assert (
        set(found.split) == {'train'}
        and counts['splits']['val']['kept'] == 0
        and 'no subject is seen' in next(iter(counts['splits']['val']['dropped']))
    )
    with pytest.raises(ValueError, match='filter: .seven. is none of'):
        T.mine_triplets(tmp_path / 'photos', 100, filter='seven', parser='world')


@pytest.mark.e2e
def test_published_rules_and_ratings_reach_the_triplets(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    root, asked = said(tmp_path / 'photos'), []

    def mined(**change):
        return T.mine_triplets(root, 20, captions='all', parser='world', **change)

    monkeypatch.setattr(T, 'concreteness', lambda source: asked.append(source) or world_ratings())
    _, relations, counts = T.read_triplets(mined(rules='published', ratings='literal'))
    source = tmp_path / 'store' / counts['relation_folder']
    assert read_shards(source)['rules'] == 'published' and len(relations) and asked == ['literal']
    assert mined() == mined(rules='own') != mined(rules='published')
    with pytest.raises(ValueError, match="rules: 'other' is none of published, own, wider"):
        mined(rules='other')


@pytest.mark.e2e
@needs_data('concreteness')
def test_literal_ratings_give_other_triplets(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    root = said(tmp_path / 'photos')
    own, literal = (
        T.mine_triplets(root, 20, captions='all', parser='world', ratings=r, filter='none') for r in ('auto', 'literal')
    )
    assert own != literal and T.read_triplets(own)[2]['relations'] == T.read_triplets(literal)[2]['relations']


# ---- speed


@pytest.mark.e2e
def test_rates_come_from_processes_of_their_own():
    r = T.triplet_rates(500, 3000, 5)
    assert (
        r.implementation.tolist() == ['all at once', 'one by one']
        and r.triplets.tolist() == [3000, 5]
        and (r.peak_bytes > 10**7).all()
        and r.times.iloc[1] == 1
        and r.times.iloc[0] > 1
    )


def test_a_race_that_dies_says_so(monkeypatch):
    monkeypatch.setattr(sys, 'executable', '/bin/false')
    with pytest.raises(RuntimeError, match='all at once.*exit code 1'):
        T._in_new_process('all at once', 10, 5)
