"Files with the names and shapes of the released CompoDiff denoiser, random values in them."

import torch
from safetensors.torch import save_file

from cis_nb.methods.diffusion import cosine_alphas

TABLES = (
    'betas alphas_cumprod alphas_cumprod_prev sqrt_alphas_cumprod sqrt_one_minus_alphas_cumprod '
    'log_one_minus_alphas_cumprod sqrt_recip_alphas_cumprod sqrt_recipm1_alphas_cumprod posterior_variance '
    'posterior_log_variance_clipped posterior_mean_coef1 posterior_mean_coef2 p2_loss_weight'
).split()


def layers(prefix: str, n: int) -> dict:
    "The three linear maps of a time or mask network."
    shapes = {f'{prefix}.net.0.0.weight': (1536, n), f'{prefix}.net.0.0.bias': (1536,)}
    shapes |= {f'{prefix}.net.1.0.weight': (1536, 1536), f'{prefix}.net.1.0.bias': (1536,)}
    return shapes | {f'{prefix}.net.2.weight': (768, 1536), f'{prefix}.net.2.bias': (768,)}


def released_shapes() -> dict:
    "Names and shapes of the released file, written out."
    shapes = {'net.to_text_embeds.0.weight': (768, 1280), 'net.to_text_embeds.0.bias': (768,)}
    shapes |= layers('net.to_time_embeds.0.1', 768) | layers('net.to_mask_embeds.1', 4096)
    shapes |= {'net.transformer.rel_pos_bias.relative_attention_bias.weight': (32, 16)}
    shapes |= {'net.transformer.norm.g': (768,), 'net.transformer.project_out.weight': (768, 768)}
    block = {'0.null_kv': (2, 64), '0.norm.g': (768,), '0.to_q.weight': (1024, 768), '0.to_kv.weight': (128, 768)}
    block |= {'0.rotary_emb.freqs': (16,), '0.to_out.0.weight': (768, 1024), '0.to_out.1.g': (768,)}
    block |= {'1.null_kv': (2, 64), '1.norm.g': (768,), '1.to_q.weight': (512, 768), '1.to_kv.weight': (1024, 768)}
    block |= {'1.to_out.0.weight': (768, 512), '1.to_out.1.g': (768,)}
    block |= {'2.0.g': (768,), '2.1.weight': (6144, 768), '2.5.weight': (768, 3072)}
    shapes |= {f'net.transformer.layers.{i}.{k}': s for i in range(12) for k, s in block.items()}
    shapes |= {f'noise_scheduler.{name}': (1000,) for name in TABLES}
    return {f'model.{k}': s for k, s in shapes.items()}


def released_file(path, shared: bool = False, seed: int = 0) -> dict:
    """A file of random values, but for the noise levels; `shared` has the rotary frequencies in the first block only,
    else all have them."""
    g = torch.Generator().manual_seed(seed)
    tensors = {k: 0.02 * torch.randn(s, generator=g) for k, s in released_shapes().items()}
    tensors['model.noise_scheduler.alphas_cumprod'] = cosine_alphas().float()
    first = 'model.net.transformer.layers.0.0.rotary_emb.freqs'
    for k in [k for k in tensors if k.endswith('rotary_emb.freqs')]:
        tensors[k] = tensors[first].clone()
        if shared and k != first:
            del tensors[k]
    save_file(tensors, path)
    return tensors
