"Composed queries of the world: sentences that can be parsed back, official layouts, the same bytes everywhere."

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from cis_nb.world import composed as c
from cis_nb.world.captions import THING_NOUNS, PLACE_WORDS, any_combination, training_combination
from cis_nb.world.scenes import (
    COLORS,
    PATTERNS,
    POSES,
    SIZES,
    TEXTURES,
    THINGS,
    Thing,
    is_held_out,
    render,
    visible_boxes,
)

GOLDEN = dict(
    cirr='cd8aadc240c3c8901db2f0fed12f1631b06ce86116dd93b41241759d8aacbee0',
    mitstates='d26d080543696623f1e1e5395db00591924163c47e61fac4a13ef071dfdf7d20',
)
SPLITS = ('train', 'val', 'test1')
seeds = st.integers(0, 10**9)


def read(root, name):
    return json.loads((root / 'cirr' / name).read_text(encoding='utf-8'))


def cirr_hash(root):
    "Every JSON file as it is, every picture as its pixels (how PNG packs them depends on the library)."
    h = hashlib.sha256()
    for p in sorted(root.rglob('*.json')):
        h.update(str(p.relative_to(root)).encode() + p.read_bytes())
    for p in sorted(root.rglob('*.png')):
        h.update(str(p.relative_to(root)).encode() + np.asarray(Image.open(p)).tobytes())
    return h.hexdigest()


def states_hash():
    "Close-ups as drawn: JPEG bytes depend on the library."
    shots = (
        render(c.draw_state(w, n, random.Random(i)), 64).tobytes()
        for i, (w, n) in enumerate((w, n) for n in THINGS for w in ('adj', *c.adjectives_of(n)))
    )
    return hashlib.sha256(b''.join(shots)).hexdigest()


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('composed')
    c.write_cirr(folder, 90, seed=5)
    return folder


# -- reading the sentences back: only the reference and the words are known

CALLED = {word: k for k in THINGS for word in THING_NOUNS.get(k, (k,))}
NOUN = '|'.join(sorted(CALLED, key=len, reverse=True))
VALUE = '|'.join((*COLORS, *PATTERNS, *POSES, 'small', 'larg'))
PLACE = {words: p for p, many in PLACE_WORDS.items() for words in many}


def any_of(options):
    return f'(?:{"|".join(options)})'


THING = (
    f'{any_of(SIZES)} (?:{any_of(TEXTURES)} )?(?:{any_of(POSES)} )?{any_of(COLORS)} (?:{any_of(PATTERNS)} )?(?:{NOUN})'
)
GAPS = dict(
    n=f'(?P<n>{NOUN})',
    m=f'(?P<m>{NOUN})',
    am=f'an? (?P<am>{NOUN})',
    v=f'(?P<v>{VALUE})',
    av=f'an? (?P<av>{VALUE})',
    was=f'(?:{VALUE})',
    k='(?P<k>color|pattern)',
    p=f'(?P<p>{"|".join(PLACE)})',
    all=f'(?P<all>the (?:{NOUN})(?: and the (?:{NOUN}))?)',
    thing=f'an? (?P<thing>{THING})',
    where=f'(?P<where>{"|".join(c.RELATION_WORDS.values())})',
)


def pattern(template):
    "A template as a regular expression; a gap that comes twice must be filled twice with the same."
    out, seen = re.escape(template).replace(r'\{', '{').replace(r'\}', '}').replace(r'\ ', ' '), set()
    for name in re.findall(r'{(\w+)}', template):
        out = out.replace('{%s}' % name, f'(?P={name})' if name in seen else GAPS[name], 1)
        seen.add(name)
    return out


TEMPLATES = {
    free: [(kind, re.compile(pattern(t))) for kind, sorts in said.items() for sort in sorts for t in sort]
    for free, said in ((False, c.EDIT_SENTENCES), (True, c.FREE_EDIT_SENTENCES))
}


@lru_cache(maxsize=None)
def clause(text, free):
    return [(k, m) for k, p in TEMPLATES[free] if (m := p.fullmatch(text))]


def clauses(text, free):
    "All ways to read `text` as one or two clauses: lists of (kind, match)."
    cuts = [m.start() for m in re.finditer(' and ', text)]
    return [[w] for w in clause(text, free)] + [
        [a, b] for i in cuts for a in clause(text[:i], free) for b in clause(text[i + 5 :], free)
    ]


def said_of(words):
    "Which thing 'small red striped ball' speaks of, and what it says of it; None if it is no thing with looks."
    name = next((n for n in sorted(CALLED, key=len, reverse=True) if words.endswith(n)), '')
    said = words.removesuffix(name).split()
    found = {
        k: v
        for k, options in dict(color=COLORS, pattern=PATTERNS, texture=TEXTURES, pose=POSES, size=SIZES).items()
        for v in options
        if v in said or all(p in said for p in v.split())
    }
    return (CALLED[name], found) if name and sorted(' '.join(found.values()).split()) == sorted(said) else None


def thing_of(words):
    "The thing that 'small red striped ball' describes: what is not said is as usual."
    name, found = said_of(words)
    return name, dict(dict(c.USUAL_LOOK, color=None, size=None), **found)


def seen(text, scene):
    "The looks that a list of things leads to: the reference's things change only as said, new ones are told in full."
    for template in c.DESCRIPTION_FORMS:
        head = template.removesuffix('{}')
        if head and not text.startswith(head) or not text.removeprefix(head).startswith(('a ', 'an ')):
            continue
        there, facts = c.scene_facts(scene, free=True), {}
        things = [said_of(re.sub('^an? ', '', words)) for words in re.split(', | and ', text.removeprefix(head))]
        if None in things:
            continue
        for name, found in things:
            facts[name] = tuple(
                found.get(k, there[name][i] if name in there else c.USUAL_LOOK.get(k))
                for i, k in enumerate(c.LOOK_ATTRIBUTES)
            )
        return [facts] if all(None not in looks for looks in facts.values()) else []
    return []


def beyond(scene, where, other):
    "The cell that lies there, seen from a thing."
    dx, dy = next(d for d, w in c.RELATION_WORDS.items() if w == where)
    cell = c.cell_of(next(t for t in scene.things if t.category == CALLED[other]))
    x, y = cell % 2 + dx, cell // 2 + dy
    return x + 2 * y if 0 <= x < 2 and 0 <= y < 2 else None


def meant(kind, g, scene):
    "The edit that a clause can mean, told from the reference; None where it makes no sense there."
    what, there = CALLED.get(g.get('n')), {t.category: t for t in scene.things}
    if what and kind != 'add' and what not in there:
        return None
    if kind == 'size':
        return (
            c.Edit('size', what, {'small': 'small', 'larg': 'large'}[g['v']]) if g['v'] in ('small', 'larg') else None
        )
    if kind in ('color', 'pattern', 'pose'):
        v = g.get('v') or g.get('av')  # 'a red boat in place of the blue one'
        return c.Edit(kind, what, v) if v in dict(color=COLORS, pattern=PATTERNS, pose=POSES)[kind] else None
    if kind == 'like':
        return c.Edit('like', what, (g['k'], CALLED[g['m']])) if CALLED[g['m']] in there else None
    if kind == 'replace':
        return c.Edit('replace', what, CALLED[g['am']])
    if kind == 'swap':
        return c.Edit('swap', what, CALLED[g['m']]) if CALLED[g['m']] in there else None
    if kind == 'remove':
        return c.Edit('remove', what)
    if kind == 'keep':
        return c.Edit('keep', value=tuple(CALLED[n] for n in re.findall(f'the ({NOUN})', g['all'])))
    if kind == 'place':
        return c.Edit('place', value=PLACE[g['p']])
    name, looks = thing_of(g['thing']) if kind == 'add' else (None, None)
    if 'where' not in g:
        cell = 0  # of a free group
    elif CALLED[g['m']] not in there or (cell := beyond(scene, g['where'], g['m'])) is None:
        return None
    if kind == 'move':
        return c.Edit('move', what, cell)
    return (
        c.Edit('add', name, c.put_in_cell(c.with_look(Thing(name), **looks), cell))
        if name not in there and looks['color'] and looks['size']
        else None
    )


def obeyed(text, scene, free=False):
    "The facts that the sentence leads to from `scene`, one for each reading."
    out = seen(text, scene) if free else []
    for reading in clauses(text, free):
        edits = [meant(kind, m.groupdict(), scene) for kind, m in reading]
        if None not in edits:
            out.append(c.scene_facts(c.apply_edits(edits, scene), free))
    return out


@settings(max_examples=20, deadline=None)
@given(seeds, st.booleans())
def test_whoever_reads_the_sentence_finds_the_target_and_nothing_else(seed, free):
    r = random.Random(seed)
    groups = c.draw_family(r, n=2, free=free)
    known = [c.scene_facts(s, free) for g in groups for s in g]
    for g in groups:
        for i, j in c.CIRR_PAIRS:
            kind, text = c.edit_sentence(c.edits_between(g[i], g[j], free), g[i], g[j], r, free)
            results = obeyed(text, g[i], free)
            assert results, f'cannot read {text!r}'
            assert {known.index(f) for f in results if f in known} == {known.index(c.scene_facts(g[j], free))}, text
            assert text == text.lower() and kind in {*c.EDIT_CHOOSERS, 'two', 'shows'}


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_in_a_free_group_every_picture_has_its_own_place_and_order_and_keeps_its_looks(seed):
    r = random.Random(seed)
    scene = c.draw_stage(r)
    there = [c.scatter_things(scene, r) for _ in range(30)]
    assert all(c.scene_facts(s, True) == c.scene_facts(scene, True) for s in there)
    assert len({s.place for s in there}) > 3 and len({str(c.scene_facts(s)) for s in there}) > 15
    assert not any(c.edits_between(scene, s, True) for s in there) and any(c.edits_between(scene, s) for s in there)


@pytest.mark.data
def test_how_often_the_real_sentences_name_a_change():
    "The share that the prose of the world's chapter gives."
    data = os.environ.get('CIS_DATA')
    if not data or not (Path(data) / 'cirr/captions').is_dir():
        pytest.skip('CIS_DATA has no cirr/captions')
    real = json.loads((Path(data) / 'cirr/captions/cap.rc2.val.json').read_text(encoding='utf-8'))
    change = re.compile(
        r'\b(replac|chang|turn|swap|switch|remov|add|exclud|delet|eliminat|rotat|reduc|increas|decreas|mov)\w*\b|'
        r'\b(put|place|make|making|instead|rather|without|no longer|same|take|unlike|different|similar|keep|become)\b'
    )
    assert (
        len(real) == 4181 and round(100 * sum(not change.search(e['caption'].lower()) for e in real) / len(real)) == 46
    )


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(sorted(c.EDIT_CHOOSERS)))
def test_every_kind_of_edit_can_be_made_and_read(seed, kind):
    r, found = random.Random(seed), None
    while found is None:
        scene = c.draw_stage(r)
        found = c.draw_edit(scene, r, kind)
    after, said, text = found
    assert said == kind or (kind in ('color', 'pattern') and said == 'like') or kind == 'like'
    assert c.scene_facts(after) != c.scene_facts(scene) and c.scene_facts(after) in obeyed(text, scene)
    assert c.scene_facts(c.redraw_scene(after, r)) == c.scene_facts(after) and len(
        visible_boxes(render(c.redraw_scene(after, r), 64, with_segments=True)[1])
    ) == len(after.things)


def test_training_shows_no_held_out_pair():
    for i in range(6):
        assert not any(
            is_held_out(t.color, t.category)
            for g in c.draw_family(random.Random(i), training_combination)
            for s in g
            for t in s.things
        )
    seen = {
        (t.color, t.category)
        for i in range(6)
        for g in c.draw_family(random.Random(i), any_combination)
        for s in g
        for t in s.things
    }
    assert any(is_held_out(*p) for p in seen)
    for n in THINGS:
        for w in ('adj', *c.adjectives_of(n)):
            t = c.draw_state(w, n, random.Random(1)).things[0]
            assert (
                t.category == n
                and (n in c.WORLD_TEST_NOUNS or not is_held_out(t.color, n))
                and (w == 'adj' or w in (t.color, t.pattern, t.texture, t.pose))
            )


@pytest.mark.parametrize('split', SPLITS)
def test_the_official_fields_and_folders(root, split):
    entries, files = read(root, f'captions/cap.rc2.{split}.json'), read(root, f'image_splits/split.rc2.{split}.json')
    kinds, secret = read(root, f'kinds.{split}.json'), split == 'test1'
    assert {str(e['pairid']) for e in entries} == set(kinds) and set(kinds.values()) <= {
        *c.EDIT_CHOOSERS,
        'two',
        'shows',
    }
    targets = read(root, 'targets.test1.json') if secret else {str(e['pairid']): e['target_hard'] for e in entries}
    for e in entries:
        members, target = e['img_set']['members'], targets[str(e['pairid'])]
        assert set(e) == {'pairid', 'reference', 'caption', 'img_set'} | (
            set() if secret else {'target_hard', 'target_soft'}
        )
        assert set(e['img_set']) == {'id', 'members', 'reference_rank'} | (set() if secret else {'target_rank'})
        assert (
            len(set(members)) == 6
            and {e['reference'], target} <= set(members) <= set(files)
            and e['reference'] != target
        )
        if not secret:
            assert e['target_soft'] == {target: 1.0}
    for name, path in files.items():
        assert path == (
            f'./train/{int(name.split("-")[1]) % 100}/{name}.png'
            if split == 'train'
            else f'./{c.SPLIT_PREFIXES[split]}/{name}.png'
        )
        with Image.open(root / path) as im:
            assert im.size == (128, 128) and im.format == 'PNG'


def test_splits_share_nothing(root):
    names = [set(read(root, f'image_splits/split.rc2.{s}.json')) for s in SPLITS]
    ids = [{e['pairid'] for e in read(root, f'captions/cap.rc2.{s}.json')} for s in SPLITS]
    groups = [{e['img_set']['id'] for e in read(root, f'captions/cap.rc2.{s}.json')} for s in SPLITS]
    for some in (names, ids, groups):
        assert sum(map(len, some)) == len(set().union(*some))
    assert len(list(root.rglob('*.png'))) == sum(map(len, names))
    assert len({p.read_bytes() for p in root.rglob('*.png')}) == sum(map(len, names))


@pytest.mark.data
@pytest.mark.parametrize('split', ('val', 'test1'))
def test_the_same_fields_as_the_real_files(root, split):
    data = os.environ.get('CIS_DATA')
    if not data or not (Path(data) / 'cirr/captions').is_dir():
        pytest.skip('CIS_DATA has no cirr/captions')
    real = json.loads((Path(data) / f'cirr/captions/cap.rc2.{split}.json').read_text(encoding='utf-8'))

    def shape(v):
        return (
            {k: shape(x) for k, x in v.items()}
            if isinstance(v, dict) and 'pairid' in v or isinstance(v, dict) and 'members' in v
            else type(v).__name__
        )

    assert {json.dumps(shape(e), sort_keys=True) for e in read(root, f'captions/cap.rc2.{split}.json')} == {
        json.dumps(shape(e), sort_keys=True) for e in real
    }
    if split == 'val':
        assert {(e['img_set']['reference_rank'], e['img_set']['target_rank']) for e in real} == set(c.CIRR_PAIRS)


def test_the_readers_of_the_official_layouts_read_the_world(tmp_path):
    from cis_nb.benchmarks.cirr import load_cirr, read_cirr
    from cis_nb.benchmarks.mit_states import load_mitstates

    c.write_cirr(tmp_path, 30)
    c.write_mitstates(tmp_path, 1)
    for split in SPLITS:
        assert len(read_cirr(tmp_path, split).targets) == len(read(tmp_path, f'captions/cap.rc2.{split}.json'))
    assert load_cirr(tmp_path, 'test1').protocol.coverage == 1
    states = load_mitstates(tmp_path)
    assert (
        len(states) == len(c.WORLD_TEST_NOUNS) * c.ADJECTIVES_PER_NOUN * (c.ADJECTIVES_PER_NOUN - 1)
        and len(states.shared_gallery) == len(c.WORLD_TEST_NOUNS) * c.ADJECTIVES_PER_NOUN
    )


def test_golden(root):
    assert (cirr_hash(root), states_hash()) == (GOLDEN['cirr'], GOLDEN['mitstates']), (
        'the composed world has changed: every number made from it changes with it'
    )


@pytest.mark.e2e
def test_the_same_in_another_process(root, tmp_path):
    code = (
        'import sys; from pathlib import Path; from cis_nb.world.composed import write_cirr; '
        'write_cirr(Path(sys.argv[1]), 90, seed=5)'
    )
    subprocess.run([sys.executable, '-c', code, str(tmp_path)], env={**os.environ, 'PYTHONHASHSEED': '77'}, check=True)
    assert cirr_hash(tmp_path) == cirr_hash(root)


def test_a_part_of_size_zero_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    folder = c.composed_root(cirr=18, mitstates=0)
    assert (folder / 'cirr').is_dir() and not (folder / 'mit-states').exists() and folder == c.composed_root(18, 0)
    assert c.composed_root(cirr=18, mitstates=0, seed=1) != folder
