"""What a page says of its results follows from them: pages are run on exchanged results, and no sentence may stay that
says which method is ahead."""

import html
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from projects import ROOT

from cis_nb.experiments import matrix

PAGES = sorted((ROOT / 'nbs').rglob('*.ipynb'))  # pages of results, and library pages, whose examples are results too
RERUN = {  # page -> parameters in place of its defaults
    '06_evaluation/composed_retrieval': {},
    '06_evaluation/pseudo_words_genecis': {},
    '06_evaluation/matrix': dict(trainings=['lincir']),
}

NAME = (
    r'(?:Image \+ Text|Image only|Text only|(?:even|tuned) (?:sum|mean)|late fusion|score product|Combiners?|LinCIR|'
    r'Pic2Word|SEARLE|CompoDiff|CondViT|ARTEMIS|ViTs?|pseudo-words?|trainings?|noise|filter|networks?|methods?|'
    r'baselines?|φ|backbones?|text alone|image alone|(?:the|a) sum|the mean|the text|the image|the condition)'
)
STATE = r'(?:is|are|was|were|scores?|ranks?|finds?|has|have|reach(?:es)?|stays?|lies?)'
ORDER = (
    r'(?:better|worse|best|worst|higher|highest|lower|lowest|fewer|more targets|more often|stronger|strongest|weaker|'
    r'weakest|ahead of|behind|twice|as good)'
)
VERB = (
    r'(?:beats?|wins?|leads?|gains?|loses?|helps?|hurts?|improves?|outperforms?|exceeds?|fails?|trails?|recovers?|'
    r'solves)'
)
ASSERTION = re.compile(rf'\b{NAME}[^.;:]*?\b(?:{STATE}\b[^.;:]{{0,40}}?\b{ORDER}|{VERB})\b', re.I)
OPEN = re.compile(  # a condition, a question, a paper's result, a definition
    r'\b(?:whether|if|should|may|might|can|could|would|must|papers?|printed|published|Tables?|Figures?|claims?|until|'
    r'does not|to be|best on (?:validation|other|the validation))\b|\?',
    re.I,
)


def sentences(text: str) -> list:
    "The sentences of Markdown or of a page's text, without code, headings and tables."
    text = re.sub(r'```.*?```', '', text, flags=re.S)
    text = re.sub(r'^(?:#|\|).*$', '', text, flags=re.M)
    return [s.strip() for s in re.split(r'(?<=[.!?])\s+|\n\s*\n|\n(?=- )', text) if s.strip()]


def verdicts(text: str) -> list:
    "The sentences that say which method is ahead, as a result of the page."
    return [s for s in sentences(text) if ASSERTION.search(s) and not OPEN.search(s)]


def cells(page: Path) -> list:
    return [(c['cell_type'], ''.join(c['source'])) for c in json.loads(page.read_text(encoding='utf-8'))['cells']]


@pytest.mark.parametrize('page', PAGES, ids=lambda p: f'{p.parent.name}-{p.stem}')
def test_no_text_of_a_page_says_which_method_is_ahead(page):
    assert [s for kind, text in cells(page) if kind == 'markdown' for s in verdicts(text)] == []


@pytest.mark.parametrize(
    'sentence',
    [
        'Image + Text is the best method on CIRR.',
        'On MIT-States the Combiner beats the tuned sum by two points.',
        'Here LinCIR finds fewer targets than Image + Text.',
        'A sum with a better weight recovers much of the gain of a pseudo-word.',
        'Noise helps on CIRR.',
        'Where a sentence names what is new, the sum gains much over the image alone.',
    ],
)
def test_a_typed_winner_is_noticed(sentence):
    assert verdicts(f'## Reading\n\nThe table shows it. {sentence}') == [sentence]


def test_conditions_definitions_and_papers_are_not_taken_for_results():
    said = [
        'The table shows whether the Combiner is better than the sum.',
        'In the paper LinCIR is better than Pic2Word.',
        'Image + Text should be worse where the condition removes an object.',
        'The baseline is the one that is best on validation queries.',
    ]
    assert verdicts(' '.join(said)) == []


# %% numbers

BARE = re.compile(r'(?<![\w.,/#-])\d{4,}(?![\w/-]|\.\d)')  # four digits or more, without a comma
NO_COUNTS = {'49407', '4711'}  # identifiers: the end token, a product
YEAR = re.compile(r'(?:19|20)\d\d')


def bare_counts(text: str) -> list:
    "The numbers of four digits or more that Markdown writes without a comma; years, code, formulas and links aside."
    for aside in (r'```.*?```', r'`[^`]*`', r'\]\([^)]*\)', r'\$[^$\n]*\$', r'https?://\S+'):
        text = re.sub(aside, '', text, flags=re.S)
    return [n for n in BARE.findall(text) if not YEAR.fullmatch(n) and n not in NO_COUNTS]


@pytest.mark.parametrize('page', PAGES, ids=lambda p: f'{p.parent.name}-{p.stem}')
def test_thousands_have_a_comma(page):
    assert [n for kind, text in cells(page) if kind == 'markdown' for n in bare_counts(text)] == []


def test_a_count_without_a_comma_is_noticed():
    assert bare_counts('In 2021 [CIRR](a/5000) had 21552 images, 1,197 queries; `n = 4000`, $x > 1000$.') == ['21552']


# %% pages on exchanged results


def ranks_at(table, tasks: dict, first: bool):
    "Rankings with all targets of a query at the beginning of its list, or at the end."
    targets = {q: t for task in tasks.values() for q, t in zip(task.queries.query_id, task.queries.targets)}
    table = table.copy()
    sizes, counts = table.gallery_size.astype(int), table.ranks.map(len)
    table['ranks'] = [[*range(1, n + 1)] if first else [*range(s - n + 1, s + 1)] for s, n in zip(sizes, counts)]
    table['rank'] = table.ranks.map(min)
    shown = [([*t], [i for i in top if i not in {*t}]) for t, top in zip(table.query_id.map(targets), table.top)]
    table['top'] = [(t + rest if first else rest)[:50] for t, rest in shown]
    return table


def exchanged(folder, best: str):
    "`cached_benchmark_rankings` with invented ranks: trained methods find every target and all others none."
    real = matrix.cached_benchmark_rankings

    def rankings(entry, benchmark):
        found = real(entry, benchmark)
        out = folder / best / found.name
        out.mkdir(parents=True, exist_ok=True)
        first = (best == 'trained') == bool(entry.run)
        changed = ranks_at(pd.read_parquet(found / 'rankings.parquet'), benchmark.tasks, first)
        changed.to_parquet(out / 'rankings.parquet', index=False)
        return out

    return rankings


def shown_text(nb) -> str:
    "What a reader sees of an executed notebook besides code: Markdown, and the text of its outputs."
    parts = []
    for c in nb.cells:
        if c.cell_type == 'markdown':
            parts.append(c.source)
        for o in getattr(c, 'outputs', []):
            data = o.get('data', {})
            text = data.get('text/html') or data.get('text/markdown') or data.get('text/plain') or ''
            text = re.sub(r'<(style|script).*?</\1>', '', ''.join(text), flags=re.S)
            text = re.sub(r'</(?:td|th|tr|div|p|summary|small|b)>|<br>', '\n\n', text)
            parts.append(html.unescape(re.sub(r'<[^>]+>', '', text)))
    return '\n\n'.join(parts)


def run_page(page: str, given: dict, more: tuple = ()) -> str:
    "The text of a page, run in this process with some parameters and further cells before its last one."
    from execnb.nbio import mk_cell, read_nb
    from execnb.shell import CaptureShell

    nb = read_nb(ROOT / f'nbs/{page}.ipynb')
    at = next(i for i, c in enumerate(nb.cells) if 'parameters' in c.metadata.get('tags', []))
    nb.cells.insert(at + 1, mk_cell('\n'.join(f'{k} = {v!r}' for k, v in given.items()), 'code'))
    nb.cells[-1:-1] = [mk_cell(text, kind) for kind, text in more]
    shell = CaptureShell(path=(ROOT / f'nbs/{page}').parent)
    shell.run_all(nb, exc_stop=True)
    return shown_text(nb)


@pytest.fixture(scope='module')
def shared_store(tmp_path_factory):
    "One store for all runs of this module: the pages share trainings."
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_STORE', str(tmp_path_factory.mktemp('store')))
        yield m


def texts(page: str, folder: Path, monkeypatch, more: tuple = ()) -> dict:  # best -> text
    found = {}
    for best in ('trained', 'others'):
        with monkeypatch.context() as m:
            m.setattr(matrix, 'cached_benchmark_rankings', exchanged(folder, best))
            found[best] = run_page(page, RERUN[page], more)
    return found


def unchanged_verdicts(found: dict) -> list:
    "Sentences that name who is ahead and are on the page whoever is."
    of_others = {*verdicts(found['others'])}
    return [s for s in verdicts(found['trained']) if s in of_others]


LEAD = re.compile(r'\b(better|worse) than ([^(\n;]+?) \(([+−]\d+\.\d)')


@pytest.mark.e2e
@pytest.mark.parametrize('page', RERUN)
def test_a_page_says_of_exchanged_results_what_they_are(page, shared_store, tmp_path, monkeypatch):
    found = texts(page, tmp_path, monkeypatch)
    assert unchanged_verdicts(found) == []
    assert found['trained'] != found['others']
    for best, text in found.items():
        for word, rival, sign in LEAD.findall(text):
            assert (word == 'better') == sign.startswith('+'), (best, rival)
    words = {best: {w for w, *_ in LEAD.findall(text)} for best, text in found.items()}
    if any(words.values()):
        assert words == dict(trained={'better'}, others={'worse'})


@pytest.mark.e2e
def test_a_winner_that_is_typed_into_a_page_is_found(shared_store, tmp_path, monkeypatch):
    typed = (
        ('markdown', 'Here Image + Text is better than the tuned sum.'),
        (
            'code',
            "from cis_nb.core.report import show_text\nshow_text('The Combiner finds fewer targets than chance.')",
        ),
    )
    found = unchanged_verdicts(texts('06_evaluation/matrix', tmp_path, monkeypatch, typed))
    assert found == ['Here Image + Text is better than the tuned sum.', 'The Combiner finds fewer targets than chance.']
