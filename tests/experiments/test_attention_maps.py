"Maps finer than the patches: places, shifts, components."

import numpy as np
import pandas as pd
import pytest
import torch

from cis_nb.backbones.conditional_vit import CondViT, GalleryTower, ViTShape
from cis_nb.experiments.attention_maps import (
    SubPatchShifts,
    class_attention,
    patch_geometry,
    pointing_leads,
    pointing_note,
    pointing_table,
    token_component,
)
from cis_nb.experiments.comparison import verdict_in_words
from cis_nb.methods.condvit import CondViTMethod
from cis_nb.world.lrvsf import drawn_image, split_products, worn_address


@pytest.mark.parametrize('patch, step', [(8, 2), (14, 2), (16, 4), (32, 8)])
def test_the_step_of_a_shift_divides_every_patch(patch, step):
    net = CondViT(ViTShape(64, patch, 2 * patch, 1, 8).build(), condition='none')
    assert patch_geometry(net) == (patch, patch // 2)
    assert SubPatchShifts.of(net).step == step


@pytest.mark.parametrize('step', [1, 2, 4, 8, 16])
@pytest.mark.parametrize('centre', [0, 5, 8])
def test_every_place_of_an_image_is_seen_by_some_patch(step, centre):
    shifts = SubPatchShifts(16, centre, step)
    merged = shifts.merge(torch.ones(len(shifts.shifts), 16))
    assert merged.shape == (64 // step, 64 // step)
    assert torch.allclose(merged, torch.ones_like(merged))


def test_a_spot_is_found_where_it_is():
    "Each patch reports the brightness under its centre; the spot is smaller than a patch."
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    image[:, 20:24, 40:44] = 255
    shifts = SubPatchShifts(16, 8, 4)
    seen = shifts.pixels(image)[:, 0, 8::16, 8::16].flatten(1).float()
    assert divmod(int(shifts.merge(seen).argmax()), 16) == (5, 10)


def test_the_attention_of_any_depth_and_number_of_heads_is_mapped():
    item = split_products('test', 1)[0]
    image = drawn_image(worn_address(item.outfit, 1))
    net = CondViT(ViTShape(128, 16, 64, 6, 32).build()).eval()
    m = CondViTMethod(name='condvit', title='CondViT', backbone=GalleryTower(net, 'deep'), net=net)
    found = class_attention(m, image, item.product.category)
    assert found.shape == (16, 16) and 0 <= found.min() and found.max() <= 1
    assert not torch.equal(
        found, class_attention(m, image, next(c for c in net.categories if c != item.product.category))
    )


def test_a_component_ignores_what_is_common_to_a_condition():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(20, 16, 4, generator=generator)
    conditions = ['a', 'b'] * 10
    moved = tokens + torch.tensor([[0.0], [50]]).repeat(10, 4)[:, None]
    plain, other = token_component(tokens, conditions), token_component(moved, conditions)
    assert torch.allclose(plain.direction, other.direction, atol=1e-3)
    assert torch.allclose(plain.values, other.values, atol=1e-2)
    assert plain.between < 0.1 and other.between > 0.9


def pointing_lines(task, family, seeds=(0,), **scores) -> pd.DataFrame:  # method -> scores
    "Lines of `pointing_hits`, each training seed with the same scores."
    about = dict(task=task, draw=0, family=family, area=5.0)
    parts = [
        pd.DataFrame(dict(method=m, seed=s, query_id=np.arange(len(v)), score=v, **about))
        for m, v in scores.items()
        for s in seeds
    ]
    return pd.concat(parts, ignore_index=True)


def test_intervals_of_the_pointing_game_redraw_outfits():
    alone = pointing_lines('Feet', np.arange(40), ViT=[0.0] * 20 + [100.0] * 20)
    tied = alone.assign(family=np.arange(40) // 20)  # two outfits: an interval over them spans all
    alone, tied = (pointing_table(t).ViT.iloc[-1] for t in (alone, tied))
    assert alone.startswith('50.0 [3') and tied == '50.0 [0.0, 100.0]'


def weak_lines(seeds, categories: int = 10) -> pd.DataFrame:
    "Categories without a difference, but for the first one, whose 24 points over 25 outfits are barely significant."
    weak = np.array([100.0] * 7 + [0.0] * 17 + [-100.0])
    lead = np.concatenate([weak, np.zeros(25 * (categories - 1))])
    named = np.repeat([f'c{i}' for i in range(categories)], 25)
    outfits = np.tile(np.arange(25), categories)
    return pointing_lines(named, outfits, seeds, CondViT=50 + lead / 2, ViT=50 - lead / 2)


def test_the_pointing_game_corrects_for_its_categories():
    "A category whose interval excludes zero alone is undecided among eleven."
    hits = weak_lines([0, 1, 2])
    alone = pointing_leads(hits[hits.task == 'c0'], 'CondViT', 'ViT')['c0']
    found = pointing_leads(hits, 'CondViT', 'ViT')
    assert alone['low'] > 0 and found['c0']['family'] == 11
    assert (verdict_in_words(alone), verdict_in_words(found['c0'])) == ('better', 'undecided by Holm')
    said = pointing_note(hits, found, 'CondViT', 'ViT')
    assert 'correction for 11 comparisons.' in said
    assert '; undecided by Holm in c0 (62 against 38 %). ' in said and 'better in' not in said


def test_the_pointing_game_gives_one_training_no_verdict():
    hits = weak_lines([0], 1)
    found = pointing_leads(hits, 'CondViT', 'ViT')
    assert found['c0']['low'] > 0 and {verdict_in_words(c) for c in found.values()} == {'one seed, no verdict'}
    assert '; 1 seed: the spread between seeds is not known' in pointing_note(hits, found, 'CondViT', 'ViT')
