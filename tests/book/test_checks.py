"What a change reaches, and what the commands say if something fails."

import subprocess
import pytest
from projects import ROOT
from cis_nb.book import checks
from cis_nb.book.checks import changed_modules, main, run_checks


@pytest.fixture(autouse=True)
def this_project(monkeypatch):
    monkeypatch.setenv('CIS_HOME', str(ROOT))


def test_files_that_no_module_reads_reach_no_module():
    assert changed_modules([]) == set() and changed_modules(['LICENSE', 'tests/conftest.py', 'cis_nb/x/y.txt']) == set()


def test_a_module_that_was_deleted_is_still_a_change():
    assert changed_modules(['cis_nb/world/nowhere.py']) == {'cis_nb.world.nowhere'}


@pytest.mark.e2e
def test_a_change_of_a_world_reaches_the_tests_that_ask_for_all_benchmarks():
    found = {p.relative_to(ROOT).as_posix() for p in checks.reached(['cis_nb/world/circo.py'])[1]}
    assert {
        'tests/test_api.py',
        'tests/benchmarks/test_circo.py',
    } <= found and 'tests/world/test_outfits.py' not in found


def test_a_module_without_a_file_of_tests_gets_those_of_its_package_that_import_it():
    found = [p.name for p in checks.tests_of('01_world/07_circo')]
    assert found and 'test_circo.py' not in found


@pytest.mark.parametrize('bad, rc, good', [((), 0, True), (('b',), 0, False), ((), 1, False), (('a', 'b'), 1, False)])
def test_one_failure_of_notebooks_or_tests_is_enough(bad, rc, good, monkeypatch, capsys):
    monkeypatch.setattr(checks, '_run_notebook', lambda chapter: chapter not in bad)
    monkeypatch.setattr(subprocess, 'run', lambda *a, **k: subprocess.CompletedProcess(a, rc))
    assert run_checks(['a', 'b'], ['tests/x.py']) is good
    assert capsys.readouterr().err == (f'failed notebooks: {", ".join(bad)}\n' if bad else '')


def test_without_tests_pytest_is_not_called(monkeypatch):
    monkeypatch.setattr(subprocess, 'run', None)
    assert run_checks([], [])


@pytest.mark.parametrize('ok, code', [(True, 0), (False, 1)])
def test_the_exit_code_follows_the_checks(ok, code, monkeypatch, capsys):
    monkeypatch.setattr(checks, 'changed_files', lambda base: [])
    monkeypatch.setattr(checks, 'run_checks', lambda chapters, tests: ok)
    assert main(['changed']) == code
    assert capsys.readouterr().out.startswith('0 of ')


def test_a_branch_that_is_not_there_is_an_error_of_its_own(monkeypatch, capsys):
    def no_branch(base):
        raise RuntimeError(f'git merge-base {base} HEAD: not a valid object name')

    monkeypatch.setattr(checks, 'changed_files', no_branch)
    assert main(['changed', 'nowhere']) == 2 and 'merge-base nowhere' in capsys.readouterr().err


@pytest.mark.parametrize(
    'given', ['05_train', 'nbs/05_train.ipynb', 'nbs/05_train', './nbs/05_train.ipynb', '05_train.ipynb']
)
def test_a_chapter_is_known_by_its_name_and_by_the_path_of_its_notebook(given, monkeypatch):
    ran = []
    monkeypatch.setattr(checks, 'run_checks', lambda chapters, tests: ran.append((chapters, tests)) or True)
    assert main(['chapter', given]) == 0
    assert ran == [(['05_train'], checks.tests_of('05_train'))]


def test_an_unknown_chapter_is_named_as_the_book_names_it(capsys):
    assert main(['chapter', 'nbs/05_lincir.ipynb']) == 2
    assert (
        'there is no nbs/05_lincir.ipynb; name a notebook below nbs/; did you mean 04b_methods/05_lincir'
        in capsys.readouterr().err
    )
