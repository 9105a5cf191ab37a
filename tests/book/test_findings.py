"Findings that the library keeps: which are kept, where they are shown, and what replaces them."

import re

import pytest
from cis_nb.book.findings import COLUMNS, add_findings, kept_findings, read_findings

ROW = dict(zip(COLUMNS, ['full', '07_ablations/x.y', 'First', 60, '2026-01-02', 'a processor', 'abc'], strict=True))


def test_a_finding_replaces_that_of_the_same_experiment_alone(tmp_path):
    file = tmp_path / 'findings.csv'
    assert read_findings(file).empty
    add_findings([ROW, ROW | dict(profile='photos')], file)
    add_findings([ROW | dict(finding='Second, "quoted", on\ntwo lines')], file)
    found = read_findings(file)
    assert list(zip(found.profile, found.finding)) == [('full', 'Second, "quoted", on\ntwo lines'), ('photos', 'First')]
    assert [r['profile'] for r in kept_findings('07_ablations/x', 'full', found)] == ['photos']
    assert kept_findings('07_ablations/x.yz', 'quick', found) == [] == kept_findings('07_ablations', 'quick', found)


def test_a_file_with_other_columns_is_named(tmp_path):
    (tmp_path / 'findings.csv').write_text('profile,finding\nfull,First\n')
    with pytest.raises(ValueError, match=r"findings\.csv: column 'experiment' is missing; needed: profile, experiment"):
        read_findings(tmp_path / 'findings.csv')


@pytest.mark.parametrize(
    'line, said',
    [
        ('full,a/b,f,3,d,c,l,more', 'line 3: has 8 cells, the heading 7'),
        ('full,a/b', 'line 3: has 2 cells'),
        (
            'full,a/b,f,xyz,d,c,l',
            'full a/b has no number of seconds; delete it and write it anew by `cis-book keep full`',
        ),
        ('full,07_ablations/x.y,f,3,d,c,l', 'full 07_ablations/x.y is there twice'),
        ('full,a/b,"f', 'is no CSV'),
    ],
)
def test_a_damaged_file_is_named(tmp_path, line, said):
    file = tmp_path / 'findings.csv'
    add_findings([ROW], file)
    file.write_text(f'{file.read_text()}{line}\n')
    with pytest.raises(ValueError, match=re.escape(said)):
        read_findings(file)


@pytest.mark.e2e
def test_a_kept_finding_stands_on_the_page_of_another_profile(project):
    project.chapter('00_page', '')
    project.chapter('06_honest', profile='full')
    rc, said = project.book('keep', 'full')
    assert rc == 1 and '0 findings of full kept' in said  # it has not run
    assert project.book('run', 'full', '06_honest')[0] == 0
    rc, said = project.book('keep', 'full')
    assert rc == 0 and '✓  06_honest' in said and '1 findings of full kept' in said
    headline = (
        read_findings(project.home / 'cis_nb' / 'assets' / 'findings.csv').set_index('experiment').finding['06_honest']
    )
    rc, said = project.book('make', 'quick')
    assert rc == 0, said
    html = project.report('html') / '06_honest.html'
    assert (
        '06_honest: result of profile full, kept by the library.' in html.read_text() and headline in html.read_text()
    )
    assert headline in (project.report('html') / 'index.html').read_text()


@pytest.mark.e2e
def test_a_result_out_of_date_is_named_and_not_kept(project):
    project.chapter('06_honest', profile='full')
    assert project.book('run', 'full', '06_honest')[0] == 0
    project.write('params/full/06_honest.yaml', 'n: 3\n')
    rc, said = project.book('keep', 'full')
    assert rc == 1 and '0 findings of full kept' in said
    assert '✗  06_honest is out of date and not kept; `cis-book run full 06_honest` updates it' in said
