"The tensors of the published files by name and shape, as their publishers' programs write them."

import open_clip
import torch

from cis_nb.backbones.weights import BACKBONES, Weights

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


def residual_block(name: str, inside: int, outside: int, first: bool) -> dict:
    "A bottleneck of CLIP's ResNet: `inside` channels come in, `outside` in the middle, four times that go out."
    convolutions = [(outside, inside, 1, 1), (outside, outside, 3, 3), (4 * outside, outside, 1, 1)]
    found = {}
    for i, shape in enumerate(convolutions, 1):
        found |= {f'{name}.conv{i}.weight': shape} | batch_norm(f'{name}.bn{i}', shape[0])
    if first:
        found |= {f'{name}.downsample.0.weight': (4 * outside, inside, 1, 1)}
        found |= batch_norm(f'{name}.downsample.1', 4 * outside)
    return found


def batch_norm(name: str, n: int) -> dict:
    "Without `num_batches_tracked`, which OpenAI's weights do not have."
    return {f'{name}.{part}': (n,) for part in ('weight', 'bias', 'running_mean', 'running_var')}


def text_block(name: str, w: int) -> dict:
    matrices = {
        'attn.in_proj_': (3 * w, w),
        'attn.out_proj.': (w, w),
        'mlp.c_fc.': (4 * w, w),
        'mlp.c_proj.': (w, 4 * w),
    }
    found = {f'{name}.{k}weight': shape for k, shape in matrices.items()}
    found |= {f'{name}.{k}bias': shape[:1] for k, shape in matrices.items()}
    return found | {f'{name}.ln_{i}.{part}': (w,) for i in (1, 2) for part in ('weight', 'bias')}


def resnet_clip(D: int, width: int, blocks: tuple, size: int, W: int, layers: int) -> dict:  # name -> shape
    "OpenAI's names of a CLIP with a ResNet, which its fine-tuned copies keep."
    stem = [(width // 2, 3, 3, 3), (width // 2, width // 2, 3, 3), (width, width // 2, 3, 3)]
    found = dict(logit_scale=(), positional_embedding=(77, W), text_projection=(W, D))
    found |= {'token_embedding.weight': (49408, W), 'ln_final.weight': (W,), 'ln_final.bias': (W,)}
    for i in range(layers):
        found |= text_block(f'transformer.resblocks.{i}', W)
    for i, shape in enumerate(stem, 1):
        found |= {f'visual.conv{i}.weight': shape} | batch_norm(f'visual.bn{i}', shape[0])
    inside = width
    for i, n in enumerate(blocks):
        for k in range(n):
            found |= residual_block(f'visual.layer{i + 1}.{k}', inside, width << i, k == 0)
            inside = 4 * (width << i)
    found |= {'visual.attnpool.positional_embedding': ((size // 32) ** 2 + 1, inside)}
    for name, n in dict(q_proj=inside, k_proj=inside, v_proj=inside, c_proj=D).items():
        found |= {f'visual.attnpool.{name}.weight': (n, inside), f'visual.attnpool.{name}.bias': (n,)}
    return found


def tensors(shapes, prefix=''):
    g = torch.Generator().manual_seed(0)
    return {prefix + k: 0.02 * torch.randn(s, generator=g) for k, s in shapes.items()}


SMALL_RESNET = dict(D=16, width=8, blocks=(1, 2, 1, 1), size=64, W=32, layers=2)


def use_small_rn50x4(monkeypatch):
    "The name `rn50x4` means a small ResNet here."
    vision = dict(image_size=64, layers=SMALL_RESNET['blocks'], width=8)
    text = dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=2)
    config = dict(embed_dim=16, quick_gelu=True, vision_cfg=vision, text_cfg=text)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'small-resnet', config)
    row = Weights('small-resnet', 'openai', 'someone/demo', 0.001, 16, 32, 64, 'quick_gelu')
    monkeypatch.setitem(BACKBONES, 'rn50x4', row)


def clip_tensors(prefix=''):
    "Half-precision numbers of the small ResNet; variances are positive."
    found = tensors(resnet_clip(**SMALL_RESNET), prefix)
    return {k: (t.abs() + 0.5 if k.endswith('running_var') else t).half() for k, t in found.items()}
