"What a training leaves on disk is read back whole, or refused with its place."

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from figures import drawn_texts, texts_outside

from cis_nb.core.plotting import color
from cis_nb.training.validation import (
    RankedQueries,
    rank_ticks,
    read_net,
    recall_curves,
    recall_ks,
    run_folder,
    write_net,
)

ABOUT = dict(n=3, backbone='tiny_xs', fingerprint='aa')


def make(about):
    return torch.nn.Linear(2, about['n'])


@pytest.fixture
def folder(tmp_path):
    return write_net(tmp_path / 'new' / 'run', 'net', torch.nn.Linear(2, 3), ABOUT)


@pytest.mark.parametrize('size, ks', [(1, ()), (2, (1,)), (5, (1,)), (6, (1, 5)), (10, (1, 5)), (11, (1, 5, 10))])
def test_a_gallery_gets_the_ranks_it_is_large_enough_for(size, ks):
    assert recall_ks(SimpleNamespace(shared_gallery=['i'] * size)) == ks


@pytest.mark.parametrize('panels, last', [(1, 9), (2, 261), (2, 1200), (3, 1200), (4, 20000)])
def test_the_ticks_of_recall_by_rank_do_not_overlap(panels, last, monkeypatch):
    found = pd.DataFrame(dict(rank=[1, last], gallery_size=[last, last]))
    fig = recall_curves(*[{f'task {n}': found for n in range(panels)}] * 2, 'lincir')
    ticks = [(text, box) for text, box in drawn_texts(fig, monkeypatch) if text.isdigit()]
    for ax in fig.axes[:panels]:
        low, left, right = ax.bbox.y0, ax.bbox.x0, ax.bbox.x1
        boxes = [b for _, b in ticks if b.y1 <= low and left <= (b.x0 + b.x1) / 2 <= right]
        assert len(boxes) == len(rank_ticks(last, 16 // max(2, panels)))
        assert not any(a.padded(2).overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    assert not [text for text in texts_outside(fig, monkeypatch) if text.isdigit()]


def test_ranks_are_powers_of_ten_where_the_others_are_too_many():
    assert rank_ticks(261, 8) == [1, 2, 5, 10, 20, 50, 100, 200] and rank_ticks(500, 8) == [1, 10, 100]


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
    (report / 'receipt.json').write_text(json.dumps(dict(runs=['run/first'])))
    assert run_folder(report) == store / 'store' / 'run' / 'first'


@pytest.mark.parametrize('runs', [[], ['rankings/first'], ['run/first', 'run/second']])
def test_the_report_of_an_evaluation_is_refused(store, runs):
    (store / 'receipt.json').write_text(json.dumps(dict(runs=runs)))
    with pytest.raises(ValueError, match='is no report on a training; those are reports/PROFILE/05_train.NAME'):
        run_folder(store)


@pytest.mark.parametrize('method', ['lincir', 'combiner'])
def test_the_curve_after_a_training_has_the_colour_of_its_method(method):
    before, after = (RankedQueries({'t': pd.DataFrame(dict(rank=r, gallery_size=9))}, {}, method) for r in ([9], [1]))
    lines = {line.get_label(): line for line in after.overview(before).axes[0].lines}
    assert {k: lines[k].get_color() for k in ('before', 'after')} == dict(before=color('grey'), after=color(method))
    assert (lines['before'].get_ydata()[0], lines['after'].get_ydata()[0]) == (0, 100)
