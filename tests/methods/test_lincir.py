"LinCIR: pseudo-words in published architectures, resumed training, defaults, traced towers."

import json
from pathlib import Path
import numpy as np
import pytest
import torch
from cis_nb.mining.corpora import Corpus
from cis_nb.backbones.tokenizer import tokenizer
from cis_nb.backbones.loading import load_backbone, text_backbone
from cis_nb.methods.lincir import SelfMasking
from cis_nb.methods.pseudo_words import Phi, PseudoWord, load_pseudo_word, save_phi
from cis_nb.backbones.weights import BACKBONES, build_text_model
from cis_nb.benchmarks.lrvsf import training_captions

torch.set_num_threads(1)


def words(ids):
    return tokenizer().decode([i for i in ids.tolist() if 0 < i < 49406]).replace('$', '[$]').strip()


def test_pictures_go_with_their_captions_where_some_are_left_out(store):
    from PIL import Image
    from cis_nb.data.image_sources import folder_images
    from cis_nb.data.augmentation import stored_size
    from cis_nb.backbones.features import image_features
    from cis_nb.methods.lincir import LinCIRConfig, corpus_of, caption_image_features

    (store / 'photos').mkdir()
    colors = ['red', 'green', 'blue', 'orange', 'purple', 'black', 'white', 'brown']
    with open(store / 'photos/captions.jsonl', 'w') as f:
        for i, c in enumerate(colors):
            Image.new('RGB', (64, 64), c).save(store / f'photos/{i}.png')
            f.write(
                json.dumps(
                    dict(
                        image=f'{i}.png',
                        split='train' if i < 6 else 'test',
                        captions=[f'a {c} cup', '$ $', ' ', f'a {c} hat'][: 4 if i % 2 else 2] if i != 4 else ['$'],
                    )
                )
                + '\n'
            )
    tiny, p = (
        load_backbone('tiny', device='cpu'),
        LinCIRConfig(corpus=str(store / 'photos'), parser='world'),
    )
    c = Corpus(corpus_of(p))
    said = [words(r) for r in c.whole(range(len(c)))]
    assert said == [
        f'a {x} {thing}'
        for i, x in enumerate(colors[:6])
        if i != 4
        for thing in (('cup', 'hat') if i % 2 else ('cup',))
    ]
    seen, pictures = (
        caption_image_features(tiny, p, len(c)),
        folder_images(store / 'photos', stored_size(tiny.image_size)),
    )
    own = image_features(tiny, [str(colors.index(t.split()[1])) for t in said], pictures.load, pictures.key)
    np.testing.assert_array_equal(seen, own.array[[own.index[str(colors.index(t.split()[1]))] for t in said]])


# ---- towers


def free_gb():  # of memory, as Linux counts it
    lines = Path('/proc/meminfo').read_text().splitlines() if Path('/proc/meminfo').exists() else []
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith('MemAvailable')), None)


@pytest.mark.parametrize(
    'name, width, layers', [('vit_b32', 512, 12), ('vit_l', 768, 12), ('vit_h', 1024, 24), ('vit_g', 1280, 32)]
)
@pytest.mark.e2e
def test_a_word_put_in_is_the_word_in_the_published_towers(name, width, layers):
    need = (
        sum(p.numel() for p in build_text_model(BACKBONES[name].config, device='meta').parameters()) * 4 / 2**30 + 1.5
    )  # the weights, and room to work
    if (free := free_gb()) is None or free < need:
        known = 'nobody knows how much' if free is None else f'{free:.1f} GB'
        pytest.skip(f'{name}: its text tower needs {need:.1f} GB of memory and {known} is free')
    b = text_backbone(name, 'cpu')
    assert (b.W, len(b.model.transformer.resblocks), b.context) == (width, layers, 77)

    def distance(one, other):
        return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())

    with torch.no_grad():
        boat = b.model.token_embedding.weight[b.tokenize(['boat'])[0, 1]][None]
        for prompt in ('$', 'a photo of $ that is red', '$ and $'):
            written, put_in = b.encode_text([prompt.replace('$', 'boat')]), b.encode_pseudo(prompt, boat)
            assert distance(put_in, written) < 1e-5, prompt
            assert distance(b.encode_pseudo(prompt, boat.roll(1, 1)), written) > 1e-3, (
                prompt
            )  # another vector says something else
        ids = torch.nn.functional.pad(b.tokenize(['a photo of boat that is red']), (0, 77))[:, :77]
        assert (
            distance(b.encode_pseudo('a photo of $ that is red', boat), b.model.encode_text(ids)) < 1e-5
        )  # the tower as open_clip runs it


# ---- training


def test_a_phi_of_another_backbone_names_both(store):
    tiny, other = load_backbone('tiny', device='cpu'), load_backbone('tiny_s', device='cpu')
    save_phi(store / 'run', PseudoWord(name='lincir', title='LinCIR', backbone=tiny, phi=Phi(tiny.D, tiny.W)))
    with pytest.raises(ValueError) as e:
        load_pseudo_word(store / 'run', 'cpu', other)
    for part in ('tiny', 'tiny_s', tiny.fingerprint, other.fingerprint):
        assert part in str(e.value)


@pytest.mark.e2e
def test_training_is_the_same_after_a_kill(store):
    from cis_nb.train import make_objective, settings
    from cis_nb.training.loop import train

    p = settings(
        dict(method='lincir', steps=6, batch_size=16, world_images=40, width=32, cirr=60, device='cpu', eval_every=2)
    )

    def run(folder, **kw):
        return train(
            make_objective(p),
            folder,
            **{k: getattr(p, k) for k in ('steps', 'batch_size', 'lr', 'seed', 'eval_every')},
            **kw,
        )

    run(store / 'whole')
    real = SelfMasking.loss

    def dies(self, batch):
        self.count = getattr(self, 'count', 0) + 1
        if self.count == 5:
            raise KeyboardInterrupt
        return real(self, batch)

    SelfMasking.loss = dies
    try:
        with pytest.raises(KeyboardInterrupt):
            run(store / 'killed')
    finally:
        SelfMasking.loss = real
    run(store / 'killed')
    a, b = ((store / f / 'phi.safetensors').read_bytes() for f in ('whole', 'killed'))
    assert a == b and json.loads((store / 'whole/phi.json').read_text())['method'] == 'lincir'


def test_the_default_for_a_published_backbone_is_lincir():
    from cis_nb.train import settings

    c = settings(dict(backbone='vit_h'))
    assert (c.method, c.pretrained) == ('lincir', 'default')


@pytest.mark.e2e
def test_a_traced_tower_gives_the_same_loss(store):
    from cis_nb.train import make_objective, settings

    p = dict(method='lincir', world_images=60, cirr=30, width=32, dropout=0.0, noise='none')

    def loss(**kw):
        o = make_objective(settings(p | kw))
        return float(o.loss(o.prepare(np.arange(8), np.random.default_rng(0))).detach())

    assert abs(loss(compile='eager') - loss()) < 1e-5
    with pytest.raises(ValueError, match="compile: 'fast' is not allowed: .*'inductor'"):
        settings(p | dict(compile='fast'))


def test_a_corpus_of_products_is_read_by_the_parser_of_the_world(store):
    from cis_nb.methods.lincir import LinCIRConfig, corpus_of

    corpus = Corpus(corpus_of(LinCIRConfig(corpus='products', products=6)))
    captions = training_captions('world', 6).read_text().splitlines()
    assert corpus.about['parser'].startswith('en_cis_world') and len(corpus) == len(captions)
    assert all(corpus.rows([i], 77)['run'].max() > 0 for i in range(len(corpus)))  # each has a keyword
    both = Corpus(corpus_of(LinCIRConfig(corpus='world + products', products=6, world_images=5)))
    assert len(both) > len(corpus)
