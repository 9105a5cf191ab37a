"The drawn FashionIQ: sentences checked by a second reader, official files, the same bytes everywhere."

import ast
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from projects import DATA, ROOT, needs_data

from cis_nb.benchmarks.fashioniq import (
    CATEGORIES,
    FASHIONIQ_SPLITS,
    audit_fashioniq,
    load_fashioniq,
    read_fashioniq,
    shared_images,
)
from cis_nb.world.cloth import CLOTH_COLORS
from cis_nb.world.fashioniq import Garment, draw_fashioniq, draw_new, write_fashioniq

data = DATA
real = needs_data('fashioniq/captions/cap.dress.val.json')


@real
def test_the_drawn_world_stands_beside_the_right_numbers():
    nb = json.loads((ROOT / 'nbs/01_world/08_fashioniq.ipynb').read_text())
    line = next(l for c in nb['cells'] for l in ''.join(c['source']).splitlines() if l.startswith('real = ('))
    numbers = ast.literal_eval(line.removeprefix('real = '))
    assert [round(float(v), 1) for v in audit_fashioniq(data)['count']] == list(numbers)


# The world, read by somebody else

PRINT = {
    'horizontal stripes': 'striped',
    'vertical stripes': 'pinstriped',
    'diagonal stripes': 'diagonal',
    'checks': 'checked',
    'checked': 'checked',
    'dots': 'dotted',
    'dotted': 'dotted',
    'zigzags': 'zigzag',
    'diamonds': 'diamond',
    'flowers': 'floral',
    'floral': 'floral',
    'details': 'plain',
}
GARMENTS = {
    'button-up shirt': 'shirt',
    **{
        k: k
        for k in ('T-shirt', 'hoodie', 'tank top', 'blouse', 'sweater', 'summer dress', 'shirt dress', 'evening gown')
    },
}


def arms(g):  # 0 none, 1 short, 2 long
    if g['kind'] == 'shirt':
        return 2 if g['cut'] == 'long-sleeved' else 1
    return (
        0
        if g['kind'] in ('tank top', 'summer dress', 'evening gown')
        else 1
        if g['kind'] in ('T-shirt', 'shirt dress')
        else 2
    )


def light(g):
    return (
        sum(CLOTH_COLORS[g['color']]) + sum(CLOTH_COLORS[g['second'] if g['pattern'] != 'plain' else g['color']])
    ) // 2


def true(clause, a, b) -> bool:
    "Is a clause true of garment `b`, compared with `a`? It knows English and nothing of the grammar that wrote it."
    c = re.sub(r'^(it )?(is|has) ', '', clause)
    c = re.sub(r'^(a|an) ', '', re.sub(r'^it ', '', c))
    if m := re.fullmatch(r'(?:does not have an? |does not have |no )(.+)', c):
        return dict(pattern=b['pattern'] == 'plain', sleeves=arms(b) == 0).get(m[1], a['detail'] == m[1] != b['detail'])
    if c in ('plain', 'solid color'):
        return b['pattern'] == 'plain'
    if c == 'sleeveless':
        return arms(b) == 0
    if m := re.fullmatch(r'(short|long) sleeve[sd]', c):
        return arms(b) == dict(short=1, long=2)[m[1]]
    if m := re.fullmatch(r'(?:the sleeves are (longer|shorter)|(longer|shorter) sleeves)', c):
        return arms(b) > arms(a) if 'longer' in m.groups() else 0 < arms(b) < arms(a)
    if m := re.fullmatch(r'(longer|shorter)( dress)?', c):
        return (b['kind'] == 'evening gown') - (a['kind'] == 'evening gown') == dict(longer=1, shorter=-1)[m[1]]
    if m := re.fullmatch(r'(lighter|darker)( color| in color)?', c):
        return (light(b) - light(a)) * dict(lighter=1, darker=-1)[m[1]] >= 150
    if m := re.fullmatch(r'(more|less) colorful', c):
        return bool(b['second']) - bool(a['second']) == dict(more=1, less=-1)[m[1]]
    if (m := re.fullmatch(r'(\w+)( color| in color)?', c)) and m[1] in CLOTH_COLORS:
        return b['color'] == m[1]
    if m := re.fullmatch(r'(larger|smaller) (.+)', c):
        return (
            a['pattern'] == b['pattern'] == PRINT[m[2]]
            and b['scale'] == dict(larger='large', smaller='small')[m[1]] != a['scale']
        )
    if (m := re.fullmatch(r'(\w+) (.+)', c)) and m[1] in CLOTH_COLORS:
        return b['second'] == m[1] and b['pattern'] == PRINT[m[2]]
    if c in PRINT:
        return b['pattern'] == PRINT[c]
    if c in GARMENTS:
        return b['kind'] == GARMENTS[c]
    if c in ('crew neck', 'turtleneck'):
        return b['cut'] == c.replace(' ', '-')
    return b['detail'] == c


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    root = tmp_path_factory.mktemp('fashioniq')
    write_fashioniq(root, 30, 5)
    return root


def test_a_foreign_reader_finds_every_sentence_true():
    "Of the target, and of the candidate none."
    n, kinds = 0, set()
    for (c, s), (shown, entries) in draw_fashioniq(400, 9).items():
        for e in entries:
            a, b = (shown[e[k]]._asdict() for k in ('candidate', 'target'))
            for words, told in zip(e['captions'], e['kinds']):
                clauses = re.split(r' and | with ', words.strip()) if words else []
                assert len(clauses) == len(told), (words, told)
                for clause in clauses:
                    assert true(clause, a, b) and not true(clause, a, a), (clause, a, b)
                n += len(clauses)
                kinds |= set(told)
    assert n > 3000 and len(kinds) == 13


def test_lists_hold_no_garment_twice_and_names_say_nothing():
    drawn = draw_fashioniq(100, 2)
    names = [i for shown, _ in drawn.values() for i in shown]
    assert len(names) == len(set(names))
    for shown, entries in drawn.values():
        assert len(set(shown.values())) == len(shown) and all(isinstance(g, Garment) for g in shown.values())
        used = {e[k] for e in entries for k in ('candidate', 'target')}
        assert (
            used < set(shown)
            and 0.6 < len(used) / len(shown) < 0.8
            and all(re.fullmatch('B0[0-9A-Z]{8}', i) for i in shown)
            and list(shown) == sorted(shown)
        )


def test_the_files_are_the_official_ones(drawn):
    f = drawn / 'fashioniq'
    for c in CATEGORIES:
        for s in FASHIONIQ_SPLITS:
            q = read_fashioniq(drawn, c, s)
            assert (
                all(set(e) == {'candidate', 'captions', *(['target'] if s != 'test' else [])} for e in q.entries)
                and len(q.entries) >= dict(train=18, val=6, test=6)[s]
            )
            assert set(json.loads((f / f'facts.{c}.{s}.json').read_text())) == set(q.names) and len(q.targets) == len(
                q.entries
            )
            b = load_fashioniq(drawn, c, s)
            assert b.protocol.coverage == 1 and b.load(q.names[0]).size == (128, 128)
    assert len(shared_images(drawn)) == 0 and len(list((f / 'images').iterdir())) == sum(
        len(read_fashioniq(drawn, c, s).names) for c in CATEGORIES for s in FASHIONIQ_SPLITS
    )


def tree(root):
    return hashlib.sha256(
        b''.join(str(p.relative_to(root)).encode() + p.read_bytes() for p in sorted(root.rglob('*')) if p.is_file())
    ).hexdigest()


@pytest.mark.e2e
@pytest.mark.parametrize('hash_seed', ['0', '77'])
def test_the_same_bytes_in_another_process(drawn, tmp_path, hash_seed):
    code = (
        'from pathlib import Path; from cis_nb.world.fashioniq import write_fashioniq; '
        f'write_fashioniq(Path({str(tmp_path)!r}), 30, 5)'
    )
    subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONHASHSEED': hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert tree(tmp_path) == tree(drawn)
    write_fashioniq(tmp_path / 'other', 5, 6)
    assert tree(tmp_path / 'other') != tree(drawn)


def test_a_world_that_is_too_small_says_so():
    only = Garment('hoodie', '', '', 'plain', '', 'red', '')
    with pytest.raises(ValueError, match='too few different garments of the category shirt; ask for fewer queries'):
        draw_new(lambda: only, {only}, 'shirt')


def test_the_splits_of_a_large_world_are_alike():
    "No list runs out of plain cloth, so that others would ask about prints only."
    drawn = draw_fashioniq(1500)
    for c in CATEGORIES:
        plain = [np.mean([g.pattern == 'plain' for g in drawn[c, s][0].values()]) for s in FASHIONIQ_SPLITS]
        assert min(plain) > 0.2 and max(plain) - min(plain) < 0.12, (c, plain)
