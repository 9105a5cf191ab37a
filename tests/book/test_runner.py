"The runner: which results are trusted, what runs again, what survives a failure or a kill."

import errno
import json
import os
import shutil
import signal
import time
import pandas as pd
import pytest
from process_trees import wait_for
from projects import ROOT, Project, receipt_of
from cis_nb import api
from cis_nb.book import runner as book
from cis_nb.book import site
from cis_nb.book.command_line import main
from cis_nb.core import code
from cis_nb.core.experiment_files import experiments, read_notebook
from cis_nb.core.store import StorageFault

FAULTS = {  # fixture -> what the verdict must name
    'raises': 'raised ValueError: no such <thing>',
    'leaves_early': 'never ran',
    'no_receipt': 'no receipt',
    'other_value': 'the receipt says n = 99, the file says 2',
    'kernel_dies': 'DeadKernelError',
}


@pytest.mark.e2e
@pytest.mark.parametrize('name', FAULTS)
def test_a_run_that_may_not_be_trusted(project, name):
    project.chapter(f'01_{name}')
    e = experiments('quick')[f'01_{name}']
    assert not book.run(e)
    failed = json.loads((e.folder / 'failed.json').read_text())
    assert any(FAULTS[name] in r for r in failed['reasons']), failed['reasons']
    assert not e.receipt.exists() and not book.done(e)
    assert (e.folder / 'log.txt').read_text()
    if name == 'raises':
        assert (
            failed['cell'] == 2
            and failed['source'].startswith('def inner')
            and 'inner()' in '\n'.join(failed['traceback'])
            and '\x1b' not in str(failed)
        )


def test_a_disk_that_is_full_while_a_notebook_is_written_is_named_with_the_remedy(project, monkeypatch):
    def full(*a, **kw):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr('papermill.execute_notebook', full)
    project.chapter('01_honest')
    e = experiments('quick')['01_honest']
    with pytest.raises(StorageFault, match='disk full while running .*free some space or make .* writable'):
        book.run(e)
    assert not book.done(e)


@pytest.mark.parametrize('damage', [b'', b'[' * 5000, b'\xff\xfe', b'[]', b'{"methods": 3}'])
def test_damage_of_what_is_kept_of_plugins_names_the_file(damage, tmp_path, monkeypatch):
    "As many bytes as before, so that the folder counts as finished."
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    book.registered()
    (file,) = tmp_path.glob('registered/*/registered.json')
    file.write_bytes(damage.ljust(size := file.stat().st_size)[:size])
    with pytest.raises(ValueError, match='delete the folder .*: it is made again') as e:
        book.registered()
    assert str(e.value).startswith(str(file))


def test_a_lost_tag_does_not_pass_for_success(project):
    "Where the tag is lost, the values come first and the defaults win."
    project.chapter('01_honest')
    path = project.home / 'nbs' / '01_honest.ipynb'
    path.write_text(path.read_text().replace('"parameters"', '"other"'))
    with pytest.raises(ValueError, match='no cell with the tag `parameters`'):
        experiments('quick')


@pytest.mark.parametrize(
    'name, params, says',
    [
        ('honest', 'm: 2', 'unknown parameter'),
        ('honest', 'n: two', 'n must be int'),
        ('honest', 'rate: 1e-4', 'write 1.0e-4'),
        ('honest', 'n: {a: 1}', 'n must be int'),
        ('honest', 'n: 1\nn: 2', 'given twice'),
        ('honest', '- 1', 'expected lines like'),
        ('honest', 'a: [', 'is not YAML'),
        ('two_parameter_cells', '', '2 cells'),
        ('computed_parameter', '', 'may hold only lines like'),
        ('not_for_tests', '', 'use a parameter instead'),
        ('page', 'n: 1', 'no cell with the tag'),
    ],
)
def test_a_parameter_file_that_does_not_fit(project, capsys, name, params, says):
    "Found before anything runs, with the name of the file or the notebook."
    project.chapter(f'01_{name}', params)
    with pytest.raises((ValueError, TypeError)) as e:
        experiments('quick')
    assert says in str(e.value) and f'01_{name}' in str(e.value)
    assert main(['make', 'quick']) == 2 and 'The book cannot be made' in capsys.readouterr().err


def test_a_training_over_an_unknown_backbone_is_refused_before_anything_runs(project):
    shutil.copy(ROOT / 'nbs' / '05_train.ipynb', project.home / 'nbs')
    project.write('params/quick/05_train.big.yaml', 'backbone: vit_b31\n')
    refused = "05_train.big.yaml: backbone: 'vit_b31' is not allowed: known: tiny_xs, .*; did you mean 'vit_b32'"
    with pytest.raises(ValueError, match=refused):
        experiments('quick')


def test_a_file_for_no_notebook_and_a_profile_that_is_not_there(project):
    project.chapter('01_honest')
    project.write('params/quick/07_nothing.yaml', '')
    with pytest.raises(ValueError, match='07_nothing.yaml fits no notebook'):
        experiments('quick')
    with pytest.raises(ValueError, match='profiles: quick'):
        experiments('other')


@pytest.mark.e2e
def test_a_page_without_parameters_is_run_for_its_pictures(project):
    project.chapter('01_page', '# nothing to set\n')
    e = experiments('quick')['01_page']
    assert book.run(e)
    assert json.loads(e.receipt.read_text())['headline'] == 'Words and a picture, nothing to set.'
    assert '42' in (e.folder / 'notebook.ipynb').read_text()


def test_data_of_the_reader_replaces_the_parameter(project):
    project.chapter('01_with_data')
    project.chapter('02_honest')
    found = experiments('quick', data='my photos')
    assert found['01_with_data'].params == dict(n=2, data='my photos') and found['02_honest'].params == dict(n=2)
    assert book.depends(found['01_with_data']) != book.depends(experiments('quick')['01_with_data'])


TAKEN = '01_world/00_scenes 05_train.combiner 05_train.cirr 05_train.lincir 06_evaluation/matrix'.split()


@pytest.fixture
def taken(project, monkeypatch):
    "A few experiments of this book in a project with its own copy of the modules."
    for name in TAKEN:
        for path in (f'nbs/{name.split(".")[0]}.ipynb', f'params/quick/{name}.yaml'):
            project.write(path, (ROOT / path).read_text())
    monkeypatch.setattr(code, 'module_file', lambda m: project.home.joinpath(*m.split('.')).with_suffix('.py'))
    return project


def inputs() -> dict:
    return {name: book.depends(e) for name, e in experiments('quick').items()}


REACHED = {
    'methods/lincir.py': {'05_train.lincir', '06_evaluation/matrix'},
    'benchmarks/circo.py': {'06_evaluation/matrix'},
    'benchmarks/mit_states.py': {'06_evaluation/matrix'},
    'world/circo.py': {'06_evaluation/matrix'},
}


@pytest.mark.e2e
def test_what_is_found_by_name_is_a_dependence_of_what_names_it(taken):
    after = inputs()
    for file, reaches in REACHED.items():
        before = after
        with open(taken.home / 'cis_nb' / file, 'a') as f:
            f.write('\nx = 1\n')
        after = inputs()
        assert {name for name in TAKEN if after[name] != before[name]} == reaches, file


@pytest.fixture
def chain(project, monkeypatch):
    "A chapter that imports `core.plotting`, one that needs it, one that needs that one, and one for itself."
    for name in ('01_imports_show', '02_honest', '03_measures', '04_counts_runs'):
        project.chapter(name)
    needs = 'chapters:\n  02_honest: {needs: [01_imports_show]}\n  03_measures: {needs: [02_honest]}\n'
    project.write('params/chapters.yaml', needs)
    monkeypatch.setattr(code, 'module_file', lambda m: project.home.joinpath(*m.split('.')).with_suffix('.py'))
    return project


def changed(before: dict) -> set:
    "The experiments with other inputs than `before`."
    after = inputs()
    return {name for name in after if after[name] != before[name]}


def test_a_module_that_only_a_need_imports_is_a_dependence_of_what_reads_its_result(chain):
    before = inputs()
    plotting = chain.home / 'cis_nb/core/plotting.py'
    plotting.write_text(plotting.read_text() + '\nnew = 1\n')
    assert changed(before) == {'01_imports_show', '02_honest', '03_measures'}


def test_a_result_made_from_older_inputs_is_another_one_to_what_reads_it(chain):
    "A page may be run alone before what it needs is up to date."
    before = inputs()
    made = dict(experiment='01_imports_show', inputs=dict(notebook='older'), seconds=1, created='2026-01-31')
    for name, record in (('receipt.json', receipt_of(experiment='01_imports_show')), ('run.json', made)):
        chain.write(f'reports/quick/01_imports_show/{name}', json.dumps(record))
    assert changed(before) == {'02_honest'}


OUTSIDE = '''
from cis_nb.api import Plugin


class Outside(Plugin):
    name, title = 'from_outside', 'From outside'
'''


@pytest.mark.e2e
def test_an_installed_package_is_a_dependence_of_what_names_its_method(taken, tmp_path, monkeypatch):
    site = tmp_path / 'site'
    about = site / 'cis_from_outside-0.1.dist-info'
    about.mkdir(parents=True)
    (about / 'METADATA').write_text('Metadata-Version: 2.1\nName: cis-from-outside\nVersion: 0.1\n')
    (about / 'entry_points.txt').write_text('[cis_nb.methods]\nfrom_outside = cis_from_outside:Outside\n')
    (site / 'cis_from_outside.py').write_text(OUTSIDE + '\nfrom cis_nb.core import plotting\n')
    monkeypatch.syspath_prepend(site)
    api.installed.cache_clear()
    try:
        taken.write('params/quick/06_evaluation/matrix.yaml', 'methods: [from_outside]\n')
        before = inputs()
        (site / 'cis_from_outside.py').write_text(OUTSIDE + '\nx = 1\n')
        after = inputs()
    finally:
        monkeypatch.undo()
        api.installed.cache_clear()
        api.get.cache_clear()
    assert list(before['06_evaluation/matrix']['packages']) == ['cis_from_outside.py']
    assert {name for name in before if after[name] != before[name]} == {'06_evaluation/matrix'}


@pytest.mark.e2e
def test_warnings_are_listed_below_the_title_alone(project):
    from cis_nb.book import site

    project.chapter('01_warns')
    e = experiments('quick')['01_warns']
    assert book.run(e)
    nb = read_notebook(e.folder / 'notebook.ipynb')
    assert len(site.warnings_of(nb)) == 1 and 'noise' in str(nb['cells'][-1]['outputs'])
    assert not any(o.get('name') == 'stderr' for c in site.notebook_page(nb, {})['cells'] for o in c.get('outputs', ()))
    assert '<summary>1 warning</summary>' in site.run_line(e, ('done', ''), nb)


@pytest.fixture(scope='module')
def graph(tmp_path_factory):
    "A book with a need, a failure and what needs the failed."
    p = Project(tmp_path_factory.mktemp('graph') / 'project')
    numbered = '01_honest 02a_measures 03_imports_show 04a_raises 05_counts_runs 06_threads'.split()
    for name in (*numbered, '07_folder/with_data'):
        p.chapter(name)
    p.chapter('02a_measures', 'n: 3\n', variant='.three')
    p.write(
        'params/chapters.yaml',
        'chapters:\n  02a_measures: {needs: [01_honest]}\n  05_counts_runs: {needs: [01_honest, 04a_raises]}\n'
        '  06_threads: {all_cores: true}\n',
    )
    p.first = p.book('make', 'quick', '--cores', '2')
    return p


GOOD = ['01_honest', '02a_measures', '02a_measures.three', '03_imports_show', '06_threads', '07_folder/with_data']


@pytest.mark.e2e
def test_a_failure_stops_only_what_needs_it(graph):
    rc, said = graph.first
    assert rc == 1 and '6 of 8 experiments have a result' in said, said
    graph.made(*GOOD)
    assert (graph.report('04a_raises') / 'failed.json').exists() and not graph.report('05_counts_runs').exists()
    assert not (graph.home / 'runs.txt').exists()
    assert len(list((graph.home / 'nbs').rglob('*.ipynb'))) == 8  # nothing is left beside the notebooks


@pytest.mark.e2e
def test_threads_are_shared(graph):
    def receipt(n):
        return json.loads((graph.report(n) / 'run.json').read_text())

    assert receipt('06_threads')['threads'] == 2 and receipt('01_honest')['threads'] == 1
    assert json.loads((graph.report('06_threads') / 'receipt.json').read_text())['headline'] == '2 threads'


@pytest.mark.e2e
def test_the_pages_tell_what_failed_and_what_was_skipped(graph):
    html = graph.home / 'reports/quick/html'
    front = (html / 'index.html').read_text()
    assert 'failed: cell 2 raised ValueError: no such &lt;thing&gt;' in front
    assert 'skipped, because it needs 04a_raises, which has no result' in front
    assert 'Measures (three)' in front and 'n is 3' in front
    page = (html / '04a_raises.html').read_text()
    assert 'no such &lt;thing&gt;' in page and 'cis-trouble' in page
    assert (
        (html / '05_counts_runs.html').exists()
        and (html / '07_folder/with_data.html').exists()
        and (html / 'runs/04a_raises/failed.json').exists()
        and (html / 'map.html').exists()
    )
    assert not (graph.home / 'reports/quick/site.log').read_text()


@pytest.mark.e2e
def test_data_come_from_the_world_or_from_the_reader(graph):
    def said():
        return json.loads((graph.report('07_folder/with_data') / 'receipt.json').read_text())['headline']

    odd = ' 007 \'q\' "d" ü写 {n} {wildcards.name} $HOME $(touch hit) `touch hit` \\n a: b\n1e3;# '
    assert said() == 'data from world'
    (graph.home / odd).mkdir()
    rc, told = graph.book('make', 'quick', '--cores', '2', '--data', odd)
    assert said() == f'data from {odd}', told
    assert not (graph.home / 'hit').exists()
    graph.book('make', 'quick', '--cores', '2')
    assert said() == 'data from world'


@pytest.mark.e2e
def test_an_error_of_snakemake_reaches_the_reader(project):
    project.chapter('01_honest')
    project.write('Snakefile', 'raise ValueError("this is broken")\n')
    rc, said = project.book()
    assert rc == 2 and 'Snakemake ended with exit code 1 and without 01_honest' in said, said
    assert 'this is broken' in said and 'snakemake.log' in said
    shutil.copy(ROOT / 'Snakefile', project.home)
    rc, said = project.book()
    assert rc == 0, said
    rc, said = project.book('make', 'quick', '--no-such-option')  # everything has a result
    assert rc == 2 and 'Snakemake ended with exit code 2. From' in said, said
    assert 'unrecognized arguments: --no-such-option' in said


DAMAGE = {
    'empty': b'',
    'cut': b'{"reasons": ["x", "par',
    'of another program': b'{"a": 1}',
    'list': b'[1]',
    'binary': b'\xff\xfe\0',
}


@pytest.mark.e2e
def test_a_damaged_record_is_no_result_and_the_page_says_why(project):
    project.chapter('01_honest')
    rc, said = project.book()
    e = experiments('quick')['01_honest']
    assert rc == 0 and book.done(e) and book.damage(e) == '', said
    good = {name: (e.folder / name).read_bytes() for name in ('run.json', 'receipt.json')}
    for name in (*good, 'failed.json'):
        for kind, content in DAMAGE.items():
            (e.folder / name).write_bytes(content)
            assert not book.done(e) and f'{name} is damaged' in book.damage(e), (name, kind)
            assert site.experiment_states({e.name: e}) == {e.name: ('missing', book.damage(e))}
            (e.folder / name).write_bytes(good[name]) if name in good else (e.folder / name).unlink()
    assert book.done(e)
    (e.folder / 'receipt.json').write_bytes(b'')
    for stamp in ('.wall', '.site.stamp', '.seconds.json', 'html/index.html'):
        (e.folder.parent / stamp).write_bytes(b'\xff\xfe\0')
    rc, said = project.book()
    assert rc == 0 and '01_honest runs again, since receipt.json is damaged (empty)' in said, said
    page = (e.folder.parent / 'html/01_honest.html').read_text()
    assert 'run again, since receipt.json is damaged (empty)' in page
    assert 'Honest' in (e.folder.parent / 'html/index.html').read_text()


def cured(e, name: str, content: bytes) -> str:
    "What is wrong while a file of a finished experiment holds something else."
    good = (e.folder / name).read_bytes()
    (e.folder / name).write_bytes(content)
    assert not book.done(e)
    wrong = book.damage(e)
    (e.folder / name).write_bytes(good)
    assert book.done(e) and not book.damage(e)
    return wrong


@pytest.mark.e2e
def test_a_valid_file_of_another_run_is_no_result_and_the_book_says_why(project):
    for name in ('01_honest', '01_collects'):
        project.chapter(name, None)
    for name, given in {'01_honest': 'n: 2\n', '01_honest.three': 'n: 3\n', '01_collects': ''}.items():
        project.write(f'params/quick/{name}.yaml', given)
        assert book.run(experiments('quick')[name])
    found = experiments('quick')
    e, three, collects = (found[name] for name in ('01_honest', '01_honest.three', '01_collects'))
    assert cured(e, 'receipt.json', three.receipt.read_bytes()) == "the receipt is of '01_honest.three'"
    renamed = json.dumps(json.loads(three.receipt.read_text()) | dict(experiment=e.name)).encode()
    assert cured(e, 'receipt.json', renamed) == 'the receipt says n = 3, the file says 2'
    later = json.dumps(json.loads(e.receipt.read_text()) | dict(headline='n is 4')).encode()
    assert cured(e, 'receipt.json', later) == 'receipt.json is not the one that its run has left'
    assert cured(e, 'run.json', (three.folder / 'run.json').read_bytes()) == "run.json is of '01_honest.three'"
    for other in (three, collects):
        wrong = cured(e, 'notebook.ipynb', (other.folder / 'notebook.ipynb').read_bytes())
        assert wrong == 'notebook.ipynb is not the one that its run has left'
    shutil.copy(collects.folder / 'notebook.ipynb', e.folder)
    assert book.remove_outdated(e) == wrong and book.run(e)
    assert json.loads((e.folder / 'run.json').read_text())['again'] == wrong


@pytest.mark.e2e
def test_another_value_in_the_parameter_file_is_no_damage(project):
    project.chapter('01_honest')
    assert book.run(experiments('quick')['01_honest'])
    project.write('params/quick/01_honest.yaml', 'n: 5\n')
    e = experiments('quick')['01_honest']
    assert not book.done(e) and book.damage(e) == ''
    assert site.experiment_states({e.name: e}) == {e.name: ('earlier', '')}


@pytest.mark.e2e
def test_the_cause_of_a_failure_comes_first(project):
    project.chapter('01_kernel_dies')
    rc, said = project.book()
    assert rc == 1 and '✗  01_kernel_dies  the run ended with DeadKernelError' in said, said
    front = (project.home / 'reports/quick/html/index.html').read_text()
    assert 'failed: the run ended with DeadKernelError' in front


@pytest.mark.e2e
def test_who_waits_for_an_experiment_is_told_so(project):
    project.chapter('01_waits', 'n: 5\n')
    first = project.start('run', 'quick', '01_waits')
    wait_for(project.home / 'started', first)
    rc, said = project.book('run', 'quick', '01_waits')
    assert rc == 0 and 'waiting: another process is at work on the experiment 01_waits' in said, said
    assert first.wait(30) == 0


@pytest.mark.e2e
def test_results_are_one_table(graph):
    d = pd.read_parquet(graph.home / 'reports/quick/results.parquet')
    assert dict(zip(d.experiment, d.value)) == {'02a_measures': 2.0, '02a_measures.three': 3.0}


@pytest.mark.e2e
def test_nothing_changed_nothing_runs_and_a_change_reruns_what_depends_on_it(graph):
    before = graph.made(*GOOD)
    shutil.copy(graph.home / 'nbs/01_honest.ipynb', graph.home / 'nbs/04a_raises.ipynb')  # mended
    plotting = graph.home / 'cis_nb/core/plotting.py'
    plotting.write_text(plotting.read_text() + '\nnew = 1\n')
    report = graph.home / 'cis_nb/core/report.py'
    report.write_text(report.read_text() + '\n# only a comment\n')
    rc, said = graph.book('make', 'quick', '--cores', '2')
    assert rc == 0 and '8 of 8' in said, said
    after = graph.made(*GOOD)
    assert {n for n in GOOD if after[n] != before[n]} == {'03_imports_show'}
    assert (graph.home / 'runs.txt').read_text().split() == ['05_counts_runs']
    rc, said = graph.book('make', 'quick', '--cores', '2')
    assert rc == 0 and graph.made(*GOOD) == after and '…' not in said, said


@pytest.mark.e2e
def test_a_new_value_runs_again_with_what_needs_it(graph):
    before = graph.made(*GOOD)
    graph.write('params/quick/01_honest.yaml', 'n: 5\n')
    rc, said = graph.book('make', 'quick', '--cores', '2')
    after = graph.made(*GOOD)
    assert rc == 0 and {n for n in GOOD if after[n] != before[n]} == {
        '01_honest',
        '02a_measures',
        '02a_measures.three',
    }, said
    assert (graph.home / 'runs.txt').read_text().split() == ['05_counts_runs'] * 2


@pytest.mark.e2e
def test_a_kill_leaves_nothing_finished_and_the_next_call_goes_on(project):
    project.chapter('01_counts_runs')
    project.chapter('02_waits', 'n: 600\n')
    project.write('params/chapters.yaml', 'chapters:\n  02_waits: {needs: [01_counts_runs]}\n')
    p = project.start('make', 'quick', start_new_session=True)
    deadline = time.time() + 240
    while not (project.home / 'started').exists():
        assert p.poll() is None and time.time() < deadline, p.communicate()[0]
        time.sleep(0.2)
    os.killpg(p.pid, signal.SIGKILL)
    p.communicate()
    assert (project.report('01_counts_runs') / 'receipt.json').exists() and not list(
        project.report('02_waits').glob('*')
    )
    project.write('params/quick/02_waits.yaml', 'n: 1\n')
    rc, said = project.book()
    assert rc == 0 and '2 of 2' in said, said
    assert (project.home / 'runs.txt').read_text().split() == ['01_counts_runs']  # what was done is not done again


@pytest.mark.e2e
def test_two_that_ask_at_once_do_the_work_once(project):
    project.chapter('01_counts_runs')
    both = [project.start('run', 'quick', '01_counts_runs') for _ in range(2)]
    assert [(p.communicate(), p.returncode)[1] for p in both] == [0, 0]
    assert (project.home / 'runs.txt').read_text().split() == ['01_counts_runs']


@pytest.mark.e2e
def test_the_readme_is_the_index(project):
    project.chapter('01_honest')
    index = project.home / 'nbs' / 'index.ipynb'
    links = 'Read [Honest](01_honest.ipynb) and [the map](../cis_nb/paper/map.csv).'
    index.write_text(index.read_text().replace('<!-- links -->', links))
    assert project.book('readme')[0] == 0
    text = (project.home / 'README.md').read_text()
    assert text.startswith('# A small book\n\n> For tests.\n')
    assert 'Read [Honest](nbs/01_honest.ipynb) and [the map](cis_nb/paper/map.csv).' in text


def test_the_contents_list_every_chapter_with_its_result(project):
    project.chapter('01_honest')
    project.chapter('07_folder/with_data')
    assert book.contents().splitlines()[2:] == [
        '| [Honest](01_honest.ipynb) `01_honest` | It computes with what it is given. |',
        '| [Takes data](07_folder/with_data.ipynb) `07_folder/with_data` | A folder of the reader. |',
    ]


@pytest.mark.parametrize(
    'args, said',
    [
        (['run', 'quick', '06_evaluation/pseudo_words'], 'did you mean 06_evaluation/pseudo_words_'),
        (['run', 'quick', '06_evaluation/condition_transfer'], 'it is in full'),
        (['run', 'quick'], 'which experiment of quick'),
    ],
)
def test_an_experiment_that_a_profile_does_not_have(args, said, capsys):
    assert main(args) == 2
    assert said in capsys.readouterr().err
