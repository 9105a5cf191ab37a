"Folders of data sets: which of several places is taken, and what is said if there is none."

import os

import pytest
from PIL import Image
from cis_nb.benchmarks.circo import read_circo
from cis_nb.benchmarks.cirr import read_cirr
from cis_nb.benchmarks.domain_conversion import read_folders, read_lists
from cis_nb.benchmarks.fashioniq import read_fashioniq
from cis_nb.benchmarks.genecis_construction import read_panoptic, read_vaw
from cis_nb.benchmarks.grocery import read_grocery
from cis_nb.benchmarks.lrvsf import read_lrvsf
from cis_nb.benchmarks.mit_states import read_states
from cis_nb.benchmarks.object_composition import read_instances
from cis_nb.core.experiment_files import experiments, texts_in
from cis_nb.core.store import fingerprint
from cis_nb.data.image_folders import read_photos
from cis_nb.data.image_sources import image_folder
from cis_nb.data.roots import DATA_PARAMETERS, SOURCES, cirr_root, data_root, dataset_root, need_data, need_file
from cis_nb.retrieval.protocol import rank_folder


@pytest.fixture
def places(tmp_path, monkeypatch):
    "A working folder and a folder CIS_DATA."
    (tmp_path / 'here').mkdir()
    (tmp_path / 'data').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    monkeypatch.setenv('CIS_DATA', str(tmp_path / 'data'))
    return tmp_path


def test_a_folder_here_goes_before_one_of_the_same_name_in_the_data(places):
    (places / 'data' / 'photos').mkdir()
    assert data_root('photos') == (places / 'data' / 'photos').resolve()
    (places / 'here' / 'photos').mkdir()
    assert data_root('photos') == (places / 'here' / 'photos').resolve()


def test_a_link_to_a_folder_whose_name_is_not_utf8_stands_for_it(places):
    "As the error for such a name advises."
    odd = os.fsencode(places / 'data') + b'/caf\xe9'
    os.mkdir(odd)
    os.mkdir(odd + b'/cirr')
    for link in (places / 'data' / 'cafe', places / 'here' / 'cafe'):
        link.symlink_to(os.fsdecode(odd))
        assert data_root('cafe') == link and fingerprint(str(data_root('cafe')))
    assert cirr_root('cafe') == places / 'here' / 'cafe' / 'cirr'
    assert dataset_root('fashioniq', 'cafe') == places / 'here' / 'cafe'


def test_a_folder_that_may_not_be_looked_into_is_named(places, monkeypatch):
    def refuse(path, **kw):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr('pathlib.Path.is_dir', refuse)
    for find in (lambda: data_root('closed'), lambda: cirr_root('closed')):
        with pytest.raises(PermissionError, match='closed.* may not be looked into: allow this user to read it'):
            find()


def test_a_very_long_name_is_no_folder(places):
    for find in (data_root, cirr_root):
        with pytest.raises(FileNotFoundError, match=r'xxx.*\(5,000 characters\)') as e:
            find('x' * 5000)
        assert len(str(e.value)) < 600


def test_a_path_from_home_is_expanded(places, monkeypatch):
    monkeypatch.setenv('HOME', str(places))
    assert data_root('~/here') == (places / 'here').resolve()


@pytest.mark.parametrize('base, said', [(None, 'CIS_DATA is not set'), ('', 'CIS_DATA is not set')])
def test_without_a_data_folder_the_error_says_so(places, monkeypatch, base, said):
    monkeypatch.delenv('CIS_DATA') if base is None else monkeypatch.setenv('CIS_DATA', base)
    with pytest.raises(FileNotFoundError, match=f"corpus 'nowhere': no such folder here, and {said}.*corpus: world"):
        data_root('nowhere', what='corpus')


def test_a_file_is_no_folder(places):
    (places / 'data' / 'photos').write_text('')
    with pytest.raises(FileNotFoundError, match='no such folder here'):
        data_root('photos')
    assert data_root('photos', files=True).is_file()


def test_a_missing_file_without_facts_has_a_short_error(places):
    with pytest.raises(FileNotFoundError) as e:
        need_file(places / 'a.json', 'VAW')
    assert str(e.value) == f'VAW: {places / "a.json"} is missing'
    assert need_file(places, 'VAW') == places


READERS = {
    'cirr': read_cirr,
    'circo': read_circo,
    'fashioniq': read_fashioniq,
    'lists': read_lists,
    'domains': read_folders,
    'panoptic': read_panoptic,
    'photos': read_photos,
    'images': image_folder,
    'lrvsf': read_lrvsf,
    'mit_states': read_states,
    'composition': read_instances,
    'vaw': read_vaw,
    'grocery': read_grocery,
}


@pytest.mark.parametrize('name', READERS)
def test_an_empty_path_is_not_the_current_folder(places, name):
    Image.new('RGB', (8, 8)).save('a.png')
    with pytest.raises(ValueError, match="root is empty: give a path, or '.' for the current folder"):
        READERS[name]('')


def test_an_empty_folder_to_rank_is_named(places):
    Image.new('RGB', (8, 8)).save('a.png')
    with pytest.raises(ValueError, match='folder is empty: give a path'):
        rank_folder(None, '', 'a.png', 'is red')


def test_cirr_is_taken_from_the_named_folder_before_the_data_folder(places):
    (places / 'data' / 'cirr').mkdir()
    assert cirr_root('anything') == (places / 'data' / 'cirr').resolve()
    (places / 'here' / 'mine' / 'cirr').mkdir(parents=True)
    assert cirr_root('mine') == (places / 'here' / 'mine' / 'cirr').resolve()


def test_a_benchmark_may_lie_in_a_folder_of_its_layout_or_be_the_folder(places):
    (places / 'data' / 'coco').mkdir()
    assert dataset_root('object_composition', 'published') == (places / 'data' / 'coco').resolve()
    (places / 'here' / 'mine').mkdir()
    assert dataset_root('coco_captions', 'mine') == (places / 'here' / 'mine').resolve()
    (places / 'here' / 'mine' / 'coco').mkdir()
    assert dataset_root('coco_captions', 'mine') == (places / 'here' / 'mine' / 'coco').resolve()


@pytest.mark.parametrize('profile', ['quick', 'full', 'bench', 'photos', 'photos_full', 'paper'])
def test_all_data_that_parameter_files_name_have_a_source(profile):
    words = {'world', 'published', 'random', 'auto', 'windows', '', 'lists', 'phrases', 'talk', 'products'}
    named = {
        part
        for e in experiments(profile).values()
        for k in DATA_PARAMETERS
        for t in texts_in(((e.defaults or {}) | e.params).get(k))
        for part in t.split(' + ')
    }
    assert named - words - {'condvit_category', 'condvit_text'} <= set(SOURCES)


@pytest.mark.parametrize('name', SOURCES)
def test_a_missing_folder_or_file_has_source_and_licence(places, name):
    where, licence, size = SOURCES[name]
    with pytest.raises(FileNotFoundError) as e:
        data_root(name, files=True)
    how_much = f'size: about {size}' if size else 'size: not stated'
    assert f'Get it from {where}; licence: {licence}; {how_much}' in str(e.value)


def test_all_missing_data_of_parameters_are_told_at_once(places):
    (places / 'data' / 'cc3m').mkdir()
    need_data(dict(data='cc3m', validation='cirr'))
    with pytest.raises(FileNotFoundError) as e:
        need_data(dict(data='published', validation='cirr', corpus='captions/cc3m.txt.gz'))
    assert 'cirr: Get it from' in str(e.value) and 'captions/cc3m.txt.gz: Get it from' in str(e.value)
