"Edits of several facts: what is said is what is drawn, nothing that training may not show, shares, bad ids."

import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from cis_nb.mining import scene_edits as S
from cis_nb.mining.synthetic import CaptionTriplet
from cis_nb.mining.triplet_images import CannotDraw, WorldGenerator
from cis_nb.world.captions import training_combination
from cis_nb.world.scenes import ATTRIBUTES, Scene, Thing

TWO = Scene('lake', 0, (Thing('ball', 'red', x=16), Thing('tent', 'red', x=48)))


def name(category):
    return category


@pytest.mark.parametrize('kind', S.EDIT_SHARES)
def test_an_edit_changes_what_its_kind_says_and_nothing_else(kind):
    for k in range(30):
        after, filled, told = S.edit_thing(TWO, kind, random.Random(k), name)
        before, later = ({t.category: t for t in s.things} for s in (TWO, after))
        gone, new = before.keys() - later.keys(), later.keys() - before.keys()
        counts = dict(replace=(1, 1), remove=(1, 0), add=(0, 1)).get(kind, (0, 0))
        assert (len(gone), len(new)) == counts and (after.place != TWO.place) == (kind == 'place')
        for c in before.keys() & later.keys():
            other = {a for a in ATTRIBUTES if getattr(before[c], a) != getattr(later[c], a)}
            assert other == set() or (other == {kind} and filled['n'] == c and told == {c: {kind}})
        if new:
            (thing,) = (later[c] for c in new)
            assert told == {thing.category: S.told_attributes(thing)} and training_combination(
                thing.color, thing.category
            )
        assert all('{' not in S.edit_words(kind, filled, random.Random(j)) for j in range(60))


def test_what_a_scene_does_not_allow():
    one, four = Scene('lake', 0, TWO.things[:1]), Scene('lake', 0, TWO.things * 2)
    assert S.edit_thing(one, 'remove', random.Random(0), name) is None
    assert S.edit_thing(four, 'add', random.Random(0), name) is None


def test_a_description_names_what_is_new_and_what_has_changed():
    ball, tent = TWO.things
    words = S.target_words(Scene('lake', 0, (ball, tent)), {'ball': {'color'}}, random.Random(0), name)
    assert 'a red ball' in words and 'a tent' in words and 'red tent' not in words
    assert S.told_attributes(ball) == {'color', 'pattern', 'size'}  # texture and pose are usual
    assert S.describe_told(Thing('umbrella', 'orange'), (), 'umbrella') == 'an umbrella'


def test_an_edit_is_decided_by_its_id():
    ids = [f'train{k:08d}#edit{j}' for k in range(20) for j in range(3)]
    found = [S.scene_edit(i) for i in ids]
    assert found == [S.scene_edit(i) for i in ids] and len({f[2] for f in found}) > 50
    assert all(before != after for before, after, _ in found)
    assert S.scene_edit(ids[0], world_seed=1) != found[0]
    for bad in ('train00000000#0', 'train0#edit1', 'photo.jpg', 'train00000000#edit'):
        with pytest.raises(CannotDraw, match='caption without an edit of its scene'):
            S.scene_edit(bad)


def test_triplets_go_through_the_scenes_one_after_the_other():
    found = S.scene_edit_triplets(7, 3)
    assert [t.id for t in found][:4] == [f'train0000000{k}#edit{j}' for k, j in ((0, 0), (1, 0), (2, 0), (0, 1))]
    assert {t.route for t in found} == {'edits'} and not any(t.swapped for t in found)


def test_stored_edits_of_an_older_route_are_refused():
    def stored(id, route):
        return SimpleNamespace(folder='old', table=pd.DataFrame(dict(id=['train00000003', id], route=['llm', route])))

    for known in (stored('train00000001#edit2', 'edits'), stored('photo', 'llm')):
        assert S.with_known_routes(known) is known
    with pytest.raises(ValueError, match=r'shards: old holds 1 edits of .* train00000001#edit2; .* draw them again'):
        S.with_known_routes(stored('train00000001#edit2', 'llm'))


def test_another_image_has_the_same_things():
    for k in range(20):
        found = S.another_image(TWO, random.Random(k))
        looks = [[(t.category, *(getattr(t, a) for a in ATTRIBUTES)) for t in s.things] for s in (TWO, found)]
        assert looks[0] == looks[1] and S.another_image(TWO, random.Random(k), keep_place=True).place == 'lake'
    assert len({S.another_image(TWO, random.Random(k)).place for k in range(20)}) > 3
    many = Scene('lake', 0, tuple(Thing('ball', 'red', x=8 * k) for k in range(6)))
    assert len(S.another_image(many, random.Random(0)).things) == 6


def test_the_generator_draws_both_routes():
    edit = S.scene_edit_triplet('train00000000#edit0')
    kept, moved = S.SceneEditGenerator(moved=0.0), S.SceneEditGenerator(moved=1.0)
    a, b = kept.draw(edit, 5), moved.draw(edit, 5)
    assert (np.asarray(a.reference) == np.asarray(b.reference)).all()
    assert (np.asarray(a.target) != np.asarray(b.target)).any() and b.mask is None
    shares = [
        S.SceneEditGenerator(moved=0.5).draw(edit, k).target.tobytes() == kept.draw(edit, k).target.tobytes()
        for k in range(40)
    ]
    assert 8 < sum(shares) < 32
    scene = S.caption_scene('train00000000')
    word = scene.things[0].color
    keyword = CaptionTriplet(
        'train00000000#0', f'a {word} {scene.things[0].category}', f'a white {scene.things[0].category}', 'white', word,
        'white' if word != 'white' else 'black', 0, 'keyword',
    )  # fmt: skip
    mine, theirs = kept.draw(keyword, 3), WorldGenerator().draw(keyword, 3)
    assert mine.target.tobytes() == theirs.target.tobytes() and (mine.mask == theirs.mask).all()
    assert kept.record != moved.record != WorldGenerator().record
    for bad in (-0.1, 1.1, float('nan')):
        with pytest.raises(ValueError, match='moved must be a share from 0 to 1'):
            S.SceneEditGenerator(moved=bad)
