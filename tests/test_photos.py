"Caption retrieval, the index, composed search, and the chapter about photographs."
import json, os, re, shutil, sys
from pathlib import Path
import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageDraw
from cis_nb.benchmarks import retrieval as R
from cis_nb.benchmarks.protocol import RESULT_COLUMNS
from cis_nb.core import project_root
from cis_nb.data import PhotoPairs, held_out

flickr = Path(os.environ.get('CIS_DATA', '/nowhere'))/'flickr8k'
quick = settings(max_examples=50, deadline=None)

@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path/'store'))

# ---- ranks

def slow_rank(scores, targets):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i in targets))
    return 1 + min(order.index(t) for t in targets)

@quick
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_ranks_equal_a_slow_reference_with_many_ties(photos, most, D, seed):
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.concatenate([np.full(rng.integers(1, most+1), i) for i in range(photos)]))
    image, text = rng.integers(-1, 2, (photos, D)).astype(np.float32), rng.integers(-1, 2, (len(owner), D)).astype(np.float32)
    S, r = text@image.T, R.retrieval_ranks(image, text, owner)
    assert list(r['text to image'])==[slow_rank(s, [o]) for s,o in zip(S, owner)]
    assert list(r['image to text'])==[slow_rank(s, list(np.flatnonzero(owner==i))) for i,s in enumerate(S.T)]

def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0); owner = np.repeat(np.arange(50), 3)
    image, text = R.unit(rng.normal(size=(50, 8))), R.unit(rng.normal(size=(150, 8)))
    whole, block = R.retrieval_ranks(image, text, owner), R._blocks
    monkeypatch.setattr(R, '_blocks', lambda q, g, t, rows=7: block(q, g, t, 7))
    for way, r in R.retrieval_ranks(image, text, owner).items(): assert (r==whole[way]).all()

@quick
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 10), st.integers(0, 1000))
def test_chance_is_what_random_orders_find(photos, most, k, seed):
    rng = np.random.default_rng(seed)
    owner = np.concatenate([np.full(rng.integers(1, most+1), i) for i in range(photos)])
    lists = np.stack([rng.permutation(owner) for _ in range(3000)])
    found = np.mean([(lists[:, :k]==i).any(1).mean() for i in range(photos)])
    c = R.chance(owner, k)
    assert abs(c['image to text']-found)<.04 and c['text to image']==min(1, k/photos)

def test_not_finite_and_orphans_are_refused():
    with pytest.raises(ValueError, match='1 of 2 feature vectors are not finite'): R.caption_retrieval([[1., np.inf], [1, 1]], [[1., 1]]*2, [0, 1], {})
    with pytest.raises(ValueError, match='no caption'): R.retrieval_ranks(np.ones((2, 3)), np.ones((1, 3)), [0])

def test_rows_are_the_books_rows():
    rng = np.random.default_rng(0); owner = np.repeat(np.arange(30), 2); x = rng.normal(size=(30, 8))
    p = R.retrieval_protocols(30, 60, 'test', 'toy')
    rows = R.caption_retrieval(x, x[owner], owner, p, n=50, method='perfect', benchmark='toy', backbone='none', profile='')
    assert list(rows.columns)==RESULT_COLUMNS and (rows[rows.metric=='recall'].value==100).all() and (rows[rows.metric!='recall'].value==1).all()
    assert set(rows.protocol)=={q.id for q in p.values()}
    table = R.retrieval_table(pd.concat([rows, R.chance_rows(owner, p)]))
    assert len(table)==4 and 'nan' not in table.to_string()

# ---- the index

@quick
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 300), st.integers(0, 1000))
def test_the_index_is_brute_force(n, D, k, seed):
    rng = np.random.default_rng(seed)
    x, q = rng.normal(size=(n, D)).astype(np.float32), rng.normal(size=(5, D)).astype(np.float32)
    import faiss
    index = R.PhotoIndex.__new__(R.PhotoIndex); index.ids, index.faiss = list(range(n)), faiss.IndexFlatIP(D); index.faiss.add(R.unit(x))
    scores, rows = index.search(q, k)
    S = R.unit(q)@R.unit(x).T
    assert rows.shape==(5, min(n, k)) and np.allclose(scores, -np.sort(-S, axis=1)[:, :k], atol=1e-5)
    assert np.allclose(np.take_along_axis(S, rows, 1), scores, atol=1e-5) and all(len(set(r))==len(r) for r in rows)

def test_an_index_is_kept_and_made_again_when_damaged():
    x = np.random.default_rng(0).normal(size=(20, 6))
    a = R.build_index(x, range(20), 'a')
    assert R.build_index(x, range(20), 'a').folder==a.folder and R.build_index(x*2, range(20), 'a').folder==a.folder   # only directions count
    assert R.build_index(x, range(1, 21), 'a').folder!=a.folder
    (a.folder/'index.faiss').unlink()
    with pytest.warns(UserWarning, match='incomplete'): b = R.build_index(x, range(20), 'a')
    assert (b.search(x, 1)[1][:, 0]==np.arange(20)).all()

def test_queries_that_do_not_fit():
    index = R.build_index(np.eye(4), 'abcd', 'e')
    with pytest.raises(ValueError, match='another backbone'): index.search(np.ones((1, 3)))
    with pytest.raises(ValueError, match='not finite'): index.search(np.full((1, 4), np.nan))
    assert index.search(np.zeros((1, 4)), 9)[1].shape==(1, 4)
    with pytest.raises(ValueError, match='at least one'): R.build_index(np.zeros((0, 4)), [], 'e')

# ---- composed search

@quick
@given(st.integers(0, 1000))
def test_compose_and_swap_at_their_ends(seed):
    rng = np.random.default_rng(seed); x, y, z = rng.normal(size=(3, 4, 8))
    assert np.allclose(R.compose(x, y, 0), R.unit(x), atol=1e-6) and np.allclose(R.compose(x, y, 1), R.unit(y), atol=1e-6)
    assert np.allclose(R.swap(x, y, y), R.unit(x), atol=1e-6) and np.allclose(R.swap(x, y, z, 0), R.unit(x), atol=1e-6)
    assert np.allclose(np.linalg.norm(R.compose(x, y), axis=1), 1, atol=1e-5)

words = st.lists(st.sampled_from('a the dog man is in on snow beach running sitting red blue near'.split()), min_size=1, max_size=9).map(' '.join)

@quick
@given(st.lists(st.lists(words, min_size=1, max_size=3), min_size=1, max_size=12))
def test_composed_queries_keep_their_promises(photos):
    texts, owner = [c for p in photos for c in p], [i for i,p in enumerate(photos) for _ in p]
    made = R.composed_queries(texts, owner, least=1)
    said = [set(' '.join(p).split()) for p in photos]
    for q in made.itertuples():
        assert q.who in said[q.reference] and q.word not in said[q.reference] and q.reference not in q.targets
        assert q.targets==[i for i,s in enumerate(said) if q.who in s and q.word in s]
    assert made.equals(R.composed_queries(texts, owner, least=1))
    assert len(R.pick(made, 5))==min(5, made.drop_duplicates(['kind', 'who', 'condition']).shape[0])

def test_captions_of_another_kind_give_no_questions_and_no_error():
    made = R.composed_queries(['ein Hund im Schnee', '犬', '...', 'x'], [0, 1, 2, 3])
    assert len(made)==0 and list(made.columns)==['reference', 'who', 'kind', 'word', 'condition', 'instead', 'targets'] and len(R.pick(made, 3))==0

@pytest.mark.skipif(not flickr.is_dir(), reason='needs CIS_DATA with flickr8k')
def test_questions_of_flickr8k():
    pairs = held_out(flickr, 16)
    made = R.composed_queries(pairs.texts, pairs.owner)
    assert pairs.split=='test' and len(pairs)==5000 and made.groupby(['who', 'condition']).ngroups>100
    assert {('dog', 'in the snow'), ('man', 'on the beach'), ('boy', 'running')} <= set(zip(made.who, made.condition))

# ---- the chapter

COLOURS = ['red', 'green', 'blue', 'orange', 'purple', 'black']
def small_folder(root, n=80):
    "Coloured discs and boxes with captions, a table of them, and three faults."
    root.mkdir()
    lines = ['image,caption,split']
    for i in range(n):
        img = Image.new('RGB', (80, 60), '#dddddd'); c, s = COLOURS[i%6], ('disc', 'box')[i//6%2]
        getattr(ImageDraw.Draw(img), 'ellipse' if s=='disc' else 'rectangle')([20, 10, 60, 50], fill=c)
        img.save(root/f'{i}.jpg')
        where = ('on the grass', 'in the snow')[i//12%2]
        lines += [f'{i}.jpg,a {c} {s} is lying {where},{"test" if i<60 else "train"}', f'{i}.jpg,the {s} near a wall,{"test" if i<60 else "train"}']
    (root/'3.jpg').write_bytes(b'nothing'); (root/'7.jpg').write_bytes((root/'7.jpg').read_bytes()[:200]); lines.append('gone.jpg,not there,test')
    (root/'captions.csv').write_text('\n'.join(lines)+'\n')
    return root

def run_chapter(tmp_path, monkeypatch, **params):
    import papermill
    report = tmp_path/'reports'/'photos'/'06p_photos'; report.mkdir(parents=True)
    for k,v in dict(CIS_REPORT=report, CIS_EXPERIMENT='06p_photos', CIS_PROFILE='photos', PYTHONPATH=project_root(), IPYTHONDIR=tmp_path/'ipython').items(): monkeypatch.setenv(k, str(v))
    papermill.execute_notebook(str(project_root()/'nbs'/'06p_photos.ipynb'), str(report/'notebook.ipynb'), dict(pictures=2, index_sizes=[1000], **params), kernel_name='python3', progress_bar=False)
    nb = json.loads((report/'notebook.ipynb').read_text())
    return json.loads((report/'receipt.json').read_text()), pd.read_parquet(report/'results.parquet'), [o for c in nb['cells'] for o in c.get('outputs', [])]

def test_the_chapter_on_a_small_dirty_folder_with_the_run_of_another_experiment(tmp_path, monkeypatch):
    from cis_nb.core import stored
    from cis_nb.models.backbone import load_backbone, save_backbone
    run = stored('run', 'pretended', {}, lambda folder: save_backbone(load_backbone('tiny', 'none', 'cpu'), folder))
    other = tmp_path/'reports'/'photos'/'05_train.photos'; other.mkdir(parents=True)
    (other/'receipt.json').write_text(json.dumps(dict(runs=[f'run/{run.name}'])))
    receipt, results, outputs = run_chapter(tmp_path, monkeypatch, data=str(small_folder(tmp_path/'pictures')), weights=['05_train.photos', 'none'])
    assert f'run/{run.name}' in receipt['runs'] and receipt['params']['weights']==['05_train.photos', 'none']
    assert receipt['counts']=={'photos': 78, 'caption of a photo that is not there': 1, 'file that is no image': 1, 'damaged image': 1}
    assert list(results.columns)==RESULT_COLUMNS and {'captions/pictures', 'composed/pictures'}==set(results.benchmark)
    assert load_backbone('tiny', str(run), 'cpu').record in receipt['backbone']                  # the page stands on the weights of that run
    assert {'trained here', 'random weights'}<=set(results.method)
    assert not [o for o in outputs if o['output_type']=='error' or o.get('name')=='stderr'], [o for o in outputs if o.get('name')=='stderr']
    assert sum('image/png' in o.get('data', {}) for o in outputs)>=6

def test_a_run_is_named_by_its_experiment(tmp_path, monkeypatch):
    from cis_nb.core import store_root
    from cis_nb.train import run_of
    monkeypatch.setenv('CIS_REPORT', str(tmp_path/'photos'/'.running-06p_photos'))
    assert [run_of(w) for w in ('default', 'none', 'auto', str(tmp_path))]==['default', 'none', 'auto', str(tmp_path)]
    with pytest.raises(FileNotFoundError, match='05_train.photos.*has to run first'): run_of('05_train.photos')
    other = tmp_path/'photos'/'05_train.photos'; other.mkdir(parents=True)
    (other/'receipt.json').write_text(json.dumps(dict(runs=['run/a', 'run/b'])))
    assert run_of('05_train.photos')==str(store_root()/'run'/'a')

def test_the_profile_has_known_parameters():
    from cis_nb.book import experiments
    found = experiments('photos', '/some/where')
    assert {'05_train.photos', '06p_photos'} <= set(found)
    assert all(e.params['data']=='/some/where' for e in found.values() if 'data' in e.defaults)

# ---- triplets from real captions

def test_the_chapters_run_after_what_they_name():
    from cis_nb.book import experiments
    found = experiments('photos')
    assert found['05_train.combiner'].needs==('05_train.photos',) and found['06q_photo_triplets'].needs==('05_train.photos',)

def test_the_one_combiner_is_one_of_the_twelve():
    from cis_nb.book import experiments
    found = experiments('photos'); one, q = found['05_train.combiner'].params, found['06q_photo_triplets']
    twelve = {**q.defaults, **q.params}
    assert one['partner'] in twelve['partners'] and one['attributes'] in twelve['attributes'] and found['05_train.combiner'].defaults['seed'] in twelve['seeds']
    assert {k: one[k] for k in one if k in twelve and k!='attributes'}=={k: twelve[k] for k in one if k in twelve and k!='attributes'}
    assert (one['warmup'], one['eval_every'])==(twelve['steps']//10, twelve['steps']//4)

def cells_of(name, *starts):
    "The code cells of a chapter that hold these words."
    cells = [''.join(c['source']) for c in json.loads((project_root()/'nbs'/f'{name}.ipynb').read_text())['cells'] if c['cell_type']=='code']
    return [next(c for c in cells if s in c) for s in starts]

def test_kinds_of_conditions_and_what_captions_say():
    space = dict(re=re, relations=pd.DataFrame(dict(relation=['in'], kind=['relation'])), np=np)
    exec(cells_of('06q_photo_triplets', 'def kind_of')[0], space)
    assert [space['kind_of'](*r) for r in (('next to', 'relation'), ('In', 'relation'), ('wearing', 'relation'), ('jumps over', 'relation'), ('is', 'attribute'))]==['where', 'where', 'has', 'does', 'is']
    lines = {'a': ['A dog , in the Snow .', 'snowy hills'], 'b': ['Snow !', 'snow']}
    space.update(every=pd.DataFrame(dict(captions=list(lines.values())), index=list(lines)), said={k: ' '.join(re.sub(r'[^a-z0-9 -]', ' ', ' . '.join(c).lower()).split()) for k,c in lines.items()})
    exec(cells_of('06q_photo_triplets', 'def names')[0].split('\nsome =')[0], space)
    assert space['names']('a', 'snow') and not space['names']('a', 'hill') and [space['times'](k, 'Snow') for k in 'ab']==[1, 2]
