"Synthetic caption triplets: odd captions, kills, cut shards, and brute force."

import gzip
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections import Counter
from pathlib import Path
import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from cis_nb.backbones.loading import load_backbone
from cis_nb.core.store import store_root
from cis_nb.mining import synthetic as S
from cis_nb.mining.captions import is_complete_shard
from cis_nb.mining.parsers import find_parser, load_parser
from cis_nb.world.captions import with_article

torch.set_num_threads(1)
THINGS = 'boat cup hat tent lamp ball cat house car umbrella'.split()
MANY = '\n'.join(f'a red {THINGS[i % 10]} next to {with_article(THINGS[(i // 10 + i + 1) % 10])}' for i in range(60))


def written(store, text=MANY, name='many.txt', **kw):
    (store / name).write_text(text, encoding='utf-8')
    return S.caption_shards(store / name, 'world', **kw)


def made_up_replacements(folder, pairs):
    "Replacements from {term: [terms]}, written as `replacement_folder` does."
    terms = sorted({t for k, some in pairs.items() for t in (k, *some)})
    found = [np.array(sorted(terms.index(t) for t in pairs.get(k, ())), np.int32) for k in terms]
    folder.mkdir()
    np.save(folder / 'starts.npy', np.concatenate([[0], np.cumsum([len(f) for f in found])]))
    np.save(folder / 'items.npy', np.concatenate(found))
    (folder / 'terms.json').write_text(json.dumps(terms))
    return folder


@pytest.fixture
def every_thing(store):
    return made_up_replacements(store / 'replacements', {t: [o for o in THINGS if o != t] for t in THINGS})


def triplets(folder):
    return list(S.read_caption_triplets(folder))


# ---- templates


@pytest.mark.parametrize(
    'template', ['', 'remove {source}', '{target', '{}', '{0} {target}', '{target.upper}', '{target[0]}', '}{target}']
)
def test_a_template_without_its_places_is_refused(template):
    with pytest.raises(ValueError, match='templates: number 2 is .* needs a place {target}'):
        S.check_instruction_templates(['use {target}', template])


def test_a_brace_that_is_text_is_allowed():
    assert S.check_instruction_templates(['{{{target}}}'])[0].format(source='a', target='cup') == '{cup}'


def test_the_mining_refuses_templates_before_it_reads_captions(store, monkeypatch):
    monkeypatch.setattr(S, 'caption_shards', None)
    with pytest.raises(ValueError, match='number 1'):
        S.mine_keyword_triplets(store / 'none.txt', templates=['nothing'])


# ---- captions


def test_ids_name_the_caption_in_every_kind_of_source(store):
    (store / 'c.tsv').write_text('7.jpg\ttrain\t4\ta cup\nwithout columns\n8.jpg\tval\t0\ta hat\n')
    (store / 'c.txt.gz').write_bytes(gzip.compress(b'a cup\n\na hat\n'))
    assert [r['id'] for r in S.shard_rows(S.caption_shards(store / 'c.tsv', 'world'))] == ['7.jpg#4', '8.jpg#0']
    assert [r['id'] for r in S.shard_rows(S.caption_shards(store / 'c.txt.gz', 'world'))] == [
        'c.txt.gz:1',
        'c.txt.gz:3',
    ]
    rows = list(S.shard_rows(S.caption_shards('world', world_images=20, portion=33)))
    assert len(rows) == 80 and [r['id'].rpartition('/')[2] for r in rows[4:6]] == ['train00000000#4', 'train00000001#0']
    assert len({r['id'] for r in rows}) == 80


def test_captions_that_cannot_be_used_are_counted(store):
    text = '\n'.join(['a cup', '', ' \t ', 'a cup ' * 38, 'a hat ' * 400, 'a hat']).encode() + b'\ncaf\xe9\n'
    (store / 'odd.txt').write_bytes(text)
    about = S.read_shard_list(S.caption_shards(store / 'odd.txt', 'world', portion=2))
    assert about['skipped'] == {'empty caption': 2, S.TOO_LONG: 2, 'caption that is not UTF-8': 1}
    assert about['read'] == 7 == about['lines'] + sum(about['skipped'].values())


def test_the_context_is_counted_in_tokens_not_characters():
    assert not S.is_too_long('a cup ' * 37 + 'a') and S.is_too_long('a cup ' * 38)
    assert S.is_too_long('龘靐' * 30) and not S.is_too_long('a ' + 'umbrella ' * 70)


@pytest.mark.parametrize('text', ['', '\n \n'])
def test_a_source_without_captions_is_named(store, text):
    with pytest.raises(ValueError, match='none.txt: no captions; left out'):
        written(store, text, 'none.txt')
    assert not list((store_root() / 'captions').glob('none*'))


def test_a_word_that_the_parser_does_not_know_is_named_with_the_file(store):
    with pytest.raises(ValueError, match="many.txt: 'zebra' in 'a zebra' is not a word of the world"):
        written(store, 'a cup\na zebra')


def test_a_source_that_changes_while_it_is_read(store, monkeypatch):
    real = S.mine_terms

    def grows(job):
        (store / 'many.txt').write_text(MANY + '\na tent')
        return real(job)

    monkeypatch.setattr(S, 'mine_terms', grows)
    with pytest.raises(ValueError, match='many.txt: changed while it was read'):
        written(store)


def test_captions_in_english_have_their_terms(store):
    try:
        parser = find_parser()
    except OSError:
        pytest.skip('no English spaCy pipeline is installed and CIS_DATA has none')
    text = 'A brown dog runs across the beach'
    terms = [text[a:b] for a, b in S.parse_terms([text], load_parser(parser))[text]]
    assert {'dog', 'beach'} <= set(terms)


# ---- terms


def test_terms_are_counted_by_captions_in_lower_case(store):
    folder = written(store, 'a cup and a cup\na cup\na hat\na tent')
    assert S.count_terms(folder) == dict(cup=2, hat=1, tent=1)
    table = S.term_list(folder, 1, 2)
    assert table.values.tolist() == [['cup', 2], ['hat', 1]] and table.attrs['all_terms'] == 3
    with pytest.raises(ValueError, match='min_count: 9 leaves 0 of 3 terms'):
        S.term_list(folder, 9)


# ---- replacements


def brute_force(x, low, high):
    "For each unit vector the others in the band; pairs within rounding of an end are left to either side."
    cosines = x.astype(np.float64) @ x.T.astype(np.float64)
    near = (np.abs(cosines - low) < 1e-6) | (np.abs(cosines - high) < 1e-6)
    inside = (cosines >= low) & (cosines <= high)
    np.fill_diagonal(inside, False)
    assert not near[np.triu_indices(len(x), 1)].any()
    return [np.flatnonzero(row).tolist() for row in inside]


@pytest.mark.parametrize('block, chunk, part', [(90, 90, 90), (7, 25, 21), (32, 10, 64), (1, 90, 90)])
def test_the_band_holds_what_brute_force_finds(block, chunk, part, monkeypatch, tmp_path):
    x = S.crowded_vectors(90, 24, seed=3)
    monkeypatch.setattr(S, 'BLOCK', block)
    monkeypatch.setattr(S, 'CHUNK', chunk)
    S._write_replacements(tmp_path, x, 0.5, 0.7, 90, 0, part)
    (tmp_path / 'terms.json').write_text(json.dumps([f't{i}' for i in range(90)]))
    known, slow = S.Replacements(tmp_path), brute_force(x, 0.5, 0.7)
    assert [[int(t[1:]) for t in known.of(f't{i}')] for i in range(90)] == slow
    assert 10 < np.mean([len(s) for s in slow]) < 80 and not list(tmp_path.glob('part*'))


def test_the_ends_of_the_band_belong_to_it():
    x = np.array([[1, 0], [0.5, math.sqrt(0.75)], [0, 1]], np.float32)
    index = faiss.IndexFlatIP(2)
    index.add(x)
    assert [r.tolist() for r in S.band_rows(index, x[:1], 0.5, 1.0)] == [[0, 1]]
    assert [r.tolist() for r in S.band_rows(index, x[:1], 0.0, 0.5)] == [[1, 2]]


def test_the_sample_of_a_term_does_not_depend_on_chunks_or_parts(monkeypatch, tmp_path):
    x, found = S.crowded_vectors(120, 32, seed=1), []
    monkeypatch.setattr(S, 'BLOCK', 20)
    for k, (chunk, part) in enumerate([(120, 120), (30, 40), (7, 60)]):
        folder = tmp_path / str(k)
        folder.mkdir()
        monkeypatch.setattr(S, 'CHUNK', chunk)
        S._write_replacements(folder, x, 0.45, 0.75, 5, 7, part)
        found.append((np.load(folder / 'starts.npy').tolist(), np.load(folder / 'items.npy').tolist()))
    assert found[0] == found[1] == found[2]
    assert set(np.diff(found[0][0])) == {5}


def test_a_sample_is_even_over_all_that_is_in_the_band():
    x = S.crowded_vectors(60, 24, seed=2)
    options, n = brute_force(x, 0.5, 0.7)[3], 2000
    drawn = Counter(i for seed in range(n) for i in S.sample_band(x, 0, 0.5, 0.7, 5, seed)[3].tolist())
    assert set(drawn) == set(options) and sum(drawn.values()) == 5 * n
    p = 5 / len(options)
    assert all(abs(k - n * p) < 5 * math.sqrt(n * p * (1 - p)) for k in drawn.values())


def test_a_killed_search_goes_on_at_its_parts(monkeypatch, tmp_path):
    x, real, seen = S.crowded_vectors(40, 8), S.sample_band, []

    def dies(x, first, *how):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(first)
        return real(x, first, *how)

    monkeypatch.setattr(S, 'BLOCK', 10)
    monkeypatch.setattr(S, 'sample_band', dies)
    with pytest.raises(KeyboardInterrupt):
        S._write_replacements(tmp_path, x, 0.5, 0.7, 9, 0, part=10)
    assert len(list(tmp_path.glob('part-*.npz'))) == 2 and not (tmp_path / 'items.npy').exists()
    monkeypatch.setattr(S, 'sample_band', lambda x, first, *how: seen.append(first) or real(x, first, *how))
    S._write_replacements(tmp_path, x, 0.5, 0.7, 9, 0, part=10)
    assert seen == [0, 10, 20, 30]
    other = tmp_path / 'other'
    other.mkdir()
    S._write_replacements(other, x, 0.5, 0.7, 9, 0, part=40)
    assert (tmp_path / 'items.npy').read_bytes() == (other / 'items.npy').read_bytes()


def test_a_term_is_never_its_own_replacement(store):
    folder = S.replacement_folder(load_backbone('tiny', device='cpu'), THINGS, (-1, 1))
    known = S.Replacements(folder)
    assert all(sorted([t, *known.of(t)]) == sorted(THINGS) for t in THINGS)
    with pytest.raises(KeyError, match='zebra'):
        known.of('zebra')


@pytest.mark.parametrize('band', [(0.7, 0.5), (0.5, 0.5), (-2, 0.5), (0.5,), (0.5, 1.5), (0.1, float('nan'))])
def test_a_band_without_room_is_refused(band):
    with pytest.raises(ValueError, match='band: two rising numbers from -1 to 1'):
        S.cosine_band(np.eye(3, dtype=np.float32), band)


# ---- one caption


@given(st.text('abC -,é', max_size=20), st.sampled_from(['a', 'ab', 'a b', 'é', 'c']))
@settings(max_examples=300, deadline=None)
def test_whole_words_are_counted_as_a_regular_expression_counts_them(text, term):
    word = r'[^\W_]'
    assert S.occurrences(text, term) == len(re.findall(rf'(?<!{word})(?={re.escape(term)}(?!{word}))', text.lower()))


@pytest.mark.parametrize(
    'caption, old, new, expected',
    [
        ('a boat', 'boat', 'apple', 'an apple'),
        ('an apple', 'apple', 'boat', 'a boat'),
        ('An apple', 'apple', 'unicycle', 'A unicycle'),
        ('A boat', 'boat', 'old hat', 'An old hat'),
        ('la boat', 'boat', 'apple', 'la apple'),
        ('a red boat', 'boat', 'apple', 'a red apple'),
        ('Boat on a lake', 'Boat', 'apple', 'Apple on a lake'),
        ('NASA launch', 'NASA', 'esa', 'Esa launch'),
    ],
)
def test_the_words_around_a_new_term(caption, old, new, expected):
    at = caption.index(old)
    assert S.replace_term(caption, at, at + len(old), new) == expected


def test_a_term_that_occurs_twice_stays(store, every_thing):
    captions = written(store, 'a boat and a boat\na cup and a boat and a boat\nred\na toadstool')
    made = S.keyword_triplets(captions, every_thing)
    assert S.read_shard_list(made)['skipped'] == {S.TWICE: 1, S.NO_TERM: 1, S.NOT_FREQUENT: 1}
    (only,) = triplets(made)
    assert 'cup' in (only.removed, only.added) and 'boat' not in (only.removed, only.added)


def test_a_term_that_the_caption_has_is_not_put_in():
    rng, caption = random.Random(0), 'a cup, a hat'
    assert S.draw_new_term(caption, 2, 5, ['cup', 'hat'], rng) is None
    drawn = {S.draw_new_term(caption, 2, 5, ['cup', 'tent', 'hat', 'boat'], rng) for _ in range(60)}
    assert drawn == {'tent', 'boat'}


def test_a_term_that_contains_the_old_one_or_is_a_part_of_it_is_not_put_in():
    rng = random.Random(0)
    assert S.draw_new_term('a ball', 2, 6, ['beach ball', 'ball game'], rng) is None
    assert S.draw_new_term('a beach ball', 2, 12, ['ball', 'beach'], rng) is None
    assert S.draw_new_term('a ball', 2, 6, ['beach ball', 'football'], rng) == 'football'
    assert S.draw_new_term('a beach ball house', 2, 12, ['beach'], rng) is None


def test_replacements_are_drawn_evenly():
    rng, options = random.Random(1), ['cup', 'tent', 'hat', 'boat']
    drawn = Counter(S.draw_new_term('a cup', 2, 5, options, rng) for _ in range(3000))
    assert set(drawn) == {'tent', 'hat', 'boat'} and all(abs(n - 1000) < 4 * 26 for n in drawn.values())


def test_a_new_caption_that_is_too_long_is_left_out(tmp_path):
    folder = made_up_replacements(tmp_path / 'r', {'cup': ['umbrella ' * 4 + 'stand']})
    caption = 'a cup ' + 'and red ' * 36
    row = dict(id='x', caption=caption.strip(), terms=[[2, 5]])
    assert not S.is_too_long(row['caption'])
    assert S.keyword_triplet(row, S.Replacements(folder)) == S.TARGET_TOO_LONG


def test_a_triplet_is_what_its_instruction_says(store, every_thing):
    captions = written(store)
    texts = {r['id']: r['caption'] for r in S.shard_rows(captions)}
    found = triplets(S.keyword_triplets(captions, every_thing, seed=3))
    assert len(found) == 60 and len({t.id for t in found}) == 60 and 15 < sum(t.swapped for t in found) < 45
    for t in found:
        assert (t.target if t.swapped else t.source) == texts[t.id] and t.route == 'keyword'
        assert t.instruction == S.INSTRUCTION_TEMPLATES[t.template].format(source=t.removed, target=t.added)
        at = t.source.index(t.removed)
        assert S.replace_term(t.source, at, at + len(t.removed), t.added) == t.target
    assert {t.removed for t in found} | {t.added for t in found} == set(THINGS)


def test_templates_are_drawn_evenly_with_their_repetitions(tmp_path):
    folder = made_up_replacements(tmp_path / 'r', {'cup': ['hat']})
    known, n = S.Replacements(folder), 4700
    rows = (dict(id=str(i), caption='a cup', terms=[[2, 5]]) for i in range(n))
    drawn = Counter(S.keyword_triplet(r, known).template for r in rows)
    assert set(drawn) == set(range(47)) and all(abs(k - 100) < 5 * 10 for k in drawn.values())


# ---- shards


def test_triplets_do_not_depend_on_shards_or_neighbours(store, every_thing):
    whole = triplets(S.keyword_triplets(written(store), every_thing))
    parts = triplets(S.keyword_triplets(written(store, portion=7), every_thing))
    assert whole == parts and len(whole) == 60
    assert triplets(S.keyword_triplets(written(store), every_thing, seed=1)) != whole
    few = triplets(S.keyword_triplets(written(store, '\n'.join(MANY.split('\n')[:20])), every_thing))
    assert few == whole[:20]


@pytest.mark.e2e
def test_several_processes_make_the_same_shards(store, every_thing, monkeypatch):
    one = S.keyword_triplets(written(store, portion=7), every_thing)
    first = {p.name: p.read_bytes() for p in one.glob('*.gz')}
    monkeypatch.setenv('CIS_STORE', str(store / 'other'))
    two = S.keyword_triplets(written(store, portion=7, processes=2), every_thing, processes=2)
    assert two != one and {p.name: p.read_bytes() for p in two.glob('*.gz')} == first and len(first) == 9


@pytest.mark.parametrize('stage', ['captions', 'triplets'])
def test_a_stopped_run_goes_on_at_its_shard(store, every_thing, monkeypatch, stage):
    name = dict(captions='mine_terms', triplets='write_triplets')[stage]
    real, made = getattr(S, name), []

    def dies(job, *how):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(Path(job.path).name)
        return real(job, *how)

    def run():
        return S.keyword_triplets(written(store, portion=10), every_thing)

    monkeypatch.setattr(S, name, dies)
    with pytest.raises(KeyboardInterrupt):
        run()
    partial = list(store_root().glob('*/.partial-*'))
    shards = sorted(p for folder in partial for p in folder.glob('*.jsonl.gz'))
    assert len(shards) == 3 and all(map(is_complete_shard, shards))
    shards[1].write_bytes(shards[1].read_bytes()[:-20])  # a cut shard is made again
    monkeypatch.setattr(S, name, lambda job, *how: made.append(Path(job.path).name) or real(job, *how))
    folder = run()
    assert sorted(Counter(made).values()) == [1, 1, 1, 1, 1, 2] and made[3] == shards[1].name
    monkeypatch.setenv('CIS_STORE', str(store / 'other'))
    monkeypatch.setattr(S, name, real)
    assert triplets(run()) == triplets(folder)


def program(store, source):
    "Another Python that makes caption shards slowly."
    code = f"""
        import time, cis_nb.mining.synthetic as S
        real = S.readable_captions
        def slow(*args):
            time.sleep(.2)
            return real(*args)
        S.readable_captions = slow
        S.caption_shards({str(source)!r}, 'world', portion=2)"""
    (store / 'slow.py').write_text(textwrap.dedent(code))
    return subprocess.Popen([sys.executable, store / 'slow.py'])


@pytest.mark.e2e
@pytest.mark.skipif(os.name != 'posix', reason='kill -9 needs a POSIX system')
def test_a_killed_run_leaves_nothing_that_looks_finished(store, monkeypatch):
    (store / 'many.txt').write_text(MANY)
    run, end = program(store, store / 'many.txt'), time.time() + 120
    place = store_root() / 'captions'
    while len(list(place.glob('.partial-*/captions-*.jsonl.json'))) < 4 and time.time() < end:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = {p.name for p in place.glob('.partial-*/captions-*.jsonl.gz') if is_complete_shard(p)}
    assert 4 <= len(before) < 30 and not [p for p in place.iterdir() if not p.name.startswith('.')]
    made, real = [], S.mine_terms
    monkeypatch.setattr(S, 'mine_terms', lambda job: made.append(Path(job.path).name) or real(job))
    folder = S.caption_shards(store / 'many.txt', 'world', portion=2)
    assert not before & set(made) and len(made) == 30 - len(before)
    assert [r['caption'] for r in S.shard_rows(folder)] == MANY.split('\n')


@pytest.mark.parametrize('fault', ['cut', 'other', 'missing'])
def test_a_damaged_shard_is_refused_by_name(store, every_thing, fault):
    folder = S.keyword_triplets(written(store, portion=20), every_thing)
    path = folder / 'triplets-000001.jsonl.gz'
    if fault == 'cut':
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == 'other':
        path.write_bytes((folder / 'triplets-000000.jsonl.gz').read_bytes())
    else:
        path.unlink()
    read = S.read_caption_triplets(folder)
    assert len([next(read) for _ in range(20)]) == 20  # the shard before it is whole
    with pytest.raises(ValueError, match=r'triplets-000001\.jsonl\.gz is (damaged|missing).*make it again'):
        next(read)


def test_a_damaged_caption_shard_ends_the_making_of_triplets(store, every_thing):
    captions = written(store, portion=20)
    path = captions / 'captions-000-000001.jsonl.gz'
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r'captions-000-000001\.jsonl\.gz is damaged'):
        S.keyword_triplets(captions, every_thing)


def test_a_folder_without_its_list_is_named(tmp_path):
    with pytest.raises(ValueError, match='shards.json: cannot be read'):
        list(S.read_caption_triplets(tmp_path))


def test_the_funnel_adds_up(store, every_thing):
    text = MANY + '\n\na boat and a boat\nred\na toadstool\n' + 'a cup ' * 38
    captions = written(store, text)
    made = S.keyword_triplets(captions, every_thing)
    funnel = S.triplet_funnel(captions, made).set_index('stage').captions.to_dict()
    assert funnel == {
        'read': 65,
        'readable': 63,
        'with an object term': 62,
        'with a frequent term': 61,
        'with a frequent term that occurs once': 60,
        'with a replacement': 60,
        'written': 60,
    }


def test_one_call_makes_triplets_of_the_world(store):
    folder = S.mine_keyword_triplets(band=(0.0, 1.0), band_kind='quantile', world_images=30, portion=50)
    found, about = triplets(folder), S.read_shard_list(folder)
    assert len(found) == about['lines'] > 60 and about['read'] == about['lines'] + sum(about['skipped'].values()) == 120
    for t in found:  # both captions are sentences of the world, up to terms of several words
        assert all(load_parser('world')(text).has_annotation('DEP') for text in (t.source, t.target))


@pytest.mark.e2e
def test_the_reader_never_has_millions_of_captions_in_memory(store, monkeypatch):
    lines, long = 100_000, 'a red boat and a cup next to a hat in the snow at night ' * 2
    with gzip.open(store / 'long.txt.gz', 'wt', compresslevel=1) as f:
        for i in range(lines):
            f.write(f'{long}{i}\n')

    def short(job):
        rows = [dict(id=str(job.items[0][0]), caption='a cup', terms=[[2, 5]])]
        return S.write_json_lines(Path(job.path), rows, read=len(job.items), skipped={})

    monkeypatch.setattr(S, 'mine_terms', short)
    load_parser('world')
    (store / 'first.txt').write_text(long, encoding='utf-8')
    S.caption_shards(store / 'first.txt', 'world', portion=1000)  # what is loaded once
    tracemalloc.start()
    try:
        folder = S.caption_shards(store / 'long.txt.gz', 'world', portion=1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert S.read_shard_list(folder)['read'] == lines and peak < 8 * 2**20 < lines * len(long) / 1.3


def peak_of_keyword_route(file, captions: list) -> int:  # bytes
    file.write_text('\n'.join(captions), encoding='utf-8')
    tracemalloc.start()
    try:
        folder = S.mine_keyword_triplets(file, 'world', band=(0.0, 1.0), band_kind='quantile', portion=500)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert S.read_shard_list(folder)['lines'] > len(captions) / 2
    return peak


@pytest.mark.e2e
def test_the_keyword_route_needs_no_more_memory_for_more_captions(store):
    forms = [f'a {c} {a} and a {b}' for c in ('red', 'blue') for a in ('boat', 'cup', 'hat') for b in ('cat', 'lamp')]
    many = [forms[i % len(forms)] for i in range(9000)]
    peak_of_keyword_route(store / 'first.txt', many[:500])  # what is loaded once
    few, most = (peak_of_keyword_route(store / f'{n}.txt', many[:n]) for n in (1000, 9000))
    assert most - few < 2**20 < 8000 * 3 * sys.getsizeof(forms[0])  # sources, targets and instructions in memory


# ---- the LLM route


@pytest.mark.parametrize(
    'output, reason',
    [
        ('', 'no end'),
        ('make it red\n%%\na red cup', 'no end'),
        ('make it red\nEND', 'parts'),
        ('make it red\n%%\na red cup\n%%\nx\nEND', 'parts'),
        ('make it ## red\n%%\na red cup\nEND', 'parts'),
        (' \n%%\na red cup\nEND', 'empty'),
        ('make it red\n%%\n \nEND', 'empty'),
        ('make it red\n%%\n A cup. \nEND', 'unchanged'),
    ],
)
def test_a_malformed_output_has_its_reason(output, reason):
    assert S.parse_edit(output, 'a cup') == S.MALFORMED[reason]


@given(*[st.text('ab c\n', min_size=1, max_size=12).filter(str.strip)] * 3)
@settings(max_examples=200, deadline=None)
def test_a_training_text_is_read_back(caption, instruction, target):
    found = S.parse_edit(S.edit_text(caption, instruction, target)[1], caption)
    words = tuple(' '.join(t.split()) for t in (instruction, target))
    assert found == (S.MALFORMED['unchanged'] if words[1] == caption.strip() else words) or (
        words[1].strip() == caption.strip()
    )


@given(*[st.lists(st.sampled_from('abc'), min_size=1, max_size=6)] * 2)
@settings(max_examples=300, deadline=None)
def test_changed_words_lead_from_one_caption_to_the_other(a, b):
    removed, added = (w.split() for w in S.changed_words(' '.join(a), ' '.join(b)))
    ways = [a[:i] + added + a[i + len(removed) :] for i in range(len(a) + 1) if a[i : i + len(removed)] == removed]
    assert b in ways and (a != b or not removed + added)


class Echo:
    "A model that writes what it is told, by caption."

    name, fingerprint = 'echo', 'echo 1'

    def __init__(self, outputs):
        self.outputs, self.asked = outputs, []

    def complete(self, prompts, seeds):
        assert len(set(seeds)) == len(prompts)
        self.asked += prompts
        return [self.outputs[p.removesuffix(S.PROMPT_END)] for p in prompts]


def test_outputs_become_triplets_or_are_counted(store):
    captions = written(store, 'a cup\na hat\na tent\na boat', portion=2)
    model = Echo(
        {
            'a cup': S.edit_text('', 'make it red', 'a red cup')[1],
            'a hat': 'nonsense',
            'a tent': S.edit_text('', 'nothing', 'A tent')[1],
            'a boat': S.edit_text('', 'say more', 'a boat ' * 40)[1],
        }
    )
    folder = S.llm_triplets(captions, model)
    about = S.read_shard_list(folder)
    expected = {S.MALFORMED['no end']: 1, S.MALFORMED['unchanged']: 1, S.TARGET_TOO_LONG: 1}
    assert about['skipped'] == expected and (about['read'], about['lines']) == (4, 1)
    assert triplets(folder) == [
        S.CaptionTriplet('many.txt:1', 'a cup', 'a red cup', 'make it red', '', 'red', None, 'llm')
    ]
    assert S.llm_triplets(captions, model) == folder and len(model.asked) == 4  # not asked again


def test_a_limit_is_a_number_of_captions(store):
    captions, model = written(store, portion=20), Echo({c: 'x' for c in MANY.split('\n')})
    about = S.read_shard_list(S.llm_triplets(captions, model, limit=33))
    assert about['read'] == 33 == len(model.asked) and [s['read'] for s in about['shards']] == [20, 13]


def test_lines_of_edits_that_cannot_be_used_are_counted(tmp_path):
    rows = [
        dict(input='a cup', edit='make it red', output='a red cup'),
        dict(caption='a hat', edit='make it red', output='a red hat', url='u'),
        dict(input='a cup', edit='make it red'),
        dict(input='a cup', edit=3, output='a red cup'),
        dict(input='', edit='a', output='b'),
    ]
    path = tmp_path / 'edits.jsonl'
    twice = '{"input": "a cup", "edit": "paint it", "output": "a hat", "output": "a red cup"}'
    path.write_text('\n'.join([*map(json.dumps, rows), '[]', '{"input', '3', twice, '']))
    pairs, left = S.read_edits(path)
    assert pairs == [S.edit_text('a cup', 'make it red', 'a red cup'), S.edit_text('a hat', 'make it red', 'a red hat')]
    assert left == {'line without a text for input, edit, output': 3, 'line that is no JSON record': 4}
    assert len(S.read_edits(path, 1)[0]) == 1


@pytest.fixture(scope='module')
def small_model(tmp_path_factory):
    pytest.importorskip('transformers')
    texts = [a + b for a, b in (S.edit_text(c, 'replace cup with hat', c) for c in MANY.split('\n'))]
    return S.random_language_model(tmp_path_factory.mktemp('model') / 'small', texts, width=64, layers=2)


def test_outputs_do_not_depend_on_the_batch(small_model):
    prompts = [c + S.PROMPT_END for c in MANY.split('\n')[:9]]
    how = dict(device='cpu', max_new_tokens=12, temperature=1.0)
    together = S.CausalInstructionModel(small_model, **how).complete(prompts, list(range(9)))
    alone = S.CausalInstructionModel(small_model, batch=1, **how).complete(prompts[::-1], list(range(9))[::-1])
    assert together == alone[::-1] and len(set(together)) == 9
    other = S.CausalInstructionModel(small_model, **how).complete(prompts, list(range(10, 19)))
    assert all(a != b for a, b in zip(together, other))


def test_greedy_outputs_have_no_use_for_seeds(small_model):
    model = S.CausalInstructionModel(small_model, 'cpu', temperature=0.0, max_new_tokens=6)
    prompts = ['a cup' + S.PROMPT_END] * 2
    assert len(set(model.complete(prompts, [1, 2]))) == 1


def test_noise_draws_from_the_softmax_at_its_temperature():
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).repeat(6000, 1)
    drawn = S.GumbelNoise(list(range(6000)), 0.5)(None, logits).argmax(1)
    shares = torch.bincount(drawn, minlength=4) / 6000
    assert (shares - (logits[0] / 0.5).softmax(0)).abs().max() < 4 * 0.5 / 6000**0.5


def test_a_prompt_that_leaves_no_room_is_refused(small_model):
    model = S.CausalInstructionModel(small_model, 'cpu', max_new_tokens=250)
    with pytest.raises(ValueError, match='max_new_tokens: .* more than the 256 that small reads'):
        model.complete(['a cup next to a hat' + S.PROMPT_END], [0])


def test_other_settings_are_another_model(small_model):
    made = [S.CausalInstructionModel(small_model, 'cpu', temperature=t) for t in (0.7, 0.7, 1.0)]
    assert made[0].fingerprint == made[1].fingerprint != made[2].fingerprint


def test_pickled_weights_are_not_opened(small_model, tmp_path):
    for p in small_model.iterdir():
        if p.suffix != '.safetensors':
            (tmp_path / p.name).write_bytes(p.read_bytes())
    torch.save({'x': torch.zeros(1)}, tmp_path / 'pytorch_model.bin')
    with pytest.raises(OSError, match='cannot be loaded .*only .safetensors weights'):
        S.load_language_model(tmp_path)


def test_code_that_comes_with_a_model_does_not_run(small_model, tmp_path):
    for p in small_model.iterdir():
        (tmp_path / p.name).write_bytes(p.read_bytes())
    config = json.loads((tmp_path / 'config.json').read_text())
    auto = dict(AutoConfig='own.Config', AutoModelForCausalLM='own.Model')
    config |= dict(model_type='own_model', auto_map=auto)
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'own.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")')
    with pytest.raises(OSError, match='and no code of others'):
        S.load_language_model(tmp_path)
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('name', ['nowhere', '/nowhere/at/all', 'a model'])
def test_a_language_model_that_is_not_there(name):
    with pytest.raises(
        FileNotFoundError, match='language_model .* no such folder .* it is no name of the form owner/model'
    ):
        S.language_model_folder(name)


def test_a_hub_that_gives_nothing_is_named(monkeypatch):
    def fails(*args, **kw):
        raise ConnectionError('no network')

    monkeypatch.setattr(S, 'snapshot_download', fails)
    with pytest.raises(FileNotFoundError, match='the hub gives nothing .ConnectionError: no network'):
        S.language_model_folder('owner/model')


def test_only_completions_are_learned(small_model):
    tokens, model = S.load_language_model(small_model)
    pairs = [S.edit_text('a cup', 'make it red', 'a red cup'), S.edit_text('a', 'b', 'c')]
    ids, attention, labels = S.EditTexts(tokens, model, pairs, pairs).prepare([0, 1], None)
    for row, seen, label, (prompt, completion) in zip(ids, attention, labels, pairs):
        assert tokens.decode(row[seen == 1]) == prompt + completion
        assert tokens.decode(row[label != S.IGNORED]) == completion


def test_pairs_longer_than_the_context_are_left_out_and_counted(small_model):
    tokens, model = S.load_language_model(small_model)
    short, long = S.edit_text('a cup', 'make it red', 'a red cup'), S.edit_text('a cup ' * 300, 'make it red', 'a cup')
    objective = S.EditTexts(tokens, model, [short, long], [short, long])
    assert (objective.data, objective.held_out) == ([short], [short])
    assert objective.counts == {'pairs longer than the context': 2}
    assert math.isfinite(objective.validate()['log_likelihood'])
    with pytest.raises(ValueError, match='1 pairs to learn from and 0 held out have at most 256 tokens'):
        S.EditTexts(tokens, model, [short], [long])


@pytest.mark.e2e
def test_a_fine_tuned_model_writes_what_it_has_learned(store, small_model):
    edits = {f'a {a}': ('make it red', f'a red {a}') for a in THINGS[:4]}
    pairs = [S.edit_text(c, *e) for c, e in edits.items()] * 4
    folder = S.fine_tune_language_model(small_model, pairs, 300, 8, 3e-3, device='cpu')
    assert folder == S.fine_tune_language_model(small_model, pairs, 300, 8, 3e-3, device='cpu')
    captions = written(store, '\n'.join(edits))
    made = S.llm_triplets(captions, S.CausalInstructionModel(folder, 'cpu', temperature=0.0, max_new_tokens=40))
    found = {t.source: (t.instruction, t.target) for t in triplets(made)}
    assert found == edits and {t.added for t in triplets(made)} == {'red'}


def test_one_pair_is_too_few_to_learn_from(small_model):
    with pytest.raises(ValueError, match='edits: 1 pairs, and at least two are needed'):
        S.fine_tune_language_model(small_model, [('a', 'b')], 1, 1, 1e-3)


# ---- statistics


def test_shares_of_tokens_have_a_last_bin():
    assert S.token_shares([0, 3, 3, 50], 3).tolist() == [0.25, 0, 0, 0.75]
    assert S.token_shares([], 2).tolist() == [0, 0, 0]
    assert S.token_counts(['a red boat', '!', 'a cup of unbelievable tea']).tolist()[:2] == [3, 1]


def test_the_cost_of_the_search_is_measured_on_what_lies_in_the_band():
    cost = S.search_cost(1200, 16, keep=4, rows=8)
    x = S.crowded_vectors(1200, 16)
    inside = (x[:8] @ x.T >= 0.5) & (x[:8] @ x.T <= 0.7)
    assert cost['in_band'] == pytest.approx(inside.mean(), abs=1e-3) and 0.3 < inside.mean() < 0.9
    assert cost['sample'] > 0 and cost['whole'] > 0
