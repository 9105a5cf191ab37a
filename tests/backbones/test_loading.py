"Backbones that cannot be loaded or saved are refused before anything is written."

import pytest
import torch
from cis_nb import api
from cis_nb.backbones.loading import half_weights, load_backbone, save_backbone


@pytest.fixture(scope='module')
def tiny():
    return load_backbone('tiny', 'none', device='cpu')


@pytest.mark.parametrize('name', ['blip', 'tiny', 'nowhere'])
def test_an_unknown_number_type_is_refused_for_every_backbone(name):
    with pytest.raises(ValueError, match="dtype 'float8' is not one of float32"):
        load_backbone(name, 'none', dtype='float8')


def test_an_unknown_backbone_and_missing_weights_are_named(tmp_path):
    with pytest.raises(ValueError, match='vit_x'):
        load_backbone('vit_x', 'none')
    with pytest.raises(FileNotFoundError, match='nowhere'):
        load_backbone('tiny', str(tmp_path / 'nowhere'))


def test_random_weights_follow_their_seed_and_leave_the_generator_alone(tiny):
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    again = load_backbone('tiny', 'none', device='cpu')
    assert torch.rand(1) == before and again.fingerprint == tiny.fingerprint


def test_a_backbone_of_an_installed_package_gets_all_options(monkeypatch):
    monkeypatch.setattr(api, 'names', lambda kind: ['mine'])

    class Mine(api.BackbonePlugin):
        name = 'mine'

        def load(self, *given):
            return given

    monkeypatch.setattr(api, 'get', lambda kind, name: Mine())
    assert load_backbone('mine', 'w', 'cpu', 'float16', 3, True) == ('w', 'cpu', 'float16', 3, True)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), 1e6])  # the last is too large for half precision
def test_weights_that_are_not_finite_in_half_precision_are_not_saved(value, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.model.logit_scale, 'data', torch.tensor(value))
    with pytest.raises(ValueError, match='tiny: logit_scale is not finite in half precision'):
        save_backbone(tiny, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_half_weights_are_copies_that_keep_whole_numbers(tiny):
    tiny.model.register_buffer('count', torch.tensor([70000]))  # beyond the largest half
    found = half_weights(tiny)
    assert found['count'].tolist() == [70000] and found['logit_scale'].dtype == torch.float16
    del tiny.model.count
