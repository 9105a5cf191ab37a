"What a training leaves on disk is read back whole, or refused with its place."

import json
from types import SimpleNamespace
import pandas as pd
import pytest
import torch
from cis_nb.core.plotting import color
from cis_nb.training.validation import RankedQueries, read_net, recall_ks, run_folder, write_net

ABOUT = dict(n=3, backbone='tiny_xs', fingerprint='aa')


def make(about):
    return torch.nn.Linear(2, about['n'])


@pytest.fixture
def folder(tmp_path):
    return write_net(tmp_path / 'new' / 'run', 'net', torch.nn.Linear(2, 3), ABOUT)


@pytest.mark.parametrize('size, ks', [(1, ()), (2, (1,)), (5, (1,)), (6, (1, 5)), (10, (1, 5)), (11, (1, 5, 10))])
def test_a_gallery_gets_the_ranks_it_is_large_enough_for(size, ks):
    assert recall_ks(SimpleNamespace(shared_gallery=['i'] * size)) == ks


@pytest.mark.parametrize(
    'file, content',
    [
        ('net.safetensors', b''),
        ('net.safetensors', b'\x08' * 64),
        ('net.json', b'{"n": '),
        ('net.json', b'{}'),
        ('net.json', b'{"n": 4, "backbone": "tiny_xs", "fingerprint": "aa"}'),  # weights of another size
    ],
)
def test_damaged_files_are_refused_with_the_remedy(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=r'net.safetensors or its .json is damaged (?s:.*) train again'):
        read_net(folder, 'net', make, 'no run')


def test_weights_without_their_description_are_damaged(folder):
    (folder / 'net.json').unlink()
    with pytest.raises(ValueError, match='is damaged'):
        read_net(folder, 'net', make, 'no run')


def test_a_network_is_read_in_eval_mode_and_from_any_memory_layout(tmp_path):
    net = torch.nn.Linear(3, 3)
    net.weight.data = net.weight.data.T  # not contiguous
    write_net(tmp_path, 'net', net, ABOUT)
    found, _ = read_net(tmp_path, 'net', lambda about: torch.nn.Linear(3, 3), 'no run')
    assert torch.equal(found.weight, net.weight) and not found.training


def test_a_receipt_names_a_run_of_the_store(store):
    (report := store / 'report').mkdir()
    assert run_folder(report) == report  # a run itself has no receipt
    (report / 'receipt.json').write_text(json.dumps(dict(runs=['runs/first', 'runs/second'])))
    assert run_folder(report) == store / 'store' / 'runs' / 'first'


@pytest.mark.parametrize('method', ['lincir', 'combiner'])
def test_the_curve_after_a_training_has_the_colour_of_its_method(method):
    before, after = (RankedQueries({'t': pd.DataFrame(dict(rank=r, gallery_size=9))}, {}, method) for r in ([9], [1]))
    lines = {line.get_label(): line for line in after.overview(before).axes[0].lines}
    assert {k: lines[k].get_color() for k in ('before', 'after')} == dict(before=color('grey'), after=color(method))
    assert (lines['before'].get_ydata()[0], lines['after'].get_ydata()[0]) == (0, 100)
