"Files of published weights whose tensors are of other kinds than a dense one with memory for each number."

import io
import zipfile
from types import SimpleNamespace

import pytest
import torch
from hostile import attack
from published_files import clip_tensors, use_small_rn50x4
from safetensors.torch import load_file, save

from cis_nb.backbones.conditional_vit import CondViT, ViTShape, read_condvit, write_condvit
from cis_nb.backbones.denoiser import Denoiser, DenoiserShape, read_denoiser, write_denoiser
from cis_nb.backbones.loading import load_backbone
from cis_nb.backbones.weights import BACKBONES
from cis_nb.methods.combiner import Combiner, export_combiner, read_published_combiner
from cis_nb.methods.pseudo_words import export_published, make_net, read_published_net

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures('store'),
    pytest.mark.filterwarnings('ignore:Validating sparse tensor invariants'),
]
WIDE = 10**6


def with_other_numbers(t) -> dict:  # name of a kind -> tensor
    "Tensors in place of `t` that are no weights."
    return {
        'expanded': torch.zeros((1,) * t.ndim).expand(t.shape),
        'expanded to a large width': torch.zeros((1,) * t.ndim).expand(WIDE, *t.shape[1:]),
        'one number': torch.tensor(1.0),
        'empty': torch.zeros((0, *t.shape[1:])),
        'empty and large': torch.zeros((0, WIDE, WIDE)).transpose(0, 2),
        'sparse': t.float().to_sparse(),
        'without memory': t.to('meta'),
        'complex': t.to(torch.complex64),
        'quarters': t.float().to(torch.float8_e4m3fn),
        'integers': t.to(torch.int64),
        'a matrix more': torch.zeros(2, 3, 4, 5, 6),
    }


def saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def packed(data: bytes) -> bytes:
    "The same file, compressed."
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, 'w', zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def kinds_of_tensors(entry: str, tensors: dict):
    "Changes of a .pt file with its tensors in `entry`: two tensors, each of every kind, and the whole file."

    def changes(data: bytes):
        names = [k for k, t in tensors.items() if t.ndim]
        for k in (names[0], names[-1]):
            for kind, t in with_other_numbers(tensors[k]).items():
                yield f'{k}: {kind}', saved({entry: tensors | {k: t}} if entry else tensors | {k: t})
        many = {f'more.{i}.num_batches_tracked': tensors[names[0]] for i in range(1000)}
        yield 'a thousand names of one tensor', saved({entry: tensors | many} if entry else tensors | many)
        large = tensors | {names[0]: torch.zeros(10**7)}
        yield 'compressed', packed(saved({entry: large} if entry else large))

    return changes


def attack_pt(path, entry: str, tensors: dict, read):
    "Attack a reader of .pt files; the valid file has its tensors in `entry`, at the top level if that is ''."
    path.write_bytes(saved({entry: tensors} if entry else tensors))
    kinds = kinds_of_tensors(entry, tensors)
    assert attack('weights', path, lambda: (read(path).state_dict(), {}), [kinds], places=False) == []


def exported(write, path) -> dict:
    "The tensors of a file that this project's exporter has written."
    write(path)
    return load_file(path)


@pytest.mark.parametrize('net, entry', [('phi', 'Phi'), ('mapper', 'state_dict_img2text')])
def test_mapping_networks(tmp_path, net, entry):
    phi = SimpleNamespace(phi=make_net(net, D=8, W=6, hidden=12), unit_input=False)
    tensors = exported(lambda path: export_published(phi, path), tmp_path / 'phi.safetensors')
    attack_pt(tmp_path / 'net.pt', entry, tensors, lambda path: read_published_net(path, net, 8, 6))


def test_combiners(tmp_path):
    net = Combiner(8, 6, 12)
    tensors = exported(lambda path: export_combiner(net, path), tmp_path / 'combiner.safetensors')
    attack_pt(tmp_path / 'net.pt', 'Combiner', tensors, lambda path: read_published_combiner(path, 8))


def test_clips(tmp_path, monkeypatch):
    use_small_rn50x4(monkeypatch)
    for name in {*BACKBONES} - {'rn50x4'}:  # a file is compared with all of them, some of them large
        monkeypatch.delitem(BACKBONES, name)
    read = lambda path: load_backbone('rn50x4', pretrained=str(path), device='cpu').model  # noqa: E731
    attack_pt(tmp_path / 'net.pt', 'CLIP', clip_tensors(), read)


def test_conditional_vits(tmp_path):
    net = CondViT(ViTShape(64, 16, 32, 1, 8).build())
    tensors = exported(lambda path: write_condvit(net, path), tmp_path / 'condvit.safetensors')
    attack_pt(tmp_path / 'net.pt', '', tensors, read_condvit)


def test_notes_of_conditional_vits(tmp_path):
    path = write_condvit(CondViT(ViTShape(64, 16, 32, 1, 8).build()), tmp_path / 'condvit.safetensors')

    def notes(data: bytes):
        tensors, about = load_file(path), dict(condition='category', insert_before='1', activation='quick_gelu')
        for name in about:
            for value in ('', 'x', '0', '-1', '1.5', '99', '9' * 5000):
                yield f'{name}: {value[:9]}', save(tensors, about | {name: value})

    read = lambda: (read_condvit(path).settings, {})  # noqa: E731
    assert attack('weights', path, read, [notes], places=False) == []


def test_denoisers(tmp_path):
    net = Denoiser(DenoiserShape(D=16, depth=2, heads=4, cross_heads=2, head_dim=8, text_width=12, mask_side=4))
    tensors = exported(lambda path: write_denoiser(net, path), tmp_path / 'denoiser.safetensors')
    attack_pt(tmp_path / 'net.pt', '', tensors, read_denoiser)
