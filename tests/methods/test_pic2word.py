"Pic2Word's parameters and the gradients of its loss."

import pytest
import torch
from pydantic import ValidationError
from cis_nb.backbones.loading import load_backbone
from cis_nb.methods.pic2word import Pic2Word, Pic2WordConfig
from cis_nb.methods.pseudo_words import Mapper


@pytest.mark.parametrize('wrong', [dict(prompt='a photo of it'), dict(world_images=0), dict(width=-1), dict(cirr=0)])
def test_parameters_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Pic2WordConfig(**wrong)


def test_gradients_stop_at_the_backbone_and_equal_images_have_equal_shares():
    tiny = load_backbone('tiny', 'none', device='cpu')
    same = torch.randn(1, tiny.D).expand(4, -1).numpy()
    objective = Pic2Word(tiny, Mapper(tiny.D, tiny.W).eval(), same, {})
    loss = objective.loss(objective.prepare([0, 1, 2, 3], None))
    assert loss.item() == pytest.approx(torch.tensor(4.0).log().item(), abs=1e-4)
    assert not any(p.requires_grad for p in tiny.parameters()) and loss.requires_grad
