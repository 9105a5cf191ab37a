"SEARLE: vocabularies, phrases, textual inversion and its resumption, losses against slow references."

import importlib.util
import json
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st
from PIL import Image
from projects import DATA, ROOT
from cis_nb.backbones.clip import pad_to_ratio
from cis_nb.core.store import fingerprint
from cis_nb.methods import searle as S
from cis_nb.backbones.loading import load_backbone
from cis_nb.backbones.features import l2_normalize
from cis_nb.methods.pseudo_words import (
    Phi,
    PseudoWord,
    load_pseudo_word,
    pad_images,
    padding_of,
    save_phi,
    training_image_features,
)

torch.set_num_threads(1)
data = DATA
tiny = load_backbone('tiny', device='cpu')


# ---- vocabularies and phrases


@pytest.mark.parametrize(
    'name, content, words',
    [
        ('empty.txt', b'\n \n', 'no names'),
        ('binary.txt', bytes(range(128, 256)), 'cannot be read as a vocabulary'),
        ('odd.csv', b'Label,Name\na,b\n', 'DisplayName'),
        ('empty.csv', b'', 'cannot be read as a vocabulary'),
        ('wide.txt', 'cat\ndog\n'.encode('utf-16'), 'UTF-16: save it as UTF-8'),
        ('zero.txt', b'cat\ndo\0g\n', 'line 2: has a byte of zero.*: give a text file'),
        ('zero.csv', b'DisplayName\nca\0t\n', 'line 2: has a byte of zero'),
        ('twice.csv', b'DisplayName,DisplayName\na,b\n', 'line 1: needs DisplayName once'),
        ('long.csv', b'Label,DisplayName\na,cat\nb,dog, big\n', 'line 3: needs 2 cells'),
        ('short.csv', b'Label,DisplayName\na,cat\nb\n', 'line 3: needs 2 cells'),
        ('quote.csv', b'Label,DisplayName\na,"cat\nb,dog"\n', 'line 3: .* is a quote not closed'),
        ('quote2.csv', b'Label,DisplayName\na,"cat\nb,dog\n', 'cannot be read as a vocabulary'),
    ],
)
def test_a_vocabulary_that_is_none(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        S.read_concepts(str(tmp_path / name))


def test_names_come_once_and_without_dollars(tmp_path):
    (tmp_path / 'v.txt').write_text(' boat \nboat\nUS$ bill\n\ncat  tree\n', encoding='utf-8')
    assert S.read_concepts(str(tmp_path / 'v.txt')) == ['boat', 'US dollar bill', 'cat tree']


@pytest.mark.parametrize('mark', [b'', b'\xef\xbb\xbf'])
def test_numbers_and_words_for_nothing_are_names(tmp_path, mark):
    names = ['7', '1e5', 'None', 'null', 'NA', 'nan', 'true', 'pick-up, red', "'Nduja"]
    (tmp_path / 'v.txt').write_bytes(mark + '\n'.join(names).encode())
    rows = [f'{i},"{name}"' for i, name in enumerate(names)]
    (tmp_path / 'v.csv').write_bytes(mark + '\r\n'.join(['Label,DisplayName', *rows, '']).encode())
    for form in ('txt', 'csv'):
        assert S.read_concepts(str(tmp_path / f'v.{form}')) == names


@pytest.mark.data
def test_the_class_names_of_open_images():
    if not (data / 'openimages').is_dir():
        pytest.skip('CIS_DATA has no openimages')
    names = S.read_concepts('openimages/oidv7-class-descriptions.csv')
    assert 20_000 < len(names) <= 20_931 and 'Boat' in names


@given(st.lists(st.text('ab .\n$', max_size=30), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_a_phrase_is_one_line_without_dollars(texts):
    for t in map(S.one_line, texts):
        assert not {'\n', '$'} & set(t) and '..' not in t and t == t.strip()


def test_concepts_that_do_not_come_up_are_left_out_and_counted(tmp_path):
    said = {'cat': ['a photo of cat that sits'] * 2, 'the moon': ['a photo of the' + ' moon that shines', 'nothing']}
    S.write_phrases(tmp_path, list(said), lambda i, concept: said[concept])
    assert json.loads((tmp_path / 'phrases.json').read_text()) == {'cat': ['a photo of cat that sits'] * 2}
    assert json.loads((tmp_path / 'left_out.json').read_text()) == ['the moon']
    (tmp_path / 'other').mkdir()
    with pytest.raises(ValueError, match='no phrase names its concept'):
        S.write_phrases(tmp_path / 'other', ['cat'], lambda i, concept: ['nothing'])


def test_phrases_that_were_stopped_go_on(tmp_path):
    asked = []

    def say(i, concept):
        if len(asked) == 3:
            asked.append('stop')
            raise KeyboardInterrupt
        asked.append((i, concept))
        return [f'a photo of {concept} that sits']

    names = ['cat', 'boat', 'hat', 'cup', 'bus']
    with pytest.raises(KeyboardInterrupt):
        S.write_phrases(tmp_path, names, say, portion=2)
    S.write_phrases(tmp_path, names, say, portion=2)
    assert asked == [
        (0, 'cat'),
        (1, 'boat'),
        (2, 'hat'),
        'stop',
        (2, 'hat'),
        (3, 'cup'),
        (4, 'bus'),
    ]  # the first portion is not said again
    assert list(json.loads((tmp_path / 'phrases.json').read_text())) == names


def test_without_the_package_the_error_names_it():
    if importlib.util.find_spec('transformers'):
        pytest.skip('transformers is installed')
    with pytest.raises(ImportError, match='pip install transformers'):
        S.language_model_phrases('somewhere', 2)


def test_a_small_language_model_goes_on_with_concepts(tmp_path):
    transformers = pytest.importorskip('transformers')
    tokenizers = pytest.importorskip('tokenizers')
    words = 'a photo of cat boat that is red on the sea . <end>'.split()
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='<end>'))
    t.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token='<end>').save_pretrained(tmp_path)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(words), n_positions=40, n_embd=16, n_layer=1, n_head=2, eos_token_id=len(words) - 1
        )
    ).save_pretrained(tmp_path, safe_serialization=True)

    def say_all():
        say = S.language_model_phrases(tmp_path, 3)
        return {c: say(i, c) for i, c in enumerate(['cat', 'boat'])}

    said = say_all()
    assert {c: len(p) for c, p in said.items()} == {'cat': 3, 'boat': 3} and all(
        p.startswith(f'a photo of {c} that') for c, ps in said.items() for p in ps
    )
    assert said == say_all()


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_the_worlds_phrases_name_their_concept_and_gaps_replace_it(seed):
    rng = np.random.default_rng(seed)
    for c in S.read_concepts('world'):
        for p in S.grammar('world', c, 2, rng):
            assert p.startswith(f'a photo of {c} that is ')
            said, words, slow = p.split(), c.split(), []
            while said:  # word by word: *hat* is not meant in *that*, nor *ball* in *balloon*
                here = said[: len(words)] == words
                slow.append('$' if here else said[0])
                said = said[len(words) if here else 1 :]
            assert (
                S.insert_placeholder(p, c).split() == slow
                and '$' in slow
                and S.insert_placeholder(p, c, every=False).count('$') == 1
            )


# ---- losses and the search


@given(st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_counterparts_by_the_definition(n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, 4, generator=g), torch.randn(n, 4, generator=g)
    x, slow = l2_normalize(torch.cat([a, b])), []
    for i in range(2 * n):
        slow.append(
            -(x[i] @ x[(i + n) % (2 * n)] / 0.25)
            + torch.logsumexp(torch.stack([x[i] @ x[j] / 0.25 for j in range(2 * n) if j != i]), 0)
        )
    torch.testing.assert_close(S.distillation_loss(a, b), sum(slow) / len(slow), atol=1e-4, rtol=1e-4)


def some_pictures():
    return training_image_features(tiny, 'world', 60)


@pytest.mark.e2e
def test_a_found_word_means_its_picture_and_not_another(store):
    features = some_pictures()[:12]
    phrases = S.read_phrases(tiny, S.phrase_folder(n=4))
    near = S.nearest_concepts(features, S.concept_features(tiny, phrases.names), 5)
    words = S.invert(tiny, features, near, phrases, 60)
    with torch.no_grad():
        q = l2_normalize(tiny.encode_pseudo('a photo of $', words))
    assert (q @ l2_normalize(torch.from_numpy(features)).T).argmax(1).tolist() == list(range(12))
    torch.testing.assert_close(S.invert(tiny, features, near, phrases, 3), S.invert(tiny, features, near, phrases, 3))
    torch.testing.assert_close(
        S.invert(tiny, features[7:9], near[7:9], phrases, 8),
        S.invert(tiny, features, near, phrases, 8)[7:9],
        atol=1e-4,
        rtol=1e-3,
    )  # whoever else is searched for
    assert not any(p.requires_grad for p in tiny.parameters())


@pytest.mark.e2e
def test_a_stopped_search_goes_on_at_its_block(store, monkeypatch):
    features = some_pictures()
    phrases = S.read_phrases(tiny, S.phrase_folder(n=2))
    near = S.nearest_concepts(features, S.concept_features(tiny, phrases.names), 3)
    p, real, made = S.SearleConfig(search_steps=2, num_concepts_inversion=3), S.invert, []

    def dies(*a, **kw):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(a[1][0])
        return real(*a, **kw)

    monkeypatch.setattr(S, 'invert', dies)
    with pytest.raises(KeyboardInterrupt):
        S.inverted_tokens(tiny, 'pictures', features, phrases, near, p, block=16)
    monkeypatch.setattr(S, 'invert', lambda *a, **kw: made.append(a[1][0]) or real(*a, **kw))
    words = S.inverted_tokens(tiny, 'pictures', features, phrases, near, p, block=16)
    assert np.array_equal(made, features[::16])  # each block once
    assert words.shape == (len(features), tiny.W) and np.isfinite(words).all()


# ---- generators


def test_other_weights_of_a_generator_are_another_generator(store):
    (folder := store / 'gpt').mkdir()
    (folder / 'model.safetensors').write_text('one')
    one = fingerprint(S.phrase_sources('world', str(folder)))
    (folder / 'model.safetensors').write_text('another')
    assert fingerprint(S.phrase_sources('world', str(folder))) != one != fingerprint(S.phrase_sources('world', 'world'))


def test_the_two_grammars_speak_of_the_concept_and_differ():
    said = {g: S.grammar(g, 'boat', 40, np.random.default_rng(0)) for g in S.GRAMMARS}
    assert all(s.startswith('a photo of boat that ') for ss in said.values() for s in ss)
    assert not any(' is ' in s for s in said['beside']) and all(' is ' in s for s in said['world'])


# ---- target padding


def test_padding_adds_bars_as_published():
    "Sides after padding from SEARLE's rule: m = longer / 1.25, bars of int((m - shorter) / 2) on both sides."
    for size, wanted in {
        (500, 400): (500, 400),
        (500, 399): (500, 399),
        (500, 200): (500, 400),
        (300, 1000): (800, 1000),
    }.items():
        image = pad_to_ratio(Image.new('RGB', size, 'white'))
        assert image.size == wanted
        bars = np.asarray(image)[..., 0] == 0
        assert bars.mean() == pytest.approx(1 - np.prod(size) / np.prod(wanted)) and (bars == bars[::-1, ::-1]).all()


def test_a_padded_backbone_sees_the_ends_of_a_wide_image():
    wide = Image.new('RGB', (200, 50), 'white')
    wide.paste('red', (0, 0, 50, 50))
    whole, padded = tiny, pad_images(tiny, S.TARGET_PAD)
    assert torch.equal(whole.encode_image([wide]), whole.encode_image([Image.new('RGB', (200, 50), 'white')]))
    seen = padded.encode_image([wide])
    assert not torch.equal(seen, padded.encode_image([Image.new('RGB', (200, 50), 'white')]))
    assert torch.equal(seen, whole.encode_image([pad_to_ratio(wide)])) and padded.fingerprint != whole.fingerprint
    assert padding_of(padded) == 1.25 and padding_of(pad_images(padded, 0)) == 0
    assert pad_images(padded, 0).fingerprint == whole.fingerprint


def test_a_trained_word_keeps_its_padding(tmp_path):
    padded = pad_images(tiny, S.TARGET_PAD)
    method = PseudoWord(name='searle', title='SEARLE', backbone=padded, phi=Phi(tiny.D, tiny.W))
    save_phi(tmp_path, method)
    again = load_pseudo_word(tmp_path, backbone=tiny)
    assert padding_of(again.backbone) == 1.25 and again.backbone.fingerprint == padded.fingerprint


def test_a_backbone_without_padding_is_named():
    with pytest.raises(ValueError, match='target_pad: other cannot pad its images'):
        pad_images(SimpleNamespace(name='other'), S.TARGET_PAD)


def test_the_published_settings_pad():
    for name in 'lgh':
        given = yaml.safe_load((ROOT / f'params/paper/05_train.searle.vit_{name}.yaml').read_text())
        assert given['target_pad'] is True
