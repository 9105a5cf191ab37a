"Methods under comparison: parameters of their trainings."

import json

import pytest
from projects import ROOT, receipt_of
from cis_nb.experiments import entries


def test_the_receipt_of_a_training_tells_its_parameters(tmp_path, monkeypatch):
    (tmp_path / '05_train.mine').mkdir()
    (tmp_path / '05_train.mine' / 'receipt.json').write_text(
        json.dumps(receipt_of(experiment='05_train.mine', params=dict(method='combiner', steps=7)))
    )
    monkeypatch.setenv('CIS_BOOK', str(tmp_path))
    assert entries.training_config('05_train.mine').steps == 7 and entries.training_config('mined').triplets == 'mined'
    with pytest.raises(FileNotFoundError, match='run the experiment .* of the same profile first'):
        entries.training_config('05_train.other')


def test_without_a_book_the_parameter_file_tells_them(tmp_path, monkeypatch):
    monkeypatch.delenv('CIS_BOOK', raising=False)
    monkeypatch.setenv('CIS_HOME', str(tmp_path))
    monkeypatch.setenv('CIS_PROFILE', 'mine')
    (tmp_path / 'nbs').symlink_to(ROOT / 'nbs')
    (tmp_path / 'params' / 'mine').mkdir(parents=True)
    (tmp_path / 'params' / 'mine' / '05_train.x.yaml').write_text('method: combiner\nsteps: 3\n')
    p = entries.training_config('05_train.x')
    assert (p.steps, p.backbone, p.pretrained) == (3, 'tiny', 'default')
    with pytest.raises(FileNotFoundError, match='the profile mine has no such experiment'):
        entries.training_config('05_train.y')


def test_two_trainings_of_the_same_kind_are_refused():
    with pytest.raises(ValueError, match='two of them'):
        entries.trained_entries(['cirr', 'cirr'], [0], backbone=None)


def test_a_stage_of_another_seed_starts_from_a_run_of_that_seed(monkeypatch):
    second = entries.training_config('compodiff').model_copy(update=dict(start='05_train.first'))
    first, trained = second.model_copy(update=dict(stage='1', start='none')), []
    monkeypatch.setattr(entries, 'training_config', {'05_train.first': first}.get)
    monkeypatch.setattr(entries, 'train_or_load', lambda c: trained.append((c.stage, c.seed)) or f'run {c.seed}')
    assert entries.seeded_config(second, 0).start == '05_train.first' and trained == []
    found = entries.seeded_config(second, 3)
    assert (found.seed, found.start, found.stage, trained) == (3, 'run 3', '2', [('1', 3)])
    named = second.model_copy(update=dict(start='a/folder'))
    assert entries.seeded_config(named, 3).start == 'a/folder' and trained == [('1', 3)]
