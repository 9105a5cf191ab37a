"CondViT: conditions, gallery, published files, damaged runs, several processes."

import json
import math
import pickle
import re
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from cis_nb import train as T
from cis_nb.api import Queries, configure
from cis_nb.backbones import conditional_vit as V
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks.lrvsf import LRVSFBenchmark
from cis_nb.benchmarks.lrvsf_training import product_pairs
from cis_nb.core.experiment_files import experiments
from cis_nb.core.store import project_root
from cis_nb.data.image_sources import ImageSource
from cis_nb.data.products import COMPLEX_COLUMNS, SIMPLE_COLUMNS, ProductPairs
from cis_nb.experiments.entries import Entry
from cis_nb.experiments.referred_search import filtered_method
from cis_nb.methods import condvit as C
from cis_nb.methods.detector_crop import CroppedReference
from cis_nb.training.launch import launch
from cis_nb.training.loop import accelerator_for, start_or_resume, train
from condvit_files import published_shapes, random_file


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    torch.set_num_threads(1)
    return tmp_path / 'store'


@pytest.fixture(scope='module')
def tiny():
    return load_backbone('tiny', device='cpu')


def dots(n=4):
    "Images of one colour each, wider than high."

    def load(i):
        return Image.new('RGB', (40, 32), (60 * int(i), 90, 30))

    return ImageSource([str(i) for i in range(n)], load, 'dots')


def query(m, *texts, references=None):
    n = len(texts)
    return m.encode_queries(
        Queries([f'q{i}' for i in range(n)], [list(t) for t in texts], references or ['1'] * n, dots())
    )


def method(backbone, condition='category', **kw):
    net = V.conditional_vit(backbone, condition=condition, text_width=backbone.D, **kw).eval()
    return C.CondViTMethod(name='condvit', title='CondViT', backbone=backbone, net=net)


def test_queries_of_both_kinds_and_the_errors_of_each(tiny):
    category, text = method(tiny), method(tiny, 'text')
    assert (
        query(category, ['Bags'], ['Head', 'Waist']).shape == query(text, ['a bag'], ['a hat', 'red']).shape == (2, 160)
    )
    with pytest.raises(ValueError, match="'a red bag' is no category of this model; it knows Bags, .*condition: text"):
        query(category, ['Bags'], ['a red bag'])
    with pytest.raises(ValueError, match="'Bags' is the name of a category.*condition: category"):
        query(text, ['Bags'])
    for m, words in ((category, 'Bags'), (text, 'a bag')):
        with pytest.raises(ValueError, match='query q1: CondViT needs a reference image'):
            query(m, [words], [words], references=['1', None])
    apart = query(category, ['Bags'], ['Head'], references=['1', '2'])
    torch.testing.assert_close(apart[:1], query(category, ['Bags']), atol=1e-6, rtol=0)
    assert not torch.allclose(query(category, ['Bags']), query(category, ['Head']), atol=1e-3)


@pytest.mark.parametrize('kind', ['category', 'text'])
def test_a_query_without_a_condition_is_named_where_one_is_read(tiny, kind):
    m, words = method(tiny, kind), ['Bags' if kind == 'category' else 'a bag']
    with pytest.raises(ValueError, match='query q1: it has no condition, and this CondViT reads one'):
        query(m, words, [])
    assert query(m).shape == (0, 160)


def test_a_vit_without_conditions_reads_the_reference_alone(tiny):
    m = method(tiny, 'none')
    torch.testing.assert_close(query(m, [], ['a bag']), query(m, ['Bags'], ['red']), atol=1e-6, rtol=0)


def test_features_of_the_gallery_are_kept_under_a_key_of_the_weights(tiny):
    m, source = method(tiny), dots()
    kept = m.encode_gallery(source)
    assert m.encode_gallery(source) is kept and method(tiny).encode_gallery(dots()).path == kept.path
    with torch.no_grad():
        m.net.visual.head.proj.weight[0, 0] += 0.5
    changed = C.CondViTMethod(name='condvit', backbone=tiny, net=m.net)
    assert changed.encode_gallery(dots()).path != kept.path and changed.fingerprint != method(tiny).fingerprint
    live = C.CondViTMethod(name='condvit', backbone=tiny, net=m.net, live=True).encode_gallery(source)
    torch.testing.assert_close(live[source.ids], changed.encode_gallery(source)[source.ids], atol=1e-5, rtol=0)


def test_a_gallery_token_is_part_of_the_gallery(tiny):
    with_token, without = method(tiny, gallery_token=True), method(tiny)
    a, b = (m.encode_gallery(dots()) for m in (with_token, without))
    assert a.path != b.path and not torch.allclose(a[['1']], b[['1']], atol=1e-3)


@pytest.mark.e2e  # networks of the published size
@pytest.mark.parametrize('file', ['condvit.safetensors', 'condvit.pt'])
def test_a_published_file_is_a_method_in_one_line(file, tmp_path):
    tensors = random_file(tmp_path / file, published_shapes(16, True))
    m = C.published_condvit(tmp_path / file, 'cpu')
    assert (m.backbone.name, m.net.D, m.net.condition, m.net.insert_before) == ('vit_b16', 512, 'category', 1)
    assert query(m, ['Bags']).shape == (1, 512) and m.encode_gallery(dots(2)).array.shape == (2, 512)
    written = load_file(V.write_condvit(m.net, tmp_path / 'again.safetensors'))
    assert written.keys() == tensors.keys() and all(torch.equal(written[k], tensors[k]) for k in tensors)


@pytest.mark.e2e
def test_a_published_text_model_names_its_sentence_encoder(tmp_path, monkeypatch):
    random_file(tmp_path / 'text.safetensors', published_shapes(32, False))
    m = C.published_condvit(tmp_path / 'text.safetensors', 'cpu', text_model='no/such-model')
    assert (m.net.condition, m.net.settings['text_width'], m.backbone.name) == ('text', 768, 'vit_b32')
    assert not hasattr(m.net, 'c_proj') and m.encode_gallery(dots(2)).array.shape == (2, 512)
    monkeypatch.setitem(sys.modules, 'sentence_transformers', None)  # as where it is not installed
    with pytest.raises(ImportError, match="'no/such-model' needs the package sentence-transformers: pip install"):
        query(m, ['a red bag'])


@pytest.mark.e2e
def test_keys_that_do_not_fit_are_named(tmp_path):
    file, shapes = tmp_path / 'x.safetensors', published_shapes(32, True)

    def refused(words, **changes):
        given = shapes | {k.replace('__', '.'): s for k, s in changes.items()}
        random_file(file, {k: s for k, s in given.items() if s is not None})
        with pytest.raises(ValueError, match=words):
            C.published_condvit(file, 'cpu')

    refused(r'1 missing: ln_post.weight$', ln_post__weight=None)
    refused(r'1 additional: visual_head', visual_head=(3,))
    refused(r'1 wrongly shaped: c_embedding.weight \(12, 768\), needed \(10, 768\)', c_embedding__weight=(12, 768))
    refused(r'wrongly shaped: positional_embedding \(49, 768\), needed \(50, 768\)', positional_embedding=(49, 768))
    refused(r'1 missing: proj; 1 additional: projection', proj=None, projection=(768, 512))
    refused(r'1 missing: c_pos_embedding', c_pos_embedding=None)


def test_a_checkpoint_of_another_method(tmp_path, tiny):
    random_file(tmp_path / 'phi.pt', {'layers.0.weight': (8, 4), 'layers.0.bias': (8,)})
    with pytest.raises(ValueError, match='no CondViT: conv1.weight .* the file begins with layers.0.bias, layers.0'):
        C.published_condvit(tmp_path / 'phi.pt', 'cpu')
    with open(tmp_path / 'code.pt', 'wb') as f:
        pickle.dump(dict(model=Image.new('RGB', (2, 2))), f)
    with pytest.raises(ValueError, match='code.pt cannot be read as tensors .*because it can run code'):
        C.published_condvit(tmp_path / 'code.pt', 'cpu')
    torch.save(dict(state_dict={}), tmp_path / 'nested.pt')
    with pytest.raises(ValueError, match='tensors by name at its top level'):
        C.published_condvit(tmp_path / 'nested.pt', 'cpu')
    (tmp_path / 'cut.safetensors').write_bytes(b'12345')
    with pytest.raises(ValueError, match='cut.safetensors cannot be read as tensors'):
        C.published_condvit(tmp_path / 'cut.safetensors', 'cpu')
    from cis_nb.methods.combiner import Combiner, save_combiner

    run = save_combiner(tmp_path / 'combiner', Combiner(tiny.D, 8, 8), tiny)
    with pytest.raises(FileNotFoundError, match='condvit.safetensors is missing: .*not a run of `method: condvit`'):
        C.load_condvit(run, 'cpu')


def objective(tiny, pairs=None, **kw):
    given = dict(samples=40, val_samples=12, distractors=8, batch_size=8, steps=6, warmup=3, condition='category')
    config = configure(C.CondViTConfig, given | kw)
    o = C.CondViTPlugin().objective(tiny, config)
    if pairs is None:
        return o
    settings = dict(batch_size=config.batch_size, steps=config.steps, warmup=config.warmup)
    return C.CondViTTraining(tiny, o.net, pairs, o.tasks, **settings)


def test_the_k_that_selects_the_weights_is_a_parameter(tiny):
    assert [objective(tiny, selection_k=k).metric for k in (1, 10)] == ['products R@1', 'products R@10']


def test_a_filtered_gallery_has_the_images_of_the_targets_category(tiny):
    o = objective(tiny, condition='none', val_samples=30, distractors=60)
    val = C.training_products(configure(C.CondViTConfig, dict(val_samples=30, distractors=60)), tiny.image_size)[1]
    task, among = val['products'], o.tasks[C.FILTERED_TASK]
    pairs = product_pairs('world', 'val', 30, tiny.image_size, 0, 60)
    assert len(pairs.category_of) == 90 and set(among.queries.query_id) <= set(task.queries.query_id)
    for q in among.queries.itertuples():
        mine = {i for i in task.shared_gallery if pairs.category_of[i] == pairs.category_of[q.targets[0]]}
        assert set(q.gallery) == mine and q.targets[0] in mine and len(mine) > 1
    assert o.also_best == {'filtered': o.selected_by('filtered')} and o.also_best['filtered'] in o.validate()
    assert objective(tiny, condition='text').also_best == {}
    unknown = replace(pairs, distractor_categories=[])
    assert unknown.category_of == {} and C.filtered_task(unknown, task) is None
    with pytest.raises(ValueError, match='1 categories for 60 distractors'):
        replace(pairs, distractor_categories=['Bags'])


@pytest.mark.e2e
def test_one_training_keeps_the_weights_for_both_galleries(tiny, monkeypatch):
    rising = iter([dict(products=9, filtered=1), dict(products=1, filtered=9)])

    def planted(self):
        found = next(rising)
        return {self.selected_by(name): found[name] for name in self.tasks}

    monkeypatch.setattr(C.CondViTTraining, 'validate', planted)
    given = dict(condition='none', samples=40, val_samples=12, distractors=8, steps=4, eval_every=2, batch_size=8)
    run = T.train_or_load(T.settings(dict(given, method='condvit', warmup=0, lr=0.01, device='cpu', seed=77)))
    assert [json.loads((d / 'best.json').read_text())['step'] for d in (run, run / C.FILTERED_TASK)] == [2, 4]
    best, among = (C.load_condvit(d, 'cpu', tiny) for d in (run, run / C.FILTERED_TASK))
    assert best.tower.fingerprint != among.tower.fingerprint and best.run == among.run
    entry = Entry(best, 77, run, 'vit_products')
    assert filtered_method(entry).tower.fingerprint == among.tower.fingerprint
    assert filtered_method(Entry(best, name='own')) is best


def products(categories=('Bags', 'Head'), captions=('a bag', 'a hat')):
    "Two products in one complex image."
    rows = [(f'p{i}', str(i), c, [t]) for i, (c, t) in enumerate(zip(categories, captions))]
    simple = pd.DataFrame(rows, columns=SIMPLE_COLUMNS)
    return ProductPairs(dots(3), simple, pd.DataFrame([('p0', '2'), ('p1', '2')], columns=COMPLEX_COLUMNS))


@pytest.mark.e2e
def test_products_that_cannot_be_trained_on(tiny):
    with pytest.raises(ValueError, match="'NonClothing' is no category of this model"):
        objective(tiny, products(('Bags', 'NonClothing')), batch_size=2)
    with pytest.raises(ValueError, match="1 simple images have no caption .the first: '1'.; .*condition: category"):
        objective(tiny, products(captions=('a bag', '')), condition='text', batch_size=2)
    with pytest.raises(ValueError, match='batch_size: must be at most 2'):
        objective(tiny, products(), batch_size=3)
    for given, words in (
        (dict(condition='none', gallery_token=True), 'gallery_token must be false'),
        (dict(condition='category', text_model='sentence-transformers/x'), "text_model must be 'backbone'"),
        (dict(tune='some'), "tune: 'some' is not allowed"),
        (dict(insert_before=0), 'insert_before: 0 is not allowed'),
    ):
        with pytest.raises(ValueError, match=words):
            T.settings(dict(method='condvit', **given))
    with pytest.raises(FileNotFoundError, match='my/photos'):
        T.make_objective(T.settings(dict(method='condvit', data='my/photos', device='cpu')))


def moved(o, begun) -> set:
    return {n for n, p in o.net.named_parameters() if not torch.equal(p, begun[n])}


@pytest.mark.e2e
@pytest.mark.parametrize('condition', ['category', 'text', 'none'])
def test_the_warm_up_trains_projection_and_new_parameters_alone(condition, tiny, tmp_path):
    o = objective(tiny, condition=condition)
    begun = {n: p.detach().clone() for n, p in o.net.named_parameters()}
    new = {n for n in begun if n.startswith(V.NEW_PARAMETERS)}
    after, moments, begins = [], [], C.CondViTTraining.before_step

    class Watched(C.CondViTTraining):
        def before_step(self, step, optimizer):
            begins(self, step, optimizer)
            moments.append(len(optimizer.state))

        def after_step(self):
            super().after_step()
            after.append(moved(self, begun))

    o.__class__ = Watched
    train(o, tmp_path / 'run', steps=6, batch_size=8, lr=1e-3, warmup=3, weight_decay=0.01, clip=0.0, device='cpu')
    assert after[0] == after[2] == new and after[3] > new and 'visual.trunk.cls_token' in after[-1]
    assert moments[:4] == [0, len(new), len(new), 0] and moments[4] > len(new)


@pytest.mark.e2e
def test_the_tower_rests_where_only_new_parameters_train(tiny, tmp_path):
    o = objective(tiny, tune='new', gallery_token=True)
    begun = {n: p.detach().clone() for n, p in o.net.named_parameters()}
    train(o, tmp_path / 'run', steps=5, batch_size=8, lr=1e-3, warmup=2, weight_decay=0.01, device='cpu')
    assert moved(o, begun) == {'visual.head.proj.weight', 'c_embedding.weight', 'c_pos_embedding', 'empty_token'}


def test_adamw_has_its_usual_betas_and_decays_all_parameters(tiny, tmp_path):
    "Vectors, scalars, norms and the table of categories too."
    o = objective(tiny)
    optimizer, _ = start_or_resume(o, tmp_path, 0.01, accelerator_for('cpu'))
    decayed = {id(p) for g in optimizer.param_groups if g['weight_decay'] == 0.01 for p in g['params']}
    assert {g['betas'] for g in optimizer.param_groups} == {(0.9, 0.999)}
    assert decayed == {id(p) for p in o.net.parameters()} and id(o.net.logit_scale) in decayed


def test_the_temperature_starts_at_its_ceiling_and_stays_in_bounds(tiny):
    o = objective(tiny)
    assert o.net.logit_scale.item() == pytest.approx(4.6052, abs=1e-4)
    for given, kept in ((9.0, math.log(100)), (-1.0, 0.0), (2.0, 2.0)):
        with torch.no_grad():
            o.net.logit_scale.fill_(given)
        o.after_step()
        assert o.net.logit_scale.item() == pytest.approx(kept)


def test_a_batch_is_a_function_of_its_places(tiny):
    "However many processes share it, and whatever their generators are."
    o = objective(tiny)
    whole, numbers = o.prepare(np.arange(8), np.random.default_rng(0))
    halves = [o.prepare(part, np.random.default_rng(5)) for part in (np.arange(4), np.arange(4, 8))]
    simple, complex = whole.chunk(2)
    assert torch.equal(torch.cat([h[0][:4] for h in halves]), simple)
    assert torch.equal(torch.cat([h[0][4:] for h in halves]), complex)
    assert torch.equal(torch.cat([h[1] for h in halves]), numbers)
    assert not torch.equal(o.prepare(np.arange(8, 16), None)[0], whole)


def fit_by(processes: int, folder, given: dict):
    launch('cis_nb.train:fit', processes, [str(folder / str(processes)), given])
    return load_file(folder / str(processes) / 'condvit.safetensors')


@pytest.mark.e2e
def test_two_processes_learn_what_one_learns(tmp_path, tiny):
    "Through the end of the warm-up. Keys of attention have no gradient but rounding, which AdamW enlarges."
    small = dict(samples=32, val_samples=8, distractors=0, steps=4, warmup=2, batch_size=8, lr=1e-4, eval_every=2)
    given = dict(method='condvit', condition='category', device='cpu', dtype='float32', log_every=1, **small)
    given = T.settings(given).model_dump()
    one, two = (fit_by(n, tmp_path, given) for n in (1, 2))
    begun = T.make_objective(T.settings(given)).net.state_dict()
    a, b = (pd.read_csv(tmp_path / n / 'history.csv').drop(columns='items_per_s') for n in '12')
    pd.testing.assert_frame_equal(a, b, rtol=1e-4)
    assert one.keys() == two.keys() == begun.keys()
    step = {k: (one[k] - begun[k]).norm() for k in one}
    assert all(step[k] > 0 for k in ('visual.trunk.blocks.0.attn.qkv.weight', 'c_embedding.weight'))
    for k in one:
        if not k.endswith('qkv.bias'):
            assert (one[k] - two[k]).norm() <= 0.02 * step[k] + 1e-6, k


@pytest.mark.e2e
@pytest.mark.parametrize('condition', ['category', 'text'])
def test_what_is_trained_is_loaded_again(condition, tiny):
    given = dict(method='condvit', condition=condition, samples=32, val_samples=8, steps=2, batch_size=8, device='cpu')
    config = T.settings(given)
    run, o = T.train_or_load(config), T.make_objective(config)
    assert T.train_or_load(config) == run and o.metric in o.validate()
    o.load(run)
    m, words = T.load_method(run, 'cpu'), [['Bags'] if condition == 'category' else ['a red bag']]
    torch.testing.assert_close(query(m, *words), query(o.method(), *words), atol=1e-6, rtol=0)
    other = load_backbone('tiny', 'none', device='cpu')
    with pytest.raises(ValueError, match='this CondViT was trained on tiny with the weights'):
        C.load_condvit(run, 'cpu', other)
    rows = o.evaluation(seed=3).rows
    assert set(rows.benchmark) == {'products/lrvsf'} and set(rows.seed) == {3}
    f = run / 'condvit.safetensors'
    f.write_bytes(f.read_bytes()[:300])
    with pytest.raises(ValueError, match='damaged'):
        C.load_condvit(run, 'cpu')


class Sentences(torch.nn.Module):
    "A stand-in for a model of sentence-transformers: counts of letters."

    def __init__(self, name, device):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def encode(self, texts, convert_to_tensor, normalize_embeddings, show_progress_bar):
        x = torch.tensor([[t.count(letter) + 0.1 for letter in 'abcdefgh'] for t in texts])
        return self.scale * x / x.norm(dim=-1, keepdim=True)


@pytest.mark.e2e
def test_a_sentence_model_by_name(monkeypatch, tiny, tmp_path):
    import sys
    from types import ModuleType

    monkeypatch.setitem(sys.modules, 'sentence_transformers', None)
    with pytest.raises(ImportError, match=r"text_model: 'some/model' needs the package sentence-transformers: pip"):
        C.text_reader('some/model', tiny)
    package = ModuleType('sentence_transformers')
    package.SentenceTransformer = Sentences
    monkeypatch.setitem(sys.modules, 'sentence_transformers', package)
    o = objective(tiny, condition='text', text_model='some/model')
    assert o.net.settings['text_width'] == 8 and o.net.c_proj.weight.shape == (192, 8)
    train(o, tmp_path / 'run', steps=2, batch_size=8, lr=1e-3, device='cpu')
    m = C.load_condvit(tmp_path / 'run', 'cpu', tiny)
    torch.testing.assert_close(query(m, ['a bag']), query(o.method(), ['a bag']), atol=1e-6, rtol=0)
    monkeypatch.setattr(Sentences, 'encode', lambda self, texts, **kw: torch.ones(len(texts), 8))
    monkeypatch.setattr(Sentences, '__init__', other_weights)
    with pytest.raises(ValueError, match="the weights of text_model 'some/model' are not those of the training"):
        C.load_condvit(tmp_path / 'run', 'cpu', tiny)


WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'red', 'bag', 'hat']


def write_sentence_model(folder, seed=0):
    "A tiny random model of the package sentence-transformers: a BERT of one block and the mean of its tokens."
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    bert = folder / 'bert'
    bert.mkdir(parents=True)
    (bert / 'vocab.txt').write_text('\n'.join(WORDS))
    torch.manual_seed(seed)
    sizes = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(bert)
    BertTokenizerFast(str(bert / 'vocab.txt')).save_pretrained(bert)
    SentenceTransformer(modules=[models.Transformer(str(bert)), models.Pooling(12)]).save(str(folder / 'model'))
    return str(folder / 'model')


@pytest.mark.e2e
def test_a_real_sentence_model_from_a_folder(tiny, tmp_path):
    pytest.importorskip('sentence_transformers', reason="needs the extra: pip install 'cis_nb[sentences]'")
    name = write_sentence_model(tmp_path / 'a')
    texts = C.text_reader(name, tiny)
    bag, hat, again = texts.encode_text(['a red bag', 'a hat', 'a red bag'])
    torch.testing.assert_close(bag, again)
    assert texts.D == 12 and bag.norm() == pytest.approx(1, abs=1e-5) and not torch.allclose(bag, hat, atol=1e-3)
    assert texts.fingerprint != C.text_reader(write_sentence_model(tmp_path / 'b', 1), tiny).fingerprint
    o = objective(tiny, condition='text', text_model=name)
    assert o.net.c_proj.weight.shape == (192, 12)
    train(o, tmp_path / 'run', steps=2, batch_size=8, lr=1e-3, device='cpu')
    m = C.load_condvit(tmp_path / 'run', 'cpu', tiny)
    torch.testing.assert_close(query(m, ['a bag']), query(o.method(), ['a bag']), atol=1e-6, rtol=0)


def other_weights(self, name, device):
    torch.nn.Module.__init__(self)
    self.scale = torch.nn.Parameter(torch.full((1,), 2.0))


def test_a_gallery_of_one_and_texts_in_the_protocol():
    pairs = product_pairs('world', 'val', 9, 64)
    task = C.product_task(pairs)
    assert len(task.shared_gallery) == 9 == task.queries.reference.nunique()
    assert C.product_task(product_pairs('world', 'val', 1, 64)).ks == (1,)
    text = C.product_task(pairs, 'text')
    assert text.protocol.hash != task.protocol.hash and text.as_queries().texts[0] == [pairs.pair(0).caption]


@pytest.mark.parametrize(
    'method', [C.CondViTTraining.load, V.GalleryTower.preprocess, CroppedReference.score, LRVSFBenchmark.aggregate]
)
def test_a_method_of_a_contract_says_what_it_does_here(method):
    assert method.__doc__ and method.__doc__.endswith('.')


def test_the_first_training_of_the_page_is_the_one_of_the_quick_book():
    page = json.loads((project_root() / 'nbs' / '04b_methods' / '08_condvit.ipynb').read_text())
    text = '\n'.join(''.join(c['source']) for c in page['cells'] if c['cell_type'] == 'markdown')
    code, names = re.search(r'```python\n(.*?)```', text, re.S)[1], {}
    exec(code.split('method = ')[0], names)
    name = '05_train.condvit_category'
    assert names['config'] == T.settings(experiments('quick', name=name)[name].params)
