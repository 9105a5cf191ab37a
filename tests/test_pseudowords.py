"Pic2Word and SEARLE: vocabularies, phrases, the search and its resumption, losses against slow ones; variants of a training."
import importlib.util, json, os
from pathlib import Path
import numpy as np, pytest, torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from cis_nb.core import fingerprint
from cis_nb.models import searle as S
from cis_nb.models.backbone import load_backbone
from cis_nb.models.baselines import unit
from cis_nb.models.pic2word import Pic2Word
from cis_nb.models.pseudo import Mapper, Phi, pseudo_method, save_phi, seen_in_training
from cis_nb.train import find_method, make_objective, settings as params_of, train

torch.set_num_threads(1)
data = Path(os.environ.get('CIS_DATA', '/nowhere'))
tiny = load_backbone('tiny', device='cpu')

@pytest.fixture
def store(tmp_path, monkeypatch): monkeypatch.setenv('CIS_STORE', str(tmp_path/'store')); return tmp_path

# ---- vocabularies and phrases

@pytest.mark.parametrize('name, content, words', [
    ('empty.txt', b'\n \n', 'no names'), ('binary.txt', bytes(range(128, 256)), 'cannot be read as a vocabulary'), ('odd.csv', b'Label,Name\na,b\n', 'DisplayName'), ('empty.csv', b'', 'cannot be read as a vocabulary')])
def test_a_vocabulary_that_is_none(tmp_path, name, content, words):
    (tmp_path/name).write_bytes(content)
    with pytest.raises(ValueError, match=words): S.read_concepts(str(tmp_path/name))

def test_names_come_once_and_without_dollars(tmp_path):
    (tmp_path/'v.txt').write_text(' boat \nboat\nUS$ bill\n\ncat  tree\n', encoding='utf-8')
    assert S.read_concepts(str(tmp_path/'v.txt'))==['boat', 'US dollar bill', 'cat tree']

def test_the_class_names_of_open_images():
    if not (data/'openimages').is_dir(): pytest.skip('CIS_DATA has no openimages')
    names = S.read_concepts('openimages/oidv7-class-descriptions.csv')
    assert 20_000<len(names)<=20_931 and 'Boat' in names

@given(st.lists(st.text('ab .\n$', max_size=30), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_a_phrase_is_one_line_without_dollars(texts):
    for t in map(S.one_line, texts): assert not {'\n', '$'} & set(t) and '..' not in t and t==t.strip()

def test_concepts_that_do_not_come_up_are_left_out_and_counted(tmp_path):
    said = {'cat': ['a photo of cat that sits']*2, 'the moon': ['a photo of the'+' moon that shines', 'nothing']}
    S.write_phrases(tmp_path, list(said), lambda i, concept: said[concept])
    assert json.loads((tmp_path/'phrases.json').read_text())=={'cat': ['a photo of cat that sits']*2}
    assert json.loads((tmp_path/'left_out.json').read_text())==['the moon']
    (tmp_path/'other').mkdir()
    with pytest.raises(ValueError, match='no phrase names its concept'): S.write_phrases(tmp_path/'other', ['cat'], lambda i, concept: ['nothing'])

def test_phrases_that_were_stopped_go_on(tmp_path):
    asked = []
    def say(i, concept):
        if len(asked)==3: asked.append('stop'); raise KeyboardInterrupt
        asked.append((i, concept)); return [f'a photo of {concept} that sits']
    names = ['cat', 'boat', 'hat', 'cup', 'bus']
    with pytest.raises(KeyboardInterrupt): S.write_phrases(tmp_path, names, say, portion=2)
    S.write_phrases(tmp_path, names, say, portion=2)
    assert asked==[(0, 'cat'), (1, 'boat'), (2, 'hat'), 'stop', (2, 'hat'), (3, 'cup'), (4, 'bus')]       # the first portion is not said again
    assert list(json.loads((tmp_path/'phrases.json').read_text()))==names

def test_without_the_package_the_error_names_it():
    if importlib.util.find_spec('transformers'): pytest.skip('transformers is installed')
    with pytest.raises(ImportError, match='pip install transformers'): S.continued('somewhere', 2)

def test_a_small_language_model_goes_on_with_concepts(tmp_path):
    transformers = pytest.importorskip('transformers')
    tokenizers = pytest.importorskip('tokenizers')
    words = 'a photo of cat boat that is red on the sea . <end>'.split()
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i,w in enumerate(words)}, unk_token='<end>')); t.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token='<end>').save_pretrained(tmp_path)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(words), n_positions=40, n_embd=16, n_layer=1, n_head=2, eos_token_id=len(words)-1)).save_pretrained(tmp_path, safe_serialization=True)
    def say_all(): say = S.continued(tmp_path, 3); return {c: say(i, c) for i,c in enumerate(['cat', 'boat'])}
    said = say_all()
    assert {c: len(p) for c,p in said.items()}=={'cat': 3, 'boat': 3} and all(p.startswith(f'a photo of {c} that') for c,ps in said.items() for p in ps)
    assert said==say_all()

@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_the_worlds_phrases_name_their_concept_and_gaps_replace_it(seed):
    rng = np.random.default_rng(seed)
    for c in S.read_concepts('world'):
        for p in S.grammar('world', c, 2, rng):
            assert p.startswith(f'a photo of {c} that is ')
            said, words, slow = p.split(), c.split(), []
            while said:                                                   # word by word: *hat* is not meant in *that*, nor *ball* in *balloon*
                here = said[:len(words)]==words
                slow.append('$' if here else said[0]); said = said[len(words) if here else 1:]
            assert S.gap(p, c).split()==slow and '$' in slow and S.gap(p, c, every=False).count('$')==1

# ---- losses and the search

@given(st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_counterparts_by_the_definition(n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, 4, generator=g), torch.randn(n, 4, generator=g)
    x, slow = unit(torch.cat([a, b])), []
    for i in range(2*n): slow.append(-(x[i]@x[(i+n)%(2*n)]/.25) + torch.logsumexp(torch.stack([x[i]@x[j]/.25 for j in range(2*n) if j!=i]), 0))
    torch.testing.assert_close(S.counterparts(a, b), sum(slow)/len(slow), atol=1e-4, rtol=1e-4)

def some_pictures(): return seen_in_training(tiny, dict(data='world', photos=60))

def test_a_found_word_means_its_picture_and_not_another(store):
    features = some_pictures()[:12]
    phrases = S.read_phrases(tiny, S.phrase_folder(n=4))
    near = S.nearest_concepts(features, S.concept_features(tiny, phrases.names), 5)
    words = S.invert(tiny, features, near, phrases, 60)
    with torch.no_grad(): q = unit(tiny.encode_pseudo('a photo of $', words))
    assert (q@unit(torch.from_numpy(features)).T).argmax(1).tolist()==list(range(12))
    torch.testing.assert_close(S.invert(tiny, features, near, phrases, 3), S.invert(tiny, features, near, phrases, 3))
    torch.testing.assert_close(S.invert(tiny, features[7:9], near[7:9], phrases, 8), S.invert(tiny, features, near, phrases, 8)[7:9], atol=1e-4, rtol=1e-3)      # whoever else is searched for
    assert not any(p.requires_grad for p in tiny.parameters())

def test_a_stopped_search_goes_on_at_its_block(store, monkeypatch):
    features = some_pictures()
    phrases = S.read_phrases(tiny, S.phrase_folder(n=2))
    near = S.nearest_concepts(features, S.concept_features(tiny, phrases.names), 3)
    p, real, made = dict(search_steps=2, search_lr=.02, few=3, seed=0), S.invert, []
    def dies(*a, **kw):
        if len(made)==2: raise KeyboardInterrupt
        made.append(a[1][0]); return real(*a, **kw)
    monkeypatch.setattr(S, 'invert', dies)
    with pytest.raises(KeyboardInterrupt): S.found_words(tiny, 'pictures', features, phrases, near, p, block=16)
    monkeypatch.setattr(S, 'invert', lambda *a, **kw: made.append(a[1][0]) or real(*a, **kw))
    words = S.found_words(tiny, 'pictures', features, phrases, near, p, block=16)
    assert np.array_equal(made, features[::16])           # each block once
    assert words.shape==(len(features), tiny.W) and np.isfinite(words).all()

# ---- runs

@pytest.mark.parametrize('name, more', [('pic2word', {}), ('searle', dict(phrases=2, search_steps=2, few=3, many=5, width=64))])
def test_training_is_the_same_after_a_stop(store, name, more):
    p = params_of(dict(method=name, steps=6, batch_size=16, lr=1e-3, warmup=0, photos=60, cirr=30, eval_every=2, log_every=1, **more))
    loop = {k: p[k] for k in ('steps', 'batch_size', 'lr', 'eval_every', 'log_every', 'seed')}
    train(make_objective(p), store/'whole', **loop)
    o, calls = make_objective(p), []
    real = o.objective
    def dies(batch):
        if len(calls)==4: raise KeyboardInterrupt
        calls.append(1); return real(batch)
    o.objective = dies
    with pytest.raises(KeyboardInterrupt): train(o, store/'killed', **loop)
    train(make_objective(p), store/'killed', **loop)
    one, two = (pseudo_method(store/f, 'cpu', tiny)[0].phi.state_dict() for f in ('whole', 'killed'))
    assert all(torch.equal(one[k], two[k]) for k in one)
    inputs, code = find_method(name, 'sources')(tiny, p)
    assert len(inputs)>=2 and 'cis_nb.models.pseudo' in code

@pytest.mark.parametrize('name', ['lincir', 'pic2word', 'searle'])
def test_what_a_run_is_called_costs_no_look_at_a_picture(store, monkeypatch, name):
    p = params_of(dict(method=name, photos=60, cirr=30))
    def never(*a, **kw): raise AssertionError('the name of a run was to be asked for, and something was computed')
    for f in ('encode_image', 'encode_text', 'encode_ids'): monkeypatch.setattr(tiny, f, never)
    monkeypatch.setattr(S, 'speaker', never)
    one = find_method(name, 'sources')(tiny, p)[0]
    assert one==find_method(name, 'sources')(tiny, p)[0]
    assert one!=find_method(name, 'sources')(tiny, dict(p, photos=61))[0]

def test_other_weights_of_a_generator_are_another_generator(store):
    (folder := store/'gpt').mkdir(); (folder/'model.safetensors').write_text('one')
    one = fingerprint(S.phrase_sources('world', str(folder)))
    (folder/'model.safetensors').write_text('another')
    assert fingerprint(S.phrase_sources('world', str(folder)))!=one!=fingerprint(S.phrase_sources('world', 'world'))

def test_the_two_grammars_speak_of_the_concept_and_differ():
    said = {g: S.grammar(g, 'boat', 40, np.random.default_rng(0)) for g in S.GRAMMARS}
    assert all(s.startswith('a photo of boat that ') for ss in said.values() for s in ss)
    assert not any(' is ' in s for s in said['beside']) and all(' is ' in s for s in said['world'])

def test_the_word_of_another_backbone_is_refused(tmp_path):
    o = Pic2Word(tiny, Mapper(tiny.D, tiny.W), np.zeros((4, tiny.D), np.float32), {})
    save_phi(tmp_path, o.method(), tiny)
    other = load_backbone('tiny', 'none', device='cpu')
    with pytest.raises(ValueError, match=tiny.fingerprint) as e: pseudo_method(tmp_path, 'cpu', other)
    assert other.fingerprint in str(e.value)

@pytest.mark.parametrize('corpus, words', [('world + world', 'has no pictures'), ('captions.txt', 'has no pictures')])
def test_words_from_pictures_need_pictures(store, monkeypatch, corpus, words):
    (store/'captions.txt').write_text('a red boat\n'*40); monkeypatch.chdir(store)
    with pytest.raises(ValueError, match=words): make_objective(dict(method='lincir', supervision='image', corpus=corpus, parser='world', photos=60, cirr=30))

# ---- chapters with one of the two sets

@pytest.mark.parametrize('chapter', ['07bc_supervision', '07bd_corpus', '08c_word_backbones'])
@pytest.mark.parametrize('sets', [['circo'], ['full']])
def test_a_chapter_of_variants_runs_with_one_set(chapter, sets, monkeypatch):
    from cis_nb.book import code_cells, notebooks, read_notebook, tags
    monkeypatch.setenv('MPLBACKEND', 'Agg')
    small = {'07bc_supervision': dict(prompts=2, fashion=0), '07bd_corpus': dict(corpora=['world', 'talk'], lines=80), '08c_word_backbones': dict(backbones=['tiny_xs'], changes={'lincir': {}})}[chapter]
    def run(sets):
        names = {}
        for cell in code_cells(read_notebook(notebooks()[chapter])):
            exec(compile(cell['source'], chapter, 'exec'), names)
            if 'parameters' in tags(cell): names.update(small, sets=sets, seeds=[0], shorter={'steps': 4})
        return names
    names = run(sets)
    assert list((names.get('run') or names['first']).sets)==sets
    with pytest.raises(ValueError, match="sets: 'states' is none of full, circo, subset"): run(['states'])
