"Parameter files and notebooks with mistakes; each is found before anything runs."

import json
import pytest
from cis_nb.core.experiment_files import (
    collect_parameters,
    defaults,
    experiments,
    parameters,
    read_notebook,
    read_params,
)


@pytest.mark.parametrize(
    'content, said',
    [
        (b'- a\n- b\n', 'expected lines like `name: value`'),
        (b'only words', 'expected lines like `name: value`'),
        (b'n: [1, 2', 'is not YAML'),
        (b'n: \xff\xfe', 'is not YAML'),
        (b'a: 1\nb: 2\na: 3\nb: 4\n', 'a, b is given twice'),
        (b'n: !!python/object/apply:os.getcwd []', 'is not YAML'),
    ],
)
def test_a_file_that_is_not_flat_yaml_is_named(content, said, tmp_path):
    (file := tmp_path / 'p.yaml').write_bytes(content)
    with pytest.raises(ValueError, match=said) as e:
        read_params(file)
    assert str(file) in str(e.value)


@pytest.mark.parametrize('content', ['', '# only a comment\n', '---\n'])
def test_an_empty_file_changes_nothing(content, tmp_path):
    (tmp_path / 'p.yaml').write_text(content)
    assert read_params(tmp_path / 'p.yaml') == {}


@pytest.mark.parametrize('nb', [[], {}, {'cells': None}, {'cells': [{}]}, {'cells': [{'source': 3}]}])
def test_json_that_is_no_notebook_is_refused(nb, tmp_path):
    (tmp_path / 'a.ipynb').write_text(json.dumps(nb))
    with pytest.raises(ValueError, match='a.ipynb is not a notebook'):
        read_notebook(tmp_path / 'a.ipynb')


def cell(source, *tags):
    return dict(cell_type='code', source=source, metadata=dict(tags=list(tags)))


@pytest.mark.parametrize('line', ['import os', 'n += 1', 'a, b = 1, 2', 'a = b = 1', 'x: int', 'd = dict(n=1)', 'f(1)'])
def test_only_plain_assignments_are_parameters(line):
    with pytest.raises(ValueError, match='page: the parameters cell may hold only lines like `name = 3`'):
        defaults(dict(cells=[cell(line, 'parameters')]), 'page')


def test_typed_parameters_are_read_and_two_cells_refused():
    nb = dict(cells=[cell('n: int = -2  # rounds\nnames: list = ["a"]', 'parameters')])
    assert defaults(nb) == dict(n=-2, names=['a'])
    with pytest.raises(ValueError, match='2 cells have the tag `parameters`; keep one'):
        defaults(dict(cells=nb['cells'] * 2))


def test_other_data_replace_only_parameters_of_that_name(project):
    project.chapter('01_with_data', '')
    project.chapter('02_honest', 'n: 3\n')
    found = experiments('quick', 'photos')
    assert found['01_with_data'].params['data'] == 'photos' and found['02_honest'].params == dict(n=3)


def test_an_experiment_of_the_book_that_has_not_run_is_named(project, monkeypatch):
    project.chapter('01_honest')
    monkeypatch.setenv('CIS_BOOK', str(project.home / 'reports' / 'quick'))
    with pytest.raises(FileNotFoundError, match="experiment '01_honest': .*receipt.json is missing; run that"):
        parameters('01_honest')
    project.write('reports/quick/01_honest/receipt.json', '{"params": {"n": 9}}')
    assert parameters('01_honest') == dict(n=9)  # as it was run, not as the file says


def test_a_value_of_another_type_is_refused_when_parameters_are_collected(project):
    project.chapter('01_honest')
    known = defaults(read_notebook(project.home / 'nbs' / '01_honest.ipynb'))
    assert collect_parameters(dict(known), '01_honest') == known
    with pytest.raises(TypeError, match='n'):
        collect_parameters(dict(known, n='many'), '01_honest')
