"Captions of folders: what changes their key, and names that are not the world's."

import pytest
from cis_nb.data.datasets import annotations_root, captions_key, captions_root, data_name, image_text_pairs


def test_the_key_of_a_folder_follows_its_files(tmp_path):
    (tmp_path / 'a.txt').write_text('a boat')
    before = captions_key(tmp_path, tmp_path)
    assert captions_key(tmp_path, tmp_path) == before
    (tmp_path / 'b.txt').write_text('a house')
    assert captions_key(tmp_path, tmp_path) != before


def test_a_folder_that_is_called_world_somewhere_else_is_a_folder(tmp_path):
    (mine := tmp_path / 'world').mkdir()
    assert captions_root(mine) == annotations_root(mine, 1, 1, 1) == mine.resolve()
    assert data_name(mine, mine) == 'world' and captions_root(str(mine)) == mine.resolve()


@pytest.mark.parametrize('find', [captions_root, lambda name: annotations_root(name, 1, 1, 1)])
def test_a_missing_folder_is_named_with_the_remedy(find, tmp_path, monkeypatch):
    monkeypatch.delenv('CIS_DATA', raising=False)
    with pytest.raises(FileNotFoundError, match='photos.*CIS_DATA is not set.*data: world'):
        find('no photos')


def test_a_folder_without_images_has_no_pairs(store):
    (empty := store / 'empty').mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match='empty'):
        image_text_pairs(empty, 'train', 5, 0, 32)
