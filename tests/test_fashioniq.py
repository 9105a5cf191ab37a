"FashionIQ: the released annotations, damaged files, orders of captions, and a world whose sentences are read by somebody else."
import hashlib, json, os, re, subprocess, sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from cis_nb.benchmarks.fashioniq import CATEGORIES, ORDERS, SPLITS, audit_fashioniq, averaged, evaluate_fashioniq, load_fashioniq, macro_mean, read_fashioniq, shared_images, wordings
from cis_nb.benchmarks.protocol import evaluate
from cis_nb.models.backbone import load_backbone
from cis_nb.models.baselines import method
from cis_nb.models.pseudo import Phi, PseudoWord
from cis_nb.world.cloth import COLOURS
from cis_nb.world.fashioniq import Garment, draw_set, fresh, write_fashioniq

data = Path(os.environ.get('CIS_DATA', '/nowhere'))
real = pytest.mark.skipif(not (data/'fashioniq/captions/cap.dress.val.json').exists(), reason='CIS_DATA has no fashioniq/captions')


# The released files

def printed(name):
    "A table that the chapter prints as released."
    nb = json.loads((Path(__file__).parents[1]/'nbs/02cc_benchmarks.fashioniq.ipynb').read_text())
    cell = next(''.join(c['source']) for c in nb['cells'] if ''.join(c['source']).startswith(f'{name} ='))
    space = {'pd': __import__('pandas')}
    exec(cell.split('\nshow_table')[0], space)
    return space[name]

@real
def test_the_released_annotations_hold_what_the_chapter_prints():
    rows = printed('released')
    for n,(s, c) in enumerate(((s, c) for s in ('val', 'test') for c in CATEGORIES), 1):
        found = audit_fashioniq(data, c, s).set_index('what')['count']
        said = {row[0]: row[n] for row in rows if row[n] is not None}
        assert {k: round(float(found[k]), 1) for k in said}==said and set(said)==set(found.index)

@real
def test_the_drawn_world_stands_beside_the_right_numbers():
    nb = json.loads((Path(__file__).parents[1]/'nbs/01g_world.fashioniq.ipynb').read_text())
    line = next(l for c in nb['cells'] for l in ''.join(c['source']).splitlines() if l.startswith('real = dict(zip('))
    numbers = eval(line.partition('.what, ')[2].removesuffix('))'))
    assert [round(float(v), 1) for v in audit_fashioniq(data)['count']]==list(numbers)

@real
def test_the_sizes_that_papers_print():
    sets = {(c, s): read_fashioniq(data, c, s) for c in CATEGORIES for s in SPLITS}
    n = lambda what, *splits: sum(len(getattr(f, what)) for (_, s),f in sets.items() if s in splits)
    assert [len(sets[c, 'train'].entries) for c in CATEGORIES]==[5985, 5988, 6027] and [len(sets[c, 'train'].names) for c in CATEGORIES]==[11452, 19036, 16121]
    found = [n('names', *SPLITS), len({i for f in sets.values() for i in f.names}), n('entries', *SPLITS), n('names', 'train'), n('names', 'val'), n('entries', 'train'), n('entries', 'val', 'test')]
    assert found==[row[2] for row in printed('printed')] and n('names', 'val')+2==n('names', 'test')
    audits = [audit_fashioniq(data, c, s).set_index('what')['count'] for c in CATEGORIES for s in SPLITS]
    assert sum(a['empty captions'] for a in audits)==17 and sum(a['captions with blanks at an end'] for a in audits)==1679 and not any(a['queries with two empty captions'] for a in audits)

@real
def test_only_shirts_and_tops_share_images():
    found = {(r.list, r[2]): r[3] for r in shared_images(data).itertuples()}
    table = printed('crossed').set_index('shirt')
    assert found=={(f'shirt {s}', f'toptee {t}'): table.loc[s, f'toptee, {t}'] for s in SPLITS for t in SPLITS}

@real
def test_the_released_queries_in_each_gallery_and_order():
    for c,whole,used in zip(CATEGORIES, (3817, 6346, 5373), (2628, 3089, 2902)):
        b = load_fashioniq(data, c, images=False)
        assert len(b.shared_gallery)==whole and len(load_fashioniq(data, c, gallery='queries', images=False).shared_gallery)==used
        assert all(1<=len(t.split('\n'))<=2 and all(line.strip() for line in t.split('\n')) for t in b.queries.condition)
        with pytest.raises(ValueError, match=f'the test split of {c} has no targets'): load_fashioniq(data, c, 'test', images=False)
    assert '2 of 1961 queries have one caption' in b.protocol.extra
    with pytest.raises(FileNotFoundError, match='FashionIQ images'): load_fashioniq(data)


# Files made by hand

NAMES = [f'B{n}' for n in range(30)]
QUERIES = [dict(candidate='B0', target='B1', captions=['is red', 'has dots']), dict(candidate='B0', target='B2', captions=[' longer. ', '']), dict(candidate='B3', target='B4', captions=['same', 'same'])]

def files(folder, queries=QUERIES, names=NAMES, category='dress', split='val'):
    for file, content in ((f'captions/cap.{category}.{split}.json', queries), (f'image_splits/split.{category}.{split}.json', names)):
        (folder/file).parent.mkdir(parents=True, exist_ok=True)
        (folder/file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder

def but(**change): return [{k: v for k,v in {**QUERIES[0], **change}.items() if v is not ...}, *QUERIES[1:]]

DAMAGED = [(dict(queries='[{"candidate": "B0"'), 'cap.dress.val.json is not JSON'), (dict(names='["B0",'), 'split.dress.val.json is not JSON'), (dict(queries=''), 'not JSON'), (dict(queries=[]), 'cap.dress.val.json: expected a list that is not empty'),
    (dict(queries={'a': 1}), 'expected a list that is not empty, not dict'), (dict(names=[]), 'split.dress.val.json: expected a list that is not empty'), (dict(names={'B0': './B0.png'}), 'not dict'), (dict(names='null'), 'not NoneType'),
    (dict(queries=['B0']), 'entry 0: is str, not an object'), (dict(queries=but(candidate=...)), "entry 0: has no 'candidate'"), (dict(queries=but(target=...)), "entry 0: has no 'target'"), (dict(queries=but(captions=...)), "entry 0: has no 'captions'"),
    (dict(queries=but(candidate=7)), 'candidate is 7, not str'), (dict(queries=but(target=None)), 'target is None, not str'), (dict(queries=but(captions='is red')), "captions is 'is red', not list"), (dict(queries=but(captions=['a'])), 'captions must be two sentences'),
    (dict(queries=but(captions=['a', 'b', 'c'])), 'captions must be two sentences'), (dict(queries=but(captions=['a', None])), 'captions must be two sentences'), (dict(queries=but(captions=['', ' . '])), 'entry 0: captions are both empty'),
    (dict(queries=but(target='B99')), "entry 0: target 'B99' is not in the list of images"), (dict(queries=but(candidate='B99')), "entry 0: candidate 'B99' is not in the list of images"), (dict(queries=but(target='B0')), 'the target is the candidate itself'),
    (dict(names=[*NAMES, 'B7', 'B8']), "'B7' stands there twice; 2 such"), (dict(names=[*NAMES, 5]), 'entry 30: 5 is no name of an image')]
OUTSIDE = ['../../etc/passwd', '/etc/passwd', 'a/b', 'a\\b', 'C:a', '..', '.', '', 'a\n', 'a.jpg', 'é']

@pytest.mark.parametrize('change, why', DAMAGED)
def test_what_is_damaged_is_refused_by_name(tmp_path, change, why):
    with pytest.raises(ValueError, match=re.escape(why)): read_fashioniq(files(tmp_path, **change))

@pytest.mark.parametrize('name', OUTSIDE)
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match='is no name of an image'): read_fashioniq(files(tmp_path, names=[*NAMES, name]))

def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='cap.dress.val.json is missing; Get it from https://github.com/XiaoxiaoGuo'): read_fashioniq(tmp_path)
    (files(tmp_path)/'image_splits/split.dress.val.json').unlink()
    with pytest.raises(FileNotFoundError, match='split.dress.val.json is missing'): read_fashioniq(tmp_path)
    for wrong in (dict(category='hat'), dict(split='dev')):
        with pytest.raises(ValueError, match='is none of'): read_fashioniq(files(tmp_path), **wrong)
    for wrong in (dict(order='ba'), dict(gallery='references'), dict(reference='away')):
        with pytest.raises(ValueError): load_fashioniq(tmp_path, images=False, **wrong)

def test_the_three_places_where_a_set_may_lie(tmp_path):
    for place in ('fashioniq', 'FashionIQ', '.'): assert read_fashioniq(files(tmp_path/place.strip('.')/'x', names=NAMES).parent/'x').names==NAMES
    for place in ('fashioniq', 'FashionIQ'):
        files(tmp_path/f'at{place}'/place)
        assert len(read_fashioniq(tmp_path/f'at{place}').entries)==3

def test_the_audit_counts_what_the_reader_refuses(tmp_path):
    damaged = [*QUERIES, QUERIES[0], dict(candidate='B5', target='B5', captions=['', ' ']), dict(candidate='B98', target='B99', captions=['a', 'a.']), dict(candidate='B1', target='B0', captions=['a', 'b'])]
    found = audit_fashioniq(files(tmp_path, damaged, [*NAMES, 'B3'])).set_index('what')['count']
    assert [found[k] for k in ('queries', 'different candidates', 'images in the list', 'of these, used by a query', 'names that stand twice in the list', 'candidates that are not in the list', 'targets that are not in the list', 'queries whose target is the candidate', 'pairs asked before')]==[7, 5, 31, 6, 1, 1, 1, 1, 1]
    assert [found[k] for k in ('empty captions', 'queries with two empty captions', 'captions with blanks at an end', 'queries whose captions are the same', 'queries whose pair is asked the other way round too')]==[3, 1, 2, 3, 3]

def test_a_test_split_is_asked_only_where_its_answers_are(tmp_path):
    secret = [{k: v for k,v in q.items() if k!='target'} for q in QUERIES]
    files(tmp_path, secret, split='test')
    assert read_fashioniq(tmp_path, split='test').targets==[] and audit_fashioniq(tmp_path, split='test').iloc[0, 1]==3
    with pytest.raises(ValueError, match='nobody has published them; evaluate on val'): load_fashioniq(tmp_path, split='test', images=False)
    answers = tmp_path/'captions/answers.dress.test.json'
    for wrong, why in ((['B1'], 'expected a list of 3 targets'), ({'0': 'B1'}, 'expected a list of 3 targets'), (['B1', 'B2', 'B99'], 'answers.dress.test.json, entry 2: target'), (['B0', 'B2', 'B4'], 'entry 0: the target is the candidate')):
        answers.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=why): read_fashioniq(tmp_path, split='test')
    answers.write_text(json.dumps(['B1', 'B2', 'B4']))
    assert load_fashioniq(tmp_path, split='test', images=False).queries.targets.tolist()==[['B1'], ['B2'], ['B4']]

def test_missing_pictures_are_counted_and_both_formats_are_read(tmp_path):
    (files(tmp_path)/'images').mkdir()
    with pytest.raises(FileNotFoundError, match='many of them dead'): load_fashioniq(tmp_path)
    for n,name in enumerate(NAMES):
        if name not in ('B4', 'B9'): Image.new('RGB', (8, 8), (n, 0, 0)).save(tmp_path/f'images/{name}.{"png" if n%2 else "jpg"}')
    (tmp_path/'images/B4.txt').write_text('no picture')
    b = load_fashioniq(tmp_path)
    assert (len(b), len(b.shared_gallery), b.load('B3').size)==(2, 28, (8, 8)) and b.load('B3').getpixel((0, 0))==(3, 0, 0)
    for said in ('partial: 93.3 %', '2 of 30 images missing', '1 of 3 queries left out', '1 of 3 queries have one caption'): assert said in str(b.protocol)
    before = b.key
    Image.new('RGB', (9, 9)).save(tmp_path/'images/B3.png')
    assert load_fashioniq(tmp_path).key!=before
    for name in ('B1', 'B2', 'B3'): (tmp_path/f'images/{name}.{"jpg" if name=="B2" else "png"}').unlink()
    with pytest.raises(ValueError, match='no query has all of its own'): load_fashioniq(tmp_path)


# Orders, and the metric

def test_every_order_of_every_kind_of_pair():
    expected = {('a', 'b'): dict(forward='a and b', reverse='b and a', both='a and b\nb and a', first='a', second='b'), (' A, ', 'b  c.'): dict(forward='A and b c', reverse='b c and A', both='A and b c\nb c and A', first='A', second='b c'),
                ('', 'b'): dict.fromkeys(ORDERS, 'b'), ('a', '?'): dict.fromkeys(ORDERS, 'a'), ('a', 'a'): dict(forward='a and a', reverse='a and a', both='a and a', first='a', second='a')}
    for captions, said in expected.items(): assert {o: '\n'.join(wordings(captions, o)) for o in ORDERS}==said

def random_world(tmp_path, seed=0):
    "Random features and queries of three categories of different sizes."
    rng, sizes = np.random.default_rng(seed), dict(dress=40, shirt=70, toptee=55)
    for c,n in sizes.items():
        names = [f'{c}{i}' for i in range(n)]
        queries = [dict(zip(('candidate', 'target'), map(str, rng.choice(names, 2, replace=False))), captions=[f'w{rng.integers(9)} w{rng.integers(9)}', f'w{rng.integers(9)}' if i%5 else '']) for i in range(n//2)]
        files(tmp_path, queries, names, c)
    features = {f'{c}{i}': rng.normal(size=12).astype(np.float32) for c,n in sizes.items() for i in range(n)}
    features['dress3'] = features['dress4'] = features['dress5']                             # ties
    texts = lambda ts: torch.tensor(np.stack([np.random.default_rng(int(hashlib.sha256(t.encode()).hexdigest()[:8], 16)).normal(size=12).astype(np.float32) for t in ts]))
    encode = lambda backbone, ids, load, key: SimpleNamespace(array=np.stack([features[i] for i in ids]), index={i: n for n,i in enumerate(ids)})
    return features, SimpleNamespace(name='random', encode_text=texts), encode

def slow_rank(b, q, features, texts, ks_removed):
    unit = lambda v: v/np.linalg.norm(v)
    lines = [b.protocol.prompt.replace('{condition}', line) for line in q.condition.split('\n')]
    total = sum(unit(features[q.reference]+texts([t])[0].numpy()) for t in lines)
    mine = {i: float(unit(total)@unit(features[i])) for i in b.shared_gallery if not (ks_removed and i==q.reference)}
    target = q.targets[0]
    return 1 + sum(s>=mine[target]-1e-7 for i,s in mine.items() if i!=target)

@pytest.mark.parametrize('choice', [dict(order=o) for o in ORDERS]+[dict(gallery='queries'), dict(reference='removed'), dict(prompt='a photo that {condition}')])
def test_recall_is_the_slow_one_in_every_protocol(tmp_path, choice):
    features, reader, encode = random_world(tmp_path)
    benches = {c: load_fashioniq(tmp_path, c, images=False, **choice) for c in CATEGORIES}
    per_query, rows = evaluate_fashioniq(method('image_text'), benches, reader, (3, 10), encode=encode)
    slow = {c: np.array([slow_rank(b, q, features, reader.encode_text, choice.get('reference')=='removed') for q in b.queries.itertuples()]) for c,b in benches.items()}
    assert per_query['rank'].tolist()==np.concatenate(list(slow.values())).tolist()
    value = {(r.task, r.metric, r.k): (r.value, r.n) for r in rows.itertuples()}
    by = {(c, k): 100*(r<=k).mean() for c,r in slow.items() for k in (3, 10)}
    for (c, k),v in by.items(): assert value[c, 'recall', k]==(pytest.approx(v), len(slow[c]))
    for k in (3, 10): assert value['mean', 'recall', k][0]==pytest.approx(np.mean([by[c, k] for c in CATEGORIES]))
    assert value['mean', 'mean_recall', 10]==(pytest.approx(np.mean(list(by.values()))), sum(map(len, slow.values())))
    assert len(rows)==9 and ((rows.ci_low<=rows.value) & (rows.value<=rows.ci_high)).all()

def test_an_interval_redraws_candidates_with_all_their_queries(tmp_path):
    import pandas as pd
    ranks = np.tile([1, 99], 150)
    alone = pd.DataFrame(dict(task=np.repeat(CATEGORIES, 100), rank=ranks, reference=[f'r{i}' for i in range(300)], protocol='p'))
    wide, narrow = macro_mean(alone.assign(reference=[f'r{i//10}.{r}' for i,r in enumerate(ranks)])), macro_mean(alone)
    assert narrow.value.item()==50 and (wide.ci_high-wide.ci_low).item()>1.5*(narrow.ci_high-narrow.ci_low).item()
    with pytest.raises(ValueError, match='shirt, toptee is not there'): macro_mean(alone[alone.task=='dress'])

def test_two_texts_are_never_taken_for_one(tmp_path):
    features, reader, encode = random_world(tmp_path)
    b = load_fashioniq(tmp_path, images=False)
    for m in (method('text_only'), method('image_text')):
        with pytest.raises(Exception): evaluate(m, b, reader, (3,), encode=encode)
    tiny = load_backbone('tiny', device='cpu')
    torch.manual_seed(0)
    word = PseudoWord('lincir', None, 'LinCIR', phi=Phi(tiny.D, tiny.W).eval())
    ref = torch.randn(2, tiny.D)
    with pytest.raises(Exception): word.encode_query(ref, [('is red', 'is blue')]*2, tiny)
    q = averaged(word).encode_query(ref, [('is red', 'is blue'), ('a',)], tiny)
    one, other = (word.encode_query(ref, [t]*2, tiny) for t in ('is red', 'is blue'))
    assert torch.allclose(q[0], torch.nn.functional.normalize(one[0]+other[0], dim=0), atol=1e-5) and torch.allclose(q[1], word.encode_query(ref, ['a', 'a'], tiny)[1], atol=1e-5)


# The world, read by somebody else

PRINT = {'horizontal stripes': 'striped', 'vertical stripes': 'pinstriped', 'diagonal stripes': 'diagonal', 'checks': 'checked', 'checked': 'checked', 'dots': 'dotted', 'dotted': 'dotted', 'zigzags': 'zigzag', 'diamonds': 'diamond', 'flowers': 'floral', 'floral': 'floral', 'details': 'plain'}
GARMENTS = {'button-up shirt': 'shirt', **{k: k for k in ('T-shirt', 'hoodie', 'tank top', 'blouse', 'sweater', 'summer dress', 'shirt dress', 'evening gown')}}

def arms(g): # 0 none, 1 short, 2 long
    if g['kind']=='shirt': return 2 if g['cut']=='long-sleeved' else 1
    return 0 if g['kind'] in ('tank top', 'summer dress', 'evening gown') else 1 if g['kind'] in ('T-shirt', 'shirt dress') else 2

def light(g): return (sum(COLOURS[g['color']])+sum(COLOURS[g['second'] if g['pattern']!='plain' else g['color']]))//2

def true(clause, a, b)->bool:
    "Is a clause true of garment `b`, compared with `a`? It knows English and nothing of the grammar that wrote it."
    c = re.sub(r'^(it )?(is|has) ', '', clause)
    c = re.sub(r'^(a|an) ', '', re.sub(r'^it ', '', c))
    if m := re.fullmatch(r'(?:does not have an? |does not have |no )(.+)', c):
        return dict(pattern=b['pattern']=='plain', sleeves=arms(b)==0).get(m[1], a['detail']==m[1]!=b['detail'])
    if c in ('plain', 'solid color'): return b['pattern']=='plain'
    if c=='sleeveless': return arms(b)==0
    if m := re.fullmatch(r'(short|long) sleeve[sd]', c): return arms(b)==dict(short=1, long=2)[m[1]]
    if m := re.fullmatch(r'(?:the sleeves are (longer|shorter)|(longer|shorter) sleeves)', c): return arms(b)>arms(a) if 'longer' in m.groups() else 0<arms(b)<arms(a)
    if m := re.fullmatch(r'(longer|shorter)( dress)?', c): return (b['kind']=='evening gown')-(a['kind']=='evening gown')==dict(longer=1, shorter=-1)[m[1]]
    if m := re.fullmatch(r'(lighter|darker)( color| in color)?', c): return (light(b)-light(a))*dict(lighter=1, darker=-1)[m[1]]>=150
    if m := re.fullmatch(r'(more|less) colorful', c): return bool(b['second'])-bool(a['second'])==dict(more=1, less=-1)[m[1]]
    if (m := re.fullmatch(r'(\w+)( color| in color)?', c)) and m[1] in COLOURS: return b['color']==m[1]
    if m := re.fullmatch(r'(larger|smaller) (.+)', c): return a['pattern']==b['pattern']==PRINT[m[2]] and b['scale']==dict(larger='large', smaller='small')[m[1]]!=a['scale']
    if (m := re.fullmatch(r'(\w+) (.+)', c)) and m[1] in COLOURS: return b['second']==m[1] and b['pattern']==PRINT[m[2]]
    if c in PRINT: return b['pattern']==PRINT[c]
    if c in GARMENTS: return b['kind']==GARMENTS[c]
    if c in ('crew neck', 'turtleneck'): return b['cut']==c.replace(' ', '-')
    return b['detail']==c

@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    root = tmp_path_factory.mktemp('fashioniq')
    write_fashioniq(root, 30, 5)
    return root

def test_a_foreign_reader_finds_every_sentence_true():
    "Of the target, and of the candidate none."
    n, kinds = 0, set()
    for (c, s),(shown, entries) in draw_set(400, 9).items():
        for e in entries:
            a, b = (shown[e[k]]._asdict() for k in ('candidate', 'target'))
            for words, told in zip(e['captions'], e['kinds']):
                clauses = re.split(r' and | with ', words.strip()) if words else []
                assert len(clauses)==len(told), (words, told)
                for clause in clauses: assert true(clause, a, b) and not true(clause, a, a), (clause, a, b)
                n += len(clauses); kinds |= set(told)
    assert n>3000 and len(kinds)==13

def test_lists_hold_no_garment_twice_and_names_say_nothing():
    drawn = draw_set(100, 2)
    names = [i for shown,_ in drawn.values() for i in shown]
    assert len(names)==len(set(names))
    for shown, entries in drawn.values():
        assert len(set(shown.values()))==len(shown) and all(isinstance(g, Garment) for g in shown.values())
        used = {e[k] for e in entries for k in ('candidate', 'target')}
        assert used<set(shown) and .6<len(used)/len(shown)<.8 and all(re.fullmatch('B0[0-9A-Z]{8}', i) for i in shown) and list(shown)==sorted(shown)

def test_the_files_are_the_official_ones(drawn):
    f = drawn/'fashioniq'
    for c in CATEGORIES:
        for s in SPLITS:
            q = read_fashioniq(drawn, c, s)
            assert all(set(e)=={'candidate', 'captions', *(['target'] if s!='test' else [])} for e in q.entries) and len(q.entries)>=dict(train=18, val=6, test=6)[s]
            assert set(json.loads((f/f'facts.{c}.{s}.json').read_text()))==set(q.names) and len(q.targets)==len(q.entries)
            b = load_fashioniq(drawn, c, s)
            assert b.protocol.coverage==1 and b.load(q.names[0]).size==(128, 128)
    assert len(shared_images(drawn))==0 and len(list((f/'images').iterdir()))==sum(len(read_fashioniq(drawn, c, s).names) for c in CATEGORIES for s in SPLITS)

def tree(root): return hashlib.sha256(b''.join(str(p.relative_to(root)).encode()+p.read_bytes() for p in sorted(root.rglob('*')) if p.is_file())).hexdigest()

@pytest.mark.parametrize('hash_seed', ['0', '77'])
def test_the_same_bytes_in_another_process(drawn, tmp_path, hash_seed):
    code = f'from pathlib import Path; from cis_nb.world.fashioniq import write_fashioniq; write_fashioniq(Path({str(tmp_path)!r}), 30, 5)'
    subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': hash_seed}, capture_output=True, text=True, check=True)
    assert tree(tmp_path)==tree(drawn)
    write_fashioniq(tmp_path/'other', 5, 6)
    assert tree(tmp_path/'other')!=tree(drawn)

def test_a_world_that_is_too_small_says_so():
    only = Garment('hoodie', '', '', 'plain', '', 'red', '')
    with pytest.raises(ValueError, match='too few different garments of the category shirt; ask for fewer queries'): fresh(lambda: only, {only}, 'shirt')

def test_the_splits_of_a_large_world_are_alike():
    "No list runs out of plain cloth, so that others would ask about prints only."
    drawn = draw_set(1500)
    for c in CATEGORIES:
        plain = [np.mean([g.pattern=='plain' for g in drawn[c, s][0].values()]) for s in SPLITS]
        assert min(plain)>.2 and max(plain)-min(plain)<.12, (c, plain)
