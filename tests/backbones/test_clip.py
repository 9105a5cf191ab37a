"CLIP: published architectures, any text, gradients of both attentions, fingerprints."

import copy
import open_clip
import pytest
import torch
from hypothesis import given, settings, strategies as st
from cis_nb.backbones.clip import golden_images, image_attention
from cis_nb.backbones.loading import load_backbone
from cis_nb.backbones.weights import BACKBONES

torch.set_num_threads(1)


@pytest.fixture(scope='session')
def b():
    return load_backbone('tiny', 'none', device='cpu')


# --- other towers, for real (random weights)


@pytest.mark.parametrize('name', ['vit_b32', 'rn50x4'])
@pytest.mark.e2e
def test_published_architectures_encode(name):
    b = load_backbone(name, 'none', device='cpu')
    texts = ['a boat', '', 'a photo of $ that is red', 'word ' * 100]
    with torch.no_grad():
        f, g = b.encode_image(golden_images(100)), b.encode_text(texts, batch_size=2)
        padded = open_clip.get_tokenizer(BACKBONES[name].config)(texts)
        torch.testing.assert_close(g, b.model.encode_text(padded), atol=1e-4, rtol=1e-4)
        boat = b.model.token_embedding.weight[b.tokenize(['boat'])[0, 1]][None]
        torch.testing.assert_close(
            b.encode_pseudo('a photo of $ that is red', boat),
            b.encode_text(['a photo of boat that is red']),
            atol=1e-4,
            rtol=1e-4,
        )
        if name == 'vit_b32':
            x = torch.stack([b.preprocess(i) for i in golden_images(100)])
            t = b.image_tower.tokens(x)
            for block in b.image_tower.blocks:
                t = block(t)
            torch.testing.assert_close(b.image_tower.head(t), f, atol=1e-4, rtol=1e-4)
            assert image_attention(b.image_tower, x[:1], 0).shape == (1, 12, 50, 50)
    assert f.shape == (3, b.D) and g.shape == (4, b.D) and b.truncated == 1
    assert b.record['activation'] == 'quick_gelu' and b.record['parameters'] == sum(
        p.numel() for p in b.model.parameters()
    )


# --- texts of any kind


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(max_size=200) | st.sampled_from(['', '$', '* $', '<end_of_text> a', 'boat ' * 60, '\x00', '\ud800']),
        min_size=1,
        max_size=6,
    )
)
def test_any_text_is_encoded_as_if_padded(b, texts):
    ids = b.tokenize(texts)
    assert ids.shape[1] <= b.context and ((ids == 49407).sum(1) == 1).all()
    full = torch.zeros(len(ids), b.context, dtype=torch.long)
    full[:, : ids.shape[1]] = ids
    with torch.no_grad():
        torch.testing.assert_close(b.encode_text(texts, batch_size=2), b.model.encode_text(full), atol=1e-5, rtol=1e-4)


def test_plain_and_fused_attention_have_the_same_gradients(b):
    x = torch.stack([b.preprocess(i) for i in golden_images()])
    grads = []
    for f in (lambda: b.encode_image(x), lambda: b.model.encode_image(x)):
        b.zero_grad()
        f().square().sum().backward()
        grads.append(b.model.visual.trunk.blocks[0].attn.qkv.weight.grad.clone())
    b.zero_grad(set_to_none=True)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4 * grads[0].abs().max().item())


def test_training_changes_the_fingerprint(b):
    c = copy.deepcopy(b)
    opt = torch.optim.AdamW(c.parameters(), fused=True)
    before = c.fingerprint
    c.encode_text(['a boat', 'a cat']).sum().backward()
    opt.step()
    assert c.fingerprint != before and b.fingerprint == before
