"The conditional ViT: sizes and token order of the published models, insertion depths, conditions of the wrong kind."

import re

import pytest
import timm
import torch
from open_clip.factory import get_model_config
from open_clip.model import _build_vision_tower
from safetensors.torch import load_file, save_file
from cis_nb import train as T
from cis_nb.backbones import conditional_vit as V
from cis_nb.backbones.loading import load_backbone
from cis_nb.backbones.weights import build_model
from cis_nb.methods.condvit import CondViTPlugin
from condvit_files import published_shapes


@pytest.fixture(scope='module')
def tiny():
    return load_backbone('tiny', device='cpu')


def small_vit(layers=3, seed=0):
    "A ViT of open_clip with random weights: 64 pixels, 16 patches."
    torch.manual_seed(seed)
    return V.ViTShape(128, 16, 64, layers, 32).build().eval()


@pytest.mark.parametrize('patch, plain', [(32, 87_849_217), (16, 86_192_641)])
def test_sizes_are_those_of_the_published_models(patch, plain):
    for condition, more in (('none', 0), ('category', 8_448), ('text', 768)):
        with torch.device('meta'):
            visual = build_model(f'ViT-B-{patch}-quickgelu', device='meta').visual
            net = V.CondViT(visual, condition, text_width=768)
        assert sum(p.numel() for p in net.parameters()) == plain + more
        names = {k: tuple(net.state_dict()[own].shape) for k, own in V.checkpoint_names(net).items()}
        if condition != 'none':
            assert names == published_shapes(patch, condition == 'category')
        if condition == 'category':
            tokens = [t.shape[1] for t in V.block_inputs(net, torch.empty(2, 3, 224, 224, device='meta'))]
            asked = V.block_inputs(net, torch.empty(2, 3, 224, 224, device='meta'), torch.tensor([0, 1], device='meta'))
            assert set(tokens) == {(224 // patch) ** 2 + 1}
            assert [t.shape[1] for t in asked] == [tokens[0] + 1] * 12 + [tokens[0]]


def test_the_categories_are_in_the_published_order():
    order = 'Bags, Feet, Hands, Head, Lower Body, Neck, Outwear, Upper Body, Waist, Whole Body'
    assert ', '.join(V.LRVSF_CATEGORIES) == order
    net = V.CondViT(small_vit())
    assert V.category_numbers(net, ['Bags', 'Whole Body', 'Outwear']).tolist() == [0, 9, 6]


def test_the_condition_is_the_last_token_with_its_position_in_front_of_the_first_norm():
    visual, x = small_vit(), torch.randn(2, 3, 64, 64)
    net = V.CondViT(visual).eval()
    with torch.no_grad():
        patches = visual.conv1(x).flatten(2).mT
        tokens = torch.cat([visual.class_embedding.expand(2, 1, -1), patches], 1) + visual.positional_embedding
        condition = net.c_embedding.weight[[3, 8]] + net.c_pos_embedding
        by_hand = visual.ln_pre(torch.cat([tokens, condition[:, None]], 1))
        first, *_ = V.block_inputs(net, x, torch.tensor([3, 8]))
        torch.testing.assert_close(first, by_hand, atol=1e-6, rtol=0)
        feature = visual.ln_post(visual.transformer(by_hand)[:, 0]) @ visual.proj
        torch.testing.assert_close(net(x, torch.tensor([3, 8])), feature, atol=1e-5, rtol=0)


@pytest.mark.parametrize('condition', ['category', 'text', 'none'])
def test_without_a_condition_it_is_the_vit(condition, tiny):
    visual, x = small_vit(), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        net = V.CondViT(visual, condition, text_width=20).eval()
        torch.testing.assert_close(net(x), visual(x), atol=1e-6, rtol=0)
        net = V.conditional_vit(tiny, condition=condition, text_width=20).eval()
        torch.testing.assert_close(net(x), tiny.encode_image(x), atol=1e-6, rtol=0)


SMALL = {  # how a family of open_clip is built here: changes of its configuration, and of its trunk in timm
    'ViT-B-32': (dict(width=128, layers=2, patch_size=16, image_size=64), {}),
    'ViT-L-14-CLIPA': (dict(width=128, layers=2, patch_size=16, image_size=64), {}),  # mean of the patches
    'coca_ViT-B-32': (dict(width=128, layers=2, patch_size=16, image_size=64), {}),  # attention pooling
    'ViT-B-16-SigLIP': ({}, dict(embed_dim=64, depth=2, num_heads=2)),  # attention pooling, no class token, no head
    'MobileCLIP-B': ({}, dict(depth=2)),  # convolutions in front of the blocks, the head in the trunk
    'ViTamin-S': ({}, {}),
    'vit_medium_patch16_gap_256': ({}, dict(depth=2)),  # mean of the patches
}
CLOSED = dict(
    convnext_base='ConvNeXt',
    swin_base_patch4_window7_224='SwinTransformer',
    vit_relpos_medium_patch16_cls_224='VisionTransformerRelPos',
    RN50='ModifiedResNet',
)
CLOSED |= {'EVA02-B-16': r'Eva \(eva02_base', 'PE-Core-T-16-384': 'Eva', 'MobileCLIP-S1': 'FastVit'}


def tower_of(name, monkeypatch, change=None, trunk=None):
    "The image tower of a model of open_clip with random weights."
    cfg = get_model_config(name)
    vision = cfg['vision_cfg'] | dict(timm_model_pretrained=False) | (change or {})
    whole = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda *a, **kw: whole(*a, **kw | (trunk or {})))
    visual = _build_vision_tower(cfg['embed_dim'], vision, cfg.get('quick_gelu', False)).eval()
    visual.preprocess_cfg = dict(size=vision.get('image_size', 224))
    return visual


@pytest.mark.parametrize('name', SMALL)
def test_every_plain_vit_of_open_clip_can_be_conditioned(name, monkeypatch):
    torch.manual_seed(0)
    visual = tower_of(name, monkeypatch, *SMALL[name])
    net, side = V.CondViT(visual).eval(), visual.preprocess_cfg['size']
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        plain = visual(x)[0] if isinstance(visual(x), tuple) else visual(x)
        torch.testing.assert_close(net(x), plain, atol=1e-6, rtol=1e-5)
        assert net.D == plain.shape[1]
    asked = net(x, torch.tensor([3, 8]))
    asked.sum().backward()
    moved = net.c_embedding.weight.grad.abs().sum(1) > 0
    assert moved.nonzero().flatten().tolist() == [3, 8] and not torch.equal(asked, plain)


@pytest.mark.parametrize('name', CLOSED)
def test_a_tower_whose_blocks_need_more_than_tokens_is_refused(name, monkeypatch):
    with torch.device('meta'):
        visual = tower_of(name, monkeypatch)
    with pytest.raises(ValueError, match=f'a {CLOSED[name]}.* has no blocks that can be run .* such as ViT-B-16'):
        V.CondViT(visual)


@pytest.mark.parametrize('depth', [1, 2, 3])
def test_every_depth(depth):
    "Blocks before the insertion do not see the condition; the gradient reaches it at every depth."
    net, x, c = V.CondViT(small_vit(), insert_before=depth).eval(), torch.randn(2, 3, 64, 64), torch.tensor([0, 5])
    with torch.no_grad():
        asked, plain = list(V.block_inputs(net, x, c)), list(V.block_inputs(net, x))
    assert [a.shape[1] - p.shape[1] for a, p in zip(asked, plain)] == [int(k >= depth) for k in (1, 2, 3)] + [0]
    for k, (a, p) in enumerate(zip(asked, plain), 1):
        assert torch.equal(a[:, :17], p) == (k <= depth)
    net(x, c).sum().backward()
    assert net.c_embedding.weight.grad[[0, 5]].abs().min() > 0 and net.c_embedding.weight.grad[1:5].abs().max() == 0


@pytest.mark.parametrize('depth', [0, 4, -1])
def test_a_depth_that_the_tower_does_not_have(depth):
    with pytest.raises(ValueError, match=f'insert_before: must be from 1 to 3, .* got {depth}'):
        V.CondViT(small_vit(), insert_before=depth)
    if depth == 4:
        given = dict(method='condvit', backbone='tiny_xs', pretrained='default', insert_before=9, samples=40)
        config = T.settings(given | dict(device='cpu'))
        with pytest.raises(ValueError, match='insert_before: must be from 1 to 4'):
            T.make_objective(config)


def test_a_depth_is_refused_before_products_are_drawn(monkeypatch):
    monkeypatch.setattr(CondViTPlugin, 'products', lambda *a: pytest.fail('products were drawn'))
    given = dict(method='condvit', backbone='tiny_xs', pretrained='default', insert_before=99)
    config = T.settings(given | dict(device='cpu'))
    with pytest.raises(ValueError, match='insert_before: must be from 1 to 4, .* got 99'):
        T.train_or_load(config)


def test_a_resnet_cannot_be_conditioned():
    with pytest.raises(ValueError, match='ModifiedResNet has no blocks'):
        V.CondViT(build_model('RN50x4-quickgelu', device='meta').visual)


def test_a_condition_of_the_other_kind():
    x, numbers, sentences = torch.randn(2, 3, 64, 64), torch.tensor([0, 1]), torch.randn(2, 20)
    category, text = V.CondViT(small_vit()), V.CondViT(small_vit(), 'text', text_width=20)
    with pytest.raises(
        ValueError, match=r'category numbers \(2,\), got float32 \(2, 20\); sentence embeddings are for'
    ):
        category(x, sentences)
    with pytest.raises(ValueError, match=r'sentence embeddings \(2,20\), got int64 \(2,\); category numbers are for'):
        text(x, numbers)
    with pytest.raises(ValueError, match=r'sentence embeddings \(2,20\), got float32 \(2, 7\)'):
        text(x, torch.randn(2, 7))
    with pytest.raises(ValueError, match='this ViT reads none'):
        V.CondViT(small_vit(), 'none')(x, numbers)
    with pytest.raises(ValueError, match=r'category numbers \(2,\), got int64 \(3,\)'):
        category(x, torch.tensor([0, 1, 2]))


def test_a_file_that_fits_no_kind_of_model_names_the_missing_keys(tmp_path):
    file = V.write_condvit(V.CondViT(small_vit()), tmp_path / 'noted.safetensors')
    tensors = load_file(file)
    del tensors['c_embedding.weight']
    save_file(tensors, tmp_path / 'silent.safetensors')
    with pytest.raises(ValueError, match=r'silent.*c_embedding.weight \(a model by category\) and c_proj.weight'):
        V.read_condvit(tmp_path / 'silent.safetensors')
    save_file(tensors, file, metadata=dict(condition='category'))
    with pytest.raises(ValueError, match='noted.*1 missing: c_embedding.weight'):
        V.read_condvit(file)
    save_file(tensors, file, metadata=dict(condition='words'))
    with pytest.raises(ValueError, match="condition is 'words': input should be 'category', 'text' or 'none'"):
        V.read_condvit(file)


@pytest.mark.parametrize('width', [20, 128])
def test_a_text_model_is_read_back_with_and_without_a_projection(width, tmp_path):
    net = V.CondViT(small_vit(), 'text', text_width=width)
    again = V.read_condvit(V.write_condvit(net, tmp_path / 'text.safetensors'))
    assert (again.condition, again.settings['text_width'], hasattr(again, 'c_proj')) == ('text', width, width != 128)


@pytest.mark.parametrize('names', [('b', 'a', 'c'), tuple(reversed(V.LRVSF_CATEGORIES))])
def test_own_categories_and_preprocessing_are_read_back(names, tmp_path):
    visual = small_vit()
    visual.preprocess_cfg |= dict(mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 0.5))
    again = V.read_condvit(V.write_condvit(V.CondViT(visual, categories=names), tmp_path / 'own.safetensors'))
    assert again.categories == names and V.category_numbers(again, names).tolist() == list(range(len(names)))
    read = again.tower.preprocessor
    assert (list(read.mean), list(read.std)) == ([0.5] * 3, [0.25, 0.5, 0.5])


@pytest.mark.parametrize(
    'about', [dict(categories='bags'), dict(categories='[1]'), dict(preprocessing='{"mean": [1]}')]
)
def test_damaged_notes_of_categories_or_preprocessing_are_named(about, tmp_path):
    file = V.write_condvit(V.CondViT(small_vit()), tmp_path / 'noted.safetensors')
    save_file(load_file(file), file, metadata=about)
    with pytest.raises(ValueError, match=f'noted.safetensors: its notes.*{min(about)}.*write the file again'):
        V.read_condvit(file)


def test_a_published_text_model_has_neither_table_nor_projection():
    shapes = published_shapes(16, False)
    assert V.checkpoint_condition(shapes, V.CheckpointNotes(), 768, 'x') == 'text'
    assert V.checkpoint_condition(published_shapes(16, True), V.CheckpointNotes(), 768, 'x') == 'category'
    assert (
        V.checkpoint_condition(
            {k: s for k, s in shapes.items() if k != 'c_pos_embedding'}, V.CheckpointNotes(), 768, 'x'
        )
        == 'none'
    )


@pytest.fixture(scope='module')
def small_file(tmp_path_factory):
    "A small model by text, as a file: 3 blocks, width 128, 17 tokens."
    net = V.CondViT(small_vit(), 'text', text_width=20)
    return V.write_condvit(net, tmp_path_factory.mktemp('condvit') / 'small.safetensors')


@pytest.mark.parametrize(
    'key, shape, needed',
    [
        ('proj', (), r'\(128, D\)'),
        ('proj', (32,), r'\(128, D\)'),
        ('positional_embedding', (), r'\(tokens, 128\)'),
        ('c_proj.weight', (), r'\(128, C\)'),
        ('conv1.weight', (), r'\(width, 3, patch, patch\)'),
        ('conv1.weight', (32, 3, 16, 16), r'\(width, 3, patch, patch\) with a width that is a multiple of 64'),
        ('conv1.weight', (128, 3, 16, 8), r'\(width, 3, patch, patch\)'),
        ('conv1.weight', (128, 1, 16, 16), r'\(width, 3, patch, patch\)'),
    ],
)
def test_a_tensor_whose_shape_means_no_vit_is_named(small_file, tmp_path, key, shape, needed):
    file = tmp_path / 'odd.safetensors'
    save_file(load_file(small_file) | {key: torch.zeros(shape)}, file)
    with pytest.raises(
        ValueError, match=rf'odd.safetensors: no CondViT: {re.escape(f"{key} has the shape {shape}")}; ne.*{needed}'
    ):
        V.read_condvit(file)


def test_a_tensor_without_numbers_is_named(small_file, tmp_path):
    save_file(load_file(small_file) | {'conv1.weight': torch.zeros(128, 3, 0, 0)}, tmp_path / 'odd.safetensors')
    with pytest.raises(
        ValueError, match=r'odd.safetensors: conv1.weight is not a dense tensor .*shape \(128, 3, 0, 0\)'
    ):
        V.read_condvit(tmp_path / 'odd.safetensors')


@pytest.mark.parametrize(
    'left_out, added, fault',
    [
        (r'nothing', 'transformer.resblocks.3.ln_1.weight', r'1 additional: transformer.resblocks.3.ln_1.weight$'),
        (r'nothing', 'transformer.resblocks.12.ln_1.weight', r'1 additional: transformer.resblocks.12.ln_1.weight$'),
        (r'nothing', 'transformer.resblocks.x.ln_1.weight', r'1 additional: transformer.resblocks.x.ln_1.weight$'),
        (r'.*resblocks.2.ln_1.weight', '', r'1 missing: transformer.resblocks.2.ln_1.weight$'),
        (r'.*resblocks.1..*', '', r'12 missing: transformer.resblocks.1.ln_1.weight, [^;]*$'),
    ],
)
def test_a_tensor_of_a_block_that_is_missing_or_additional_is_named_alone(small_file, tmp_path, left_out, added, fault):
    tensors = {k: t for k, t in load_file(small_file).items() if not re.fullmatch(left_out, k)}
    save_file(tensors | ({added: torch.zeros(128)} if added else {}), tmp_path / 'odd.safetensors')
    with pytest.raises(ValueError, match=rf'odd.safetensors: not the tensors of a CondViT [^:]*: {fault}'):
        V.read_condvit(tmp_path / 'odd.safetensors')
