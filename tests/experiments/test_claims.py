"Claims: every one has a test or waits; verdicts follow planted numbers."

import json
from types import SimpleNamespace
import re
import numpy as np
import pandas as pd
import pytest
import yaml
from projects import ROOT, receipt_of
from cis_nb.experiments import claims as cl
from cis_nb.experiments.combiner_ablations import (
    BY_CONSTRUCTION,
    OWN_COMPARISON,
    PUBLISHED_RECIPE,
    TOO_LOW,
    UNTESTED,
    untested,
)
from cis_nb.experiments.comparison import UNTRAINED, format_interval, opposite, verdict
from cis_nb.experiments.diffusion import PUBLISHED_STAGE_TWO
from cis_nb.experiments.matrix import MatrixRun
from cis_nb.book import site
from cis_nb.book.site import render_template
from cis_nb.benchmarks.genecis_construction import Rules
from cis_nb.benchmarks.genecis import TASKS
from cis_nb.train import settings, train_or_load


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
    for i, where in ((i, where) for i, all_of in cl.by_claim(cl.TESTED_BY).items() for where in all_of):
        profile, name = where.split('/', 1)
        assert (ROOT / 'params' / profile / f'{name}.yaml').exists(), where
        own = name.split('/')[-1] in ('genecis', 'composed_retrieval', 'claims')  # tested in the library page on claims
        assert i in with_library('05b_experiments/08_claims' if own else name), f'{where} says nothing of {i}'


def test_a_claim_without_a_test_says_what_kind_of_thing_it_waits_for(tmp_path):
    found = cl.judge(planted(8), tmp_path).set_index('id').verdict
    assert (found['N02'], found['N12'], found['C02']) == (
        'waits for data or weights',
        'needs the profile full',
        'waits for data or weights',
    )


def test_a_claim_is_not_testable_where_the_full_profile_lacks_its_test(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_PROFILE', 'full')
    assert cl.judge(planted(8), tmp_path).set_index('id').verdict['N12'] == 'not testable here'
    monkeypatch.setenv('CIS_PROFILE', 'quick')
    monkeypatch.setattr(cl, 'TESTING_PAGES', cl.TESTING_PAGES | dict(N12=['07_ablations/nothing']))
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
    assert found.verdict['G07'] == cl.WAITS and found.comparisons['G07'] == []  # and no own comparison
    run = planted(8)
    run.per_query = run.per_query[(run.per_query.method != 'text_only') | (run.per_query.task != TASKS[0])]
    with pytest.raises(cl.NotTestable, match="no rankings of 'text_only'"):
        cl.sum_beats_parts_on_three(SimpleNamespace(per_query=run.per_query[run.per_query.method != 'text_only']))


def test_a_page_without_parameters_has_no_evidence(tmp_path, monkeypatch):
    judged = planted(8)
    monkeypatch.setattr(cl, 'sibling_receipt', lambda name: None if name == 'genecis' else dict(params={}))
    monkeypatch.setattr(cl, 'defaults', lambda nb: {})
    monkeypatch.setattr(cl, 'run_genecis', lambda params: judged)
    composed = MatrixRun({}, {}, None, [], [], judged.per_query, None, None)
    monkeypatch.setattr(cl, 'run_composed', lambda params: composed)
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
        ([line(-9, TOO_LOW), line(-9, OWN_COMPARISON)], TOO_LOW),
        ([line(1, TOO_LOW), line(1)], 'undecided'),
        ([line(1) | dict(p=0.03)], 'reproduced'),
        ([line(1) | dict(p=0.03)] * 2, 'undecided'),  # corrected for their number
        ([line(1), dict(what='c', role=UNTESTED)], 'undecided'),
        ([line(-9), dict(what='c', role=UNTESTED)], 'not reproduced'),
        ([line(1, BY_CONSTRUCTION)], cl.CERTAIN),
        ([line(-9, BY_CONSTRUCTION)], 'not reproduced'),
        ([line(1, BY_CONSTRUCTION), line(-1)], 'undecided'),  # the part that can fail decides
        ([dict(what='c', role=UNTESTED)], cl.NOT_HERE),
        ([line(9, OWN_COMPARISON), dict(what='c', role=UNTESTED)], cl.NOT_HERE),
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
    assert f'Apart from these, {n} hold by construction or arithmetic' in cl.verdict_finding(verdicts)
    assert 'L02' in cl.certain_claims(verdicts).data and 'L02' not in cl.tested_claims(verdicts, []).data


def test_the_front_page_counts_them_apart():
    about = dict(done=1, experiments=1, seconds=1, wall=0, made=1, partly=0, items=1, claims=9, claims_page='c')
    about |= dict(gpu='', cores='2 cores', cpu='')
    card = render_template('cards', verdicts={'reproduced': 3, cl.CERTAIN: 2}, **about)
    assert '3 of 9' in card and '2 more hold by construction or arithmetic' in card
    assert 'construction' not in render_template('cards', verdicts={'reproduced': 3}, **about)
    assert '0 of 9' in render_template('cards', verdicts={'undecided': 3}, **about)


def test_the_front_page_says_what_kept_runs_judge_and_does_not_count_it(monkeypatch):
    counts = {'reproduced': 3, 'needs the profile full': 2, 'kept run: undecided': 1, 'kept run: not reproduced': 1}
    monkeypatch.setattr(site, '_claims_receipt', lambda found: ('09_claims/claims', dict(counts=counts)))
    counts['kept run: instead of needs the profile full'] = 2
    assert site._verdict_counts({}) == {'reproduced': 3, 'needs the profile full': 2}
    rows = re.findall(r'<tr><td>(.*?)</td>.*?>(\d*)</td><td class="cis-num">(.*?)</td>', site._verdicts({}))
    assert rows == [('reproduced', '3', ''), ('not reproduced', '0', '1'), ('undecided', '0', '1')]
    assert cl.color(cl.VERDICT_FILLS['not reproduced']) in site._verdicts({})  # as on the page of the claims
    said = (
        'Kept results of longer runs judge 2 more claims, which this run does not test: 1 not reproduced, 1 undecided'
    )
    more = 'Each claim with its test and effect: [claims](09_claims/claims).'
    assert site._claims_text({}).startswith(f'{said}. They are hatched, in the colour of their verdict. {more}')
    counts = dict(reproduced=3)
    assert site._claims_text({}).startswith('Each claim')


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


# --- from the page of an experiment to a verdict


def page_receipt(name: str, book, **params):
    "Run a page with small parameters into a book, as the runner does, and return its receipt."
    import papermill

    experiment = params.pop('as_experiment', name)
    folder = book / experiment
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as m:
        about = dict(CIS_HOME=ROOT, CIS_BOOK=book, CIS_REPORT=folder, CIS_EXPERIMENT=experiment, PYTHONPATH=ROOT)
        for key, value in (about | dict(OMP_NUM_THREADS=1, CIS_PROFILE='full')).items():
            m.setenv(key, str(value))
        source, out = ROOT / 'nbs' / f'{name}.ipynb', folder / 'notebook.ipynb'
        papermill.execute_notebook(source, out, params, kernel_name='python3', progress_bar=False, cwd=ROOT)
    return cl.read_receipt(experiment, folder / 'receipt.json')


@pytest.mark.e2e
def test_verdicts_on_noise_and_on_unseen_nouns_come_from_the_pages_that_test_them(tmp_path, monkeypatch):
    book, nouns = tmp_path / 'book', ['boat', 'cat']
    gaps = {'unchanged': dict(), 'shift, gap 0.75': dict(kind='shift', gap=0.75)}
    factors = dict(factors=dict(width=[16, 32]), prompts=['$ {condition}'], factor_seeds=[0])
    shorter = dict(world_images=60, steps=2, batch_size=8, width=16, prompt='$ {condition}')
    small = dict(backbone='tiny_xs', backbones=gaps, shorter=shorter, seeds=[0], **factors)
    assert {'N10', 'N11'} <= set(page_receipt('07_ablations/modality_gap', book, **small)['evidence'])

    given = dict(
        method='contrastive', backbone='tiny_xs', pretrained='none', held_out=nouns, device='cpu', dtype='float32'
    )
    begun = train_or_load(settings(given | dict(samples=64, val_samples=16, steps=2, batch_size=16, eval_every=0)))
    small = dict(
        held_out=nouns, never_saw=str(begun), trainings=['mined'], audited=['circo=60'], read_only=[], pairs=200
    )
    unseen = '06_evaluation/zero_shot.unseen'
    page_receipt('06_evaluation/zero_shot', book, as_experiment=unseen, backbone='tiny_xs', **small)

    monkeypatch.setenv('CIS_BOOK', str(book))
    monkeypatch.setenv('CIS_PROFILE', 'full')
    others = yaml.safe_load((ROOT / 'params/full/09_claims/claims.yaml').read_text())['others']
    receipts = {name: r for name in others if (r := cl.sibling_receipt(name))}
    assert {*receipts} == {'07_ablations/modality_gap', unseen}
    evidence, sources = cl.joined_evidence(receipts), cl.evidence_sources(receipts)
    verdicts = cl.judge(planted(8), tmp_path, evidence=evidence).set_index('id')
    assert {verdicts.verdict[i] for i in ('N10', 'N11')} <= {'undecided', 'not reproduced'}
    assert 'not tested: all six noise distributions' in verdicts.effect['N10']
    assert 'gap of pseudo-words' in verdicts.effect['N11'] and sources['N10'].startswith('07_ablations/modality_gap')
    assert 'boat, cat, which no part has seen, backbone included (19 queries of 1 noun), ' in verdicts.effect['G12']


def test_the_sentences_of_cirr_are_tasks_of_their_own_by_what_they_do():
    p = dict(data='world', world_seed=2, cirr=360, split='val', sentences='mixed')
    groups = cl.sentence_groups(cl.kinds_of(cl.set_root(p, 'cirr'), 'val'))
    ranks = pd.DataFrame(dict(query_id=[*groups], task='full', rank=1))
    run = MatrixRun(dict(cirr=SimpleNamespace(tasks=dict(full=None))), {}, None, [], [], ranks, None, None)
    sizes = cl.by_sentence(run, p).per_query.task.value_counts()
    kinds = pd.Series(groups).value_counts()
    assert {f'full, {g}': n for g, n in kinds.items()} | dict(full=len(groups)) == sizes.to_dict() and len(kinds) == 2


@pytest.mark.parametrize('given', [dict(experiment='b'), None])
def test_a_foreign_or_damaged_receipt_of_another_page_is_none(given, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_BOOK', str(tmp_path))
    (tmp_path / 'a').mkdir()
    file = tmp_path / 'a' / 'receipt.json'
    file.write_text(json.dumps(receipt_of(experiment='a')))
    assert cl.sibling_receipt('a')['experiment'] == 'a' and cl.sibling_receipt('b') is None
    file.write_text(json.dumps(receipt_of(**given)) if given else '{')
    assert cl.sibling_receipt('a') is None


def test_the_full_book_reads_the_receipts_of_all_pages_that_test_claims():
    others = yaml.safe_load((ROOT / 'params/full/09_claims/claims.yaml').read_text())['others']
    needed = {name for profile, name in (e.split('/', 1) for e in cl.TESTED_BY) if 'claims' not in name}
    needed -= {'06_evaluation/genecis', '06_evaluation/composed_retrieval'}  # parameters of their own
    assert needed | {'06_evaluation/zero_shot.unseen'} <= {*others}
    assert all((ROOT / 'params/full' / f'{name}.yaml').exists() for name in others)


def test_a_clause_that_another_page_tests_is_not_untested():
    gap, noise = untested('all of six', 'six'), dict(line(1), clause='six')
    receipts = dict(a=dict(evidence=dict(N10=[line(1), gap])), b=dict(evidence=dict(N10=[noise])))
    assert cl.judge_evidence(cl.joined_evidence(receipts)['N10']).verdict == 'reproduced'
    alone = cl.joined_evidence(dict(a=receipts['a']))['N10']
    assert dict(gap, run='a') in alone and cl.judge_evidence(alone).verdict == 'undecided'
    assert cl.joined_evidence(dict(a=dict(evidence=dict(N10='too few'))))['N10'] == 'too few'


def test_the_own_recipe_never_decides_a_claim_on_the_published_one(tmp_path):
    run = planted(8)
    own = run.per_query[run.per_query.method == 'image_text'].assign(method='combiner')
    task_specific = run.per_query[run.per_query.method == 'text_only'].assign(method='task_specific')
    run.per_query = pd.concat([run.per_query, own, task_specific])
    found = cl.judge(run, tmp_path).set_index('id')
    assert found.verdict['G07'] == cl.WAITS and found.effect['G07'].startswith('waits for the published recipe, which')
    assert all(c['role'] == OWN_COMPARISON for c in found.comparisons['G07']) and len(found.comparisons['G07']) == 4


def test_a_claim_on_the_published_recipe_is_not_judged_on_a_frozen_backbone(tmp_path):
    own, towers = line(-9, OWN_COMPARISON), untested('the published recipe, which trains both towers of the backbone')
    evidence = dict(G04=[towers, own], G13=[towers, own], G15=[own], G16=[own])
    found = cl.judge(planted(8), tmp_path, evidence=evidence).set_index('id').verdict
    assert [found[i] for i in evidence] == [cl.IN_FULL, cl.IN_FULL, cl.WAITS, cl.WAITS]
    evidence |= dict(G04=[line(1), own], G13=[line(-9), own])  # as the profile full has them
    found = cl.judge(planted(8), tmp_path, evidence=evidence).set_index('id').verdict
    assert [found[i] for i in ('G04', 'G13')] == ['reproduced', 'not reproduced']


def test_what_is_said_to_be_tested_in_the_full_profile_is_tested_there():
    "The page that tests G04 to G06, G13 and G14 trains both towers there, with enough seeds."
    given = yaml.safe_load((ROOT / 'params/full/07_ablations/combiner.yaml').read_text())
    assert len(given['tune_seeds']) >= 3 and {'G04', 'G05', 'G06', 'G13', 'G14'} <= set(cl.tests_in('full'))
    assert not {'G07', 'G11', 'G12', 'G15', 'G16'} & set(cl.tests_in('full'))


def test_a_claim_whose_kept_run_of_full_gives_no_verdict_does_not_need_the_profile_full(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_PROFILE', 'quick')
    monkeypatch.setattr(cl, 'KEPT_EVIDENCE', tmp_path / 'none.json')
    assert cl.verdict_without_test('C18') == cl.IN_FULL
    monkeypatch.setattr(cl, 'KEPT_EVIDENCE', tmp_path / 'kept.json')
    cl.keep_receipts({'full/07_ablations/prediction': kept_run(C18='the published recipe is not trained')})
    assert [cl.verdict_without_test(c) for c in ('C18', 'C05')] == [cl.NOT_HERE, cl.IN_FULL]


def test_built_templates_make_the_sets_certain_and_released_ones_test_them(tmp_path, monkeypatch):
    queries = pd.DataFrame(dict(reference=['r'], targets=[['t']], gallery=[['t']]))
    run = SimpleNamespace(root=tmp_path, rules=Rules(), tasks={(0, 'focus_object'): SimpleNamespace(queries=queries)})
    monkeypatch.setattr(cl, 'read_panoptic', lambda root: None)
    monkeypatch.setattr(cl, 'families_of', lambda queries: np.arange(400))

    def said(solved):
        monkeypatch.setattr(cl, 'closest', lambda *a: (np.arange(400) < solved).astype(float))
        monkeypatch.setattr(cl, 'overlap_ranks', lambda *a: np.where(np.arange(400) < 20, 1, 3))
        return cl.sets_do_not_solve(run)

    assert [said(n).verdict for n in (40, 200, 390)] == [cl.CERTAIN, 'undecided', 'not reproduced']
    assert said(40).effect.count(', required: below 50 %') == 2
    (tmp_path / 'genecis').mkdir()
    (tmp_path / 'genecis/focus_object.json').write_text('[]')
    assert [said(n).verdict for n in (40, 200, 390)] == ['reproduced', 'undecided', 'not reproduced']


# --- kept runs


def kept_run(**evidence):
    return dict(params={}, created='2026-01-02T03:04', machine=dict(gpu='', cpu='a processor'), evidence=evidence)


def shown_text(tables) -> str:
    return re.sub('<[^>]*>', '', ' '.join(t.data for t in tables))


def test_a_kept_run_stands_beside_a_verdict_and_does_not_change_it(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path, evidence=dict(L05=[line(1)], L10=[line(1)]))
    among_more = dict(line(-1), what='a − b among 100,000 distractors')
    kept = {'full/larger': kept_run(L05=[among_more], L10=[line(1)], L14=[line(1)])}
    (outcome,) = cl.kept_beside(verdicts, kept)['L05'].values()
    assert outcome.verdict == 'undecided' and set(cl.kept_beside(verdicts, kept)) == {'L05'}  # L10: the same line
    text = shown_text(cl.claims_by_paper(verdicts, {}, '', kept))
    assert 'a − b: +2.0 [+1.0, +3.0]: holds' in text and 'full/larger: kept 2026-01-02, a processor.' in text
    assert 'kept run full/larger, a − b among 100,000 distractors: +0.0 [−1.0, +1.0]: undecided' in text
    assert verdicts.set_index('id').verdict['L05'] == 'reproduced' and 'L05' not in {
        *cl.kept_verdicts(verdicts, kept).id
    }


def test_more_lines_of_a_kept_run_are_folded_behind_its_verdict(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path, evidence=dict(L05=[line(1)]))
    kept = {'full/larger': kept_run(L05=[line(1), dict(line(-9), what='c'), dict(line(1), what='d')])}
    text = shown_text(cl.claims_by_paper(verdicts, {}, '', kept))
    assert '1 of 1 comparisons hold; kept run larger: not reproduced' in text
    assert 'kept run full/larger, a − b' not in text  # it is a line of the run


def test_a_kept_run_that_fails_by_a_line_of_this_run_shows_it(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path, evidence=dict(L05=[line(-9)]))
    kept = {'full/a': kept_run(L05=[line(-9), dict(line(1), what='c')]), 'full/b': kept_run(L05=[line(-1)])}
    text = shown_text(cl.claims_by_paper(verdicts, {}, '', kept))
    assert 'kept run full/a, as here: a − b: −8.0 [−9.0, −7.0]: does not hold' in text
    said = 'L05 is not reproduced here and in the kept run a; undecided in the kept run b'
    assert cl.judged_otherwise(verdicts, kept) == said
    twins = {'full/x/run': kept['full/b'], 'full/y/run': kept['full/b']}
    assert cl.judged_otherwise(verdicts, twins).endswith('undecided in the kept runs full/x/run, full/y/run')


def test_a_line_of_sides_that_were_not_tuned_alike_is_shown_and_not_judged(tmp_path):
    favoured = dict(line(1), untuned=True, p=0.001)
    assert [cl.judge_evidence([favoured, *more]).verdict for more in ([], [line(1)], [line(-9)])] == [
        cl.NOT_HERE,
        'undecided',
        'not reproduced',
    ]
    verdicts = cl.judge(planted(8), tmp_path, evidence=dict(L05=[favoured, dict(line(1), what='c')]))
    text = shown_text(cl.claims_by_paper(verdicts, {}, ''))
    assert 'not tested: a − b: +2.0 [+1.0, +3.0], not tuned alike' in text
    assert 'a − b' not in str([c for _, c in cl.judged_comparisons(verdicts)])


def test_each_line_of_a_claim_with_several_kept_runs_names_its_run(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path)
    recipe = untested('the published recipe; here another mix')
    own = dict(line(-9, OWN_COMPARISON), what=f'{cl.OWN_RECIPE}a − b')
    kept = {'full/07/grid.a': kept_run(C14=[own, recipe]), 'full/07/grid.b': kept_run(C14=[line(1)])}
    text = shown_text([cl.kept_claims(cl.kept_verdicts(verdicts, kept), kept)])
    assert '1 of 1 comparisons hold, 1 own comparison' not in text  # two lines are not folded
    assert 'grid.b: a − b: +2.0 [+1.0, +3.0]: holds' in text and 'not tested' not in text  # the other run tests it
    assert 'grid.a: this book’s own comparison, the book’s recipe, a − b: −8.0 [−9.0, −7.0]' in text
    assert 'full/07/grid.a' in text and 'full/07/grid.b' in text  # in full, below the title


def test_a_kept_run_with_own_comparisons_alone_is_the_reason_for_no_verdict(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path)
    recipe = untested('the published recipe; here another mix')
    kept = {'full/a': kept_run(C18=[line(1, OWN_COMPARISON), recipe], C17=[line(1)])}
    reasons = cl.claims_tested_elsewhere(verdicts, kept).set_index('id')['why not']
    assert reasons['C17'].endswith('; judged by a kept run, below') and 'kept' not in reasons['C05']
    own = 'this book’s own comparison, a − b: +2.0 [+1.0, +3.0] points'
    said = f'the kept run gives no verdict; {own}; not tested: the published recipe; here another mix'
    assert reasons['C18'].endswith(f'; {said}')
    assert [*cl.kept_verdicts(verdicts, kept).id] == ['C17']


def test_own_comparisons_of_kept_runs_stand_with_the_claims_that_wait(tmp_path):
    verdicts = cl.judge(planted(8), tmp_path, evidence=dict(C04=[line(1, OWN_COMPARISON)]))
    lines = [line(2, OWN_COMPARISON), line(1), untested('the same on photographs')]
    kept = {'full/a': kept_run(C04=lines, L08=lines), 'full/b': kept_run(L08='a reason', L05=[line(1, OWN_COMPARISON)])}
    said = cl.waiting_claims(verdicts, kept).set_index('id').iloc[:, -1]
    own = 'this book’s own comparison, a − b'
    assert said['L08'].endswith(f'; kept run full/a: {own}: +3.0 [+2.0, +4.0] points') and 'kept' not in said['L01']
    assert f'{own}: +2.0' in said['C04'] and f'kept run full/a: {own}: +3.0' in said['C04']
    assert cl.waiting_notes(verdicts, kept) == ['full/a: kept 2026-01-02, a processor.']
    assert 'kept' not in ''.join(cl.waiting_claims(verdicts).iloc[:, -1]) and not cl.waiting_notes(verdicts, {})


def kept_departures(params: dict) -> list:
    "In what the second stage of a kept run on CompoDiff departs from the published one."
    file = ROOT / 'params' / 'full' / f'{params.get("second") or params["training"]}.yaml'
    given = (yaml.safe_load(file.read_text(encoding='utf-8')) if file.exists() else {}) | params.get('shorter', {})
    return [k for k, v in PUBLISHED_STAGE_TWO.items() if given.get(k, v) != v]


def test_no_kept_line_on_compodiff_is_judged_by_another_recipe():
    others = dict(C09='a rate with random weights', C12='a time', C17='the mixture itself varies')
    seen = set()
    for r in cl.kept_receipts().values():
        if 'compodiff' not in str(r['params'].get('training')):
            continue
        departs = bool(kept_departures(r['params']))
        for claim in [*{*r['evidence']} - {*others}]:
            lines, seen = r['evidence'][claim], seen | {claim}
            if isinstance(lines, list):
                waiting = [c for c in cl.with_role(lines, UNTESTED) if c['what'].startswith(PUBLISHED_RECIPE)]
                assert bool(waiting) == departs, claim
                assert not departs or (cl.with_role(lines), cl.judge_evidence(lines).verdict) == ([], cl.NOT_HERE)
    assert seen >= {'C05', 'C15', 'C18'}


NUMBER = r'[+−][\d.]+'
INTERVAL = rf'{NUMBER} \[{NUMBER}, {NUMBER}\]'


def said_verdicts(finding: str) -> dict:
    "Interval -> verdict, as `+1.0 [+0.5, +1.5] (better` and as `better: a +1.0 [+0.5, +1.5], b +2.0 [+1.5, +2.5]`."
    parts = re.split('(better|worse|undecided)(?: by Holm)?: ', finding)
    listed = {i: word for word, text in zip(parts[1::2], parts[2::2]) for i in re.findall(INTERVAL, text)}
    return listed | dict(re.findall(rf'({INTERVAL}) \((better|worse|undecided)', finding))


def test_a_kept_line_has_the_verdict_that_the_kept_finding_of_its_page_says():
    t = pd.read_csv(cl.KEPT / 'findings.csv')
    findings, seen = dict(zip(t.profile + '/' + t.experiment, t.finding)), set()
    for name, r in cl.kept_receipts().items():
        said = said_verdicts(findings.get(name, ''))
        for claim, lines in r['evidence'].items():
            for c in cl.corrected_lines([] if isinstance(lines, str) else lines):
                for way in (c, opposite(c)) if {'key', 'seed_intervals'} <= {*c} else ():
                    if (words := format_interval(way)) in said:
                        assert verdict(way) == said[words], f'{name}, {claim}: {c["what"]}'
                        seen.add(claim)
    assert seen >= {'C05', 'C15', 'C17'}


def test_kept_lines_with_the_bound_of_a_correction_say_so():
    bound = dict(line(1), p=0.01, p_corrected=0.36, family=36, bound='Bonferroni')
    (said,) = cl.when_kept({'full/a': kept_run(C17=[bound])})
    assert said.endswith('those here are p times its 36 comparisons, the bound of Holm’s.')
    assert cl.judge_evidence([bound]).verdict == 'undecided'
    assert cl.when_kept({'full/a': kept_run(C17=[line(1)])}) == ['full/a: kept 2026-01-02, a processor.']


def test_every_early_block_of_the_kept_depth_study_has_a_line():
    lines = cl.kept_receipts()['full/07_ablations/condition_depth']['evidence']['L11']
    assert all(any(f'before block {b}' in c['what'] for c in lines) for b in (2, 3, 4))
    # the paper prints no smaller gallery with distractors
    judged = all('10,000 distractors' in c['what'] for c in lines if c.get('role') != UNTESTED)
    assert judged == bool(cl.with_role(lines))
    assert judged or cl.judge_evidence(lines).verdict == cl.NOT_HERE


def test_no_kept_ratio_of_a_cpu_is_judged_as_one_of_a_gpu():
    kept = [r for r in cl.kept_receipts().values() if 'C09' in r['evidence']]
    assert kept and all(r['machine']['gpu'] or not cl.with_role(r['evidence']['C09']) for r in kept)


@pytest.mark.parametrize('profile', ['quick', 'full'])
def test_the_claims_page_reads_every_page_of_its_profile_that_tests_a_claim(profile):
    given = yaml.safe_load((ROOT / f"params/{profile}/09_claims/claims.yaml").read_text())
    read = {given['evaluation'], given['composed_sets'], *given['others'], '09_claims/claims'}
    pages = {page for of in cl.TESTING_PAGES.values() for page in of}
    testing = {page for page in pages if (ROOT / 'params' / profile / f'{page}.yaml').exists()}
    assert testing <= read
