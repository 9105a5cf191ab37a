"""A method and a benchmark from outside: two packages, installed beside the book, that no file of the book names.

The packages are in `tests/plugin`. A book of three experiments is made in an environment that has them."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pandas as pd
import pytest
from projects import ROOT, Project

from cis_nb.world.composed import composed_root

PACKAGES = Path(__file__).parent / 'plugin'
NOTEBOOKS = ['05_train', '06_evaluation/genecis', '06_evaluation/composed_retrieval', '06_evaluation/matrix']
METHODS = ['image_only', 'text_only', 'image_text']
PARAMS = {
    '05_train.learned_sum': dict(
        method='learned_sum', steps=60, batch_size=64, lr=1e-2, eval_every=30, temperature=30.0
    ),
    '06_evaluation/genecis': dict(trainings=['05_train.learned_sum'], methods=METHODS, seeds=[0], draws=1, templates=6),
    '06_evaluation/composed_retrieval': dict(trainings=['05_train.learned_sum'], methods=METHODS, seeds=[0]),
    '06_evaluation/matrix': dict(
        trainings=['05_train.learned_sum'], methods=METHODS, seeds=[0], benchmarks=['csv_queries']
    ),
}


def environment(folder: Path) -> Path:
    "A new environment with the packages, which sees what is installed here; its Python."
    venv.create(folder / 'env', with_pip=False)
    python, (site,) = folder / 'env' / 'bin' / 'python', (folder / 'env').glob('lib/python*/site-packages')
    site.joinpath('here.pth').write_text('\n'.join(p for p in sys.path if p.endswith('site-packages')))
    shutil.copytree(PACKAGES, folder / 'packages')
    pip = [sys.executable, '-m', 'pip', '--python', python, 'install', '-q', '--disable-pip-version-check']
    pip += ['--no-deps', '--no-build-isolation', '--no-index']
    subprocess.run([*pip, *sorted((folder / 'packages').iterdir())], check=True)
    return python


def write_csv_queries(folder: Path):
    "The queries of the world's CIRR in the layout of the second package."
    cirr = composed_root(cirr=400) / 'cirr'
    files = json.loads((cirr / 'image_splits' / 'split.rc2.val.json').read_text())
    entries = json.loads((cirr / 'captions' / 'cap.rc2.val.json').read_text())
    (folder / 'images').mkdir(parents=True)
    for name, file in files.items():
        shutil.copy(cirr.parent / file, folder / 'images' / f'{name}.png')
    rows = [[f'{e["reference"]}.png', e['caption'], f'{e["target_hard"]}.png'] for e in entries]
    table = pd.DataFrame(rows, columns=['reference', 'condition', 'target'])
    table.to_csv(folder / 'queries.csv', index=False)


@pytest.fixture(scope='module')
def book(tmp_path_factory):
    "The book of three experiments, made in the new environment."
    folder = tmp_path_factory.mktemp('plugin')
    project = Project(folder / 'project')
    shutil.copytree(ROOT / 'cis_nb', project.home / 'cis_nb', dirs_exist_ok=True)  # with the weights
    for name in NOTEBOOKS:
        (project.home / 'nbs' / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / 'nbs' / f'{name}.ipynb', project.home / 'nbs' / f'{name}.ipynb')
    places = {'06_evaluation/matrix': dict(data=str(folder / 'data'))}
    for name, values in PARAMS.items():
        values = values | places.get(name, {})
        project.write(f'params/plugin/{name}.yaml', ''.join(f'{k}: {json.dumps(v)}\n' for k, v in values.items()))
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_STORE', str(project.home / 'store'))
        write_csv_queries(folder / 'data')
    project.python = environment(folder)
    project.said = subprocess.run(
        [project.python, '-m', 'cis_nb.book.command_line', 'make', 'plugin'],
        cwd=folder,
        env=project.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return project


@pytest.mark.e2e
def test_a_method_from_outside_trains_and_is_evaluated_on_every_page(book):
    assert book.said.returncode == 0, book.said.stdout
    results = pd.read_parquet(book.home / 'reports' / 'plugin' / 'results.parquet')
    mine = results[results.method == 'learned_sum']
    assert {'genecis', 'cirr', 'csv_queries'} <= set(mine.benchmark) and set(mine.experiment) == set(PARAMS)
    (run,) = json.loads((book.report('05_train.learned_sum', 'plugin') / 'receipt.json').read_text())['runs']
    for name in list(PARAMS)[1:]:  # it was trained once
        assert run in json.loads((book.report(name, 'plugin') / 'receipt.json').read_text())['runs'], name
    trained = results[(results.experiment == '06_evaluation/matrix') & (results.k == 1)].set_index('method').value
    assert trained.learned_sum > trained.image_text  # the world's CIRR again, in other files


@pytest.mark.e2e
def test_tables_and_figures_use_the_title_and_colour_of_the_package(book):
    html = book.home / 'reports' / 'plugin' / 'html'
    for name in PARAMS:
        if name.startswith('06_'):
            assert 'Learned sum' in (html / f'{name}.html').read_text(), name
    front = (html / 'index.html').read_text()
    assert re.search(r'<td[^>]*>\s*Learned sum\s*</td>', front) and 'CSV R@1' in front
    code = 'from cis_nb.core.plotting import color; print(color("learned_sum"))'
    said = subprocess.run([book.python, '-c', code], env=book.env, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == '#7a4fbf'


@pytest.mark.e2e
def test_papermill_refuses_a_parameter_that_the_package_does_not_know(book, tmp_path):
    given = ['-p', 'method', 'learned_sum', '-p', 'temprature', '3']
    path = book.home / 'nbs' / '05_train.ipynb'
    command = [book.python, '-m', 'papermill', path, tmp_path / 'out.ipynb', *given]
    done = subprocess.run(command, env=book.env, capture_output=True, text=True)
    assert done.returncode and "did you mean 'temperature'" in done.stderr


def test_no_file_of_the_book_names_the_packages():
    files = [p for folder in ('nbs', 'cis_nb', 'params') for p in (ROOT / folder).rglob('*') if p.is_file()]
    text = [p for p in files if p.suffix in ('.py', '.ipynb', '.yaml', '.csv', '.html')]
    assert len(text) > 200
    named = [p for p in text if re.search('learned_sum|csv_queries', p.read_text(encoding='utf-8'))]
    assert named == []


def test_the_page_your_own_method_needs_forty_lines_of_code():
    "From the network to the table: lines that are neither empty nor a comment."
    cells = json.loads((ROOT / 'nbs/06_evaluation/your_own_method.ipynb').read_text())['cells']
    text = [''.join(c['source']) for c in cells]
    first = next(i for i, t in enumerate(text) if t.startswith('## The method in forty lines'))
    last = next(i for i, t in enumerate(text) if 'show_table(' in t)
    code = [t for t, c in zip(text[first : last + 1], cells[first : last + 1]) if c['cell_type'] == 'code']
    lines = [line for t in code for line in t.splitlines() if line.strip() and not line.strip().startswith('#')]
    assert 30 < len(lines) <= 40, len(lines)
    assert any('with_controls(' in line for line in lines)  # its network before training has a row
