"The rows of `make bench` that measure mining and the Combiner: small sizes, and goals that can be missed."

import numpy as np
import pytest
import torch
from cis_nb.core.experiment_files import experiments
from cis_nb.experiments.gpu import RECORDED, RECORDED_ON_CPU, read_rates
from cis_nb.experiments.throughput import (
    Measurement,
    captions_and_parser,
    condvit_rates,
    condvit_table,
    end_to_end_rates,
)

pytestmark = pytest.mark.usefixtures('store')


def test_goals_have_a_direction_and_can_be_missed():
    def measured(value, goal):
        return Measurement('what', 'other', value, goal, 's')

    assert [measured(v, g).goal_ratio for v, g in ((10, '≥ 5'), (30, '≤ 60'), (120, '≤ 60'))] == [2, 2, 0.5]
    cases = {(5, '≥ 5'): 'met', (4.9, '≥ 5'): 'not met', (60, '≤ 60'): 'met', (61, '≤ 60'): 'not met'}
    cases[1, ''] = ''
    assert {case: measured(*case).outcome for case in cases} == cases


def test_end_to_end_training_is_measured_without_a_gpu_too():
    rates, most = end_to_end_rates('tiny', 4, 1, 'cpu', projection=16, hidden=16)
    assert list(rates.implementation) == ['stored features', 'every image encoded again', 'both towers train']
    assert (rates.steps_per_s > 0).all() and most > 10**7
    assert np.isclose(rates.times[1], 1) and np.allclose(rates.triplets_per_s, 4 * rates.steps_per_s)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_large_backbone_learns_end_to_end_on_a_gpu():
    rates, most = end_to_end_rates('rn50x4', 16, 2, 'cuda')
    assert (rates.steps_per_s > 0).all() and 2**30 < most < torch.cuda.get_device_properties(0).total_memory


def test_without_data_captions_are_those_of_the_world(monkeypatch):
    monkeypatch.delenv('CIS_DATA', raising=False)
    texts, parser = captions_and_parser('world', 40)
    assert parser == 'world' and len(texts) == 40 and captions_and_parser('auto', 40) == (texts, 'world')


def test_the_profile_bench_has_the_goals_own_size():
    p = experiments('bench')['08_scaling/throughput'].params
    assert (p['mined_captions'], p['mined_triplets'], p['combiner_batch']) == (3_000_000, 1_600_000, 256)
    distractors = p['ranking_images'] - p['ranking_queries']
    assert (p['ranking_queries'], distractors, p['ranking_dim']) == (2000, 2_000_014, 512)
    assert p['ranking_steps'] == [0, 10_000, 100_000, 500_000, 1_000_000] and p['condvit_backbone'] == 'vit_b16'


@pytest.mark.parametrize('file', [RECORDED, RECORDED_ON_CPU])
def test_no_kept_share_of_a_limit_is_above_it(file):
    shares = [m.value for m in read_rates(file)[0] if m.unit == '%']
    assert shares and all(0 < share <= 100 for share in shares)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_gpu_embeds_in_bfloat16():
    rates = condvit_rates('tiny_xs', 32, 2, 'cuda')
    assert set(rates.precision) == {'bfloat16'} and (rates.share > 0).all()
    assert condvit_table([rates]).device.tolist() == ['cuda', 'cuda']
