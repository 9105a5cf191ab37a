"Supervised halves of tables: what is fine-tuned, how two runs become one, and the clauses of a claim."

from types import SimpleNamespace

import pandas as pd
import pytest
from projects import ROOT

from cis_nb.core.experiment_files import read_params
from cis_nb.experiments import diffusion_ablations as A
from cis_nb.experiments import fine_tuning as F
from cis_nb.experiments.claims import judge_evidence
from cis_nb.experiments.combiner_ablations import UNTESTED
from cis_nb.experiments.diffusion import TRAIN_SPLITS, SampledRun
from cis_nb.experiments.entries import Entry
from cis_nb.methods.compodiff import CARRIED_FIELDS, DENOISER_FIELDS, CompoDiffMethod
from cis_nb.train import settings

GOOD, HALF, BAD = [1] * 40, [1, 20] * 20, [20] * 40  # of 50 images: R@1 and R@10 tell them apart


def ranked(ranks: dict, benchmark='cirr', seeds=(0, 1)) -> SampledRun:
    "The same ranks of each method for every seed, on a benchmark; all methods but the first are trained."
    about = dict(draw=0, task='full', gallery_size=50, benchmark=benchmark)
    rows = [
        dict(about, method=m, seed=s, query_id=str(q), reference=str(q), rank=r, ranks=[r])
        for m, some in ranks.items()
        for s in seeds
        for q, r in enumerate(some)
    ]
    about = dict(benchmark=benchmark, task='full', metric='recall', k=1, ci_low=0.0, ci_high=1.0, n=40)
    results = pd.DataFrame([dict(about, method=m, seed=s, value=1.0) for m in ranks for s in seeds])
    entries = [SimpleNamespace(name=m, title=m, run='a run' if k else None, method=None) for k, m in enumerate(ranks)]
    chosen = {(m, benchmark): f'weights of {m}' for m in ranks}
    run = SampledRun({benchmark: None}, {}, None, entries, [], pd.DataFrame(rows), results, pd.DataFrame(), chosen)
    run.per_query = A.benchmark_scores(run)
    return run


@pytest.mark.parametrize(
    'tuned, said',
    [
        (None, 'undecided'),
        (dict(cirr=GOOD), 'undecided'),
        (dict(cirr=GOOD, fashioniq=GOOD), 'reproduced'),
        (dict(cirr=GOOD, fashioniq=BAD), 'not reproduced'),
    ],
)
def test_a_mixture_that_wins_here_wins_the_claim_with_both_fine_tunings(tuned, said):
    ranks = dict(all_tasks=GOOD, triplets=BAD)
    one = {n: ranked(dict(all_tasks=r, triplets=HALF), n) for n, r in (tuned or {}).items()}
    after = F.joined_runs(list(one.values())) if one else None
    evidence = F.with_tuned_evidence(A.stage_two_evidence, ranked(ranks), after)
    assert judge_evidence(evidence['C17']).verdict == said
    open_clauses = {c['clause'] for c in evidence['C17'] if c.get('role') == UNTESTED}
    names = dict(cirr='CIRR', fashioniq='FashionIQ')
    assert open_clauses == {f'{A.AFTER_TUNING}, {title}' for n, title in names.items() if n not in one}
    worse = ranked(dict(all_tasks=BAD, triplets=GOOD))
    assert judge_evidence(F.with_tuned_evidence(A.stage_two_evidence, worse, None)['C17']).verdict == 'not reproduced'


def test_two_runs_become_one_with_the_weights_of_each_benchmark():
    parts = [ranked(dict(base=GOOD, other=HALF)), ranked(dict(base=HALF, other=BAD), 'fashioniq')]
    both = F.joined_runs(parts)
    assert list(both.benchmarks) == ['cirr', 'fashioniq'] and list(both.titles) == ['base', 'other']
    assert both.samplers['other', 'fashioniq'] == 'weights of other' and len(both.samplers) == 4
    found = A.base_differences(both, 'base')
    assert {name: c['diff'] for (_, name), c in found.items()} == dict(cirr=-50, fashioniq=-50)
    for part, again in zip(parts, F.by_benchmark(both), strict=True):
        assert again.results.equals(part.results.set_index(again.results.index))
        assert len(again.per_query) == len(part.per_query)


def test_fine_tuned_rows_have_names_of_their_own_in_results():
    run, after = ranked(dict(base=HALF, other=GOOD)), ranked(dict(base=GOOD, other=BAD), 'fashioniq')
    rows = F.both_results(run, after)
    assert list(rows.method.unique()) == ['base', 'other', 'other_finetuned']
    assert set(rows[rows.method == 'other_finetuned'].benchmark) == {'fashioniq'}
    assert F.both_folders(run, after) == ['a run', 'a run'] and F.both_folders(run, None) == ['a run']


@pytest.mark.parametrize('page', ['07_ablations/stage2', '07_ablations/text_encoder', '08_scaling/synthetic_triplets'])
@pytest.mark.parametrize('profile', ['full', 'paper'])
def test_pages_with_a_supervised_half_fine_tune_on_both_training_splits(page, profile, monkeypatch):
    monkeypatch.setenv('CIS_PROFILE', profile)
    p = read_params(ROOT / f'params/{profile}/{page}.yaml') | dict(tuned_shorter={})
    learned = F.learned_benchmarks(p)
    assert {n.partition('=')[0] for n in learned.values()} == set(TRAIN_SPLITS)
    second = settings(read_params(ROOT / f'params/{profile}/{p["training"]}.yaml'))
    for experiment in learned:
        c = settings(read_params(ROOT / f'params/{profile}/{experiment}.yaml'))
        assert c.start == p['training']
        for field in (*DENOISER_FIELDS, *CARRIED_FIELDS):
            assert getattr(c, field) == getattr(second, field), field


def test_a_fine_tuning_goes_on_with_the_text_encoder_of_its_variant(tmp_path, monkeypatch):
    before = settings(
        dict(method='compodiff', stage='2', start='none', backbone='tiny_xs', text_encoder='tiny_s', text_tokens=True)
    )
    monkeypatch.setattr(F, 'manifest', lambda run: dict(params=before.model_dump()))
    monkeypatch.setattr(F, 'trained_entry', lambda c, *_: Entry(method, c.seed, c))
    method = CompoDiffMethod(name='compodiff', title='C', backbone=None, net=None)
    p = dict(tuned_shorter=dict(steps=3), device='cpu')
    found = F.fine_tuned(Entry(method, 2, tmp_path, 'a row', 'A row'), '05_train.compodiff.finetune', p)
    c = found.run
    assert (found.name, found.title, c.seed, c.stage, c.steps) == ('a row', 'A row', 2, 'finetune', 3)
    assert (c.backbone, c.text_encoder, c.text_tokens, c.start) == ('tiny_xs', 'tiny_s', True, str(tmp_path))


@pytest.mark.parametrize(
    'change, why',
    [
        (dict(fine_tunings=['compodiff']), 'compodiff has no `stage: finetune`'),
        (dict(benchmarks=['cirr=60']), 'learns fashioniq, benchmarks has cirr'),
        (dict(fine_tunings=['05_train.compodiff.finetune'] * 2), 'two of them learn fashioniq'),
    ],
)
def test_a_faulty_fine_tuning_is_refused_before_anything_is_trained(change, why, monkeypatch):
    monkeypatch.setattr(F, 'train_denoisers', lambda *_: pytest.fail('a training has begun'))
    p = dict(benchmarks=['fashioniq=60'], fine_tunings=['05_train.compodiff.finetune'], tuned_shorter={})
    with pytest.raises(ValueError, match=why):
        F.train_and_fine_tune(p | change, {})
