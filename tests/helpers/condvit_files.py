"Files with the names and shapes of published CondViT weights, random values in them."

import torch
from safetensors.torch import save_file


def published_shapes(patch: int, categories: bool) -> dict:
    "Names and shapes of a published ViT-B model, written out."
    tokens = (224 // patch) ** 2 + 1
    shapes = dict(class_embedding=(768,), positional_embedding=(tokens, 768), logit_scale=(), proj=(768, 512))
    shapes |= {'c_pos_embedding': (1, 768), 'conv1.weight': (768, 3, patch, patch)}
    shapes |= {f'{norm}.{part}': (768,) for norm in ('ln_pre', 'ln_post') for part in ('weight', 'bias')}
    block = {'attn.in_proj_weight': (2304, 768), 'attn.in_proj_bias': (2304,), 'attn.out_proj.weight': (768, 768)}
    block |= {'attn.out_proj.bias': (768,), 'mlp.c_fc.weight': (3072, 768), 'mlp.c_fc.bias': (3072,)}
    block |= {'mlp.c_proj.weight': (768, 3072), 'mlp.c_proj.bias': (768,)}
    block |= {f'{norm}.{part}': (768,) for norm in ('ln_1', 'ln_2') for part in ('weight', 'bias')}
    shapes |= {f'transformer.resblocks.{i}.{k}': s for i in range(12) for k, s in block.items()}
    return shapes | ({'c_embedding.weight': (10, 768)} if categories else {})


def random_file(path, shapes, seed=0):
    "A file of random values with these names and shapes."
    g = torch.Generator().manual_seed(seed)
    tensors = {k: 0.02 * torch.randn(s, generator=g) for k, s in shapes.items()}
    if path.suffix == '.pt':
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return tensors
