"The project as a whole: what a reader finds in the tree must fit together."

import ast
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from functools import lru_cache
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from projects import ROOT
from cis_nb import api
from cis_nb.book import runner, site
from cis_nb.core.experiment_files import (
    chapter_settings,
    code_cells,
    defaults,
    examples,
    experiments,
    notebooks,
    read_notebook,
    skipped_by_tests,
    tags,
)
from cis_nb.experiments import claims
from cis_nb.experiments.entries import training_config

NOTEBOOKS = sorted(p for p in (ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
MODULES = [p for p in sorted((ROOT / 'cis_nb').rglob('*.py')) if p.name != '_modidx.py' and 'assets' not in p.parts]
PATTERNS = (
    '*.md *.ini *.toml *.py Makefile Snakefile .ci/* nbs/**/*.ipynb params/**/* tests/**/*.py tests/**/*.ipynb '
    'cis_nb/**/*.py cis_nb/**/*.json cis_nb/assets/book/**/*'
).split()
SOURCES = [
    p
    for pattern in PATTERNS
    for p in sorted(ROOT.glob(pattern))
    if p.is_file() and p.suffix not in ('.pyc', '.png', '.jpg')
]


def named(path) -> str:
    "A path as it is shown in the list of tests."
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope='module', autouse=True)
def this_project():
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_HOME', str(ROOT))
        yield


WITHOUT_TOOLS = '''
import sys, importlib, pathlib
from importlib.machinery import PathFinder

tools = set(
    'nbdev execnb ghapi papermill nbformat nbclient snakemake sphinx myst_nb jupyterlab ipykernel ipywidgets ipycanvas '
    'pytest hypothesis websocket ruff importlinter grimp'.split()
)
find = PathFinder.find_spec


def find_no_tool(cls, name, path=None, target=None):
    return None if name.split('.')[0] in tools else find(name, path, target)


PathFinder.find_spec = classmethod(find_no_tool)
import cis_nb

root = pathlib.Path(cis_nb.__file__).parent
for p in sorted(root.rglob('*.py')):
    name = '.'.join(['cis_nb', *p.relative_to(root).with_suffix('').parts]).removesuffix('.__init__')
    if '.assets.' not in name and not name.endswith('_modidx'):
        importlib.import_module(name)
'''


@pytest.mark.e2e
def test_modules_need_only_what_an_installation_without_extras_has():
    "Every module is imported in a process where the tools for developing do not exist."
    r = subprocess.run([sys.executable, '-W', 'ignore', '-c', WITHOUT_TOOLS], cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-2000:]


def test_export_and_clean_change_nothing(tmp_path):
    "Modules, notebooks and README.md are what the notebooks say."
    for name in ('nbs', 'cis_nb', 'settings.ini', 'setup.py', 'pyproject.toml', 'README.md'):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for tool in ('nbdev_export', 'nbdev_clean'):
        subprocess.run([str(Path(sys.executable).parent / tool)], cwd=tmp_path, check=True, capture_output=True)
    names = [p.relative_to(ROOT) for p in [*NOTEBOOKS, *sorted((ROOT / 'cis_nb').rglob('*.py'))]]
    made = [p.relative_to(tmp_path) for p in sorted((tmp_path / 'cis_nb').rglob('*.py'))]
    assert not [n for n in made if n not in names], 'modules that are not in the tree: make export'
    assert not [str(n) for n in names if (tmp_path / n).read_bytes() != (ROOT / n).read_bytes()], 'make export'
    assert (ROOT / 'README.md').read_text() == runner.readme(), 'make export'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_a_notebook_is_clean_and_has_its_parts(path):
    nb = read_notebook(path)
    known = defaults(nb, path.name)  # at most one parameters cell, plain values
    code = code_cells(nb)
    assert not any(c['outputs'] or c['execution_count'] for c in code), 'outputs or counts in git: make export'
    title, promise = runner.heading(nb)
    assert title and promise, 'the first cell holds a title and a quotation with the result'
    assert not any(re.match(r'\s*[%!]', line) for c in code for line in c['source'].splitlines()), 'a magic'
    if known is not None:
        assert not any(map(skipped_by_tests, code)), 'papermill runs cells marked for people too'
        assert 'finish(' in code[-1]['source'], 'the last cell calls finish(...)'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_the_comment_of_an_empty_default_ends_with_an_example(path):
    nb = read_notebook(path)
    empty = {k: type(v) for k, v in (defaults(nb) or {}).items() if v in ([], {})}
    assert {k: type(v) for k, v in examples(nb).items() if v} == empty, 'like [...] or like {...}'


WITH_PARAMETERS = [p for p in NOTEBOOKS if any('parameters' in tags(c) for c in read_notebook(p)['cells'])]


@pytest.mark.parametrize('path', WITH_PARAMETERS, ids=named)
def test_parameters_are_collected_before_anything_is_computed(path):
    "Unknown names end a run at its start; between the parameters and the check stand imports and definitions only."
    code = code_cells(read_notebook(path))
    at = next(i for i, c in enumerate(code) if 'parameters' in tags(c))
    lines = [s for c in code[at + 1 :] for s in ast.parse(c['source']).body]
    first = next(s for s in lines if not isinstance(s, (ast.Import, ast.ImportFrom, ast.FunctionDef)))
    chapter = path.relative_to(ROOT / 'nbs').with_suffix('').as_posix()
    assert isinstance(first, ast.Assign), ast.unparse(first)
    call = ast.unparse(first.value)
    allowed = [f"collect_parameters(globals(), '{chapter}'{more})" for more in ('', ', others=True')]
    assert call in allowed, f'{ast.unparse(first)}: the first line after the imports is params = {allowed[0]}'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_a_notebook_exports_to_the_module_of_its_name(path):
    "nbs/04b_methods/05_lincir.ipynb writes cis_nb.methods.lincir; an experiment page writes nothing."
    sources = [c['source'] for c in code_cells(read_notebook(path))]
    written = [m for source in sources for m in re.findall(r'^#\|\s*default_exp\s+(\S+)', source, re.M)]
    parts = path.relative_to(ROOT / 'nbs').with_suffix('').parts
    assert written in ([], ['.'.join(re.sub(r'^\d+[a-z]?_', '', part) for part in parts)])
    if parts[0][:2] in ('06', '07', '08', '09'):
        assert not written, 'an experiment page exports nothing'


EXPERIMENT_PAGES = [p for p in NOTEBOOKS if re.match(r'0[6789]_', p.parent.name) or p.name == '05_train.ipynb']


@pytest.mark.parametrize('path', EXPERIMENT_PAGES, ids=named)
def test_an_experiment_page_asks_a_question_and_shows_its_finding(path):
    "The question is a line of its own between the title and the first code; the finding is shown by one function."
    cells = read_notebook(path)['cells']
    text = [c['source'] for c in cells[:2] if c['cell_type'] == 'markdown']
    assert any(re.match(r'[A-Z].*\?', line) for source in text for line in source.splitlines()), 'no question'
    calls = [n for c in code_cells({'cells': cells}) for n in ast.walk(ast.parse(c['source']))]
    names = [getattr(n.func, 'id', '') for n in calls if isinstance(n, ast.Call)]
    assert names.count('show_finding') == 1, 'the finding is shown once, by show_finding(...)'


@pytest.mark.parametrize('path', EXPERIMENT_PAGES, ids=named)
def test_an_experiment_page_does_not_say_what_one_profile_runs(path):
    "Parameters decide what a page runs: other ones would make the sentence wrong."
    profiles = '|'.join(p.name for p in (ROOT / 'params').iterdir() if p.is_dir())
    found = [re.findall(rf'`(?:{profiles})`', c['source']) for c in read_notebook(path)['cells']]
    assert sum(found, []) == [], 'say it by the parameters, computed'


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_links_between_notebooks_lead_somewhere(path):
    words = '\n'.join(c['source'] for c in read_notebook(path)['cells'] if c['cell_type'] == 'markdown')
    links = re.findall(r'\]\((?!\w+:|#)([^)#\s]+)', words)
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize('path', NOTEBOOKS, ids=named)
def test_no_hidden_cell_draws_a_figure(path):
    "The site leaves out a cell with `#| hide`, and all that it shows."
    hidden = [c['source'] for c in code_cells(read_notebook(path)) if c['source'].startswith('#| hide\n')]
    for source in hidden:
        body = ast.parse(source).body
        own = {n.name for n in body if isinstance(n, ast.FunctionDef)}
        last = body[-1].value if body and isinstance(body[-1], ast.Expr) else None
        assert not (isinstance(last, ast.Call) and getattr(last.func, 'id', '') in own), source[-80:]


def is_there(name: str) -> bool:
    "Is `cis_nb.methods.lincir.noise` something in a module, a module or a package?"
    parts = name.split('.')
    return (
        any(ROOT.joinpath(*parts[:n]).with_suffix('.py').exists() for n in range(2, 6))
        or (ROOT / '/'.join(parts)).is_dir()
    )


def test_no_module_is_named_that_does_not_exist():
    "In notebooks, tests, parameter files and words."
    named_somewhere = {
        (named(path), name)
        for path in SOURCES
        for name in re.findall(r"\bcis_nb(?:\.[a-z][a-z_0-9]*)+(?!-)\b", path.read_text(encoding='utf-8'))
    }
    unknown = {(p, n) for p, n in named_somewhere if not is_there(n)}
    assert {(p, n) for p, n in unknown if not re.match(r'cis_nb\.a\.|.*\.nowhere$', n)} == set()  # made up


def test_tests_mirror_the_packages():
    "tests/methods/test_lincir.py tests cis_nb.methods.lincir, or an experiment of the chapters 06-09."
    pages = {chapter.split('/')[-1] for chapter in notebooks() if chapter[:2] in ('06', '07', '08', '09')}
    for path in (p for p in (ROOT / 'tests').glob('*/test_*.py') if p.parent.name != 'faults'):
        package, name = path.parent.name, path.stem.removeprefix('test_')
        known = (ROOT / 'cis_nb' / package / f'{name}.py').exists() or package == 'experiments' and name in pages
        assert known, f'{named(path)}: there is no cis_nb.{package}.{name}'


PROVED_BY_NOTEBOOK = {  # modules without a file of tests: their notebook asserts all that is to be said
    'backbones.tokenizer',
    'core.documents',
    'data.augmentation',
    'data.products',
    'experiments.backbones',
    'experiments.combiner_variants',
    'experiments.construction_audit',
    'experiments.corpora_and_masking',
    'experiments.examples',
    'experiments.gap_backbones',
    'experiments.gpu',
    'experiments.metric_agreement',
    'experiments.modality_gap',
    'experiments.noise_by_gap',
    'experiments.prompts',
    'experiments.pseudo_words',
    'experiments.supervision',
    'experiments.training_time',
    'world.circo',
    'world.cloth',
    'world.domains',
    'world.grocery',
    'world.positives',
    'world.texts',
    'world.wardrobe',
}


def test_every_module_has_a_file_of_tests_or_is_proved_by_its_notebook():
    "tests/methods/test_lincir.py, or a name in the list; a module is never in both places."
    own = [p.relative_to(ROOT / 'cis_nb').with_suffix('') for p in MODULES if p.name != '__init__.py']
    untested = {'.'.join(p.parts) for p in own if not (ROOT / 'tests' / p.parent / f'test_{p.name}.py').exists()}
    assert untested - PROVED_BY_NOTEBOOK == set(), 'write a file of tests, or assert all in the notebook'
    assert PROVED_BY_NOTEBOOK - untested == set(), 'it has a file of tests, or is no module: remove it from the list'


def assertions(source: str) -> int:
    "How often code asserts, or calls a test_… function."
    nodes = list(ast.walk(ast.parse(source)))
    called = [n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return sum(isinstance(n, ast.Assert) for n in nodes) + sum(name.startswith('test_') for name in called)


def test_notebooks_that_stand_for_tests_assert_something():
    "At least three assertions in cells that run and are not exported."
    counted = dict.fromkeys(PROVED_BY_NOTEBOOK, 0)
    for path in NOTEBOOKS:
        cells = [c for c in code_cells(read_notebook(path)) if not skipped_by_tests(c)]
        written = [m for c in cells for m in re.findall(r'^#\|\s*default_exp\s+(\S+)', c['source'], re.M)]
        if written and written[0] in counted:
            proofs = [c['source'] for c in cells if not re.match(r'#\|\s*export', c['source'])]
            counted[written[0]] = sum(map(assertions, proofs))
    assert {m: n for m, n in counted.items() if n < 3} == {}


def code_texts() -> list:
    "All modules, and all code cells that are written to no module: where, text."
    listed = re.compile(r'^__all__ = \[.*?\]\n', re.M | re.S)  # written and wrapped by nbdev
    texts = [(named(p), listed.sub('', p.read_text(encoding='utf-8'))) for p in MODULES]
    for p in NOTEBOOKS:
        cells = [c for c in code_cells(read_notebook(p)) if not re.match(r'#\|\s*export', c['source'])]
        texts += [(f'{named(p)}, cell {c["id"]}', c['source']) for c in cells]
    return texts


@lru_cache
def code_nodes() -> list:
    "Every syntax node of `code_texts`: where, node."
    return [(where, n) for where, text in code_texts() for n in ast.walk(ast.parse(text))]


RUN = {  # requirements that are run or named, not imported, and where
    'import-linter': ('Makefile', 'bin/lint-imports'),
    'jupyterlab': ('Makefile', '-m jupyterlab'),
    'nbdev': ('Makefile', 'bin/nbdev_export'),
    'pytest-xdist': ('Makefile', '-n 2 --dist'),
    'ruff': ('Makefile', 'bin/ruff'),
    'snakemake': ('cis_nb/book/command_line.py', "running_module('snakemake'"),
    'sphinx': ('cis_nb/book/site.py', "running_module('sphinx'"),
    'myst-nb': ('cis_nb/assets/book/conf.py', "extensions = ['myst_nb']"),
    'sphinx-book-theme': ('cis_nb/assets/book/conf.py', "html_theme = 'sphinx_book_theme'"),
    'sphinx-mathjax-offline': ('cis_nb/assets/book/conf.py', "find_spec('sphinx-mathjax-offline')"),
}
NEEDED_BY = {  # requirements that only another package uses
    'tensorboard': 'torch.utils.tensorboard writes the history of a training with it',
    'ipykernel': 'papermill runs a notebook in it',
    'execnb': 'nbdev does not work with a newer one',
    'ghapi': 'nbdev does not work with a newer one',
    'sentencepiece': 'transformers reads the words of T5 with it',
    'pulp': 'snakemake 7, for Python 3.10, does not work with a newer one',
}


def requirements() -> dict:
    "Name -> requirement, of all that settings.ini asks for on this machine."
    config = ConfigParser(delimiters=['='], interpolation=None)
    config.read(ROOT / 'settings.ini', encoding='utf-8')
    found = [lines for key, lines in config['DEFAULT'].items() if key.endswith('requirements')]
    every = [Requirement(line) for lines in found for line in lines.splitlines() if line.strip()]
    return {canonicalize_name(r.name): r for r in every if r.marker is None or r.marker.evaluate()}


def imported() -> set:
    "The distributions that modules, notebooks and tests import; one that is not installed is called by its module."
    texts = [text for _, text in code_texts()]
    texts += [p.read_text(encoding='utf-8') for p in sorted((ROOT / 'tests').rglob('*.py'))]
    every, found = '\n'.join(texts), packages_distributions()
    lines = re.findall(r'^ *import ([\w., ]+)', every, re.M) + re.findall(r'^ *from ([\w.]+) import', every, re.M)
    names = {re.match(r'\w*', name.strip())[0] for line in lines for name in line.split(',')}
    return {canonicalize_name(d) for name in names for d in found.get(name, [name])}


def test_every_requirement_is_used():
    "It is imported or run, or another package cannot do without it."
    unused = set(requirements()) - imported() - set(RUN) - set(NEEDED_BY)
    assert not unused, 'nothing imports or runs it: remove it from settings.ini, then make constraints'
    gone = {name: text for name, (file, text) in RUN.items() if text not in (ROOT / file).read_text(encoding='utf-8')}
    assert not gone, 'it is no longer run there'


def test_every_requirement_has_its_version():
    pinned = {canonicalize_name(Requirement(line).name) for line in (ROOT / 'constraints.txt').read_text().splitlines()}
    assert set(requirements()) - pinned == set(), 'make constraints'


TESTS = [(named(p), p.read_text(encoding='utf-8')) for p in sorted((ROOT / 'tests').rglob('*.py'))]
SCRIPTS = [(name, (ROOT / name).read_text(encoding='utf-8')) for name in ('CONTRIBUTING.md', 'Makefile', '.ci/run')]


def test_no_line_is_longer_than_120_columns():
    lines = [(where, line) for where, text in [*code_texts(), *TESTS, *SCRIPTS] for line in text.splitlines()]
    long = [f'{where}: {len(line)} columns: {line[:60]}' for where, line in lines if len(line) > 120]
    assert not long, '\n'.join(['', *long])


def test_no_function_is_longer_than_40_lines():
    "The training loop aside."
    found = [*code_nodes(), *((where, n) for where, text in TESTS for n in ast.walk(ast.parse(text)))]
    sizes = [(where, n.name, n.end_lineno - n.lineno + 1) for where, n in found if isinstance(n, ast.FunctionDef)]
    loop = ('cis_nb/training/loop.py', 'train')
    long = [f'{where}: {name}: {n} lines' for where, name, n in sizes if n > 40 and (where, name) != loop]
    assert not long, '\n'.join(['', *long])


def is_world_literal(node) -> bool:
    return isinstance(node, ast.Constant) and node.value == 'world'


def compares_world(node) -> bool:
    "Whether an expression compares something with 'world', alone or among others."
    if not isinstance(node, ast.Compare):
        return False
    sides = (node.left, *node.comparators)
    return any(is_world_literal(c) for side in sides for c in (side, *getattr(side, 'elts', ())))


def looks_up_world(node) -> bool:
    "Whether an expression has 'world' as a key, or gives it to a function; the store's kind of run aside."
    if isinstance(node, ast.Dict):
        return any(map(is_world_literal, node.keys))
    if isinstance(node, ast.Subscript):
        return is_world_literal(node.slice)
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, 'id', '')
    key = name == 'dict' and any(k.arg == 'world' for k in node.keywords)
    given = [*node.args, *(k.value for k in node.keywords)]
    return key or name not in ('stored', 'Field') and any(map(is_world_literal, given))


def test_no_code_compares_a_name_with_world():
    "All ask `is_world`, which compares with the constant; modules look nothing up under the literal either."
    for text, found in (("a == 'world'", True), ("a not in ('x', 'world')", True), ("f(a, 'world') > 1", False)):
        assert compares_world(ast.parse(text, mode='eval').body) == found
    looked_up = "dict(world=f)", "{'world': f}", "a['world']", "f(x='world')", "f(a, 'world')"
    for text, found in [*((t, True) for t in looked_up), ("stored('world', 'n')", False), ("a == 'world'", False)]:
        assert looks_up_world(ast.parse(text, mode='eval').body) == found, text
    assert not [f'{where}: {ast.unparse(n)}; ask is_world' for where, n in code_nodes() if compares_world(n)]
    modules = {named(p) for p in MODULES}
    used = [f'{where}: {ast.unparse(n)}' for where, n in code_nodes() if where in modules and looks_up_world(n)]
    assert not used, 'use WORLD, or a function of data.datasets'


WORDS_OF_DATA = (  # where strings are captions, prompts, word lists, or names in files
    'cis_nb/world/|cis_nb/mining/(parsers|concreteness)|cis_nb/methods/searle|cis_nb/benchmarks/domain_conversion'
    '|cis_nb/retrieval/search|nbs/08_scaling/search|nbs/0[0-5]|nbs/10'
)
SYNONYMS = re.compile(r'(?<![/\w])(photos?|pictures?)(?![/\w.]| of\b)|^way$', re.I)  # of image, implementation


def labels() -> list:  # (where, text)
    "All strings of code that are no docstrings."
    bodies = [n.body for _, n in code_nodes() if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docstrings = {id(b[0].value) for b in bodies if b and isinstance(b[0], ast.Expr)}
    texts = [(where, n) for where, n in code_nodes() if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [(where, n.value) for where, n in texts if id(n) not in docstrings]


def test_labels_and_errors_use_the_words_of_the_glossary():
    "Columns, titles, names of methods in results, and messages."
    names = {('cis_nb/book/site.py', 'photos'), ('cis_nb/book/command_line.py', 'photos')}  # a profile, a parameter
    shown = [(where, text) for where, text in {*labels()} - names if not re.match(WORDS_OF_DATA, where)]
    assert len(shown) > 1000
    assert [f'{where}: {text[:60]}' for where, text in shown if SYNONYMS.search(text)] == []


@pytest.mark.parametrize('fails', ['nbdev_test', 'python', ''])
def test_make_test_runs_the_tests_after_a_failed_notebook(tmp_path, fails):
    (tmp_path / 'bin').mkdir()
    for tool in ('nbdev_test', 'python'):
        script = f'#!/bin/sh\necho {tool} "$@" >> {tmp_path}/ran\nexit {int(tool == fails)}\n'
        (tmp_path / 'bin' / tool).write_text(script)
        (tmp_path / 'bin' / tool).chmod(0o755)
    (tmp_path / '.ready').touch()
    done = subprocess.run(['make', '-C', ROOT, 'test', f'VENV={tmp_path}'], capture_output=True, text=True)
    assert bool(done.returncode) == bool(fails), done.stderr
    notebooks_first, tests_next = (tmp_path / 'ran').read_text().splitlines()
    assert (
        notebooks_first.startswith('nbdev_test') and tests_next.startswith('python -m pytest') and '-rfEs' in tests_next
    )


PROTOCOLS = {'Backbone', 'Benchmark', 'ImageSource', 'Task'}  # in `api`, and the classes that keep their promises
SHARED_NAMES = PROTOCOLS | {'main'}  # the entry of three commands


def exported(module: Path) -> list:
    "The public names of a module, as nbdev lists them."
    found = [
        n.value
        for n in ast.parse(module.read_text(encoding='utf-8')).body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') == '__all__'
    ]
    return ast.literal_eval(found[0]) if found else []


def test_a_public_name_has_one_meaning():
    where = {}
    for module in MODULES:
        for name in exported(module):
            where.setdefault(name, []).append(named(module))
    shared = {name: modules for name, modules in where.items() if len(modules) > 1}
    assert set(shared) == SHARED_NAMES, shared
    assert all('cis_nb/api.py' in shared[name] for name in PROTOCOLS)


@pytest.mark.parametrize('profile', sorted(p.name for p in (ROOT / 'params').iterdir() if p.is_dir()))
def test_every_parameter_file_fits_its_notebook(profile):
    assert experiments(profile)


def paths_below_shipped_folders() -> list:  # (module or cell of a page, folder)
    "Each line of a module or a page that builds a path to files that come with the library."
    below = re.compile(r"""(?:/ |joinpath\()f?['"](paper|assets)\b|\bKEPT / """)
    lines = [
        (where, line) for where, text in code_texts() for line in text.splitlines() if not line.startswith('KEPT =')
    ]
    found = [(where, m[1] or 'assets') for where, line in lines if (m := below.search(line))]
    return [(where.removesuffix('.py').replace('/', '.'), folder) for where, folder in found]


def test_only_the_modules_that_the_list_names_read_shipped_files():
    found, reads = paths_below_shipped_folders(), chapter_settings()['reads'].items()
    shipped = {module for module, patterns in reads if not all(p.startswith('params/') for p in patterns)}
    assert {module for module, _ in found} == shipped
    assert sorted(m for m, folder in found if folder == 'paper') == [
        'cis_nb.book.site',
        'cis_nb.experiments.comparison',
    ]


def test_every_printed_table_is_in_the_list_of_what_modules_read():
    patterns = [p for found in chapter_settings()['reads'].values() for p in found]
    assert {*(ROOT / 'cis_nb' / 'paper').iterdir()} <= {f for p in patterns for f in ROOT.glob(p)}


def test_the_map_names_experiments_that_exist_or_what_is_waited_for():
    m = site.paper_map()
    assert not m.duplicated(['paper', 'item']).any() and set(m.kind) <= set(site.MAP_KINDS)
    for r in m.itertuples():
        for profile, name in [*site.made_by(r), *site.made_by(r._replace(here=r.scale))]:
            assert (ROOT / 'params' / profile / f'{name}.yaml').exists(), (
                f'{r.paper} {r.item}: params/{profile}/{name}.yaml is not there'
            )
        assert r.here or r.waits, f'{r.paper} {r.item}: neither an experiment nor what it waits for'
        assert not r.numbers or (ROOT / 'cis_nb' / 'paper' / f'{r.numbers}.csv').exists(), (
            f'{r.paper} {r.item}: {r.numbers}.csv'
        )


def printed_rows(experiment) -> set:  # of (row, backbone) in the tables of LRVS-F
    "The rows of printed tables that an experiment on LRVS-F makes."
    p = experiment.defaults | experiment.params
    trainings = [*p.get('trainings', []), *([p['training']] if 'training' in p else [])]
    configs = [training_config(name) for name in trainings]
    variants = {api.get('method', c.method).variant(c) for c in configs}
    rows = {api.method_style(v).paper_row for v in variants}
    rows |= {'frozen CLIP'} if 'image_only' in p.get('methods', []) else set()
    rows |= {'ViT + category-filtered gallery'} if 'vit_products' in p.get('filtered', []) else set()
    return {(row, p['backbone']) for row in rows}


def test_each_row_of_a_printed_table_is_made_at_paper_scale_or_waited_for(monkeypatch):
    monkeypatch.setenv('CIS_PROFILE', 'paper')
    known, tables = experiments('paper'), ('lrvsf_table1', 'lrvsf_table2', 'lrvsf_table5')
    for row in [r for r in site.paper_map().itertuples() if r.numbers in tables]:
        made = set().union(*(printed_rows(known[name]) for _, name in site.made_by(row._replace(here=row.scale))))
        t = pd.read_csv(ROOT / 'cis_nb' / 'paper' / f'{row.numbers}.csv', dtype=str, keep_default_na=False)
        for method, printed in set(zip(t.method, t.backbone)):
            tower = printed.lower().replace('clip ', '').replace('-', '_').replace('/', '')
            backbones = {b for m, b in made if m == method}
            awaited = re.split('[ -]', method)[0] in row.waits
            assert awaited or (tower in backbones if tower else backbones), f'{row.numbers}: {method} {printed}'


def test_published_trainings_on_products_select_by_the_published_recall(monkeypatch):
    "LRVS-F, Sec. 5.1: R@1 on 400 products and 99,541 distractors, once an epoch; ablations train as the files say."
    monkeypatch.setenv('CIS_PROFILE', 'paper')
    known = experiments('paper')
    trained = {n: training_config(n) for n in known if re.match(r'05_train\.(condvit|vit_products|clip4cir)', n)}
    assert len(trained) == 8
    for name, c in trained.items():
        assert (c.selection_k, c.val_samples, c.distractors) == (1, 400, 99_541), name
        assert c.eval_every == c.samples // c.batch_size or 'clip4cir' in name, name
    for e in [e for n, e in known.items() if n.startswith(('07_ablations/condition_depth', '07_ablations/gallery'))]:
        assert e.params['training'] in trained and 'selection_k' not in e.params['shorter']


MADE_AS = {  # a printed row whose name is not that of a method of the book -> the method that makes it
    'ARTEMIS': 'artemis',
    'CLIP4Cir': 'combiner_cirr',
    'CLIP4CIR': 'clip4cir_products',
    'CompoDiff stage 1+2': 'compodiff',
    'Prior-like Stage1': 'compodiff_stage1',  # with `text_tokens`
    'ViT + category-filtered gallery': 'vit_products_filtered',
    'frozen CLIP': 'image_only',
}
WAITING_ROWS = {('genecis', 'Table 4'): ('ARTEMIS', 'CIRPLANT')}  # supervised there, on the training split of CIRR


def test_each_printed_row_of_a_method_is_made_or_waited_for():
    "In all tables of the four papers that have methods: a row without a method of the book is named in the map."
    styles = api.method_styles()
    known = {name for style in styles.values() for name in (style.title, style.paper_row)} | {*styles, *MADE_AS, ''}
    assert {*MADE_AS.values()} <= {*styles}
    for row in [r for r in site.paper_map().itertuples() if r.numbers]:
        t = pd.read_csv(ROOT / 'cis_nb' / 'paper' / f'{row.numbers}.csv', dtype=str, keep_default_na=False)
        names = {m.split(':')[0] for m in t.get('method', [])}
        absent = {*(names - known), *WAITING_ROWS.get((row.paper, row.item), ())}
        assert all(re.split('[ -]', m)[0] in row.waits for m in absent), f'{row.numbers}: {absent} in {row.waits!r}'


CODE_FOR = {  # what the map waits for weights of -> the code that would run them
    'Stable Diffusion': 'cis_nb.mining.triplet_images:DiffusersGenerator',
    'an unCLIP decoder for embeddings of ViT-L/14': 'cis_nb.methods.decoding:UnclipDecoder',
    'a BLIP dual encoder': 'cis_nb.backbones.blip:BlipModel',
    'T5-XL': 'cis_nb.methods.compodiff:T5Texts',
}


def test_the_map_waits_for_weights_alone_only_where_the_code_is_there():
    asked = set()
    for text in site.paper_map().waits:
        for part in [p for p in text.split('; ') if 'weights' in p and not re.search(r'\bcode\b', p)]:
            (what,) = re.findall('weights of ([^,;]+)', part)
            asked.add(what)
    assert asked == {*CODE_FOR}
    for where in CODE_FOR.values():
        module, name = where.split(':')
        assert hasattr(import_module(module), name), where


DRAWN_BY = dict(  # number of a figure -> what its pages call to draw it, as a regular expression
    genecis={
        '1': 'condition_strip',
        **dict.fromkeys(['2', '7', '8', '9', '10'], 'gallery_examples'),
        '3': 'condition_figure',
        '4': 'diagram',
        '5': 'size_figure',
        '6': 'recall_figure',
        '11': 'won_strips',
        '12': 'failure_strips',
        '13': 'show_triplets',
    },
    lrvsf={
        '1': 'show_grid',
        '2': 'collection_figure',
        '3': 'sample_row',
        '4': 'token_path',
        '5': 'distractor_figure',
        '6': 'request_strips',
        '7': 'sample_row',
        '8': r'ax\.bar',
        '9': 'depth_figure',
        '10': 'worst_rows',
        '11': 'attention_figure',
        '12': 'component_figure',
        '13': 'category_area_figure',
        '14': 'area_figure',
        '15': 'condition_rows',
        '16': 'request_strips',
    },
    compodiff={
        '1': 'negative_rows|mask_rows',
        **dict.fromkeys(['11', '12', '13', '14'], 'nearest_rows'),
        '4': 'weight_rows',
        '5': 'beside_rows',
        '6': 'token_figure',
        '7': 'token_figure',
        '8': 'pair_rows',
        '9': 'beside_rows',
        '10': 'guidance_figure',
    },
    lincir={
        '1': 'cost_figure',
        '2': 'scheme',
        '3': 'scheme',
        '4': 'cost_figure',
        'A.1': 'show_grid|gallery_examples',
        'B.2': 'norm_figure',
        'C.1': 'strips',
    },
)


def test_each_figure_of_the_map_is_drawn_on_its_pages():
    figures = [r for r in site.paper_map().itertuples() if r.item.startswith('Figure') and r.here]
    made = {(r.paper, r.item.removeprefix('Figure ')) for r in figures}
    assert made == {(paper, number) for paper, of in DRAWN_BY.items() for number in of}
    for r in figures:
        draws = DRAWN_BY[r.paper][r.item.removeprefix('Figure ')]
        for _, name in site.made_by(r):
            page = notebooks()[name.split('.')[0]]
            text = '\n'.join(c['source'] for c in code_cells(read_notebook(page)))
            assert re.search(rf'(?<!def )(?<![\w.])(?:{draws})\(', text), f'{r.paper} {r.item}: {draws} in {page}'


FORMULA = re.compile(r'\$[A-Za-z\\][^$]*\$')  # a prompt has a blank behind its `$`, a variable no second one


def formulas_in(source: str) -> list:
    "String literals of a code cell that hold a formula; what an f-string fills in is a star."
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append(''.join(v.value if isinstance(v, ast.Constant) else '*' for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [text for text in found if FORMULA.search(text)]


def test_no_text_of_a_figure_is_a_formula():
    "A page draws its texts without reading formulas, so these would be shown as they are typed."
    cells = [(name, c['source']) for name, path in notebooks().items() for c in code_cells(read_notebook(path))]
    assert {(name, text) for name, source in cells for text in formulas_in(source)} == set()
    assert formulas_in("ax.set(xlabel='$w_I$', title=f'$q_{i}$', ylabel='$\\\\hat f$')") == [
        '$w_I$',
        '$q_*$',
        '$\\hat f$',
    ]
    assert formulas_in("prompt, folder, price = 'a photo of $ , $', '$CIS_HOME', '5 $'") == []


OF_PAPER = re.compile(r'\((GeneCIS|CompoDiff|LRVS-F|LinCIR), ([^()]*)\)')  # in the subtitle of a page


def items_in(said: str) -> set:  # of items of the map
    "The tables and figures that a subtitle names: `Tables 1, 3 and B.2, Figures 7 to 9, table of CIRR`."
    found, kind = set(), ''
    for part in said.split(', '):
        if part.startswith('table of '):
            found.add(part.capitalize()[:9] + part[9:])
            continue
        word, _, rest = part.partition(' ')
        kind, rest = (word.rstrip('s'), rest) if re.match('[A-Z][a-z]', word) else (kind, part)
        for one in rest.split(' and ') if kind in ('Table', 'Figure') else ():
            first, _, last = one.partition(' to ')
            found |= {f'{kind} {n}' for n in (range(int(first), int(last) + 1) if last else [first])}
    return found


def test_tables_and_figures_of_a_subtitle_are_those_of_the_map():
    assert items_in('Sec. 3.3 and 6, Tables 1, 3 and B.2, Figures 7 to 9, table of CIRR') == {
        *('Table 1', 'Table 3', 'Table B.2', 'Table of CIRR'),
        *('Figure 7', 'Figure 8', 'Figure 9'),
    }
    made, names = {}, {title.replace('LRVS-Fashion', 'LRVS-F'): p for p, title in site.PAPER_TITLES.items()}
    for r in site.paper_map().itertuples():
        pages = {name.split('.')[0] for _, name in site.made_by(r)} | {r.chapter}
        made |= {(page, r.paper): made.get((page, r.paper), set()) | {r.item} for page in pages}
    said = {name: OF_PAPER.search(site.heading(read_notebook(path))[1]) for name, path in notebooks().items()}
    named = {(n, names[m[1]]): items_in(m[2]) for n, m in said.items() if m and n[:2] in ('06', '07', '08', '09')}
    assert len(named) > 20
    assert {page: items - made.get(page, set()) for page, items in named.items() if items - made.get(page, set())} == {}


CHAPTER = r'\b\d\d[a-z]?_\w+(?:/\w+)?'


def test_every_chapter_that_is_named_exists():
    "By the map, and by what claims wait for."
    m, known = site.paper_map(), set(notebooks())
    assert {f'{r.paper} {r.item}: {r.chapter}' for r in m.itertuples() if r.chapter not in known} == set()
    said = {n for text in [*m.waits, *claims.waits_for().values()] for n in re.findall(CHAPTER, text)}
    assert said - known == set()


def test_the_map_holds_all_printed_tables_and_figures():
    m = site.paper_map()
    printed = {
        (d.paper.iloc[0], name)
        for p in (ROOT / 'cis_nb' / 'paper').glob('*_*.csv')
        if p.stem.split('_')[0] in site.PAPER_TITLES
        for d in [pd.read_csv(p, dtype=str)]
        for name in [p.stem]
    }
    assert not {name for paper, name in printed} - set(m.numbers)
    figures = {p: int((m.paper.eq(p) & m.item.str.startswith('Figure')).sum()) for p in site.PAPER_TITLES}
    assert figures == dict(genecis=13, compodiff=14, lrvsf=16, lincir=8)


FORBIDDEN = {  # written in two parts, so that this file may be read too
    '/wo' + 'rk/': 'a path of one machine',
    '/tm' + 'p/cis': 'a path of one machine',
    '\\.\\./sha' + 'red': 'a folder outside',
    '\\bTO' + 'DO\\b|\\bFIX' + 'ME\\b|\\bREAD' + 'ING\\b|NotImplemented' + 'Error': 'unfinished work',
    'pickle\\.lo' + 'ad|yaml\\.lo' + 'ad\\(|extract' + 'all\\((?!.*filter=)': 'unsafe reading',
    'torch\\.lo' + 'ad\\((?!.*weights_only=True)': 'unsafe reading',
}


@pytest.mark.parametrize('path', SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_says_what_it_must_not(path):
    text = path.read_text(encoding='utf-8')
    for pattern, what in FORBIDDEN.items():
        found = re.search(pattern, text)
        assert not found or (path.name == 'run' and 'outside' in what), f'{what}: {found[0]}'


def test_git_holds_nothing_heavy():
    names = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True).stdout.split('\n')
    heavy = [
        n
        for n in names
        if n
        and (ROOT / n).is_file()
        and (ROOT / n).stat().st_size > 2_000_000
        and not n.startswith('cis_nb/assets/tiny')
    ]
    assert not heavy


def test_the_front_page_names_the_two_commands():
    text = (ROOT / 'README.md').read_text()
    assert 'make book' in text and 'make test' in text
    for target in re.findall(r'\]\((?!\w+:)([^)#]+)', text):
        assert (ROOT / target).exists(), f'README.md points to {target}'


def test_the_files_of_packages_hold_no_code():
    "Keys of the store hold the modules that make a result, and not `__init__.py` of the packages on the way."
    files = sorted((ROOT / 'cis_nb').rglob('__init__.py'))
    code = {f: [ast.unparse(node) for node in ast.parse(f.read_text(encoding='utf-8')).body] for f in files}
    root = code.pop(ROOT / 'cis_nb/__init__.py')
    assert len(code) > 8 and [line.split(' = ')[0] for line in root] == ['__version__'] and not any(code.values())
