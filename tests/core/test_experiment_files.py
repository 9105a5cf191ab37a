"Parameter files and notebooks with mistakes; each is found before anything runs."

import json
import re
import shutil
from pathlib import Path

import pytest
from projects import receipt_of
from cis_nb.core import experiment_files
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
    with pytest.raises(FileNotFoundError, match="'01_honest': .*receipt.json is missing; run the experiment"):
        parameters('01_honest')
    project.write('reports/quick/01_honest/receipt.json', '{"params": {"n": 9}}')
    with pytest.raises(ValueError, match='receipt.json is damaged .its content: has no .experiment.'):
        parameters('01_honest')
    twice = json.dumps(receipt_of(params=dict(n=9)))[:-1] + ', "params": {"n": 3}}'
    project.write('reports/quick/01_honest/receipt.json', twice)
    with pytest.raises(ValueError, match="receipt.json is damaged .its content is not JSON .'params' occurs twice"):
        parameters('01_honest')
    project.write('reports/quick/01_honest/receipt.json', json.dumps(receipt_of(params=dict(n=9))))
    with pytest.raises(ValueError, match="receipt.json: the receipt is of ''; run the experiment 01_honest again"):
        parameters('01_honest')
    receipt = receipt_of(experiment='01_honest', params=dict(n=9))
    project.write('reports/quick/01_honest/receipt.json', json.dumps(receipt))
    assert parameters('01_honest') == dict(n=9)  # as it was run, not as the file says


def test_a_value_of_another_type_is_refused_when_parameters_are_collected(project):
    project.chapter('01_honest')
    known = defaults(read_notebook(project.home / 'nbs' / '01_honest.ipynb'))
    assert collect_parameters(dict(known), '01_honest') == known
    with pytest.raises(TypeError, match='n'):
        collect_parameters(dict(known, n='many'), '01_honest')


def asked(name: str, value: str = '3') -> list:
    "The kernel's history after `papermill -p name value`."
    return ['', 'n = 1\nrate = 0.1', f'# Parameters\n{name} = {value}\n', 'import json']


@pytest.mark.parametrize(
    'name, near', [('rat', "did you mean 'rate'"), ('RATE', "did you mean 'rate'"), ('_rate', ''), ('json', '')]
)
def test_a_name_that_the_page_does_not_know_is_refused_whatever_it_looks_like(name, near, project):
    project.chapter('01_honest')
    names = dict(n=1, rate=0.1, json=json, In=asked(name)) | ({} if name == 'json' else {name: 3})
    said = f"^nbs/01_honest.ipynb: unknown parameter '{name}'; {near}.*known: n, rate$"
    with pytest.raises(ValueError, match=said):
        collect_parameters(names, '01_honest')
    assert collect_parameters(names, '01_honest', others=True)[name] == 3  # though an import has bound it since


def test_only_the_last_cell_of_papermill_counts(project):
    "In JupyterLab the cell may be corrected and run again; constants of a page are no parameters."
    project.chapter('01_honest')
    names = dict(n=2, rate=0.1, RATE=3, In=asked('RATE') + asked('n', '2'))
    assert collect_parameters(names, '01_honest') == dict(n=2, rate=0.1)


@pytest.mark.e2e
@pytest.mark.parametrize('name', ['noize', 'NOISE', 'json'])
def test_papermill_ends_with_an_error_for_an_unknown_name(name, project, monkeypatch):
    import papermill

    project.chapter('01_collects')
    monkeypatch.setenv('PYTHONPATH', str(project.home))
    source, made = (str(project.home / p) for p in ('nbs/01_collects.ipynb', 'made.ipynb'))
    papermill.execute_notebook(source, made, dict(noise=2), kernel_name='python3', progress_bar=False)
    with pytest.raises(papermill.PapermillExecutionError, match=f"01_collects.ipynb: unknown parameter '{name}'"):
        papermill.execute_notebook(source, made, {name: 2}, kernel_name='python3', progress_bar=False)


@pytest.mark.parametrize(
    'given, said',
    [
        ("method: combinr", "method: 'combinr' is not registered; known: .*did you mean 'combiner'"),
        ('method: combiner\nTAU: 3', "unknown parameter 'TAU'; did you mean 'tau'"),
    ],
)
def test_a_mistake_in_the_file_of_a_training_names_the_file(given, said, project):
    shutil.copy(Path(__file__).parents[2] / 'nbs' / '05_train.ipynb', project.home / 'nbs')
    project.write('params/quick/05_train.yaml', given)
    with pytest.raises(ValueError, match=f'params/quick/05_train.yaml: {said}'):
        experiments('quick')


@pytest.mark.parametrize(
    'given, error, said',
    [
        ('method: [lincir]', TypeError, r"method must be str, like 'auto', and not \['lincir'\]"),
        ('method: {a: 1}', TypeError, "method must be str, like 'auto', and not {'a': 1}"),
        ('method: lincir\nbackbone: [tiny]', TypeError, 'backbone must be str'),
        ('method: 2026-01-01', ValueError, '.*line 1: 2026-01-01 would be a date: write it as text in quotes'),
        ('method: lincir\nsteps: 0100', ValueError, ".*line 2: '0100' would be an octal number"),
        ('method: !!int ""', ValueError, r'.*line 1 has a tag \(!!int\)'),
        ('a: !!timestamp x', ValueError, r'.*line 1 has a tag \(!!timestamp\)'),
    ],
)
def test_a_value_of_another_kind_in_the_file_of_a_training_names_the_file(given, error, said, project):
    "Types are checked before the method is looked up and before a fingerprint is made."
    shutil.copy(Path(__file__).parents[2] / 'nbs' / '05_train.ipynb', project.home / 'nbs')
    project.write('params/quick/05_train.x.yaml', given)
    with pytest.raises(error, match=f'params/quick/05_train.x.yaml(: | is not YAML of this kind: ){said}'):
        experiments('quick')


@pytest.mark.parametrize(
    'chapter, given, said',
    [
        ('03_mining/01_captions', 'more: [5]', 'more must be a list of str, like .*, and not [5]'),
        ('07_ablations/noise', 'other_seeds: [x]', "other_seeds must be a list of int, like [0, 1], and not ['x']"),
        ('07_ablations/noise', 'other_seeds: [-1]', 'other_seeds must not be negative, like [0, 1], and not [-1]'),
        ('07_ablations/noise', 'corpora: [[1]]', 'corpora must be a list of str, like .*, and not [[1]]'),
        ('07_ablations/noise', 'shorter: {steps: -5}', 'shorter must not be negative, like .*, and not .*-5'),
        ('07_ablations/condition_depth', 'blocks: [x]', "blocks must be a list of int, like [1, 3], and not ['x']"),
        ('06_evaluation/matrix', 'trainings: [5]', 'trainings must be a list of str, like .*, and not [5]'),
        ('06_evaluation/compodiff', 'most: {x: -1}', 'most must not be negative, like .*, and not .*-1'),
        ('08_scaling/search', 'larger: [x]', "larger must be a list of int, like [4], and not ['x']"),
        ('08_scaling/search', 'larger: [0]', 'larger must hold numbers of at least 1, like [4], and not [0]'),
        ('08_scaling/search', 'smaller: [0]', 'smaller must hold numbers of at least 1, like [4], and not [0]'),
    ],
)
def test_what_an_empty_default_may_hold_is_told_by_the_example_in_its_comment(chapter, given, said, project):
    (page := project.home / 'nbs' / f'{chapter}.ipynb').parent.mkdir()
    shutil.copy(Path(__file__).parents[2] / 'nbs' / f'{chapter}.ipynb', page)
    project.write(f'params/quick/{chapter}.yaml', given)
    said = re.escape(said).replace(r'\.\*', '.*')
    with pytest.raises((TypeError, ValueError), match=f'params/quick/{chapter}.yaml: {said}'):
        experiments('quick')


def test_parameters_of_a_training_are_checked_once_for_each_state(tmp_path, monkeypatch):
    "The check imports the method; what it found is read from the store until parameters or code change."
    checks, check = [], experiment_files._check_training
    monkeypatch.setattr(experiment_files, '_check_training', lambda *a: checks.append(a) or check(*a))
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    one, two = (experiments('quick', name='05_train.combiner')['05_train.combiner'] for _ in range(2))
    assert one == two and len(checks) == 1 and 'combiner' in one.names and one.defaults['tau'] == two.defaults['tau']
    monkeypatch.setattr(experiment_files, 'all_code', lambda: ['other'])
    experiments('quick', name='05_train.combiner')
    assert len(checks) == 2


@pytest.mark.parametrize('damage', [b'', b'[' * 5000, b'\xff\xfe', b'{}', b'{"method": "combiner"}'])
def test_damage_of_a_checked_training_names_the_file(damage, tmp_path, monkeypatch):
    "As many bytes as before, so that the folder counts as finished."
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    experiments('quick', name='05_train.combiner')
    (file,) = tmp_path.glob('parameters/*/checked.json')
    file.write_bytes(damage.ljust(size := file.stat().st_size)[:size])
    with pytest.raises(ValueError, match='delete the folder .*: it is made again') as e:
        experiments('quick', name='05_train.combiner')
    assert str(e.value).startswith(str(file))
