"Methods against benchmarks: hand-computed numbers, other orders, missing images, bad parameters."
import json, math
from pathlib import Path
from dataclasses import replace
from types import SimpleNamespace
import numpy as np, pandas as pd, pytest, torch
from PIL import Image
from cis_nb import claims as cl, compare as cp, evaluate as ev, show
from cis_nb.benchmarks.genecis import Rules
from cis_nb.benchmarks.protocol import Benchmark, Protocol
from cis_nb.benchmarks.templates import TASKS
from cis_nb.models import baselines as bl
ROOT = Path(__file__).resolve().parents[1]

COLOURS = dict(a=(255,0,0), b=(0,255,0), c=(0,0,255), d=(255,255,0), e=(255,0,255))
eyes = SimpleNamespace(name='eyes', fingerprint='eyes', encode_text=lambda ts: torch.tensor([[0., 0., 3.] if 'blue' in t else [3., 0., 0.] for t in ts]))

def see(backbone, ids, load, key):
    "Features of an image: its colour. What cannot be loaded is left out, as the feature store does."
    kept = [i for i in ids if load(i) is not None]
    return SimpleNamespace(array=np.stack([np.asarray(load(i))[0,0]/255. for i in kept]), index={i:n for n,i in enumerate(kept)})

def bench(task='focus_object', gallery=('c','b','d'), crop='whole image', load=None, n=1, key=None):
    rows = [(f'{task}-{i}', 'a', 'blue', [gallery[0]], list(gallery)) for i in range(n)]
    q = pd.DataFrame(rows, columns=['query_id', 'reference', 'condition', 'targets', 'gallery'])
    return Benchmark('toy', task, q, load or (lambda i: Image.new('RGB', (2,2), COLOURS[i])), Protocol(f'toy/{task}', gallery=f'{len(gallery)} per query', crop=crop), key=key or task+crop)

@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch): monkeypatch.setenv('CIS_STORE', str(tmp_path/'store'))

def rows(*items): return pd.DataFrame(items, columns=['method', 'task', 'query_id', 'rank']).assign(draw=0, gallery_size=15, reference='r')

# --- baselines

def test_raw_and_unit_average_differ_only_when_lengths_differ():
    ref, cond = torch.tensor([[3., 0.]]), torch.tensor([[0., 1.]])
    assert torch.allclose(bl.image_text(ref, cond), torch.tensor([[3., 1.]])/math.sqrt(10))
    assert torch.allclose(bl.image_text(ref, cond, normalise=True), torch.tensor([[1., 1.]])/math.sqrt(2))
    assert torch.allclose(bl.image_text(ref/3, cond), bl.image_text(ref, cond, normalise=True))

def test_queries_have_length_one_for_every_method():
    ref, cond = torch.randn(7, 5)*4, torch.randn(7, 5)
    for m in bl.methods().values(): assert torch.allclose(m.fuse(ref, cond).norm(dim=1), torch.ones(7), atol=1e-6), m.name

def test_scores_agree_for_own_and_shared_galleries():
    m, q, gal = bl.method('image_text'), bl.unit(torch.randn(4, 6)), torch.randn(9, 6)
    assert torch.allclose(m.scores(q, gal), m.scores(q, gal.expand(4, 9, 6)), atol=1e-6)

def test_random_scores_are_seeded_and_differ_between_calls():
    gal = torch.zeros(3, 15, 2)
    a, b = bl.method('random_scores', 1), bl.method('random_scores', 1)
    first = a.scores(torch.zeros(3, 2), gal)
    assert torch.equal(first, b.scores(torch.zeros(3, 2), gal)) and not torch.equal(first, a.scores(torch.zeros(3, 2), gal))

def test_random_scores_find_what_chance_finds():
    ranks = bl.method('random_scores').scores(torch.zeros(20000, 2), torch.zeros(20000, 15, 2)).argmax(1)
    assert abs((ranks==0).float().mean().item() - 1/15) < .006

# --- numbers

def test_mean_counts_tasks_not_queries():
    t = rows(*[('m', 'a', i, 1) for i in range(1)], *[('m', 'b', i, 9) for i in range(99)])
    assert cp.task_mean(cp.hits(t).m) == 50

def test_methods_must_answer_the_same_queries():
    with pytest.raises(ValueError, match='same queries'): cp.hits(rows(('m', 'a', 1, 1), ('n', 'a', 2, 1)))

def test_compare_is_antisymmetric_and_ignores_row_order():
    rng = np.random.default_rng(0)
    t = pd.concat([pd.DataFrame(dict(method=m, draw=0, task=k, query_id=range(80), reference=np.arange(80)//2, rank=rng.integers(1, 4, 80))) for m in 'xy' for k in 'ab'])
    one, other, mixed = cp.compare(t, 'x', 'y'), cp.compare(t, 'y', 'x'), cp.compare(t.sample(frac=1, random_state=1), 'x', 'y')
    assert one['diff'] == pytest.approx(-other['diff']) and one == mixed
    assert one['low'] <= one['diff'] <= one['high']

def test_compare_agrees_with_the_normal_interval():
    rng = np.random.default_rng(1); a, b = rng.random(4000) < .3, rng.random(4000) < .25
    t = pd.concat([pd.DataFrame(dict(method=m, draw=0, task='a', query_id=range(4000), reference=range(4000), rank=np.where(v, 1, 2))) for m,v in (('x', a), ('y', b))])
    c, d = cp.compare(t, 'x', 'y'), 100*(a.astype(float)-b)
    half = 1.96*d.std()/math.sqrt(4000)
    assert c['diff'] == pytest.approx(d.mean()) and c['low'] == pytest.approx(d.mean()-half, abs=.2) and c['high'] == pytest.approx(d.mean()+half, abs=.2)

def test_families_of_queries_widen_the_interval():
    rng = np.random.default_rng(2); easy = np.repeat(rng.random(100) < .4, 10)      # 100 references, ten queries each that fare alike
    t = pd.concat([pd.DataFrame(dict(method=m, draw=0, task='a', query_id=range(1000), reference=np.arange(1000)//10, rank=np.where(v, 1, 2))) for m,v in (('x', easy), ('y', np.zeros(1000, bool)))])
    width = {f: (lambda c: c['high']-c['low'])(cp.compare(t, 'x', 'y', families=f)) for f in (True, False)}
    assert width[True]/width[False] == pytest.approx(math.sqrt(10), rel=.25)

@pytest.mark.parametrize('low, high, said', [(.1, 2, 'better'), (-2, -.1, 'worse'), (-1, 1, 'cannot tell'), (0, 1, 'cannot tell'), (0, 0, 'cannot tell')])
def test_verdict(low, high, said): assert cp.verdict(dict(low=low, high=high)) == said

def test_chance_of_mixed_galleries(): assert cp.chance(rows(('m', 'a', 1, 1), ('m', 'a', 2, 1)).assign(gallery_size=[10, 20]))['a'] == pytest.approx(7.5)

# --- papers

def test_averages_of_the_paper_tables_follow_from_their_columns():
    for table in ('genecis_table2', 'genecis_table6'):
        p = cp.paper_numbers(table); one = p[(p.k==1) & (p.method!='specific')]
        for m,g in one.groupby('method'): assert g[g.task!='mean'].value.mean() == pytest.approx(g[g.task=='mean'].value.item(), abs=.06), (table, m)

EMPTY = pd.DataFrame(columns=['method', 'task', 'k', 'seed', 'value', 'ci_low', 'ci_high', 'n'])

def test_paper_table_keeps_rows_that_were_not_measured():
    t = cp.beside_paper(EMPTY, 'genecis_table2')
    assert len(t) == 6 and list(t['numbers of']) == ['paper; not measured here']*6
    assert t.iloc[:,2:].map(lambda c: c.count('.')).sum().sum() == 12 + 5*13                       # every number of the paper

@pytest.mark.parametrize('table', ['genecis_table2', 'genecis_table3_mitstates', 'genecis_table4_cirr', 'genecis_table6'])
def test_every_number_of_a_paper_table_is_shown_once(table):
    t, p = cp.beside_paper(EMPTY, table), cp.paper_numbers(table)
    assert sorted(float(v) for c in t.columns[2:] for cell in t[c] for v in cell.split(' / ') if v != '–') == sorted(p.value)

def test_a_row_of_several_seeds_is_their_mean_and_says_so():
    mine = pd.DataFrame([('combiner', 'full', 1, s, v, 0., 99., 10) for s,v in enumerate((20., 26.))], columns=EMPTY.columns)
    t = cp.beside_paper(mine, 'genecis_table4_cirr', dict(full={1:1., 5:5., 10:10.}))
    ours = t[t['numbers of'].str.startswith('this run, ')].iloc[0]
    assert ours['numbers of'] == 'this run, mean of 2 seeds' and ours.iloc[2] == '23.0 / – / –' and t.iloc[-1].tolist() == ['Chance', 'this run', '1.0 / 5.0 / 10.0']
    assert cp.doubt(next(cp.over_seeds(mine).itertuples())) == '23.0 ± 4.2'

# --- seeds

def seeded(gains, n=1000):
    "Image + Text finds a fifth; a training of each seed finds `gain` percent more, on top of the same queries."
    make = lambda m, s, share: pd.DataFrame(dict(method=m, seed=s, draw=0, task='a', query_id=range(n), reference=range(n), gallery_size=15, rank=np.where(np.arange(n)<round(share*n), 1, 5)))
    return pd.concat([make('image_text', -1, .2), *(make('combiner', s, .2+g/100) for s,g in enumerate(gains))])

def test_each_seed_is_compared_on_its_own():
    said = [cp.verdict(c) for c in cp.compare_seeds(seeded([5, 0, -5]), 'combiner', 'image_text')]
    assert said == ['better', 'cannot tell', 'worse'] and cp.compare(seeded([5, 0, -5]), 'combiner', 'image_text')['diff'] == pytest.approx(0)
    assert cp.compare_seeds(seeded([5]), 'image_text', 'combiner') == []          # the sum has no seeds

def test_the_mean_over_seeds_is_what_is_compared():
    t = seeded([4, 8]); c = cp.compare(t, 'combiner', 'image_text')
    assert c['diff'] == pytest.approx(6) and c['n'] == 1000 and c['low'] > 0

def test_a_seed_that_has_not_answered_all_is_an_error():
    t = seeded([4, 8])
    with pytest.raises(ValueError, match='same queries'): cp.hits(t[~((t.seed==1) & (t.query_id==7))])
    with pytest.raises(ValueError, match='twice'): cp.hits(pd.concat([t, t[:1]]))

def test_summary_has_rows_of_every_seed_and_no_mean_of_half_the_tasks():
    t = pd.concat([seeded([4, 8], 50).assign(task=k) for k in 'ab'] + [seeded([], 50).assign(method='specific')]).assign(protocol='p'); t['ranks'] = [[r] for r in t['rank']]
    r = ev.summary(t, 'eyes')
    assert set(r.seed[r.method=='combiner']) == {0, 1} and set(r.task[r.method=='combiner']) == {'a', 'b', 'mean'} and set(r.task[r.method=='specific']) == {'a'}
    assert 'of 2 seeds surely better' in cp.headline(t[t.method!='specific'], r[r.method!='specific'], dict(image_text='Image + Text', combiner='C'))

# --- trainings

def test_the_receipt_of_a_training_tells_its_parameters(tmp_path, monkeypatch):
    (tmp_path/'05_train.mine').mkdir(); (tmp_path/'05_train.mine'/'receipt.json').write_text(json.dumps(dict(params=dict(method='combiner', steps=7))))
    monkeypatch.setenv('CIS_REPORT', str(tmp_path/'06_evaluate'))
    assert ev.training_params('05_train.mine')['steps'] == 7 and ev.training_params('mined')['triplets'] == 'mined'
    with pytest.raises(FileNotFoundError, match='has to run first'): ev.training_params('05_train.other')

def test_without_a_book_the_parameter_file_tells_them(tmp_path, monkeypatch):
    monkeypatch.delenv('CIS_REPORT', raising=False); monkeypatch.setenv('CIS_HOME', str(tmp_path)); monkeypatch.setenv('CIS_PROFILE', 'mine')
    (tmp_path/'nbs').symlink_to(ROOT/'nbs'); (tmp_path/'params'/'mine').mkdir(parents=True); (tmp_path/'params'/'mine'/'05_train.x.yaml').write_text('method: combiner\nsteps: 3\n')
    p = ev.training_params('05_train.x')
    assert (p['steps'], p['backbone'], p['pretrained']) == (3, 'tiny', 'default')
    with pytest.raises(FileNotFoundError, match='an experiment of the profile mine'): ev.training_params('05_train.y')

def test_two_trainings_of_the_same_kind_are_refused():
    with pytest.raises(ValueError, match='two of them'): ev.trained_entries(['cirr', 'cirr'], [0], eyes)

def test_answers_of_a_training_carry_its_seed():
    b, m = bench(), replace(bl.method('text_only'), name='combiner')
    found = ev.answers([m, 'image_only'], {(0, 'focus_object'): b}, eyes, encode=ev.encode_once(eyes, [b], see), training=3)
    assert set(found.seed) == {3} and set(found.method) == {'combiner', 'image_only'}

# --- specific solutions

def test_a_name_that_nobody_knows_leaves_the_task_out():
    b = bench(); eye = SimpleNamespace(names=['green'])
    s = SimpleNamespace(method=SimpleNamespace(), backbone=eye)
    assert ev.unknown_names(s, b).startswith("1 of 1 queries ask for 'blue'") and not ev.unknown_names(SimpleNamespace(method=SimpleNamespace(types={'blue': []}), backbone=eyes), b)

def test_without_annotations_there_is_no_specific_solution(tmp_path):
    found, missing = ev.specific_solutions(tmp_path, eyes, {(0, 'focus_object'): bench(), (0, 'focus_attribute'): bench('focus_attribute')})
    assert not found and 'panoptic_val2017.json is missing' in missing['focus_object'] and 'VAW' in missing['focus_attribute']

# --- which queries are shown

def test_shown_queries_follow_their_rules():
    t = pd.concat([rows(('c', 'a', 1, 1), ('c', 'a', 2, 1), ('c', 'a', 3, 4), ('c', 'a', 4, 2)), rows(('x', 'a', 1, 3), ('x', 'a', 2, 9), ('x', 'a', 3, 1), ('x', 'a', 4, 1))])
    assert ev.won_by(t, 'c', ['x'], 'a').query_id.tolist() == [2, 1] and ev.failures(t, 'c', 'a').query_id.tolist() == [4, 3]
    asked = t.assign(task='focus_object', condition=['p', 'q', 'q', 'r']*2, reference=['i', 'i', 'j', 'j']*2)
    assert ev.most_asked(asked, 'c', 'object').condition.tolist() == ['p', 'q']           # both references have two; i has more right

def test_a_strip_of_several_right_answers_marks_them_all():
    b = bench(gallery=('c','b','d')); b.queries.at[0, 'targets'] = ['c', 'b']
    a = pd.Series(dict(query_id='focus_object-0', reference='a', condition='blue '*40, rank=1, top=['c', 'b', 'd']))
    s = ev.answer_strip(b, a); assert s['outlines'] == ['reference', 'target', 'target', None] and len(s['title']) < 90

# --- running

def test_each_distinct_image_is_encoded_once():
    seen = []
    def count(backbone, ids, load, key): seen.extend(ids); return see(backbone, ids, load, key)
    bs = [bench('focus_object', ('c','b','d')), bench('change_object', ('c','d','e')), bench('focus_attribute', ('c','b'), crop='box')]
    ev.encode_once(eyes, bs, count)
    assert sorted(seen) == sorted('abcde' + 'abc')      # whole images once, crops of the same names on their own

def test_a_crop_and_a_whole_image_of_the_same_name_stay_apart():
    whole, box = bench(crop='whole image'), bench('focus_attribute', crop='box', load=lambda i: Image.new('RGB', (2,2), (0,0,255)))
    enc = ev.encode_once(eyes, [whole, box], see)
    assert enc(eyes, ['a'], whole.load, '').array.max() == 1 and enc(eyes, ['a'], box.load, '').array[:,:2].max() == 0

def test_answers_do_not_depend_on_the_order_of_the_gallery():
    found = [ev.answers(['image_text', 'text_only'], {(0, 'focus_object'): b}, eyes, encode=ev.encode_once(eyes, [b], see))
             for b in (bench(gallery=('c','b','d','e')), replace(bench(), queries=bench().queries.assign(gallery=[['e','d','b','c']]), images=None))]
    assert list(found[0]['rank']) == list(found[1]['rank'])

def test_a_guess_is_new_on_every_task():
    bs = {(0, t): bench(t, gallery=('c','b','d','e'), n=50) for t in TASKS[:2]}
    found = ev.answers(['random_scores'], bs, eyes, encode=ev.encode_once(eyes, list(bs.values()), see))
    first, second = (found[found.task==t]['rank'].tolist() for t in TASKS[:2])
    assert first != second and set(first) == {1, 2, 3, 4}

def test_an_unreadable_image_makes_the_task_partial():
    b = bench(n=2); b.queries.at[1, 'gallery'] = ['c', 'e']
    b = replace(b, images=None, load=lambda i: None if i=='e' else Image.new('RGB', (2,2), COLOURS[i]))
    found = ev.answers(['text_only'], {(0, 'focus_object'): b}, eyes, encode=ev.encode_once(eyes, [b], see))
    assert list(found.query_id) == ['focus_object-0']

def test_an_image_that_cannot_be_encoded_makes_the_protocol_partial():
    b = bench(gallery=('c','b','d')); q = pd.concat([b.queries, b.queries.assign(query_id='other', gallery=[['c','e']])], ignore_index=True)
    b = replace(b, queries=q, images=None, load=lambda i: None if i=='e' else Image.new('RGB', (2,2), COLOURS[i]))
    found, missing = ev.readable({(0, 'focus_object'): b}, eyes, ev.encode_once(eyes, [b], see))
    assert len(found[0, 'focus_object']) == 1 and 'partial' in str(found[0, 'focus_object'].protocol) and not missing
    blind = replace(b, load=lambda i: None if i in 'cd' else Image.new('RGB', (2,2), COLOURS[i]))
    found, missing = ev.readable({(0, 'focus_object'): blind}, eyes, ev.encode_once(eyes, [blind], see))
    assert not found and 'no query has all of its own' in missing['focus_object']

def test_no_benchmark_gives_an_empty_table_and_an_empty_summary():
    found = ev.answers(['image_only'], {}, eyes, encode=see)
    assert found.empty and ev.summary(found, 'eyes').empty and cp.chance(found).empty

def test_unknown_names_are_errors():
    with pytest.raises(KeyError, match='image_only'): ev.answers(['image_txt'], {(0, 'a'): bench()}, eyes, encode=see)
    with pytest.raises(ValueError, match='the tasks are'): ev.load_tasks('.', ['focus_colour'])

# --- a folder of real images

def templates(n, first=0): return [dict(reference=dict(val_image_id=first), target=dict(val_image_id=first+1), gallery=[dict(val_image_id=first+2+j) for j in range(14)], condition='tree') for _ in range(n)]

@pytest.fixture
def folder(tmp_path):
    (tmp_path/'genecis').mkdir(); (tmp_path/'val2017').mkdir()
    (tmp_path/'genecis'/'focus_object.json').write_text(json.dumps([*templates(1), *templates(1, 20)], indent=4, sort_keys=True))
    for i in range(16): Image.new('RGB', (8,8), (i*10, 0, 0)).save(tmp_path/'val2017'/f'{i:012d}.jpg')
    return tmp_path

def test_released_templates_are_used_and_missing_images_make_them_partial(folder):
    found, missing = ev.load_tasks(folder, ['focus_object', 'change_object'], draws=3)
    b = found[0, 'focus_object']
    assert list(found) == [(0, 'focus_object')] and 'change_object' in missing          # no second draw of released templates
    assert len(b) == 1 and b.protocol.coverage == .5 and 'partial' in cp.protocol_line([b.protocol])

def test_without_a_usable_query_the_task_is_left_out_with_the_reason(folder):
    (folder/'val2017'/'000000000003.jpg').unlink()
    found, missing = ev.load_tasks(folder, ['focus_object'])
    assert not found and 'no query has all of its own' in missing['focus_object']

def test_a_broken_file_is_an_error_and_not_a_missing_task(folder):
    (folder/'genecis'/'focus_object.json').write_text('[{"reference":')
    with pytest.raises(ValueError, match='not JSON'): ev.load_tasks(folder, ['focus_object'])

# --- claims

def test_every_claim_has_a_test_or_waits():
    ids = set(cl.claims().id)
    assert set(cl.waits_for()) < ids and sorted(ids - set(cl.waits_for())) == sorted(cl.TESTED)

def test_every_test_of_a_claim_is_an_experiment_that_speaks_of_it():
    root = Path(__file__).resolve().parents[1]
    for i, where in cl.by_claim(cl.TESTED_BY).items():
        profile, name = where.split('/')
        assert (root/'params'/profile/f'{name}.yaml').exists(), where
        own = name.startswith(('06_', '06c_', '09_'))     # tested in the chapter on claims itself
        assert i in (root/'nbs'/f'{"09_claims" if own else name}.ipynb').read_text(encoding='utf-8'), f'{where} says nothing of {i}'

def test_a_claim_without_a_test_says_what_kind_of_thing_it_waits_for(tmp_path):
    found = cl.judge(planted(8), tmp_path).set_index('id').verdict
    assert (found['C01'], found['N02'], found['N12']) == ('waits for a chapter', 'waits for data or weights', 'not testable here')

def planted(gain):
    "A run in which Image + Text answers `gain` percent more queries than either of its parts."
    n, parts = 1000, []
    for t in TASKS:
        for m, share in (('image_only', .2), ('text_only', .1), ('image_text', .2+gain/100)):
            parts.append(pd.DataFrame(dict(method=m, task=t, draw=0, query_id=[f'{t}{i}' for i in range(n)], reference=range(n), rank=np.where(np.arange(n)<share*n, 1, 5), gallery_size=15)))
    return SimpleNamespace(per_query=pd.concat(parts), benchmarks={}, rules=Rules(), root='nowhere')

def test_claims_follow_planted_numbers(tmp_path):
    good, bad = (cl.judge(planted(g), tmp_path).set_index('id').verdict for g in (8, -8))
    assert (good['G01'], good['G02'], good['G03']) == ('reproduced', 'reproduced', 'not reproduced')
    assert (bad['G01'], bad['G02'], bad['G03']) == ('not reproduced', 'not reproduced', 'reproduced')

def test_a_claim_that_cannot_be_tested_says_why(tmp_path):
    run = planted(8); run.per_query = run.per_query[run.per_query.task!='focus_attribute']
    found = cl.judge(run, tmp_path).set_index('id')
    assert found.verdict['G03'] == 'not testable here' and 'Focus Attribute' in found.effect['G03'] and found.verdict['G09'] == 'not testable here'

# --- pictures

def test_pictures_are_as_wide_as_a_column():
    images = [Image.new('RGB', (60, 40)), Image.new('L', (30, 90)), Image.new('RGBA', (5, 5))]
    for fig in (show.show_strip(images, ['a', 'b'*80, 'c'], ['target', None, 'red'], 'row'), show.forest([('x', 1, .5, 2)]), show.page()[0]):
        import io; assert Image.open(io.BytesIO(fig.png())).width == 800
