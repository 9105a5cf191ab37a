"Masked corpora, pseudo-words and LinCIR's training: odd captions, damaged files, exactness in other towers."
import json, os
from pathlib import Path
import numpy as np, pytest, spacy, torch
from hypothesis import example, given, settings, strategies as st
from cis_nb.mining import corpus as C
from cis_nb.mining.corpus import MASKINGS, Corpus, clean, corpus_folder, hidden, marks, with_gaps
from cis_nb.mining.parsers import find_parser
from cis_nb.models.backbone import EOS, PSEUDO, load_backbone, tokenizer
from cis_nb.models.lincir import SelfMasking
from cis_nb.models.pseudo import Phi, PseudoWord, pseudo_method, save_phi

torch.set_num_threads(1)
data = Path(os.environ.get('CIS_DATA', '/nowhere'))
def english():
    try: return find_parser()
    except OSError: pytest.skip('no English spaCy pipeline is installed and CIS_DATA has none')

def words(ids): return tokenizer().decode([i for i in ids.tolist() if 0<i<49406]).replace('$', '[$]').strip()

@pytest.fixture
def store(tmp_path, monkeypatch): monkeypatch.setenv('CIS_STORE', str(tmp_path/'store')); return tmp_path

# ---- captions

ODD = ['a price of $5 , or $ 7', 'stars * and [$] gaps', 'of the and with', 'word '*500, '🙂 emoji 🙃', 'Ein Hund läuft über die Straße .', "the man's t-shirt doesn't fit", '<PERSON> and <start_of_text> hug', '!!!', 'a']

def test_odd_captions_are_marked_and_masked(store):
    (store/'odd.txt').write_text('\n'.join(ODD), encoding='utf-8')
    c = Corpus(corpus_folder(store/'odd.txt', english()))
    assert len(c)==len(ODD)
    whole = c.whole(range(len(c)))
    tiny = load_backbone('tiny', device='cpu')
    for i,t in enumerate(ODD):
        n = int(whole[i].argmax())
        assert whole[i].tolist()[:n].count(PSEUDO)==0 and n<=76                     # no `$` but those that are put in
    for masking in MASKINGS:
        ids = c.masked(range(len(c)), masking, np.random.default_rng(0))
        assert ((ids==PSEUDO).sum(1)>0).all() and (ids.max(1).values==EOS).all(), masking
        ids = c.masked(range(len(c)), masking, np.random.default_rng(0), tiny.context)
        assert ((ids==PSEUDO).sum(1)>0).all() and (ids.max(1).values==EOS).all() and ids.shape[1]<=tiny.context, masking
        with torch.no_grad(): assert torch.isfinite(tiny.inject(ids, ids==PSEUDO, torch.randn(len(c), tiny.W))).all()
    assert words(c.masked([2], 'runs', np.random.default_rng(0))[0]).count('[$]')==1    # only stop words: a random one, or what the parser takes for an article

@given(st.lists(st.text(max_size=60), min_size=1, max_size=5))
@example(['¬®²', 'Â¬Â®', 'Ä¢\x95'])                     # pieces that mean something else on their own
@settings(max_examples=60, deadline=None)
def test_any_text_becomes_the_ids_that_the_backbone_makes(texts):
    nlp, tiny = spacy.blank('en'), load_backbone('tiny', device='cpu')
    for t in map(clean, texts):
        if not t: continue
        ids = marks(nlp(t))['id'].tolist()
        made = [i for i in tiny.tokenize([t])[0].tolist()[1:] if i!=EOS]
        assert ids[:tiny.context-2]==made
        assert '$' not in t

@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6), st.sampled_from([m for m in MASKINGS if m!='literal']), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_gaps_replace_exactly_what_is_hidden(rows, masking, seed):
    m = np.zeros((len(rows), max(map(len, rows))), C.MARK)
    for row, runs in zip(m, rows): row['run'][:len(runs)] = runs; row['id'][:len(runs)] = 1000+np.arange(len(runs)); row['word'][:len(runs)] = 1+np.arange(len(runs)); row['noun'][:len(runs)] = [r*(r%2) for r in runs]
    gap = hidden(m, masking, np.random.default_rng(seed))
    assert (gap[m['word']==0]==0).all() and (gap>0).any(1).all()
    for ids, row, g in zip(with_gaps(m, gap).tolist(), m, gap):
        slow = [49406]
        for i,(k,w) in enumerate(zip(g, row['word'])):
            if w==0: continue
            if k==0: slow.append(int(row['id'][i]))
            elif i==0 or g[i-1]!=k: slow.append(PSEUDO)
        assert [i for i in ids if i]==[*slow, EOS]

def test_a_stopped_corpus_goes_on(store, monkeypatch):
    (store/'many.txt').write_text('\n'.join(f'a red boat and {"a cup" if i%2 else "a hat"}' for i in range(40)))
    real, made = C._marked, []
    def dies(job):
        if len(made)==2: raise KeyboardInterrupt
        made.append(job[2]); return real(job)
    monkeypatch.setattr(C, '_marked', dies)
    with pytest.raises(KeyboardInterrupt): corpus_folder(store/'many.txt', 'world', portion=10, processes=1)
    monkeypatch.setattr(C, '_marked', lambda job: made.append(job[2]) or real(job))
    c = Corpus(corpus_folder(store/'many.txt', 'world', portion=10, processes=1))
    assert made==[0, 10, 20, 30] and len(c)==40
    assert [words(r) for r in c.whole([0, 39])]==['a red boat and a hat', 'a red boat and a cup']

def test_several_sources_follow_each_other(store):
    for name, text in (('one.txt', 'a cup\n'), ('two.txt', 'a hat\na tent')): (store/name).write_text(text)
    c = Corpus(corpus_folder(f"{store/'one.txt'} + {store/'two.txt'}", 'world'))
    assert corpus_folder([store/'one.txt', store/'two.txt'], 'world')==c.folder
    assert [words(r) for r in c.whole(range(3))]==['a cup', 'a hat', 'a tent'] and c.about['sources']=='one.txt+two.txt'

# ---- towers

@pytest.mark.parametrize('name, width', [('vit_b32', 512), ('vit_l', 768)])
def test_a_word_put_in_is_the_word_in_other_towers(name, width):
    b = load_backbone(name, 'none', device='cpu')
    assert b.W==width
    with torch.no_grad():
        boat = b.model.token_embedding.weight[b.tokenize(['boat'])[0, 1]][None]
        for prompt in ('$', 'a photo of $ that is red', '$ and $'):
            torch.testing.assert_close(b.encode_pseudo(prompt, boat), b.encode_text([prompt.replace('$', 'boat')]), atol=1e-4, rtol=1e-4)

# ---- training

def test_a_phi_of_another_backbone_names_both(store):
    tiny, other = load_backbone('tiny', device='cpu'), load_backbone('tiny_s', device='cpu')
    save_phi(store/'run', PseudoWord('lincir', None, 'LinCIR', phi=Phi(tiny.D, tiny.W)), tiny)
    with pytest.raises(ValueError) as e: pseudo_method(store/'run', 'cpu', other)
    for part in ('tiny', 'tiny_s', tiny.fingerprint, other.fingerprint): assert part in str(e.value)

def test_training_is_the_same_after_a_kill(store):
    from cis_nb.train import make_objective, settings, train
    p = settings(dict(method='lincir', steps=6, batch_size=16, photos=40, width=32, cirr=60, device='cpu', eval_every=2))
    run = lambda folder, **kw: train(make_objective(p), folder, **{k: p[k] for k in ('steps', 'batch_size', 'lr', 'seed', 'eval_every')}, **kw)
    run(store/'whole')
    real = SelfMasking.objective
    def dies(self, batch):
        self.count = getattr(self, 'count', 0)+1
        if self.count==5: raise KeyboardInterrupt
        return real(self, batch)
    SelfMasking.objective = dies
    try:
        with pytest.raises(KeyboardInterrupt): run(store/'killed')
    finally: SelfMasking.objective = real
    run(store/'killed')
    a, b = ((store/f/'phi.safetensors').read_bytes() for f in ('whole', 'killed'))
    assert a==b and json.loads((store/'whole/phi.json').read_text())['method']=='lincir'

def test_the_default_for_a_published_backbone_is_lincir_and_its_weights_are_asked_for(tmp_path, monkeypatch):
    from cis_nb.train import settings
    assert (settings(dict(backbone='vit_h'))['method'], settings(dict(backbone='vit_h'))['pretrained'])==('lincir', 'default')

def test_a_traced_tower_gives_the_same_loss(store):
    from cis_nb.train import make_objective
    p = dict(method='lincir', photos=60, cirr=30, width=32, drop=0., noise='none')
    def loss(**kw): o = make_objective(p|kw); return float(o.objective(o.prepare(np.arange(8), np.random.default_rng(0))).detach())
    assert abs(loss(compile='eager')-loss())<1e-5
    with pytest.raises(ValueError, match="compile: 'fast' is none of"): make_objective(p|dict(compile='fast'))
