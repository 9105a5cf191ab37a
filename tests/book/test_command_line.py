"The command line without running anything: what it refuses, and its exit codes."

import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from filelock import FileLock
from projects import ROOT
from cis_nb.book import command_line, processes
from cis_nb.book.command_line import main
from cis_nb.core.experiment_files import experiments
from cis_nb.core.store import stored, unfinished_work
from cis_nb.data import roots


@pytest.fixture
def small(project):
    project.chapter('01_honest')
    project.chapter('01_honest', 'n: 3\n', 'full', '.more')
    return project


@pytest.mark.parametrize(
    'words, said',
    [
        (['run', 'quick'], 'run: which experiment of quick? It has 1, such as 01_honest; params/quick has'),
        (['run', 'quick', '01_honst'], "profile 'quick' has no experiment '01_honst'; did you mean 01_honest?"),
        (['run', 'quick', '01_honest.more'], "no experiment '01_honest.more'; it is in full"),
        (['run', 'quick', 'zzz'], "no experiment 'zzz'; it has 01_honest"),
        (['run', 'quick', 'onest'], 'cis-book run: profile'),
        (['run', '01_honest'], "'01_honest' is no profile, and no experiment is given: `cis-book run PROFILE EXPERI"),
        (['keep', 'quik'], 'cis-book keep: no parameter files in'),
        (['make', 'quik'], 'no parameter files in'),
        (['run', 'quik', '01_honest'], 'profiles: full, quick'),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(small, words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_only_what_is_likely_is_suggested(project, capsys):
    for name in (
        '06_evaluation/genecis',
        '06_evaluation/grocery',
        '06_evaluation/decoding',
        '05_train.c.1',
        '05_train.c.2',
    ):
        project.write(f'params/quick/{name}.yaml', '')
    for given, said in [
        ('06_evaluation/gencis', "'06_evaluation/gencis'; did you mean 06_evaluation/genecis?\n"),
        ('05_train.c', "'05_train.c'; did you mean 05_train.c.2 or 05_train.c.1?\n"),
    ]:
        assert main(['run', 'quick', given]) == 2 and capsys.readouterr().err.endswith(said)


def test_the_help_explains_each_command_and_lists_the_profiles(small, capsys):
    with pytest.raises(SystemExit) as e:
        main(['--help'])
    said = capsys.readouterr().out
    assert e.value.code == 0 and said.endswith('profiles: full, quick\n')
    assert all(f'\n  {name:13}{what}\n' in said for name, what in command_line.COMMANDS.items())


def test_two_processes_do_not_make_one_profile_at_a_time(small, capsys, monkeypatch):
    monkeypatch.setattr(processes, 'PATIENCE', 0.2)
    (folder := small.home / 'reports' / 'quick').mkdir(parents=True)
    with FileLock(folder / '.lock'):
        assert main(['make', 'quick']) == 2
    said = capsys.readouterr().err
    assert 'is locked: another process is making this profile' in said
    assert 'waiting: ' in said


@pytest.mark.parametrize(
    'words', [[], ['print'], ['make', 'quick', '--cores', 'two'], ['make', '--cores', '-3'], ['make', '--cores', '0']]
)
def test_words_that_are_no_command_end_with_the_usage(words, capsys):
    with pytest.raises(SystemExit) as e:
        main(words)
    assert e.value.code == 2 and 'usage: cis-book' in capsys.readouterr().err


def test_unknown_options_go_to_snakemake_and_failure_is_exit_code_one(small, monkeypatch):
    seen = []
    monkeypatch.setattr(command_line, 'make', lambda *given: seen.append(given) or len(seen) < 2)
    assert [main(['make', 'full', '--data', 'd', '--cores', '2', '--forceall']) for _ in range(2)] == [0, 1]
    assert seen[0] == ('full', 'd', 2, ['--forceall'])


NAMES = r"""
photos|two words|it's|"quoted"|both ' and "|Größe|写真|007|1e3|null|true|a: b|[1, 2]|{braces}|{wildcards.name}
back\slash|$HOME|$(touch hit)|`touch hit`|a;touch hit|a&b|#hash|a#b|%d|*|~|-x|--forceall|a=b|!x|'|trailing
""".strip().replace('\n', '|').split('|')  # fmt: skip
NAMES += ['trailing ', ' blanks ', 'tab\t', 'two\nlines', 'a|b', '$$', '$(shell touch hit)']


@pytest.fixture
def typed(tmp_path):
    "What a name becomes that is given to make: as its argument, or as a variable of the environment."
    (tmp_path / 'bin').mkdir()
    probe = 'import json, sys; print(json.dumps(sys.argv[1:]))'
    (tmp_path / 'bin' / 'python').write_text(f"#!/bin/sh\nshift 2\nexec python3 -c '{probe}' \"$@\"\n")
    (tmp_path / 'bin' / 'python').chmod(0o755)
    for name in ('settings.ini', 'setup.py', 'pyproject.toml', 'constraints.txt', '.ready'):
        (tmp_path / name).touch()

    def ask(*words, **environment):
        command = ['make', '-C', tmp_path, '-f', ROOT / 'Makefile', '-s', '--no-print-directory', 'book']
        command += [f'VENV={tmp_path}', *words]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / 'hit').exists()
        return command_line._parser().parse_known_args(json.loads(done.stdout))

    return ask


@pytest.mark.skipif(not shutil.which('make'), reason='needs make')
@pytest.mark.parametrize('name', NAMES)
def test_data_and_profile_arrive_as_typed(typed, name):
    given, more = typed(DATA=name, PROFILE=name)
    assert (given.command, more, given.data, given.profile) == ('make', [], name, name)
    given, more = typed(f'DATA={name}', f'PROFILE={name}')  # here make itself drops blanks in front of a value
    assert (given.command, more, given.data, given.profile) == ('make', [], name.lstrip(), name.lstrip())


@pytest.mark.parametrize('profile', ['', '.', '..', '../params/quick', 'quick/.', 'quick/01_folder', '*', 'a b', '-x'])
def test_a_profile_is_the_name_of_one_folder(small, profile, capsys):
    (small.home / 'params/quick/01_folder').mkdir()
    assert main(['--', 'make', profile]) == 2
    assert 'profiles: full, quick' in capsys.readouterr().err


def test_all_that_the_photographs_read_is_told(monkeypatch, tmp_path):
    "Without any data: the clothes that a page shows, the ratings and a pipeline too; none of them for the drawn world."
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roots, 'entry_points', lambda group: [])

    def lines_of(profile):
        return command_line._missing_lines({n: replace(e, profile='none') for n, e in experiments(profile).items()})

    lines = lines_of('photos')
    told = {line.removeprefix('  !  ').split(' is missing, which ')[0] for line in lines}
    assert {'flickr8k', 'grocery', 'clothing', 'concreteness', 'an English spaCy pipeline'} < told
    assert all('Get it from ' in line and '; licence: ' in line and '; size: ' in line for line in lines)
    (tmp_path / 'spacy_en_ewt_clear_sm').mkdir()
    assert not roots.missing_data([roots.ENGLISH])
    for profile in ('quick', 'full'):
        assert lines_of(profile) == []


def test_data_that_cannot_be_written_as_text_are_refused(small, capsys):
    assert main(['make', 'quick', '--data', os.fsdecode(b'caf\xe9')]) == 2
    assert "data 'caf\\udce9': the name is not UTF-8; rename the folder" in capsys.readouterr().err


def test_a_folder_of_the_reader_that_is_missing_stops_the_book_at_once(small, monkeypatch, capsys):
    monkeypatch.setattr(command_line, 'remove_outdated', lambda e: pytest.fail('a result was removed'))
    assert main(['make', 'quick', '--data', 'nowhere']) == 2
    assert "data 'nowhere': no such folder or file here" in capsys.readouterr().err
    assert main(['run', 'quick', '01_honest', '--data', 'nowhere']) == 2
    assert "data 'nowhere': no such folder or file here" in capsys.readouterr().err


def test_missing_data_are_told_before_the_first_experiment_starts(small, monkeypatch, tmp_path, capsys):
    "Each once, with source, licence and size, and the experiments that name it."
    for i, data in enumerate(('cc3m', 'cc3m', 'cirr', 'flickr8k')):
        small.chapter('02_with_data', f'data: {data}\n', variant=f'.v{i}')
    (tmp_path / 'data' / 'flickr8k').mkdir(parents=True)
    monkeypatch.setenv('CIS_DATA', str(tmp_path / 'data'))
    monkeypatch.chdir(small.home)
    monkeypatch.setattr(command_line, '_run_graph', lambda *a: print('starts') or 0)
    monkeypatch.setattr(command_line, 'site', lambda *a: True)
    main(['make', 'quick'])
    told, rest = capsys.readouterr().out.split('starts')
    begins = [
        '  !  cc3m is missing, which 02_with_data.v0, 02_with_data.v1 name. Get it from https://',
        '  !  cirr is missing, which 02_with_data.v2 names. Get it from https://github.com/',
    ]
    assert len(told.splitlines()) == len(begins) and all(map(str.startswith, told.splitlines(), begins))
    assert told.count('licence: ') == told.count('size: ') == 2


def interrupted(folder):
    "A builder of a module of the library, interrupted."
    raise KeyboardInterrupt


interrupted.__module__ = 'cis_nb.data.packed'


def begun(variant: str):
    "Unfinished work in the store."

    def build(folder):
        (folder / 'half').write_text('x' * 1000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored('run', variant, {}, build, resume=True)


def test_unfinished_work_of_the_same_code_is_kept_after_a_change_elsewhere(small):
    "Only the modules of the work itself count, and of them no comments; without a record it is kept."
    begun('of a notebook')
    with pytest.raises(KeyboardInterrupt):
        stored('run', 'of a module', {}, interrupted, resume=True)
    odd = {f'odd {n}': dict(modules={f'cis_nb.{name}': '0'}) for n, name in enumerate(('a\0b', 'a' * 5000, '../a'))}
    for variant in odd:
        begun(variant)
    for variant, change in ({'of a notebook': dict(modules=3), 'of a module': {}} | odd).items():
        (folder,) = [r['folder'] for r in unfinished_work() if r['variant'] == variant]
        record = folder.with_name(folder.name.replace('.partial', '.record') + '.json')
        said = json.loads(record.read_text()) | dict(library='another') | change
        assert change or 'cis_nb.data.packed' in said['modules']
        record.write_text(json.dumps(said))
    assert {r['state'] for r in unfinished_work()} == {'can be resumed'}


def test_unfinished_work_of_other_code_is_listed_before_it_is_deleted(small, capsys):
    begun('new')
    begun('old')
    (old,) = [r['folder'] for r in unfinished_work() if r['variant'] == 'old']
    record = old.with_name(old.name.replace('.partial', '.record') + '.json')
    record.write_text(json.dumps(json.loads(record.read_text()) | dict(modules={'cis_nb.core.store': 'another'})))
    assert main(['clean-store']) == 0
    said = capsys.readouterr().out
    assert '2 unfinished, 1 of them left by other code' in said and 'nothing deleted' in said and old.exists()
    assert main(['clean-store', '--yes']) == 0
    assert '1 deleted' in capsys.readouterr().out
    assert [r['variant'] for r in unfinished_work()] == ['new'] and not record.exists()


@pytest.mark.parametrize(
    'words, said',
    [
        (['verify', 'all'], "what is 'all'? `verify` reads options alone"),
        (['keep'], '`keep` needs a profile: '),
        (['keep', 'quick', '01_honest'], "what is '01_honest'? `keep` reads a profile"),
        (['run', 'quick', '01_honest', 'again'], "what is 'again'? `run` reads a profile and an experiment"),
    ],
)
def test_words_that_a_command_does_not_read_are_refused(small, capsys, words, said):
    assert main(words) == 2 and said in capsys.readouterr().err


def test_finished_work_is_verified_on_demand(small, capsys):
    folder = stored('run', 'kept', {}, lambda to: (to / 'a.txt').write_text('content'))
    assert main(['verify']) == 0 and '0 wrong' in capsys.readouterr().out
    (folder / 'a.txt').write_text('CONTENT')  # as long as before
    assert main(['verify']) == 1
    assert f'{folder}  has changed since' in capsys.readouterr().out
    said = json.loads((folder / 'manifest.json').read_text())
    del said['created']
    (folder / 'manifest.json').write_text(json.dumps(said))
    assert main(['verify']) == 1
    assert f'{folder}  has changed since it was made: delete it' in capsys.readouterr().out
    (folder / 'manifest.json').unlink()
    assert main(['verify']) == 1
    assert f'{folder}  has no manifest.json: delete it' in capsys.readouterr().out


def test_an_error_of_the_system_is_one_line(small, monkeypatch, capsys):
    def full(*given):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(command_line, 'site', full)
    monkeypatch.setattr(command_line, '_run_graph', lambda *given: 0)
    assert main(['make', 'quick']) == 2
    said = capsys.readouterr().err
    assert said.startswith('The book cannot be made. ') and 'disk full while making quick' in said
    assert 'CIS_STORE' in said and 'TMPDIR' in said


@pytest.mark.parametrize(
    'ended, said', [('receipt.json', 'exit code 2. From'), ('', 'exit code 2 and without 01_honest')]
)
def test_a_fault_of_snakemake_is_told(small, ended, said):
    "Also where every experiment has a result; not where an experiment of this run has failed."
    found = experiments('quick')
    small.write('reports/quick/snakemake.log', 'unrecognized arguments')
    if ended:
        small.write(f'reports/quick/01_honest/{ended}', '{}')
    with pytest.raises(RuntimeError, match=said):
        command_line._check_graph('quick', found, 2)
    command_line._check_graph('quick', found, 0)
    small.write('reports/quick/01_honest/failed.json', '{}')
    command_line._check_graph('quick', found, 1)
