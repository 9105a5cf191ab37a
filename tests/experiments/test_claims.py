"Claims: every one has a test or waits; verdicts follow planted numbers."

from types import SimpleNamespace
import re
import numpy as np
import pandas as pd
import pytest
from projects import ROOT
from cis_nb.experiments import claims as cl
from cis_nb.experiments.combiner_ablations import BY_CONSTRUCTION, OWN_COMPARISON, UNTESTED
from cis_nb.experiments.comparison import UNTRAINED
from cis_nb.book.site import render_template
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
    assert (found['N02'], found['N12'], found['C02']) == (
        'waits for data or weights',
        'tested in the profile full',
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


# --- lines of evidence


def line(low, role=''):
    return dict(what='a − b', diff=low + 1.0, low=low, high=low + 2.0) | (dict(role=role) if role else {})


@pytest.mark.parametrize(
    'lines, said',
    [
        ([line(1), line(-9, OWN_COMPARISON)], 'reproduced'),  # an own comparison is not judged
        ([line(1, OWN_COMPARISON)], cl.NOT_HERE),  # nothing of the claim itself
        ([line(1) | dict(p=0.03)], 'reproduced'),
        ([line(1) | dict(p=0.03)] * 2, 'undecided'),  # corrected for their number
        ([line(1), dict(what='c', role=UNTESTED)], 'undecided'),
        ([line(-9), dict(what='c', role=UNTESTED)], 'not reproduced'),
        ([line(1, BY_CONSTRUCTION)], cl.CERTAIN),
        ([line(-9, BY_CONSTRUCTION)], 'not reproduced'),
        ([line(1, BY_CONSTRUCTION), line(-1)], 'undecided'),  # the part that can fail decides
        ([dict(what='c', role=UNTESTED)], 'undecided'),
        ([line(1), dict(line(-1), needed=90)], cl.TOO_FEW),
        ([line(-9), dict(line(-1), needed=90)], 'not reproduced'),
    ],
)
def test_a_verdict_follows_the_roles_of_its_lines(lines, said):
    assert cl.judge_evidence(lines).verdict == said


def test_claims_that_cannot_fail_are_counted_apart(tmp_path):
    evidence = dict(L02=[line(1, BY_CONSTRUCTION)], L05=[line(1)])
    verdicts = cl.judge(planted(8), tmp_path, evidence=evidence)
    found = verdicts.set_index('id').verdict
    assert (found['L02'], found['L07'], found['L05']) == (cl.CERTAIN, cl.CERTAIN, 'reproduced')
    counts = cl.verdict_counts(verdicts)
    assert counts.to_numpy().sum() == len(cl.claims())
    assert counts.loc['lrvsf', cl.CERTAIN] == 2 and counts.loc['lrvsf', 'reproduced'] == 1
    n = (found == cl.CERTAIN).sum()
    assert f'apart from these, {n} hold by construction or arithmetic' in cl.verdict_finding(verdicts)
    assert 'L02' in cl.certain_claims(verdicts).data and 'L02' not in cl.tested_claims(verdicts, []).data


def test_the_front_page_counts_them_apart():
    about = dict(done=1, experiments=1, seconds=1, wall=0, made=1, partly=0, items=1, claims=9, claims_page='c')
    about |= dict(gpu='', cores='2 cores', cpu='')
    card = render_template('cards', verdicts={'reproduced': 3, cl.CERTAIN: 2}, **about)
    assert '3 of 9' in card and '2 more hold by construction or arithmetic' in card
    assert 'construction' not in render_template('cards', verdicts={'reproduced': 3}, **about)
    assert '0 of 9' in render_template('cards', verdicts={'undecided': 3}, **about)


def test_weights_of_a_category_are_counted_as_the_claim_counts():
    outcome = cl.condition_weights()
    assert outcome.verdict == cl.CERTAIN and cl.condition_weights(7680).verdict == 'not reproduced'
    embeddings, _, position = outcome.effect.split('; ')
    assert '7,680' in embeddings and position.endswith('8,448')


def test_a_claim_that_waits_shows_the_own_comparison(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path, evidence=dict(L08=[line(1, OWN_COMPARISON)])).set_index('id', drop=False)
    assert verdicts.verdict['L08'] == 'waits for data or weights' and len(verdicts) == len(cl.claims())
    assert 'own comparison, a − b: +2.0 [+1.0, +3.0]' in verdicts.effect['L08']


def test_released_templates_are_tested_and_built_ones_are_certain(tmp_path):
    run = SimpleNamespace(root=tmp_path)
    assert (cl.on_templates(run, True), cl.on_templates(run, False)) == (cl.CERTAIN, 'not reproduced')
    (tmp_path / 'genecis').mkdir()
    (tmp_path / 'genecis/focus_object.json').write_text('[]')
    assert (cl.on_templates(run, True), cl.on_templates(run, False)) == ('reproduced', 'not reproduced')
