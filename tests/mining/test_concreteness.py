"Ratings of words: faulty files, missing files, the real table, the words of the world."

import pytest
from projects import DATA, needs_data
from cis_nb.mining import concreteness as C
from cis_nb.mining.captions import read_relations, relation_shards
from cis_nb.mining.triplets import sample_triplets

HEAD = 'Word\tBigram\tConc.M\tConc.SD\tUnknown\tTotal\tPercent_known\tSUBTLEX\tDom_Pos\r\n'


def rated(path, *lines):
    path.write_bytes((HEAD + ''.join(line + '\r\n' for line in lines)).encode())
    return path


def line(word='boat', value='4.9'):
    return f'{word}\t0\t{value}\t0.3\t0\t30\t1.0\t0\tNoun'


def test_a_file_without_ratings_or_of_another_encoding_is_refused(tmp_path):
    whole = rated(tmp_path / 'r.txt', line('tent'), line('café')).read_bytes()
    head, *lines = whole.splitlines()
    cases = {head: 'no word has a rating', whole.decode().encode('latin-1'): 'is not UTF-8'}
    for data, says in cases.items():
        (tmp_path / 'bad.txt').write_bytes(data)
        with pytest.raises(ValueError, match=f'bad.txt.*{says}'):
            C.read_ratings(tmp_path / 'bad.txt')
    (tmp_path / 'mac.txt').write_bytes(b'\r'.join([head, *lines]))  # lines that end as on an old Mac
    assert C.read_ratings(tmp_path / 'mac.txt') == C.read_ratings(tmp_path / 'r.txt') != {}


@pytest.mark.parametrize(
    'bad, says',
    [
        (line(value=''), "line 3, column Conc.M: ''"),
        (line(value='4,9'), 'line 3, column Conc.M'),
        (line(value='nan'), 'line 3, column Conc.M'),
        (line(value='0.2'), 'line 3, column Conc.M'),
        (line(value='5.01'), 'line 3, column Conc.M'),
        (line(word=' '), 'line 3, column Word'),
        (line(word=' tent'), "line 3, column Word: 'tent' was rated before"),
        ('boat\t0\t4.9', 'line 3: 3 columns instead of 9'),
        (line().replace('\t', ' '), 'line 3: 1 columns'),
    ],
)
def test_a_damaged_line_is_named(tmp_path, bad, says):
    with pytest.raises(ValueError, match=says):
        C.read_ratings(rated(tmp_path / 'r.txt', line('tent'), bad))


def test_other_files_are_not_taken_for_ratings(tmp_path):
    for data in (b'', b'word,rating\nboat,5\n'):
        (tmp_path / 'r.txt').write_bytes(data)
        with pytest.raises(ValueError, match='line 1: expected the columns Word, Bigram, Conc.M'):
            C.read_ratings(tmp_path / 'r.txt')


def test_ratings_missing(monkeypatch, tmp_path):
    monkeypatch.delenv('CIS_DATA', raising=False)
    with pytest.raises(FileNotFoundError, match='CIS_DATA is not set'):
        C.concreteness.__wrapped__('auto')
    (tmp_path / 'concreteness').mkdir()
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    with pytest.raises(FileNotFoundError, match='Brysbaert et al. .2014.*is missing; Get it from'):
        C.concreteness.__wrapped__('auto')


WORDS = [line(w, v) for w, v in dict(dog=4.85, dogs=5.0, short=3.61, shorts=4.82).items()]


@pytest.mark.parametrize('first', ['literal', 'auto'])
@pytest.mark.parametrize('words', [WORDS, WORDS[::-1]])
def test_a_file_called_literal_is_one_like_others(tmp_path, monkeypatch, first, words):
    "Whichever table the store has got first; the same words in another order are another table."
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    for n, lines in enumerate((WORDS[::-1], words)):  # the second table is the one at hand
        (tmp_path / 'concreteness').mkdir(exist_ok=True)
        copy = rated(tmp_path / 'literal.txt', *lines)
        rated(tmp_path / 'concreteness' / C.RATINGS_FILE, *lines)
        given = {'literal': 'literal', 'auto': str(copy)}
        found = {k: C.concreteness.__wrapped__(given[k]) for k in (first, *given)}
        plain = C.read_ratings(copy)
        assert found['literal'] == C.literal_plurals(plain) and found['auto'] == C.with_plurals(plain), n
    assert found['literal']['dog'] == 5.0 and found['auto']['dog'] == 4.85


def test_of_words_with_one_plural_the_last_counts_in_the_published_program(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    (tmp_path / 'concreteness').mkdir()
    for lines, rating in ((['toe', 'to'], 1.6), (['to', 'toe'], 4.9)):
        values = dict(toe='4.9', to='1.6')
        rated(tmp_path / 'concreteness' / C.RATINGS_FILE, *(line(w, values[w]) for w in lines))
        assert C.concreteness.__wrapped__('literal')['toes'] == rating


real = DATA / 'concreteness'


@needs_data('concreteness')
def test_the_real_table():
    words = C.read_ratings(real / C.RATINGS_FILE)
    assert (
        len(words) == 39954
        and words['dog'] == 4.85
        and words['hot dog'] == 4.87
        and sum(' ' in w for w in words) > 2800
    )
    many = C.concreteness('auto')
    assert (
        many['dogs'] == words['dogs'] == 5
        and many['lighthouses'] == words['lighthouse']
        and many['toes'] == words['toe']
        and many['women'] == words['woman']
        and many['buses'] == words['bus']
        and many['people'] == words['people']
        and all(many[w] == v for w, v in words.items())
    )


def test_the_worlds_words_are_rated():
    from cis_nb.world.captions import THING_NOUNS
    from cis_nb.world.scenes import ATTRIBUTES, STUFF, THINGS

    r = C.world_ratings()
    assert {w for t in THINGS for w in THING_NOUNS.get(t, (t,))} | set(STUFF) | {
        v for a in ATTRIBUTES.values() for v in a
    } <= set(r)
    assert (
        all(1 <= v <= 5 for v in r.values())
        and max(r[w] for w in ('love', 'idea', 'week', 'memory', 'afternoon')) < 4.8
    )


@needs_data('concreteness')
def test_literal_plurals_overwrite_as_many_ratings_as_in_the_published_program():
    words = C.read_ratings(real / C.RATINGS_FILE)
    literal = C.literal_plurals(words)
    assert sum(literal[w] != v for w, v in words.items()) == 1108
    assert {w: literal[w] for w in ('dog', 'sky', 'shorts')} == dict(dog=5.0, sky=4.83, shorts=3.61)
    assert {w: words[w] for w in ('dog', 'sky', 'shorts')} == dict(dog=4.85, sky=4.45, shorts=4.82)
    assert C.concreteness('literal')['dog'] == 5.0 and C.concreteness()['dog'] == 4.85


@needs_data('flickr8k', 'concreteness', 'spacy_en_ewt_clear_sm')
def test_literal_ratings_move_as_many_mentions_and_triplets_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    parser = str(DATA / 'spacy_en_ewt_clear_sm')
    relations = read_relations(relation_shards('flickr8k', parser, limit=1500, processes=1))
    sides = dict(mentions=['subject', 'object'], subjects=['subject'], objects=['object'])
    share, triplets = {}, []
    for name, columns in sides.items():
        heads = relations[columns].to_numpy().ravel()
        auto, literal = (C.rate_heads(heads, C.concreteness(r)) for r in ('auto', 'literal'))
        share[name] = 100 * (auto != literal).mean()
    for ratings in ('auto', 'literal'):
        found, _ = sample_triplets(relations, 2000, 0, C.concreteness(ratings))
        triplets.append({*found[['reference', 'target', 'distractor']].itertuples(index=False, name=None)})
    assert share == pytest.approx(dict(mentions=17.7, subjects=22.0, objects=13.4), abs=0.3)
    assert 100 * len(triplets[0] - triplets[1]) / len(triplets[0]) == pytest.approx(26.1, abs=1)
