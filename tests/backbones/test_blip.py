"BLIP as a backbone: the reference forward pass, padding, token ids, a small training, folders without weights."

import gzip
import json
import os
import sys
from pathlib import Path
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from projects import DATA, needs_data
from cis_nb.benchmarks.cirr import load_cirr
from cis_nb.retrieval.protocol import evaluate
from cis_nb.backbones.tokenizer import PSEUDO, bpe
from cis_nb.backbones.clip import golden_features, golden_images
from cis_nb.backbones.loading import load_backbone, save_backbone
from cis_nb.backbones.blip import BlipTextTower, decode_ids
from cis_nb.data.roots import cirr_root
from cis_nb.methods.pseudo_words import Phi, PseudoWord, load_pseudo_word, save_phi
from cis_nb.train import load_method, make_objective, settings, train_or_load
from cis_nb.training.loop import train

torch.set_num_threads(1)
data = DATA
TEXTS = [
    'a red boat',
    '',
    'A photo of a striped cat that sits, next to 2 boats!',
    'boat',
    'a 3d print from 2019 costs $5',
    'a photo of a cat',
]
WORDS = 'a photo of that is red boat boats cat striped sits next to print from and costs 2 3 2019 5 3d the on'.split()


def small_blip(folder, seed=0, longest=40, **about):
    "A BLIP with random weights and a small vocabulary, saved as the hub lays it out."
    transformers = pytest.importorskip('transformers', reason='the package transformers is not installed')
    letters = 'abcdefghijklmnopqrstuvwxyz0123456789'
    vocab = [
        '[PAD]',
        '[UNK]',
        '[CLS]',
        '[SEP]',
        '[MASK]',
        *'$.,!?-\'&#;:',
        *letters,
        *('##' + c for c in letters),
        *(w for w in WORDS if len(w) > 1),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'vocab.txt').write_text('\n'.join(vocab) + '\n')
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(tokenizer_class='BertTokenizer', do_lower_case=True)))
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = dict(
        sizes,
        num_hidden_layers=2,
        vocab_size=len(vocab),
        max_position_embeddings=longest,
        bos_token_id=2,
        sep_token_id=3,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = transformers.BlipForImageTextRetrieval(
        transformers.BlipConfig(
            text_config=text, vision_config=dict(sizes, image_size=32, patch_size=8), image_text_hidden_size=12, **about
        )
    ).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    d = tmp_path_factory.mktemp('blip')
    small_blip(d)
    return d


@pytest.fixture
def b(folder):
    return load_backbone('blip', str(folder), device='cpu')


# --- as the package computes it


def test_features_are_those_of_the_package(folder, b):
    import transformers

    model = transformers.BlipForImageTextRetrieval.from_pretrained(folder, local_files_only=True).eval()
    read = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    pictures = [*golden_images(70), Image.new('RGB', (90, 30), (200, 30, 60))]
    with torch.no_grad():
        x, t = torch.stack([b.preprocess(p) for p in pictures]), read(TEXTS, padding=True, return_tensors='pt')
        images, texts = b.encode_image(pictures), b.encode_text(TEXTS, batch_size=2)
        alone = torch.cat([b.encode_text([s]) for s in TEXTS])
        cosine = torch.cat(
            [
                model(
                    input_ids=t.input_ids, attention_mask=t.attention_mask, pixel_values=p[None], use_itm_head=False
                ).itm_score
                for p in x
            ]
        )
    assert (
        images.shape == (4, 12)
        and texts.shape == (6, 12)
        and (b.D, b.W, b.image_size, b.context, b.name) == (12, 16, 32, 40, 'blip')
    )
    torch.testing.assert_close(F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T, cosine, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, texts, atol=1e-5, rtol=1e-5)  # padding makes no difference
    assert cosine.std() > 0.05 and b.truncated == 0


def test_pictures_are_prepared_as_by_the_package(b):
    transformers = pytest.importorskip('transformers')
    theirs = transformers.BlipImageProcessor(size=dict(height=32, width=32))
    for p in (
        golden_images(70)[0],
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 40, 3), np.uint8)),
        Image.new('L', (31, 77), 90),
    ):
        want = torch.as_tensor(np.asarray(theirs(images=p.convert('RGB'), return_tensors='pt')['pixel_values'][0]))
        away = (b.preprocess(p) - want).abs()
        assert away.mean() < 0.01 and away.max() < 0.15  # a byte is about .015; torch and PIL round differently


def test_a_words_own_embedding_gives_the_plain_sentence(b):
    def own(w):
        return b.text_tower.embed(b.text_tower.tokenize([w]))[0, 1]

    vectors = torch.stack([own('boat'), own('cat'), own('boat'), own('red')]).detach()
    prompts = ['a photo of $ that is red', '$', 'the $ and $ on a cat', 'a $ print']
    want = ['a photo of boat that is red', 'cat', 'the boat and boat on a cat', 'a red print']
    with torch.no_grad():
        for size in (1, 2, 256):
            torch.testing.assert_close(
                b.encode_pseudo(prompts, vectors, batch_size=size), b.encode_text(want), atol=1e-5, rtol=1e-5
            )
        ids = b.tokenize(prompts)
        torch.testing.assert_close(b.inject(ids, ids == PSEUDO, vectors, 2), b.encode_text(want), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            b.encode_pseudo('$ and $', vectors[:1], every=False), b.encode_text(['boat and $']), atol=1e-5, rtol=1e-5
        )
        assert not torch.allclose(b.encode_pseudo('a $', vectors[:1]), b.encode_pseudo('a $', vectors[1:2]), atol=1e-3)
    v = vectors[:1].clone().requires_grad_()
    b.requires_grad_(False).encode_pseudo('a photo of $', v).sum().backward()
    assert v.grad.abs().sum() > 0


def test_names_of_framing_pieces_are_dropped_and_long_texts_cut(b):
    with torch.no_grad():
        torch.testing.assert_close(
            b.encode_text(['a [SEP] red [CLS] boat [PAD] [MASK]']), b.encode_text(['a red boat']), atol=1e-6, rtol=0
        )
    tower = b.text_tower
    ids = tower.tokenize(['boat ' * 100, 'cat'])
    assert ids.shape == (2, 40) and ids[0, -1] == tower.sep
    assert b.truncated == 1 and tower.lengths(ids).tolist() == [40, 3]
    states, mask = b.text_states(['a red boat', 'cat'])
    assert states.shape == (2, 5, 16) and mask.sum(1).tolist() == [5, 3]
    for bad, why in ((['a', float('nan')], 'number 1 is nan'), ('a boat', 'one string was given')):
        with pytest.raises(TypeError, match=why):
            b.encode_text(bad)
    with pytest.raises(ValueError, match='prompt 1 has no stand-alone'):
        b.encode_pseudo(['$', 'a'], torch.zeros(2, 16))
    with pytest.raises(ValueError, match=r'need pseudo-words \(1,16\)'):
        b.encode_pseudo('$', torch.zeros(1, 5))


# --- the book's ids


def test_ids_of_the_book_are_read_as_their_text(b):
    with torch.no_grad():
        torch.testing.assert_close(b.encode_ids(b.tokenize(TEXTS[:4])), b.encode_text(TEXTS[:4]), atol=1e-6, rtol=0)
    assert decode_ids(bpe('A 3d print from 2019')).split() == 'a 3 d print from 2019'.split()
    ids = b.tokenize(['it costs $5, or a $ and $$ and $', 'a $'])
    for places in ([[3], [2]], [[8], [2]], [[12], [2]], [[3, 12], [2]]):
        at = torch.zeros_like(ids, dtype=torch.bool)
        for row, p in zip(at, places):
            row[p] = True
        assert all(int(i) == PSEUDO for i in ids[at])
        own, mine = b.text_tower.from_clip_ids(ids, at)
        nth = [
            [(ids[r, :c] == PSEUDO).sum().item() + 2 * (r == 0 and c > 9) for c in p] for r, p in enumerate(places)
        ]  # `$$` is one id of CLIP and two pieces
        assert [
            [(own[r, :c] == b.text_tower.placeholder).sum().item() for c in row.nonzero().flatten().tolist()]
            for r, row in enumerate(mine)
        ] == nth


@needs_data('captions')
@pytest.mark.parametrize('file, least', [('flickr8k_train.txt.gz', 0.99), ('conceptual_captions_val.txt.gz', 0.97)])
def test_most_real_captions_have_the_same_pieces_by_their_ids(file, least):
    tokenizers = pytest.importorskip('tokenizers')
    from cis_nb.mining.corpora import normalize_caption

    plain, cut = tokenizers.normalizers.BertNormalizer(lowercase=True), tokenizers.pre_tokenizers.BertPreTokenizer()

    def words(t):
        return [w for w, _ in cut.pre_tokenize_str(plain.normalize_str(t))]

    with gzip.open(data / 'captions' / file, 'rt', encoding='utf-8') as f:
        texts = [c for c in (normalize_caption(line) for _, line in zip(range(4000), f)) if c]
    share = np.mean([words(t) == words(decode_ids(bpe(t))) for t in texts])
    assert len(texts) > 3000 and least <= share < 1


# --- methods


def test_a_benchmark_of_the_world_is_answered(b, store):
    bench = load_cirr(cirr_root('world', 200))
    torch.manual_seed(0)
    m = PseudoWord(name='lincir', title='LinCIR', backbone=b, phi=Phi(b.D, b.W, 32).eval())
    found, rows = evaluate(m, bench, (1, 5))
    with torch.no_grad():
        f = dict(
            zip(
                bench.shared_gallery, F.normalize(b.encode_image([bench.load(i) for i in bench.shared_gallery]), dim=-1)
            )
        )
    slow = []
    for r in bench.queries.itertuples():  # by the definition, one query at a time
        raw = b.encode_image([bench.load(r.reference)]).detach()
        q = F.normalize(b.encode_pseudo(f'a photo of $ that {r.condition}', m.phi(raw)).detach(), dim=-1)[0]
        s = {i: float(q @ v) for i, v in f.items() if i != r.reference}
        slow.append(1 + sum(v > max(s[t] for t in r.targets) + 1e-6 for v in s.values()))
    assert (
        len(slow) > 20
        and np.abs(found['rank'].to_numpy() - slow).max() <= 1
        and (found['rank'] == slow).mean() > 0.8
        and len(set(slow)) > 3
        and rows.value.between(0, 100).all()
    )


@pytest.mark.parametrize(
    'name, more',
    [
        ('pic2word', {}),
        ('lincir', dict(noise_relative_to_std=True)),
        ('searle', dict(phrases=4, search_steps=4, num_concepts_inversion=3, num_concepts_distillation=5)),
    ],
)
@pytest.mark.e2e
def test_a_short_training_leaves_words_behind(name, more, folder, store):
    p = settings(
        dict(
            method=name,
            backbone='blip',
            pretrained=str(folder),
            steps=20,
            batch_size=24,
            lr=3e-3,
            world_images=60,
            cirr=40,
            width=32,
            eval_every=20,
            log_every=1,
            device='cpu',
            **more,
        )
    )
    run = train_or_load(p)
    assert train_or_load(p) == run
    m = load_method(run, 'cpu')
    own = m.backbone
    assert own.name == 'blip' and m.name == name and isinstance(own.text_tower, BlipTextTower)
    q = m.encode_query(torch.randn(2, own.D), ['is red', 'costs $5'])
    torch.testing.assert_close(q.norm(dim=-1), torch.ones(2))
    about = json.loads((Path(run) / 'phi.json').read_text())
    assert (about['backbone'], about['pretrained'], about['fingerprint']) == ('blip', str(folder), own.fingerprint)


@pytest.mark.e2e
def test_the_tower_stays_as_it_is_and_the_loss_falls(folder, store):
    p = settings(
        dict(
            method='lincir',
            backbone='blip',
            pretrained=str(folder),
            steps=40,
            batch_size=32,
            lr=3e-3,
            world_images=60,
            cirr=40,
            width=64,
            noise='none',
            eval_every=40,
            log_every=1,
            device='cpu',
        )
    )
    o = make_objective(p)
    before = o.backbone.fingerprint
    history = train(
        o,
        store / 'run',
        **{k: getattr(p, k) for k in ('steps', 'batch_size', 'lr', 'eval_every', 'log_every', 'seed')},
    )
    assert history.loss.iloc[-5:].mean() < 0.9 * history.loss.iloc[:5].mean() and o.backbone.fingerprint == before
    prompt = make_objective(p.model_copy(update=dict(supervision='prompt')))
    masked = prompt.prepare(np.arange(4), np.random.default_rng(0))[1]
    tower = o.backbone.text_tower
    own, at = tower.from_clip_ids(masked, masked == PSEUDO)
    assert at.sum(1).tolist() == [1] * 4 and torch.equal(own, tower.tokenize(['a photo of $'] * 4))


def test_a_phi_of_another_backbone_is_refused(folder, b, store):
    tiny = load_backbone('tiny', 'none', device='cpu')
    for run, own, pretrained in (('a', b, str(folder)), ('b', tiny, 'none')):
        m = PseudoWord(name='lincir', title='LinCIR', backbone=own, phi=Phi(own.D, own.W, 8))
        save_phi(store / run, m, pretrained)
    for run, mine, other in (('a', b, tiny), ('b', tiny, b)):
        with pytest.raises(
            ValueError,
            match=f'trained on {mine.name} with the weights {mine.fingerprint}, '
            f'and here is {other.name} with the weights {other.fingerprint}',
        ):
            load_pseudo_word(store / run, 'cpu', other)
    small_blip(store / 'other', seed=1)
    second = load_backbone('blip', str(store / 'other'), device='cpu')
    with pytest.raises(ValueError, match=f'here is blip with the weights {second.fingerprint}'):
        load_pseudo_word(store / 'a', 'cpu', second)


# --- what it is, and what it is not for


def test_record_fingerprint_and_number_types(folder, b):
    r = b.record
    assert (r['backbone'], r['D'], r['W'], r['activation'], r['dtype'], r['weights']) == (
        'blip',
        12,
        16,
        'gelu',
        'float32',
        f'{folder.name}/model.safetensors',
    )
    assert b.fingerprint == load_backbone('blip', str(folder), device='cpu').fingerprint
    half = load_backbone('blip', str(folder), device='cpu', dtype='bfloat16')
    with torch.no_grad():
        assert (
            F.cosine_similarity(half.encode_text(TEXTS), b.encode_text(TEXTS)).min() > 0.99
            and F.cosine_similarity(half.encode_image(golden_images(32)), b.encode_image(golden_images(32))).min()
            > 0.99
        )
        assert half.encode_pseudo('a $', torch.randn(1, 16)).dtype == torch.float32
    with pytest.raises(ValueError, match="dtype 'int8'"):
        load_backbone('blip', str(folder), dtype='int8')


def test_other_heads_make_another_fingerprint(folder, b, tmp_path):
    for f in folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    about = json.loads((tmp_path / 'config.json').read_text())
    about['text_config']['num_attention_heads'] = 4
    (tmp_path / 'config.json').write_text(json.dumps(about))
    assert load_backbone('blip', str(tmp_path), device='cpu').fingerprint != b.fingerprint


def test_golden_features_are_compared_where_they_lie(folder, b, tmp_path):
    for f in folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    with pytest.raises(FileNotFoundError, match='no golden features'):
        load_backbone('blip', str(tmp_path), device='cpu', golden=True)
    save_file(golden_features(b), tmp_path / 'golden.safetensors')
    load_backbone('blip', str(tmp_path), device='cpu', golden=True)
    w = load_file(tmp_path / 'model.safetensors')
    w['text_proj.bias'] = w['text_proj.bias'] + 1
    save_file(w, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='the text features of the test texts are off'):
        load_backbone('blip', str(tmp_path), device='cpu', golden=True)


def test_it_is_not_trained_saved_or_opened(b, tmp_path):
    with pytest.raises(ValueError, match='cannot be trained or saved'):
        b.train()
    with pytest.raises(ValueError, match="unknown backbone 'blip'.*neither built nor saved"):
        save_backbone(b, tmp_path / 'x')
    with pytest.raises(ValueError, match='no blocks that can be run one by one'):
        b.image_tower.blocks
    assert not b.eval().training and b.encode_text([]).shape == (0, 12) and b.encode_image([]).shape == (0, 12)


# --- folders that are none


def change_weights(change):
    "A function that changes the bias of the vision projection in a folder's weights."

    def spoil(folder):
        t = load_file(folder / 'model.safetensors')
        save_file(t | {'vision_proj.bias': change(t['vision_proj.bias'])}, folder / 'model.safetensors')

    return spoil


@pytest.mark.parametrize(
    'spoil, words',
    [
        (
            lambda d: (d / 'config.json').unlink(),
            'config.json is missing; Get it from .*blip-itm-base-coco.*licence: BSD-3-Clause',
        ),
        (lambda d: (d / 'model.safetensors').rename(d / 'pytorch_model.bin'), 'model.safetensors is missing'),
        (lambda d: (d / 'vocab.txt').unlink(), 'tokenizer.json is missing'),
        (lambda d: (d / 'config.json').write_text('{"model_type": "bl'), 'config.json is damaged'),
        (lambda d: (d / 'config.json').write_text('[]'), 'config.json is damaged'),
        (lambda d: (d / 'config.json').unlink() or os.mkfifo(d / 'config.json'), 'config.json is a pipe'),
        (lambda d: (d / 'config.json').write_text('{"model_type": "clip"}'), "model_type is 'clip', not 'blip'"),
        (
            lambda d: (d / 'model.safetensors').write_bytes((d / 'model.safetensors').read_bytes()[:3000]),
            'damaged or was cut short',
        ),
        (
            lambda d: save_file(
                {k: v for k, v in load_file(d / 'model.safetensors').items() if k != 'text_proj.weight'},
                d / 'model.safetensors',
            ),
            'text_proj.weight is missing in the file',
        ),
        (
            change_weights(lambda t: t[:5]),
            r'vision_proj.bias is \(5,\) in the file and \(12,\) in the model',
        ),
        (change_weights(lambda t: t.int()), 'vision_proj.bias holds torch.int32, weights are floats'),
        (change_weights(lambda t: t.to(torch.float8_e4m3fn)), 'vision_proj.bias holds torch.float8_e4m3fn'),
        (change_weights(lambda t: t * float('nan')), 'vision_proj.bias holds NaN or infinite numbers'),
        (change_weights(lambda t: t + float('inf')), 'vision_proj.bias holds NaN or infinite numbers'),
        (
            lambda d: (d / 'vocab.txt').write_text((d / 'vocab.txt').read_text().replace('$\n', '¢\n')),
            r'\$ is no piece of it',
        ),
        (
            lambda d: (d / 'vocab.txt').write_text((d / 'vocab.txt').read_text() + 'one\nmore\n'),
            'pieces, the text tower',
        ),
    ],
)
def test_a_folder_that_is_none_says_what_is_wrong(spoil, words, folder, tmp_path):
    for f in folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_backbone('blip', str(tmp_path), device='cpu')


@pytest.mark.parametrize(
    'pretrained, words',
    [
        ('default', "pretrained 'default' is not possible"),
        ('none', "pretrained 'none' is not possible"),
        ('/nowhere/at/all', 'is no folder, neither as a path nor in the store'),
    ],
)
def test_without_a_folder_the_error_says_what_to_get(pretrained, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_backbone('blip', pretrained)


def test_a_folder_of_the_store_is_found_by_its_name(folder, store):
    small_blip(store / 'store/myblip')
    assert load_backbone('blip', 'myblip', device='cpu').source == 'myblip/model.safetensors'


def test_without_the_package_the_error_names_it(tmp_path, monkeypatch):
    for f in ('config.json', 'model.safetensors', 'vocab.txt'):
        (tmp_path / f).write_bytes(b'{}')
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ImportError, match='pip install transformers'):
        load_backbone('blip', str(tmp_path))
