"A checkpoint is complete or absent, whatever a killed process has left behind."

import pytest
import torch
from cis_nb.training.checkpoints import last_checkpoint, load_checkpoint, load_weights, save_checkpoint, weights
from cis_nb.training.checkpoints import write_atomic


@pytest.fixture
def trained():
    net = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {'net': net}, optimizer


def test_what_a_killed_write_left_is_replaced(tmp_path):
    "The temporary name may hold a file where a folder is written now, or a folder with old files."
    for left in ('file', 'folder'):
        rest = tmp_path / '.tmp-made'
        rest.write_text('half') if left == 'file' else (rest.mkdir(), (rest / 'old').write_text('half'))

        def write(path):
            path.mkdir()
            (path / 'new').write_text('complete')

        write_atomic(tmp_path / 'made', write)
        assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob('*')] == ['made', 'made/new'], left
        (tmp_path / 'made' / 'new').unlink()
        (tmp_path / 'made').rmdir()


def test_older_and_unfinished_checkpoints_are_deleted_by_the_next_one(tmp_path, trained):
    for step in (7, 100, 20000000):  # more digits than the name has places
        save_checkpoint(tmp_path, *trained, dict(step=step))
        (tmp_path / 'checkpoints' / '.tmp-step-0000009').mkdir()
    path = save_checkpoint(tmp_path, *trained, dict(step=20000001))
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert last_checkpoint(tmp_path) == path


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path, trained):
    "A run that is resumed at its last step finds its own checkpoint."
    path = save_checkpoint(tmp_path, *trained, dict(step=3, note='first'))
    assert save_checkpoint(tmp_path, *trained, dict(step=3, note='second')) == path
    assert load_checkpoint(path, *trained)['note'] == 'first'


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert last_checkpoint(tmp_path) is None and last_checkpoint(tmp_path / 'nowhere') is None


@pytest.mark.parametrize('file', ['model.safetensors', 'state.pt'])
@pytest.mark.parametrize('content', [None, b'', b'\x00' * 40])
def test_a_damaged_or_missing_file_names_the_checkpoint(tmp_path, trained, file, content):
    path = save_checkpoint(tmp_path, *trained, dict(step=1))
    (path / file).unlink() if content is None else (path / file).write_bytes(content)
    before = weights(trained[0])
    with pytest.raises(ValueError, match=r'step-0000001 cannot be read \(\w+: .* delete it to start again') as e:
        load_checkpoint(path, *trained)
    assert 'weights_only' not in str(e.value)  # torch advises to read unsafely
    assert all(torch.equal(t, before[k]) for k, t in weights(trained[0]).items())  # nothing was filled in halfway


def test_weights_of_another_shape_or_with_unknown_names_are_refused(trained):
    modules, _ = trained
    with pytest.raises(RuntimeError, match='size mismatch'):
        load_weights(modules, weights({'net': torch.nn.Linear(2, 4)}))
    with pytest.raises(RuntimeError, match='Unexpected key'):
        load_weights(modules, weights(modules) | {'net.more': torch.zeros(1)})


def test_weights_are_copies_and_modules_with_similar_names_stay_apart():
    modules = {'net': torch.nn.Linear(2, 2), 'net2': torch.nn.Linear(2, 2)}
    kept = weights(modules)
    torch.nn.init.zeros_(modules['net'].weight)
    assert kept['net.weight'].abs().sum() > 0
    load_weights(modules, kept)
    assert all(torch.equal(t, kept[k]) for k, t in weights(modules).items())
