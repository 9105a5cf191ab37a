"The command line without running anything: what it refuses, and its exit codes."

import pytest
from filelock import FileLock
from cis_nb.book import command_line
from cis_nb.book.command_line import main


@pytest.fixture
def small(project):
    project.chapter('01_honest')
    project.chapter('01_honest', 'n: 3\n', 'full', '.more')
    return project


@pytest.mark.parametrize(
    'words, said',
    [
        (['run', 'quick'], 'run: which experiment of quick? It has 01_honest'),
        (['run', 'quick', '01_honst'], "profile 'quick' has no experiment '01_honst'; did you mean 01_honest?"),
        (['run', 'quick', '01_honest.more'], "no experiment '01_honest.more'; it is in full"),
        (['run', 'quick', 'zzz'], "no experiment 'zzz'; it has 01_honest"),
        (['make', 'quik'], 'no parameter files in'),
        (['run', 'quik', '01_honest'], 'profiles: full, quick'),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(small, words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_two_processes_do_not_make_one_profile_at_a_time(small, capsys):
    (folder := small.home / 'reports' / 'quick').mkdir(parents=True)
    with FileLock(folder / '.lock'):
        assert main(['make', 'quick']) == 2
    assert 'is locked: another process is making this profile' in capsys.readouterr().err


@pytest.mark.parametrize('words', [[], ['print'], ['make', 'quick', '--cores', 'two']])
def test_words_that_are_no_command_end_with_the_usage(words, capsys):
    with pytest.raises(SystemExit) as e:
        main(words)
    assert e.value.code == 2 and 'usage: cis-book' in capsys.readouterr().err


def test_unknown_options_go_to_snakemake_and_failure_is_exit_code_one(small, monkeypatch):
    seen = []
    monkeypatch.setattr(command_line, 'make', lambda *given: seen.append(given) or len(seen) < 2)
    assert [main(['make', 'full', '--data', 'd', '--cores', '2', '--forceall']) for _ in range(2)] == [0, 1]
    assert seen[0] == ('full', 'd', 2, ['--forceall'])
