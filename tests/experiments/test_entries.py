"Methods under comparison: parameters of their trainings."

import json

import pytest
from projects import ROOT
from cis_nb.experiments import entries


def test_the_receipt_of_a_training_tells_its_parameters(tmp_path, monkeypatch):
    (tmp_path / '05_train.mine').mkdir()
    (tmp_path / '05_train.mine' / 'receipt.json').write_text(json.dumps(dict(params=dict(method='combiner', steps=7))))
    monkeypatch.setenv('CIS_BOOK', str(tmp_path))
    assert entries.training_config('05_train.mine').steps == 7 and entries.training_config('mined').triplets == 'mined'
    with pytest.raises(FileNotFoundError, match='run that experiment of this profile first'):
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
