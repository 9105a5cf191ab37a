"Published φ and mapping networks: names and shapes as published, other files, export."

import pytest
import torch
from safetensors.torch import save_file

from cis_nb.backbones.loading import load_backbone
from cis_nb.methods.combiner import export_combiner, published_combiner, read_published_combiner
from cis_nb.methods.pseudo_words import export_published, published_pseudo_word, read_published_net

PHI = {  # LinCIR and SEARLE over ViT-L
    'layers.0.weight': (3072, 768),
    'layers.0.bias': (3072,),
    'layers.3.weight': (3072, 3072),
    'layers.3.bias': (3072,),
    'layers.6.weight': (768, 3072),
    'layers.6.bias': (768,),
}
MAPPER = {  # Pic2Word over ViT-L
    'fc_out.weight': (768, 512),
    'fc_out.bias': (768,),
    'layers.0.0.weight': (512, 768),
    'layers.0.0.bias': (512,),
    'layers.1.0.weight': (512, 512),
    'layers.1.0.bias': (512,),
}
COMBINER = {  # GeneCIS and CLIP4Cir over RN50x4
    'text_projection_layer.weight': (2560, 640),
    'text_projection_layer.bias': (2560,),
    'image_projection_layer.weight': (2560, 640),
    'image_projection_layer.bias': (2560,),
    'combiner_layer.weight': (5120, 5120),
    'combiner_layer.bias': (5120,),
    'output_layer.weight': (640, 5120),
    'output_layer.bias': (640,),
    'dynamic_scalar.0.weight': (5120, 5120),
    'dynamic_scalar.0.bias': (5120,),
    'dynamic_scalar.3.weight': (1, 5120),
    'dynamic_scalar.3.bias': (1,),
}
tiny = load_backbone('tiny', device='cpu')


def tensors(shapes, prefix=''):
    g = torch.Generator().manual_seed(0)
    return {prefix + k: 0.02 * torch.randn(*s, generator=g) for k, s in shapes.items()}


def slow(net, t, x):
    "The networks as the facts describe them, without dropout."
    if net == 'phi':
        for k in ('layers.0', 'layers.3'):
            x = torch.nn.functional.gelu(x @ t[f'{k}.weight'].T + t[f'{k}.bias'])
        return x @ t['layers.6.weight'].T + t['layers.6.bias']
    for k in ('layers.0.0', 'layers.1.0'):
        x = (x @ t[f'{k}.weight'].T + t[f'{k}.bias']).relu()
    return x @ t['fc_out.weight'].T + t['fc_out.bias']


@pytest.mark.parametrize('net, shapes, inside', [('phi', PHI, 'Phi'), ('mapper', MAPPER, 'state_dict_img2text')])
@pytest.mark.parametrize('prefix', ['', 'module.'])
@pytest.mark.parametrize('ending', ['pt', 'safetensors'])
def test_published_files_are_read(tmp_path, net, shapes, inside, prefix, ending):
    file, t = tmp_path / f'net.{ending}', tensors(shapes)
    named = {prefix + k: v for k, v in t.items()}
    torch.save({inside: named, 'epoch': 3}, file) if ending == 'pt' else save_file(named, file)
    x = torch.randn(3, 768, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(read_published_net(file, net, 768, 768)(x), slow(net, t, x), atol=1e-5)


@pytest.mark.parametrize(
    'change, said',
    [
        (lambda t: t.pop('layers.3.bias'), 'net.pt: .* 1 missing: layers.3.bias'),
        (lambda t: t.update(more=torch.zeros(1)), '1 additional: more'),
        (lambda t: t.update({'layers.6.bias': torch.zeros(5)}), r'layers.6.bias \(5,\), needed \(768,\)'),
        (lambda t: (t.clear(), t.update(tensors(MAPPER))), 'these are not the weights of a phi'),
    ],
)
def test_other_files_are_named(tmp_path, change, said):
    t = tensors(PHI)
    change(t)
    torch.save(dict(Phi=t), tmp_path / 'net.pt')
    with pytest.raises(ValueError, match=said):
        read_published_net(tmp_path / 'net.pt', 'phi', 768, 768)


def test_a_pickle_that_runs_code_is_not_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / 'ran'), 'w'))

    torch.save(dict(Phi=Evil()), tmp_path / 'net.pt')
    with pytest.raises(ValueError, match='not opened because it can run code'):
        read_published_net(tmp_path / 'net.pt', 'phi', 768, 768)
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('ending', ['pt', 'safetensors'])
@pytest.mark.parametrize('method', ['lincir', 'searle', 'pic2word'])
def test_what_is_exported_is_read_again(tmp_path, method, ending):
    D, W = tiny.D, tiny.W
    phi = {k: tuple({3072: 4 * D, 768: D}[n] for n in s) for k, s in PHI.items()}
    phi |= {'layers.6.weight': (W, 4 * D), 'layers.6.bias': (W,)}
    mapper = MAPPER | {'layers.0.0.weight': (512, D), 'fc_out.weight': (W, 512), 'fc_out.bias': (W,)}
    save_file(tensors(mapper if method == 'pic2word' else phi), tmp_path / 'net.safetensors')
    m = published_pseudo_word(tmp_path / 'net.safetensors', method, tiny)
    again = published_pseudo_word(export_published(m, tmp_path / f'again.{ending}'), method, tiny)
    x = torch.randn(2, D)
    assert torch.equal(m.encode_query(x, ['is red', '']), again.encode_query(x, ['is red', '']))


def combined(t, x, e):
    "The Combiner of the facts, without dropout."

    def layer(name, v):
        return v @ t[f'{name}.weight'].T + t[f'{name}.bias']

    z = torch.cat([layer('text_projection_layer', e).relu(), layer('image_projection_layer', x).relu()], 1)
    s = layer('dynamic_scalar.3', layer('dynamic_scalar.0', z).relu()).sigmoid()
    v = layer('output_layer', layer('combiner_layer', z).relu())
    return torch.nn.functional.normalize(v + s * e + (1 - s) * x, dim=-1)


def test_the_published_combiner_is_read_and_exported(tmp_path):
    t = tensors(COMBINER)
    torch.save(t, tmp_path / 'combiner_best.pt')
    net = read_published_combiner(tmp_path / 'combiner_best.pt')
    assert sum(p.numel() for p in net.parameters()) == 59_003_521
    x, e = torch.randn(2, 3, 640, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(net(x, e), combined(t, x, e), atol=1e-5)
    again = read_published_combiner(export_combiner(net, tmp_path / 'again.safetensors'))
    assert torch.equal(again(x, e), net(x, e))
    with pytest.raises(ValueError, match=r'not the weights of a Combiner for D = 160: .* wrongly shaped'):
        published_combiner(tmp_path / 'again.safetensors', tiny)


def test_another_method_is_no_combiner(tmp_path):
    torch.save(dict(Phi=tensors(PHI)), tmp_path / 'phi.pt')
    with pytest.raises(ValueError, match='phi.pt: the file must hold tensors by name at its top level'):
        read_published_combiner(tmp_path / 'phi.pt')
    t = tensors(COMBINER)
    del t['dynamic_scalar.0.bias']
    torch.save(t, tmp_path / 'cut.pt')
    with pytest.raises(ValueError, match='1 missing: dynamic_scalar.0.bias'):
        read_published_combiner(tmp_path / 'cut.pt')
