"The denoiser: names and sizes of the released file, hand-computed parts, conditions that do not fit."

import math
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from cis_nb.backbones import denoiser as N
from cis_nb.methods.diffusion import cosine_alphas
from denoiser_files import released_file, released_shapes

SMALL = N.DenoiserShape(D=16, depth=2, heads=4, cross_heads=2, head_dim=8, text_width=12, mask_side=4)


def small(seed=0, **changes):
    "A small denoiser without gradients, and a batch of three queries."
    torch.manual_seed(seed)
    net = N.Denoiser(SMALL, **changes).eval().requires_grad_(False)
    conditions = dict(text=torch.randn(3, 5, 12), ref=torch.randn(3, 16), mask=(torch.rand(3, 4, 4) > 0.5).float())
    return net, torch.randn(3, 16), torch.tensor([0, 500, 999]), conditions


def near(a, b, eps=1e-5):
    torch.testing.assert_close(a, b, atol=eps, rtol=0)


@pytest.mark.parametrize('shape, size', [(N.RELEASED_DENOISER, 140_043_776), (N.PAPER_DENOISER, 158_524_928)])
def test_sizes_are_those_of_the_published_models(shape, size):
    with torch.device('meta'):
        assert sum(p.numel() for p in N.Denoiser(shape).parameters()) == size


def test_names_and_shapes_are_those_of_the_released_file():
    with torch.device('meta'):
        net = N.Denoiser(N.RELEASED_DENOISER)
    own = net.state_dict()
    found = {k: tuple(own[name].shape) for k, name in N.denoiser_names(net).items()}
    assert found == {k: s for k, s in released_shapes().items() if 'noise_scheduler' not in k}
    assert N.denoiser_shape(found, 'file') == N.RELEASED_DENOISER


@pytest.mark.parametrize('shared', [False, True])
def test_a_released_file_is_read(tmp_path, shared):
    given = released_file(tmp_path / 'model.safetensors', shared)
    net = N.read_denoiser(tmp_path / 'model.safetensors')
    assert net.shape == N.RELEASED_DENOISER and not net.training
    for published, own in N.denoiser_names(net).items():
        assert published not in given or torch.equal(net.state_dict()[own], given[published]), published
    q = 'model.net.transformer.layers.11.1.to_q.weight'
    assert torch.equal(net.blocks[11].cross.to_q.weight, given[q])


@pytest.mark.parametrize(
    'name, table, words',
    [
        ('alphas_cumprod', torch.linspace(1, 0, 1000), 'alphas_cumprod differs by 0.[0-9]+ from the schedule'),
        ('betas', torch.ones(7), r'another shape than \(1000,\): betas \(7,\)'),
    ],
)
def test_a_file_of_another_noise_schedule_is_refused(tmp_path, name, table, words):
    released_file(tmp_path / 'model.safetensors', True)
    tensors = load_file(tmp_path / 'model.safetensors')
    N.read_denoiser(tmp_path / 'model.safetensors', cosine_alphas())
    save_file(tensors | {f'model.noise_scheduler.{name}': table}, tmp_path / 'other.safetensors')
    with pytest.raises(ValueError, match=words):
        N.read_denoiser(tmp_path / 'other.safetensors', cosine_alphas())


def test_what_is_written_is_read_again(tmp_path):
    net, x, t, conditions = small()
    again = N.read_denoiser(N.write_denoiser(net, tmp_path / 'a.safetensors'))
    near(again(x, t, **conditions), net(x, t, **conditions), 1e-6)
    N.write_denoiser(again, tmp_path / 'b.safetensors')
    a, b = (load_file(tmp_path / f'{n}.safetensors') for n in 'ab')
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    'name, tensor, said',
    [
        ('net.transformer.norm.g', None, '1 missing: model.net.transformer.norm.g'),
        ('net.transformer.layers.0.0.rotary_emb.freqs', None, '1 missing: model.net.transformer.layers.0.0.rotary'),
        ('net.transformer.layers.1.2.1.weight', torch.ones(3, 2), r'2.1.weight \(3, 2\), needed \(128, 16\)'),
        ('net.self_cond.weight', torch.ones(2), '1 additional: model.net.self_cond.weight'),
        ('noise_scheduler.gammas', torch.ones(2), '1 additional: model.noise_scheduler.gammas'),
        ('net.transformer.layers.1.0.rotary_emb.freqs', torch.ones(4), 'must have the same frequencies'),
        ('net.to_text_embeds.0.weight', None, 'no denoiser: model.net.to_text_embeds.0.weight missing'),
        ('net.to_text_embeds.0.weight', torch.ones(16), 'missing or not a matrix'),
    ],
)
def test_faults_of_a_file_are_named(tmp_path, name, tensor, said):
    file = N.write_denoiser(small()[0], tmp_path / 'model.safetensors')
    tensors = load_file(file) | {f'model.{name}': tensor}
    save_file({k: v for k, v in tensors.items() if v is not None}, file)
    with pytest.raises(ValueError, match=said):
        N.read_denoiser(file)


def test_a_file_of_another_model_is_no_denoiser(tmp_path):
    save_file({'conv1.weight': torch.ones(2, 2)}, tmp_path / 'other.safetensors')
    with pytest.raises(ValueError, match='the file begins with conv1.weight'):
        N.read_denoiser(tmp_path / 'other.safetensors')
    (tmp_path / 'broken.safetensors').write_bytes(b'no tensors')
    with pytest.raises(ValueError, match='cannot be read as tensors'):
        N.read_denoiser(tmp_path / 'broken.safetensors')


def test_position_buckets_are_those_of_t5():
    t5 = pytest.importorskip('transformers.models.t5.modeling_t5').T5Attention
    for n in (1, 2, 3, 300):
        distance = torch.arange(n + 1)[None] - torch.arange(n)[:, None]
        assert torch.equal(N.position_buckets(n), t5._relative_position_bucket(distance, bidirectional=False))


def test_time_features_by_hand():
    found = N.time_features(torch.tensor([3]), 8)[0]
    angles = [3 * 10_000 ** (-k / 3) for k in range(4)]
    near(found, torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles]))


def test_the_stable_norm_divides_by_the_maximum_without_a_gradient_through_it():
    x = torch.tensor([[1.0, 4.0, 2.0]], requires_grad=True)
    N.GainNorm(3, stable=True)(x)[0, 1].backward()
    y = torch.tensor([[1.0, 4.0, 2.0]], requires_grad=True)
    F.layer_norm(y / 4, (3,))[0, 1].backward()
    near(x.grad, y.grad, 1e-6)
    near(N.GainNorm(3, stable=True)(-x.detach()), F.layer_norm(x.detach(), (3,)), 1e-4)  # the sign turns


def test_half_precision_has_a_larger_epsilon():
    x = torch.tensor([[0.01, -0.01, 0.0, 0.0]])
    near(N.GainNorm(4).half()(x.half()).float(), F.layer_norm(x, (4,), eps=1e-3), 1e-3)
    assert (N.GainNorm(4)(x) - F.layer_norm(x, (4,), eps=1e-3)).abs().max() > 0.5


def by_loops(net, x, t, tokens, read=None):
    "The network for one query, token by token and head by head."
    s, d = net.shape, net.shape.head_dim
    rows = [x, net.time_in(N.time_features(t[None], s.D))[0]]

    def attend(q, keys, values, extra):
        weights = torch.softmax(torch.stack([q @ k + e for k, e in zip(keys, extra)]), 0)
        return sum(w * v for w, v in zip(weights, values))

    def turn(v, position):
        v = v.clone()
        for i, f in enumerate(net.freqs.tolist()):
            a, b, angle = v[2 * i].item(), v[2 * i + 1].item(), position * f
            v[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            v[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return 4 * v / v.norm()

    for block in net.blocks:
        own, cross = block.attention, block.cross
        h = [own.norm(r) for r in rows]
        keys = [4 * own.null_kv[0] / own.null_kv[0].norm()]
        keys += [turn(own.to_kv(r)[:d], i) for i, r in enumerate(h)]
        values = [own.null_kv[1]] + [own.to_kv(r)[d:] for r in h]
        for i, r in enumerate(h):
            q = own.to_q(r).split(d)
            bias = [net.position_bias.weight[1 if (i, j) == (1, 0) else 0] for j in range(3)]
            heads = [attend(turn(q[n], i), keys, values, [b[n] for b in bias]) for n in range(s.heads)]
            rows[i] = rows[i] + own.to_out(torch.cat(heads))
        kept = [c for j, c in enumerate(tokens) if read is None or read[j]]
        w = s.cross_heads * d
        for i, r in enumerate(rows):
            q, heads = cross.to_q(cross.norm(r)).split(d), []
            for n in range(s.cross_heads):
                part = slice(n * d, (n + 1) * d)
                keys = [cross.null_kv[0]] + [cross.to_kv(c)[:w][part] for c in kept]
                values = [cross.null_kv[1]] + [cross.to_kv(c)[w:][part] for c in kept]
                heads.append(attend(q[n] / d**0.5, keys, values, [0] * len(keys)))
            rows[i] = r + cross.to_out(torch.cat(heads))
        rows = [r + block.feed(r) for r in rows]
    return net.out(net.norm_out(rows[0]))


@pytest.mark.parametrize('masked', [False, True])
def test_the_network_is_the_one_written_out_in_loops(masked):
    net, x, t, conditions = small()
    text_mask = torch.tensor([[True] * 5, [True, True, False, False, False], [False] * 5]) if masked else None
    tokens = net.condition_tokens(**conditions)
    found = net(x, t, **conditions, text_mask=text_mask)
    for i in range(3):
        read = text_mask[i].tolist() + [True, True] if masked else None
        near(found[i], by_loops(net, x[i], t[i], tokens[i], read))


def test_the_cache_of_a_query_serves_all_its_samples_and_steps():
    net, x, t, conditions = small()
    cache = net.conditions(**conditions)
    many = torch.randn(3, 4, 16)
    for step in (0, 999):
        found = net.denoise(many.flatten(0, 1), step, cache).unflatten(0, (3, 4))
        for s in range(4):
            near(found[:, s], net(many[:, s], torch.tensor([step] * 3), **conditions))


def test_no_reference_and_no_mask_are_zeros():
    net, x, t, conditions = small()
    zeros = dict(ref=torch.zeros(3, 16), mask=torch.zeros(3, 4, 4))
    near(net(x, t, conditions['text']), net(x, t, conditions['text'], **zeros), 0)
    near(net(x, t, **conditions), net(x, t, **conditions | dict(mask=conditions['mask'].bool())), 0)


def test_dropout_acts_in_training_only():
    net, x, t, conditions = small(dropout=0.5)
    assert torch.equal(net(x, t, **conditions), net(x, t, **conditions))
    net.train()
    assert not torch.equal(net(x, t, **conditions), net(x, t, **conditions))


def test_every_parameter_is_trained():
    net, x, t, conditions = small()
    net.requires_grad_(True)(x, t, **conditions).square().sum().backward()
    assert [k for k, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize(
    'changes, said',
    [
        (dict(text=torch.zeros(3, 5, 11)), r'text: must be a tensor \(any,any,12\).*got float32 \(3, 5, 11\)'),
        (dict(text=torch.zeros(3, 5, 12).long()), 'text: must be .* of floating-point values, got int64'),
        (dict(text=['a dress'] * 3), 'text: must be .*, got list'),
        (dict(ref=torch.zeros(2, 16)), r'reference: must be a tensor \(3,16\)'),
        (dict(mask=torch.zeros(3, 5, 4)), r'mask: must be a tensor \(3,4,4\)'),
        (dict(mask=torch.zeros(3, 4, 4).int()), r'mask: must be .*, got int32'),
        (dict(text_mask=torch.ones(3, 5)), r'text_mask: must be a tensor \(3,5\) of bool'),
        (dict(text_mask=torch.ones(3, 6, dtype=bool)), r'text_mask: must be a tensor \(3,5\) of bool'),
    ],
)
def test_conditions_that_do_not_fit_are_refused(changes, said):
    net, x, t, conditions = small()
    with pytest.raises(ValueError, match=said):
        net.conditions(**conditions | changes)


def test_rows_that_do_not_fit_the_queries_are_refused():
    net, x, t, conditions = small()
    for wrong in (torch.zeros(4, 16), torch.zeros(3, 15), torch.zeros(3, 1, 16)):
        with pytest.raises(ValueError, match=r'x: must be \(B\*S,16\) for B = 3 queries'):
            net.denoise(wrong, 0, net.conditions(**conditions))


@pytest.mark.parametrize('name, value', [('depth', 0), ('heads', 2.0), ('D', 15), ('head_dim', 2)])
def test_sizes_that_no_network_has_are_refused(name, value):
    with pytest.raises(ValueError, match=f'{name}: must be'):
        N.DenoiserShape(**{name: value})
