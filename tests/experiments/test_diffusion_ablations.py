"Ablations of CompoDiff: printed settings against the parameter files, slopes and claims with a known answer."

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from projects import ROOT

from cis_nb.backbones.denoiser import Denoiser, DenoiserShape
from cis_nb.backbones.loading import load_backbone
from cis_nb.core.experiment_files import read_params
from cis_nb.experiments import diffusion_ablations as A
from cis_nb.experiments import diffusion
from cis_nb.experiments.claims import CERTAIN, NOT_HERE, joined_evidence, judge_evidence
from cis_nb.experiments.combiner_ablations import UNTESTED, untested
from cis_nb.experiments.comparison import as_shown, by_own_p, read_printed, shown_corrections, verdict
from cis_nb.experiments.entries import Entry
from cis_nb.experiments.matrix import MatrixRun
from cis_nb.experiments.training_time import Estimate
from cis_nb.methods import compodiff
from cis_nb.methods.compodiff import CompoDiffMethod
from cis_nb.methods.diffusion import DIFFUSION_STEPS, SamplerSettings, cosine_alphas, sample_embeddings
from cis_nb.train import settings
from cis_nb.training.loop import adamw

SMALL = DenoiserShape(D=16, depth=2, heads=4, cross_heads=2, head_dim=8, text_width=12, mask_side=4)
IN_WORDS = {'input_tokens', 'conditions', 'training_dataset'}


def ranked(ranks: dict, seeds=(0, 1)) -> MatrixRun:
    "The same ranks of each method for every seed, on CIRR."
    about = dict(draw=0, task='full', gallery_size=50, benchmark='cirr')
    rows = [
        dict(about, method=m, seed=s, query_id=str(q), reference=str(q), rank=r, ranks=[r])
        for m, some in ranks.items()
        for s in seeds
        for q, r in enumerate(some)
    ]
    about = dict(benchmark='cirr', task='full', metric='recall', k=1, ci_low=0.0, ci_high=1.0, n=40)
    results = pd.DataFrame([dict(about, method=m, seed=s, value=1.0) for m in ranks for s in seeds])
    entries = [SimpleNamespace(name=m, title=m, run=None, method=None) for m in ranks]
    run = MatrixRun({}, {}, None, entries, [], pd.DataFrame(rows), results, None)
    run.per_query = A.benchmark_scores(run)
    return run


def constant(values: dict) -> dict:
    return {n: Estimate(float(v), np.full(5, float(v))) for n, v in values.items()}


GOOD, HALF, BAD = [1] * 40, [1, 2] * 20, [2] * 40


def test_the_parameter_files_are_the_printed_settings():
    t = A.compared_settings()
    assert t.equal.all(), t[~t.equal]
    printed = read_printed('compodiff_hyperparameters', dtype=str)
    assert set(printed.metric) == {*A.SETTING_FIELDS, *A.CODE_SETTINGS, *IN_WORDS}
    assert len(A.settings_table()) == len(A.SETTING_FIELDS) + len(A.CODE_SETTINGS) == 16


def test_the_settings_without_a_parameter_are_those_of_the_code():
    assert A.CODE_SETTINGS == dict(
        diffusion_steps=('DIFFUSION_STEPS', 1000),
        noise_schedule=('cosine_alphas', 'cosine'),
        sampling_variance_method=('ddim_coefficients', 'DDIM'),
        optimizer=('adamw', 'AdamW'),
    )
    half_angle = np.pi / 2 / 1.008
    first = (np.cos((1 / DIFFUSION_STEPS + 0.008) * half_angle) / np.cos(0.008 * half_angle)) ** 2
    assert len(cosine_alphas()) == DIFFUSION_STEPS and float(cosine_alphas()[0]) == pytest.approx(first)
    assert SamplerSettings().noise_share == 0  # DDIM adds none
    assert type(adamw({'net': torch.nn.Linear(2, 2)}, 0.06)).__name__ == 'AdamW'


@pytest.mark.parametrize('stage', A.STAGES)
def test_the_published_files_configure_a_training_of_their_stage(stage):
    c = settings(A.published_parameters(stage))
    assert (c.backbone, c.text_encoder, c.text_tokens, c.used_triplets) == ('vit_l', '', False, 0)
    assert c.stage == {'stage1': '1', 'stage2': '2'}.get(stage, 'finetune')
    assert (c.heads, c.cross_heads, c.condition_dropout, c.w_image, c.w_text) == (16, 16, 0.1, 1.5, 7.5)
    assert stage != 'stage2' or c.task_mix == [0.3, 0.3, 0.4]


@pytest.mark.parametrize('field, value', [('lr', 2e-4), ('steps', 7), ('text_encoder', 'vit_h'), ('heads', 8)])
def test_a_parameter_that_differs_from_the_paper_is_named(field, value, monkeypatch):
    true = A.published_parameters
    monkeypatch.setattr(A, 'published_parameters', lambda s: true(s) | ({field: value} if s == 'stage2' else {}))
    wrong = A.compared_settings().query('not equal')
    assert list(wrong.stage) == ['stage 2'] and wrong.field.iloc[0] == field and wrong.here.iloc[0] == value
    assert A.settings_table()['stage 2'].str.endswith(f'(here {value})').sum() == 1


def test_texts_are_read_by_the_encoder_of_the_images_unless_one_is_named(monkeypatch):
    true = A.published_parameters
    monkeypatch.setattr(A, 'published_parameters', lambda s: true(s) | dict(backbone='vit_h'))
    wrong = A.compared_settings().query('not equal')
    assert {*wrong.field} == {'backbone', 'text_encoder'} and {*wrong.here} == {'vit_h'}


def test_the_slope_is_that_of_a_line_through_the_logarithms():
    sizes = [100, 400, 800, 3200]
    scores = np.array([3.0, 10.0, 11.0, 14.0])
    weights = A.doubling_weights(sizes)
    assert sum(weights[A.triplet_name(n)] * s for n, s in zip(sizes, scores)) == pytest.approx(
        np.polyfit(np.log2(sizes), scores, 1)[0]
    )


def test_every_step_in_size_is_a_line_of_the_claim():
    run = ranked({A.triplet_name(n): r for n, r in ((10, BAD), (20, GOOD), (40, HALF))})
    evidence = A.doubling_evidence(run, [10, 20, 40])['C15']
    assert [c['diff'] for c in evidence[:-1]] == [100.0, -50.0]
    assert evidence[-1] == untested('FashionIQ, domain conversion, object composition')
    assert judge_evidence(evidence).verdict == 'not reproduced'
    found, slopes = A.base_differences(run, A.triplet_name(40)), A.doubling_slopes(run, [10, 20, 40])
    assert '40 − 20 triplets −50.0 [' in A.doubling_finding(run, found, slopes, [10, 20, 40])


@pytest.mark.parametrize('sizes', [[], [5], [5, 5]])
def test_one_size_has_no_slope(sizes):
    with pytest.raises(ValueError, match='at least two numbers of image triplets'):
        A.triplet_variants(sizes)


@pytest.mark.parametrize('power, ratio', [(1, 1.0), (2, 3.0)])
def test_the_ratio_of_slopes_tells_a_line_from_a_curve(power, ratio):
    seconds = constant({n: n**power for n in (0, 25, 50)})
    assert A.slope_ratio(seconds).value == pytest.approx(ratio)
    shifted = constant({n: 7 + n**power for n in (0, 25, 50)})
    assert A.slope_ratio(shifted).value == pytest.approx(ratio)


def test_claims_on_steps_follow_scores_and_times():
    run = ranked({A.step_name(n): r for n, r in ((1, BAD), (5, GOOD), (10, GOOD), (100, GOOD))})
    line = constant({1: 2.0, 5: 6.0, 10: 11.0, 100: 101.0})
    said = {k: judge_evidence(v).verdict for k, v in A.step_evidence(run, line, 0.02, 3).items()}
    assert said == {'C11': 'undecided', 'C12': CERTAIN, 'C13': 'undecided'}  # fine-tuning is untested
    assert all(verdict(by_own_p(c)) == 'better' for c in A.near_evidence(run, [1, 5, 10, 100], 0.02))
    curved = constant({1: 2.0, 5: 6.0, 10: 11.0, 100: 1010.0})
    assert judge_evidence(A.step_evidence(run, curved, 0.02, 3)['C12']).verdict == 'not reproduced'
    worse = ranked({A.step_name(n): r for n, r in ((1, BAD), (5, HALF), (10, GOOD), (100, GOOD))})
    assert judge_evidence(A.step_evidence(worse, line, 0.02, 3)['C11']).verdict == 'not reproduced'


def trained(run: MatrixRun, stage: str, monkeypatch, **params) -> MatrixRun:
    "The run with one entry that is a training of a stage, with these parameters."
    given = dict(stage=stage, start='', task_mix=[0.3, 0.3, 0.4]) | params
    method = CompoDiffMethod(name='compodiff', title='C', backbone=None, net=None)
    run.entries.append(Entry(method, 0, 'a run'))
    for module in (A, diffusion):
        monkeypatch.setattr(module, 'manifest', lambda run: dict(params=given))
    return run


def test_the_limit_on_five_steps_is_the_share_that_the_paper_loses():
    losses = A.printed_losses()
    assert losses == pytest.approx({'zero-shot': 1 - 42.17 / 42.65, 'supervised': 1 - 45.03 / 46.31})
    run = ranked({A.step_name(n): r for n, r in ((5, HALF), (10, GOOD), (100, HALF))})
    to_ten, to_hundred = A.near_evidence(run, [5, 10, 100], 0.1)
    assert (to_ten['diff'], to_hundred['diff']) == pytest.approx((50 - 90, 50 - 45))
    assert to_ten['what'] == 'CIRR R@1 (paper: mean of R@1 and Rs@1), 5 steps − 90.0 % of 10 steps'


def test_a_fine_tuned_training_tests_its_clause_of_the_claims_on_steps(monkeypatch):
    line = constant({1: 2.0, 5: 6.0, 10: 11.0, 100: 101.0})
    ranks = {A.step_name(n): r for n, r in ((1, BAD), (5, GOOD), (10, GOOD), (100, GOOD))}
    plain = A.step_evidence(trained(ranked(ranks), '2', monkeypatch), line, 0.02, 3)
    tuned = A.step_evidence(trained(ranked(ranks), 'finetune', monkeypatch), line, 0.02, 3)
    assert set(tuned) == {'C11', 'C13'} and {c['clause'] for v in tuned.values() for c in v} == {A.AFTER_TUNING}
    receipts = dict(plain=dict(evidence=plain), tuned=dict(evidence=tuned))
    assert judge_evidence(joined_evidence(receipts)['C11']).verdict == 'reproduced'
    assert judge_evidence(plain['C11']).verdict == 'undecided'


def test_the_steps_with_which_validation_chose_the_checkpoints_test_no_claim(monkeypatch):
    ranks = {A.step_name(n): r for n, r in ((1, BAD), (5, GOOD), (10, HALF), (100, GOOD))}
    run = trained(ranked(ranks), '2', monkeypatch, sampling_steps=1)
    lines = A.rise_evidence(run, [1, 5, 10, 100])
    assert [c['what'] for c in lines if c.get('role') == UNTESTED] == [
        '1 step: validation with it chose the checkpoints'
    ]
    pairs = [c['what'].rpartition(', ')[2] for c in lines if 'diff' in c]
    assert pairs == ['10 steps − 5', '100 steps − 10', '100 steps − 5']


@pytest.mark.parametrize('stage', ['2', 'finetune'])
def test_another_recipe_than_the_published_one_judges_no_claim_on_recall(stage, monkeypatch):
    line = constant({1: 2.0, 5: 6.0, 10: 11.0, 100: 101.0})
    run = ranked({A.step_name(n): r for n, r in ((1, BAD), (5, GOOD), (10, GOOD), (100, GOOD))})
    evidence = A.step_evidence(trained(run, stage, monkeypatch, predicts='noise'), line, 0.02, 3)
    assert {judge_evidence(evidence[c]).verdict for c in ('C11', 'C13')} == {NOT_HERE}
    assert 'predicts noise (published: x0)' in ' '.join(c['what'] for c in evidence['C11'])


@pytest.mark.parametrize('counts, lacking', [((5, 10, 50), [100]), ((1, 2, 4), [10, 100])])
def test_what_a_claim_on_steps_names_and_a_run_lacks_is_untested(counts, lacking):
    run = ranked({A.step_name(n): GOOD for n in counts})
    evidence = A.step_evidence(run, constant({n: n for n in counts}), 0.02, 3)
    untested = [c['what'] for c in evidence['C11'] if c.get('role') == UNTESTED]
    assert untested == [*(f'5 steps beside {n}; this run lacks them' for n in lacking), 'the same after fine-tuning']
    assert evidence['C12'][-1]['what'] == 'time of 100 steps beside 5; this run lacks them'
    assert judge_evidence(evidence['C12']).verdict == NOT_HERE  # a straight line up to few steps is not enough


def test_steps_that_were_timed_alone_judge_the_time_and_not_the_recall():
    run = ranked({A.step_name(n): GOOD for n in (1, 5, 10)})
    seconds = constant({n: n for n in (1, 5, 10, 50, 100)})
    evidence = A.step_evidence(run, seconds, 0.02, 3)
    assert judge_evidence(evidence['C12']).verdict == CERTAIN
    untested = [c['what'] for c in evidence['C11'] if c.get('role') == UNTESTED]
    assert untested[0] == '5 steps beside 100; this run lacks them'
    few = {n: seconds[n] for n in (1, 5, 10)}
    table = A.step_count_table(run, A.base_differences(run, A.step_name(10)), seconds, few, 4, 10)
    assert (table['ms, one query'] != '–').sum() == 3
    assert judge_evidence(evidence['C11']).verdict != 'reproduced'


@pytest.mark.parametrize('ranks, said', [((GOOD, BAD), 'reproduced'), ((BAD, GOOD), 'not reproduced')])
def test_a_mixture_is_compared_with_triplets_alone(ranks, said):
    run = ranked(dict(zip((A.ALL_TASKS, 'triplets'), ranks)))
    assert judge_evidence(A.stage_two_evidence(run)['C17']).verdict == said


def with_mix(run: MatrixRun, mixes: dict, monkeypatch) -> MatrixRun:
    "A run whose rows of `mixes` are trainings of CompoDiff with these task mixes."
    monkeypatch.setattr(diffusion, 'manifest', lambda name: dict(params=dict(stage='2', task_mix=mixes[name])))
    run.entries = [Entry(CompoDiffMethod(name=m, title=m, backbone=None, net=None), 0, m) for m in mixes]
    return run


OWN_MIX, PUBLISHED_MIX = [0.15, 0.15, 0.7], [0.3, 0.3, 0.4]


@pytest.mark.parametrize('mix, said', [(PUBLISHED_MIX, 'not reproduced'), (OWN_MIX, NOT_HERE)])
def test_the_number_of_triplets_is_judged_by_the_published_recipe_alone(mix, said, monkeypatch):
    names = [A.triplet_name(n) for n in (10, 20)]
    run = with_mix(ranked(dict(zip(names, (GOOD, BAD)))), dict.fromkeys(names, mix), monkeypatch)
    assert judge_evidence(A.doubling_evidence(run, [10, 20])['C15']).verdict == said


@pytest.mark.parametrize(
    'mix, joined, said',
    [
        (PUBLISHED_MIX, 't5:xl', 'reproduced'),
        (OWN_MIX, 't5:xl', NOT_HERE),
        (PUBLISHED_MIX, 'tiny_xs', NOT_HERE),
        (OWN_MIX, 'tiny_xs', NOT_HERE),
    ],
)
def test_text_encoders_are_judged_by_a_language_model_and_the_published_recipe(mix, joined, said, monkeypatch):
    ranks = {'tiny': HALF, joined: BAD, f'tiny+{joined}': GOOD}
    run = with_mix(ranked(ranks), dict.fromkeys(ranks, mix), monkeypatch)
    lines, others = A.encoder_evidence(run, list(ranks))['C05'], A.untested_benchmarks(run)
    assert judge_evidence([c for c in lines if c not in others]).verdict == said
    assert judge_evidence(lines).verdict == dict(reproduced='undecided').get(said, said)  # CIRR alone is ranked
    shown = [c['what'] for c in lines if c.get('role') != UNTESTED]
    assert all(what.endswith(A.STAND_IN) == (joined == 'tiny_xs') for what in shown)
    assert any('the published recipe' in c['what'] for c in lines) == (mix == OWN_MIX)


def test_the_lines_of_a_mixture_have_the_correction_of_their_page():
    run = ranked({A.ALL_TASKS: HALF, 'triplets': GOOD, 'text': BAD})
    found = A.base_differences(run, A.ALL_TASKS)
    shown = shown_corrections([dict(comparisons=[*found.values()])])
    (line,) = as_shown(A.stage_two_evidence(run)['C17'], shown)
    of_page = found['triplets', 'cirr']
    assert (line['p_corrected'], line['family']) == (of_page['p_corrected'], 2) and line['diff'] == -of_page['diff']


@pytest.mark.parametrize('mix, said', [(PUBLISHED_MIX, 'reproduced'), ([0.2, 0.2, 0.6], NOT_HERE)])
def test_the_recipe_of_a_mixture_is_that_of_all_tasks(mix, said, monkeypatch):
    mixes = {'triplets': [0.0, 0.0, 1.0], A.ALL_TASKS: mix}  # what the claim varies is no departure
    run = with_mix(ranked({'triplets': BAD, A.ALL_TASKS: GOOD}), mixes, monkeypatch)
    assert judge_evidence(A.stage_two_evidence(run)['C17']).verdict == said


@pytest.mark.parametrize('given', [{}, dict(w_image=0.0, w_text=0.0), dict(w_image=1.0, w_text=7.5), dict(steps=1)])
@pytest.mark.parametrize('text_tokens', [False, True])
def test_branch_by_branch_gives_the_same_embeddings(given, text_tokens):
    torch.manual_seed(0)
    shape = DenoiserShape(**vars(SMALL) | dict(text_tokens=text_tokens))
    net = Denoiser(shape).double().eval().requires_grad_(False)
    q, s = A.random_queries(SMALL, 3, 5), SamplerSettings(**given)
    found = A.sample_by_branch(net, q, [1, 2, 3], s)
    assert torch.allclose(found, sample_embeddings(net, q, [1, 2, 3], s), atol=1e-5)


def test_both_forms_of_the_text_have_the_same_parameters():
    net = Denoiser(SMALL)
    other = Denoiser(DenoiserShape(**vars(SMALL) | dict(text_tokens=True)))
    assert {k: v.shape for k, v in net.state_dict().items()} == {k: v.shape for k, v in other.state_dict().items()}


def test_a_stage_does_not_go_on_from_another_form_or_encoder(tmp_path, monkeypatch):
    about = dict(stage='1', padding='masked', text_encoder='', sampling={}, shape=vars(SMALL))
    monkeypatch.setattr(compodiff, 'read_compodiff', lambda run: (Denoiser(SMALL), about))
    monkeypatch.setattr(compodiff, 'check_backbone', lambda *_: None)
    given = dict(method='compodiff', stage='2', start=str(tmp_path), depth=2, heads=4, cross_heads=2, head_dim=8)
    xs = load_backbone('tiny_xs', device='cpu')
    for change in (dict(text_tokens=True), dict(text_encoder='tiny_s')):
        (field, value), c = *change.items(), settings(given | dict(backbone='tiny_xs') | change)
        with pytest.raises(ValueError, match=f'{field}: {value!r}, there'):
            compodiff.started_denoiser(c, xs)


def test_hours_are_projected_by_samples():
    rates = dict(seconds=Estimate(2.0, np.array([1.0, 2.0, 4.0])), batch=64, device='cpu', precision='float32')
    first = A.projected_hours(rates).iloc[0]
    assert first.samples == 1_000_000 * 4096
    assert first.hours == pytest.approx(first.samples / 64 * 2 / 3600) and first.low < first.hours < first.high
    assert A.projected_hours_table([rates])['projected from'].iloc[0] == 'cpu, float32: steps of 64'


MIXED = '.published_mix'


@pytest.mark.parametrize(
    'profile, variant, beside',
    [('quick', '', ''), ('full', '', ''), ('full', MIXED, MIXED), ('full', '.finetune', '.short')],
)
def test_two_pages_choose_the_sampler_in_the_same_way(profile, variant, beside):
    "The page on all benchmarks has the queries and seeds of that on the number of steps, and its guidance weights."
    pages = (f'08_scaling/denoising_steps{variant}', f'06_evaluation/compodiff{beside}')
    steps, rivals = (read_params(ROOT / f'params/{profile}/{page}.yaml') for page in pages)
    for name in ('world_seed', 'seeds'):
        assert steps[name] == rivals[name], name
    assert {rivals['chosen_on'][n] for n in steps['tuned_on']} == {steps['chosen_on']}
    assert set(steps['benchmarks']) <= set(rivals['benchmarks']) and set(steps['tuned_on']) <= set(rivals['tuned_on'])
    assert steps['training'] in rivals['trainings']
    for n in steps['steps']:
        there = [[w_image, w_text] for k, w_image, w_text in rivals['samplers'] if k == n]
        assert len(there) < 2 or all(w in there for w in steps['weights']), n


@pytest.mark.parametrize(
    'given, why',
    [
        (dict(chosen_on=dict(crir=20)), "chosen_on: unknown parameter 'crir'; did you mean 'cirr'"),
        (dict(chosen_on=dict(cirr=1.5)), 'chosen_on: cirr must be int'),
        (dict(chosen_on={}, most=dict(cirr='many')), 'most: cirr must be int'),
        (dict(chosen_on={}, most=dict(crir=5)), "most: unknown parameter 'crir'; did you mean 'cirr'"),
    ],
)
def test_numbers_of_queries_are_checked_first(given, why):
    with pytest.raises((ValueError, TypeError), match=why):
        diffusion.run_benchmarks(dict(benchmarks=['cirr=50'], most={}) | given)


def test_the_sizes_of_a_denoiser_are_checked():
    assert A.chosen_denoiser({}) == DenoiserShape() and A.chosen_denoiser(dict(D=64)).D == 64
    for given, why in (({'D': 'x'}, 'denoiser: D must be int'), ({'depths': 2}, "unknown parameter 'depths'; did you")):
        with pytest.raises((ValueError, TypeError), match=why):
            A.chosen_denoiser(given)


def captions_of(**steps) -> A.CaptionRun:
    "A run whose rows are trainings with these numbers of steps."
    entries = [Entry(CompoDiffMethod(name=m, title=m, backbone=None, net=None), 0, m) for m in steps]
    return A.CaptionRun(None, entries, pd.DataFrame())


@pytest.mark.parametrize('steps, longer', [(dict(first_stage=120, both_stages=800), True), (dict(tokens=9), False)])
def test_a_second_stage_with_more_samples_is_named(monkeypatch, steps, longer):
    given = {m: dict(steps=n, batch_size=10, task_mix=[0.3, 0.3, 0.4]) for m, n in steps.items()}
    monkeypatch.setattr(A, 'manifest', lambda name: dict(params=given[name]))
    said = A.longer_second(captions_of(**steps))
    assert said == ('stage 1 has 1,200 samples, stage 2 8,000' if longer else '')
    note = A.stages_note(captions_of(**steps))
    assert ('1,200 captions in stage 1, 8,000 samples in stage 2, of which 30 % are captions' in note) == longer


def test_forms_whose_learning_rates_were_not_compared_alike_have_no_verdict(monkeypatch):
    p = dict(training='compodiff', shorter={}, seeds=[0], backbone='tiny', pretrained='default', device='cpu')
    run = captions_of(attention=1, tokens=1)
    monkeypatch.setattr(A, 'manifest', lambda name: dict(params=name))
    for known, marked in ((['attention'], True), (['attention', 'tokens'], False), ([], False)):
        monkeypatch.setattr(A, 'rate_was_searched', known.__contains__)
        assert (A.NOT_TUNED_ALIKE in A.caption_note(run, p)) == marked
        found = A.rates_apart({('tokens', 'attention', 'a'): {}}, A.compared_rates(run))
        assert found['tokens', 'attention', 'a'].get('untuned', False) == marked
