"Sphinx configuration of the book's pages: nothing is executed, nothing is loaded from a network."
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from sphinx.search import en

# jsonschema would build a grammar of internationalised addresses for seconds; no notebook is checked for those
sys.modules.setdefault('rfc3987_syntax', None)
# the words of the search index: each distinct one is reduced to its stem once
en.SearchEnglish.stem = lru_cache(maxsize=None)(en.SearchEnglish.stem)

project = 'The CIS Book'
html_title = project
extensions = ['myst_nb']

nb_execution_mode = 'off'
nb_ipywidgets_js = {}  # widgets need a kernel, and their scripts a network
nb_code_prompt_show = 'Code'
nb_code_prompt_hide = 'Hide code'
nb_merge_streams = True
myst_enable_extensions = ['dollarmath', 'amsmath']
myst_heading_anchors = 3
suppress_warnings = ['mystnb.unknown_mime_type', 'myst.header', 'misc.highlighting_failure']

html_theme = 'sphinx_book_theme'
html_theme_options = dict(
    home_page_in_toc=True,
    show_navbar_depth=1,
    show_toc_level=2,
    use_download_button=False,
    use_fullscreen_button=False,
    use_issues_button=False,
    use_repository_button=False,
    navigation_with_keys=False,
    footer_content_items=[],
    navbar_start=[],
    navbar_center=[],
    navbar_end=[],
    navbar_persistent=[],
)
mathjax = Path(find_spec('sphinx-mathjax-offline').origin).parent / 'static'
html_static_path = ['_static', str(mathjax)]
mathjax_path = 'mathjax/tex-chtml.js'
html_extra_path = ['extra']
html_css_files = ['book.css']
html_js_files = ['absent.js', 'book.js']  # the first one is written with the pages
html_favicon = '_static/icon.svg'
html_logo = '_static/logo.svg'
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
