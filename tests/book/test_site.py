"The smoke book from start to end, and its pages: as files, and in a browser without a network."

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from browser import CHROMIUM, Browser

import cis_nb
from cis_nb.book import site


def experiment_names(smoke):
    params = smoke.home / 'params' / 'smoke'
    return sorted(p.relative_to(params).with_suffix('').as_posix() for p in params.rglob('*.yaml'))


def html_pages(smoke):
    "The pages of the small book; the theme keeps templates of its own among the static files."
    html = smoke.home / 'reports' / 'smoke' / 'html'
    return sorted(p for p in html.rglob('*.html') if '_static' not in p.relative_to(html).parts)


@pytest.mark.e2e
def test_the_small_book_is_whole(smoke):
    assert smoke.rc == 0, smoke.said
    reports = smoke.home / 'reports' / 'smoke'
    names = experiment_names(smoke)
    receipts = {n: json.loads((reports / n / 'receipt.json').read_text()) for n in names}
    assert all(r['headline'] and r['experiment'] == n and r['profile'] == 'smoke' for n, r in receipts.items())
    results = pd.read_parquet(reports / 'results.parquet')
    assert len(results) and set(results.experiment) <= set(names) and np.isfinite(results.value).all()
    print(f'the small book: {smoke.seconds:.0f} s')


@pytest.mark.e2e
def test_a_second_call_runs_nothing(smoke):
    reports = smoke.home / 'reports' / 'smoke'
    receipts = [reports / n / 'receipt.json' for n in experiment_names(smoke)]

    def times():
        return {p: p.stat().st_mtime_ns for p in [*receipts, reports / 'html' / 'index.html']}

    before = times()
    rc, said = smoke.book('make', 'smoke')
    assert rc == 0 and times() == before and '…' not in said, said


@pytest.mark.e2e
def test_pages_were_set_without_a_warning(smoke):
    assert (smoke.home / 'reports/smoke/site.log').read_text() == ''


class Links(HTMLParser):
    "What a page loads, and where it points."

    def __init__(self):
        super().__init__()
        self.loads, self.points, self.ids = [], [], set()

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a.get('id'), a.get('name')}
        if tag in ('script', 'img', 'iframe', 'source', 'video', 'audio', 'embed') and a.get('src'):
            self.loads.append(a['src'])
        if (
            tag == 'link'
            and a.get('href')
            and a.get('rel') not in ('author', 'next', 'prev', 'search', 'index', 'canonical')
        ):
            self.loads.append(a['href'])
        if tag == 'a' and a.get('href'):
            self.points.append(a['href'])


def read(path):
    page = Links()
    page.feed(path.read_text(encoding='utf-8'))
    return page


def inside(path, link):
    "The file that a link of a page means."
    parts = urlsplit(link)
    return (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()


@pytest.mark.e2e
def test_no_page_loads_anything_from_a_network_and_no_link_is_broken(smoke):
    html = smoke.home / 'reports' / 'smoke' / 'html'
    pages = {p.resolve(): read(p) for p in html_pages(smoke)}
    assert len(pages) > 10
    for path, page in pages.items():
        outside = [u for u in page.loads if urlsplit(u).scheme not in ('', 'data') or urlsplit(u).netloc]
        assert not outside, f'{path.name} loads {outside}'
        local = [u for u in page.points if not urlsplit(u).scheme]
        missing = [u for u in [*page.loads, *local] if not urlsplit(u).scheme and not inside(path, u).exists()]
        assert not missing, f'{path.name} points to {missing}'
        lost = [
            u
            for u in local
            if (f := urlsplit(u).fragment) and inside(path, u) in pages and f not in pages[inside(path, u)].ids
        ]
        assert not lost, f'{path.name}: no such place: {lost}'
    for path in html.rglob('*.css'):
        assert not re.search(r'(url\(|@import)\s*["\']?(https?:)?//', path.read_text(encoding='utf-8')), (
            f'{path.name} loads something from a network'
        )


@pytest.mark.e2e
def test_every_picture_shows_something(smoke):
    "A picture of one colour is an empty figure."
    pictures = [p for p in (smoke.home / 'reports/smoke/html/_images').iterdir() if p.suffix in ('.png', '.jpg')]
    assert pictures
    for p in pictures:
        with Image.open(p) as im:
            assert np.asarray(im.convert('L'), float).std() > 2, p.name


LOOK = '''(() => {
  const article = document.querySelector('.bd-article'), over = [], every = name => document.querySelectorAll(name);
  const seen = e => e.getClientRects().length && getComputedStyle(e).visibility != 'hidden';
  const inner = 'table, blockquote, pre, .cis-cards, .cell_output';
  const own = e => !e.closest('details:not([open])') && !e.parentElement.closest(inner) && !e.closest('.headerlink');
  const named = e => (e.tagName + ' ' + e.textContent).trim().slice(0, 40);
  const all = [...article.querySelectorAll('p, table, pre, h1, h2, h3, blockquote, img')];
  const blocks = all.filter(e => seen(e) && own(e) && e.getBoundingClientRect().height > 0);
  const meet = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4
                         && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 4;
  blocks.forEach((x, i) => blocks.slice(i + 1).forEach(y => {
    const both = meet(x.getBoundingClientRect(), y.getBoundingClientRect());
    if (both && !x.contains(y)) over.push(named(x) + ' / ' + named(y));
  }));
  return {over: over.slice(0, 5), wide: document.documentElement.scrollWidth - innerWidth,
          text: article.innerText, height: article.scrollHeight,
          empty: [...document.images].filter(i => seen(i) && !(i.complete && i.naturalWidth > 0)).map(i => i.src),
          formulas: every('.math').length, drawn: every('.math mjx-container').length,
          wrong: every('mjx-merror').length};
})()'''

RAW = {
    r'\{["\']\w+["\']: ': 'a raw dictionary',
    r'\bat 0x[0-9a-f]{6,}': 'an object\'s address',
    r'<(Figure|Axes|IPython)\b': 'an object without a picture',
    r'\w*Warning:': 'a warning',
    r'\[?\d+/\d+ \[\d\d:\d\d<': 'a progress bar',
}


@pytest.fixture(scope='module')
def browser():
    if not CHROMIUM:
        pytest.skip('no Chromium on this machine: apt-get install chromium')
    with Browser() as b:
        yield b


def faults(browser):
    "What is wrong with the page that the browser shows."
    look, out = browser.js(LOOK), [f'error: {s}' for s in browser.said]
    out += [f'overlap: {o}' for o in look['over']] + [f'empty picture: {e}' for e in look['empty']]
    out += [f'asked for {u}' for u in browser.asked if not u.startswith(('file:', 'data:', 'blob:', 'about:'))]
    if look['wide'] > 1:
        out.append(f'{look["wide"]} pixels too wide')
    if look['wrong']:
        out.append(f'{look["wrong"]} formulas with an error')
    for pattern, what in RAW.items():
        if m := re.search(pattern, look['text']):
            out.append(f'{what}: {m[0]}')
    return out


FORMULAS = (
    'document.readyState=="complete" && '
    'document.querySelectorAll(".math").length==document.querySelectorAll(".math mjx-container").length'
)

BAD = """<!doctype html><meta charset="utf-8"><body><div class="bd-article"><h1>Bad</h1>
<p style="height:40px">One</p><p style="margin-top:-35px">Two</p>
<p>{'a': 1}</p><pre>UserWarning: careful</pre><img src="none.png" width="9" height="9">
<img src="http://example.org/a.png"><div style="width:3000px">wide</div></div></body>"""


FIRST = """(() => {
  const seen = e => e.getClientRects().length && e.getBoundingClientRect().height > 0;
  const place = name => {
    const first = [...document.querySelectorAll('.bd-article ' + name)].find(seen);
    return first ? Math.round(first.getBoundingClientRect().top + scrollY) : null;
  };
  return {screen: innerHeight, finding: place('.cis-finding'), table: place('.cell_output table'),
          figure: place('.cell_output img')};
})()"""


def far_down(places: dict) -> list:
    "What of finding, first table and first figure is missing, or does not begin within the first two screens."
    found = {what: places[what] for what in ('finding', 'table', 'figure')}
    return [f'{what} at {y}' for what, y in found.items() if y is None or y > 2 * places['screen']]


@pytest.mark.browser
def test_places_on_a_page_are_measured(browser, tmp_path):
    body = '<p class="cis-finding">One</p><div class="cell_output" style="margin-top:2500px"><table><td>1</table></div>'
    (tmp_path / 'deep.html').write_text(f'<!doctype html><div class="bd-article">{body}</div>')
    browser.open(tmp_path / 'deep.html')
    assert [place.split()[0] for place in far_down(browser.js(FIRST))] == ['table', 'figure']


@pytest.mark.browser
@pytest.mark.parametrize('width', [400, 1200])
def test_wide_tables_figures_and_titles_stay_on_the_page_and_show_that_they_go_on(browser, tmp_path, width):
    style, picture = Path(cis_nb.__file__).parent / 'assets/book/_static/book.css', io.BytesIO()
    Image.new('RGB', (1600, 90), 'white').save(picture, 'png')
    figure = f'<img src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
    cells = '<td>number</td>' * 40
    tables = ''.join(f'<table class="cis-table {name}"><tr>{cells}</table>' for name in ('cis-matrix', 'cis-front'))
    own = site.scrolling(f'<p id="title">{"A title. " * 30}</p><table><tr>{cells}</table>')
    outputs = f'<div class="cell_output" id="figure">{figure}</div><div class="cell_output text_html">{own}</div>'
    body = f'<h1>{"a_long_name_" * 12}</h1>{tables}{outputs}'
    theme = '<style>html { --pst-color-background: #fff }</style>'  # of sphinx-book-theme
    head = f'<!doctype html>{theme}<link rel="stylesheet" href="{style.as_uri()}">'
    (tmp_path / 'wide.html').write_text(f'{head}<div class="bd-article">{body}</div>')
    browser.open(tmp_path / 'wide.html')
    browser.picture(tmp_path / 'wide.png', width, 900)
    boxes = ['.cis-matrix', '.cis-scroll', *(['.cis-front'] if width == 400 else [])]
    for box in boxes:
        scrolls, edge, y, middle = browser.js(
            f"(() => {{ const b = document.querySelector('{box}'), r = b.getBoundingClientRect();"
            ' return [b.scrollWidth > b.clientWidth, r.right - 2, r.top + r.height / 2, r.left + r.width / 2] })()'
        )
        shot = Image.open(tmp_path / 'wide.png').convert('L')
        shadow, plain = (shot.getpixel((int(x), int(y) - 6)) for x in (edge, middle))
        assert scrolls and shadow < 235 and shadow < plain, box
    over = "(s => { const e = document.querySelector(s), w = document.querySelector('.bd-article').clientWidth;"
    over += ' return Math.max(e.scrollWidth - e.clientWidth, e.getBoundingClientRect().width - w) })'
    assert [browser.js(f"{over}('{part}')") <= 1 for part in ('h1', '#figure img', '#title', '.text_html')] == [
        True
    ] * 4


@pytest.mark.browser
def test_the_first_column_of_a_table_stays_in_view_on_a_narrow_screen(browser, tmp_path):
    style, cells = Path(cis_nb.__file__).parent / 'assets/book/_static/book.css', '<td>number</td>' * 40
    table = site.scrolling(f'<table><tr><th>{"a long name " * 5}</th>{cells}</table>')
    head = f'<!doctype html><link rel="stylesheet" href="{style.as_uri()}">'
    (tmp_path / 'sticky.html').write_text(f'{head}<div class="bd-article"><div class="cell_output">{table}</div></div>')
    browser.open(tmp_path / 'sticky.html')
    moved = (
        "(() => { const b = document.querySelector('.cis-scroll'), th = b.querySelector('th'); b.scrollLeft = 300;"
        ' const [at, of] = [th, b].map(e => e.getBoundingClientRect()); return [at.left - of.left, at.width / of.width]'
        ' })()'
    )
    for width, stays in ((400, True), (1200, False)):
        browser.picture(tmp_path / 'sticky.png', width, 300)
        left, share = browser.js(moved)
        assert (left == 0) == stays and share < 0.6


@pytest.mark.browser
@pytest.mark.e2e
def test_results_begin_within_the_first_two_screens(smoke, browser, tmp_path):
    "The finding, the first table and the first figure of every experiment page."
    names = [n for n in experiment_names(smoke) if re.match('05_train|0[6-9]_', n)]
    assert '06_evaluation/your_own_method' in names  # its code stands above its results
    browser.picture(tmp_path / 'first.png', 1300)
    trouble = []
    for name in names:
        browser.open(smoke.home / 'reports' / 'smoke' / 'html' / f'{name}.html', FORMULAS)
        trouble += [f'{name}: {place}' for place in far_down(browser.js(FIRST))]
    assert not trouble, '\n'.join(trouble)


@pytest.mark.browser
def test_the_look_finds_what_it_looks_for(browser, tmp_path):
    (tmp_path / 'bad.html').write_text(BAD)
    browser.open(tmp_path / 'bad.html', FORMULAS)
    found = '\n'.join(faults(browser))
    for what in (
        'overlap: P One / P Two',
        'empty picture',
        'asked for http://example.org',
        'pixels too wide',
        'a raw dictionary',
        'a warning: UserWarning',
    ):
        assert what in found, found


@pytest.mark.browser
@pytest.mark.e2e
@pytest.mark.parametrize('width', [1300, 420])
def test_pages_look_as_they_should(smoke, browser, tmp_path, width):
    "Wide or narrow: nothing overlaps, sticks out, is empty or comes from a network; all formulas are set."
    trouble = []
    browser.picture(tmp_path / 'first.png', width)
    for p in html_pages(smoke):
        if p.stem in ('genindex', 'search'):
            continue
        browser.open(p, FORMULAS)
        trouble += [f'{p.name} ({width}): {f}' for f in faults(browser)]
        browser.picture(tmp_path / 'page.png', width)
        with Image.open(tmp_path / 'page.png') as im:
            trouble += [f'{p.name} is blank'] if np.asarray(im.convert('L'), float).std() < 5 else []
    assert not trouble, '\n'.join(trouble)


@pytest.mark.browser
@pytest.mark.e2e
def test_names_and_captions_are_shown_as_text(project, browser):
    "Scripts in a plugin's title, in captions, cells, results and parameters."
    project.chapter('01_markup', "name: '<script>window.hostile=2</script>'\n")
    rc, said = project.book()
    assert rc == 0, said
    pages = [p for p in project.report('html').glob('*.html') if 'hostile' in p.read_text(encoding='utf-8')]
    assert len(pages) > 1  # the page itself, and the front page with its finding
    for page in pages:
        browser.open(page)
        found = browser.js(
            '({ran: window.hostile, handlers: document.querySelectorAll("[onerror], [onclick=x]").length, '
            'scripts: [...document.querySelectorAll("script")].filter(s => s.text.includes("hostile")).length, '
            'links: [...document.querySelectorAll("a")].filter(a => a.protocol=="javascript:" '
            '&& a.href.includes("hostile")).length, text: document.body.innerText})'
        )
        assert not found.get('ran') and not found['handlers'] and not found['scripts'] and not found['links'], page
        assert 'window.hostile=1' in found['text']


def test_damaged_and_lost_pages_are_made_again(project, monkeypatch):
    "The records and the sources of the pages are as they were."
    project.chapter('01_honest')
    made = []

    def build(src, out):
        made.append(out)
        for name in ('index.html', '_static/style.css', 'sub/page.html'):
            project.write(str((out / name).relative_to(project.home)), f'all of {name}')
        return ''

    monkeypatch.setattr(site, 'build_html', build)
    html = project.home / 'reports' / 'quick' / 'html'
    site.site('quick')
    site.site('quick')
    assert made == [html]
    for name in ('index.html', 'sub/page.html', '_static/style.css'):
        for damage in (b'', b'all of', b'x' * len(f'all of {name}'), None):
            (html / name).unlink() if damage is None else (html / name).write_bytes(damage)
            made.clear()
            site.site('quick')
            assert made == [html] and (html / name).read_text() == f'all of {name}', (name, damage)
