"The rows of `make bench` that measure mining and the Combiner: small sizes, and goals that can be missed."

import json
from pathlib import Path
import numpy as np, pytest, torch
from cis_nb.core.store import project_root


pytestmark = pytest.mark.usefixtures('store')


def functions(*names, **space):
    "Some functions of the chapter, with what they use."
    cells = [
        ''.join(c['source'])
        for c in json.loads((project_root() / 'nbs' / '08_scaling/throughput.ipynb').read_text())['cells']
        if c['cell_type'] == 'code'
    ]
    import ast

    for cell in cells:
        for node in ast.parse(cell).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                exec(ast.unparse(node), space)
    return [space[n] for n in names]


def test_goals_have_a_direction_and_can_be_missed():
    reached, verdict = functions('reached', 'verdict')
    assert reached(10, '≥ 5') == 2 and reached(30, '≤ 60') == 2 and reached(120, '≤ 60') == 0.5
    assert [verdict(v, g) for v, g in ((5, '≥ 5'), (4.9, '≥ 5'), (60, '≤ 60'), (61, '≤ 60'), (1, ''))] == [
        'met',
        'not met',
        'met',
        'not met',
        '',
    ]


def test_end_to_end_training_is_measured_without_a_gpu_too():
    from cis_nb.core.report import peak_memory_bytes
    from cis_nb.backbones.loading import load_backbone
    from cis_nb.methods.combiner import training_rates

    (end_to_end,) = functions(
        'end_to_end',
        torch=torch,
        load_backbone=load_backbone,
        peak_memory_bytes=peak_memory_bytes,
        seed=0,
        training_rates=lambda b, batch, steps, seed: training_rates(b, batch, steps, 16, 16, seed=seed),
    )
    rates, most = end_to_end('tiny', 4, 1, 'cpu')
    assert (
        list(rates.way) == ['stored features', 'every image encoded again', 'both halves learn']
        and (rates.steps_per_s > 0).all()
        and most > 10**7
    )
    assert np.isclose(rates.times[1], 1) and np.allclose(rates.triplets_per_s, 4 * rates.steps_per_s)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_large_backbone_learns_end_to_end_on_a_gpu():
    from cis_nb.core.report import peak_memory_bytes
    from cis_nb.backbones.loading import load_backbone
    from cis_nb.methods.combiner import training_rates

    (end_to_end,) = functions(
        'end_to_end',
        torch=torch,
        load_backbone=load_backbone,
        peak_memory_bytes=peak_memory_bytes,
        seed=0,
        training_rates=training_rates,
    )
    rates, most = end_to_end('rn50x4', 16, 2, 'cuda')
    assert (rates.steps_per_s > 0).all() and 2**30 < most < torch.cuda.get_device_properties(0).total_memory


def test_without_data_captions_are_those_of_the_world(monkeypatch):
    import os
    from cis_nb.data.roots import data_root
    from cis_nb.mining.captions import read_captions
    from cis_nb.mining.parsers import find_parser
    from cis_nb.world.layouts import world_root

    monkeypatch.delenv('CIS_DATA', raising=False)
    both = dict(
        os=os,
        Path=Path,
        data_root=data_root,
        read_captions=read_captions,
        world_root=world_root,
        find_parser=find_parser,
        captions=40,
    )
    (ask,), (auto,) = (
        functions('captions_and_parser', caption_data='world', **both),
        functions('captions_and_parser', caption_data='auto', **both),
    )
    texts, parser = ask()
    assert parser == 'world' and len(texts) == 40 and auto() == (texts, 'world')


def test_the_profile_bench_has_the_goals_own_size():
    from cis_nb.core.experiment_files import experiments

    p = experiments('bench')['08_scaling/throughput'].params
    assert (p['mined_captions'], p['mined_triplets'], p['combiner_batch']) == (3_000_000, 1_600_000, 256)
