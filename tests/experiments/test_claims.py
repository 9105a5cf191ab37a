"Claims: every one has a test or waits; verdicts follow planted numbers."

from types import SimpleNamespace
import re
import numpy as np
import pandas as pd
import pytest
from projects import ROOT
from cis_nb.experiments import claims as cl
from cis_nb.experiments.comparison import UNTRAINED
from cis_nb.benchmarks.genecis_construction import Rules
from cis_nb.benchmarks.genecis import TASKS


pytestmark = pytest.mark.usefixtures('store')


# --- claims


def test_every_claim_has_a_test_or_waits():
    ids = set(cl.claims().id)
    assert set(cl.waits_for()) < ids and sorted(ids - set(cl.waits_for())) == sorted(cl.TESTED)


def with_library(name: str) -> str:
    "The text of a page and of the library pages on experiments that it imports."
    page = (ROOT / 'nbs' / f'{name}.ipynb').read_text(encoding='utf-8')
    modules = set(re.findall(r'from cis_nb\.experiments\.(\w+) import', page))
    return page + ''.join((ROOT / f'cis_nb/experiments/{m}.py').read_text(encoding='utf-8') for m in modules)


def test_every_test_of_a_claim_is_an_experiment_that_speaks_of_it():
    for i, where in cl.by_claim(cl.TESTED_BY).items():
        profile, name = where.split('/', 1)
        assert (ROOT / 'params' / profile / f'{name}.yaml').exists(), where
        own = name.split('/')[-1] in ('genecis', 'composed_retrieval', 'claims')  # tested in the library page on claims
        assert i in with_library('05b_experiments/08_claims' if own else name), f'{where} says nothing of {i}'


def test_a_claim_without_a_test_says_what_kind_of_thing_it_waits_for(tmp_path):
    found = cl.judge(planted(8), tmp_path).set_index('id').verdict
    assert (found['C01'], found['N02'], found['N12']) == (
        'waits for a chapter',
        'waits for data or weights',
        'tested in the profile full',
    )


def test_a_claim_is_not_testable_where_the_full_profile_lacks_its_test(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_PROFILE', 'full')
    assert cl.judge(planted(8), tmp_path).set_index('id').verdict['N12'] == 'not testable here'
    monkeypatch.setenv('CIS_PROFILE', 'quick')
    monkeypatch.setattr(cl, 'TESTING_PAGE', cl.TESTING_PAGE | dict(N12='07_ablations/nothing'))
    assert cl.judge(planted(8), tmp_path).set_index('id').verdict['N12'] == 'not testable here'


def planted(gain):
    "A run in which Image + Text answers `gain` percent more queries than either of its parts."
    n, parts = 1000, []
    for t in TASKS:
        for m, share in (('image_only', 0.2), ('text_only', 0.1), ('image_text', 0.2 + gain / 100)):
            parts.append(
                pd.DataFrame(
                    dict(
                        method=m,
                        task=t,
                        draw=0,
                        seed=UNTRAINED,
                        query_id=[f'{t}{i}' for i in range(n)],
                        reference=range(n),
                        rank=np.where(np.arange(n) < share * n, 1, 5),
                        gallery_size=15,
                    )
                )
            )
    return SimpleNamespace(per_query=pd.concat(parts), tasks={}, rules=Rules(), root='nowhere')


def test_claims_follow_planted_numbers(tmp_path):
    good, bad = (cl.judge(planted(g), tmp_path).set_index('id').verdict for g in (8, -8))
    assert (good['G01'], good['G02'], good['G03']) == ('reproduced', 'reproduced', 'not reproduced')
    assert (bad['G01'], bad['G02'], bad['G03']) == ('not reproduced', 'not reproduced', 'reproduced')


def test_a_claim_that_cannot_be_tested_says_why(tmp_path):
    run = planted(8)
    run.per_query = run.per_query[run.per_query.task != 'focus_attribute']
    found = cl.judge(run, tmp_path).set_index('id')
    assert (
        found.verdict['G03'] == cl.IN_FULL
        and 'Focus Attribute' in found.effect['G03']
        and found.verdict['G09'] == cl.IN_FULL
    )


@pytest.mark.parametrize('error', [KeyError('column'), ValueError('shapes'), TypeError('None')])
def test_an_error_of_a_test_is_no_verdict(error):
    def broken():
        raise error

    with pytest.raises(type(error)):
        cl.judge_one(broken, set())


def test_a_claim_about_a_method_without_rankings_is_not_tested(tmp_path):
    found = cl.judge(planted(8), tmp_path).set_index('id')
    assert found.verdict['G04'] == cl.IN_FULL and found.effect['G04'] == "no rankings of 'combiner'"
    run = planted(8)
    run.per_query = run.per_query[(run.per_query.method != 'text_only') | (run.per_query.task != TASKS[0])]
    with pytest.raises(cl.NotTestable, match="no rankings of 'text_only'"):
        cl.sum_beats_parts_on_three(SimpleNamespace(per_query=run.per_query[run.per_query.method != 'text_only']))


def test_a_page_without_parameters_has_no_evidence(tmp_path, monkeypatch):
    judged = planted(8)
    monkeypatch.setattr(cl, 'sibling_receipt', lambda name: None if name == 'genecis' else dict(params={}))
    monkeypatch.setattr(cl, 'defaults', lambda nb: {})
    monkeypatch.setattr(cl, 'run_genecis', lambda params: judged)
    monkeypatch.setattr(cl, 'run_composed', lambda params: None)
    monkeypatch.setattr(cl, 'templates_folder', lambda run, params: tmp_path)
    assert len(cl.judge_book('genecis', 'composed', ['a page']).verdicts) == len(cl.claims())


def test_a_run_without_galleries_says_what_to_ask_for():
    with pytest.raises(ValueError, match=f'no gallery of {TASKS[0]}, .*; name one in `tasks`, with `templates` of at'):
        cl.sizes(SimpleNamespace(tasks={}))
