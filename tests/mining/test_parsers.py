"Parsers that are not there, and captions at the edges of the world's grammar."

import pytest
import spacy
from cis_nb.mining import parsers
from cis_nb.mining.parsers import find_parser, load_parser, read_tree, world_parser


@pytest.fixture
def installed(monkeypatch, tmp_path):
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    return lambda *names: monkeypatch.setattr(spacy.util, 'get_installed_models', lambda: list(names))


def test_the_published_pipeline_goes_first_then_the_first_by_name(installed):
    installed('de_core_news_sm', 'en_zz', 'en_core_web_sm', 'en_aa')
    assert find_parser() == 'en_core_web_sm'
    installed('de_core_news_sm', 'en_zz', 'en_aa')
    assert find_parser() == 'en_aa'


def test_without_an_english_pipeline_the_data_folder_is_used_or_the_remedy_said(installed, tmp_path):
    installed('de_core_news_sm')
    with pytest.raises(OSError, match='no English spaCy pipeline is installed: install one with'):
        find_parser()
    (tmp_path / 'spacy_en_ewt_clear_sm').mkdir()
    assert find_parser() == str(tmp_path / 'spacy_en_ewt_clear_sm')


def test_a_pipeline_with_a_tagger_alone_lacks_a_parser(tmp_path):
    nlp = spacy.blank('en')
    nlp.add_pipe('tagger').add_label('NN')
    nlp.initialize()
    nlp.to_disk(tmp_path / 'half')
    with pytest.raises(ValueError, match='has no parser, only tagger'):
        parsers.open_pipeline(str(tmp_path / 'half'))


@pytest.mark.parametrize('content', [None, '', '{"lang": '])
def test_a_damaged_folder_is_refused_with_the_remedy(tmp_path, content):
    if content is not None:
        (tmp_path / 'meta.json').write_text(content)
    with pytest.raises(OSError, match='cannot be loaded .*install one with'):
        load_parser(str(tmp_path))


def test_empty_captions_of_the_world_have_no_words():
    assert [len(world_parser()(text)) for text in ('', ' ')] == [0, 0]


def test_a_tree_with_an_unknown_part_of_speech_is_refused():
    with pytest.raises(KeyError, match='Z'):
        read_tree('boat.Z.ROOT.0')
