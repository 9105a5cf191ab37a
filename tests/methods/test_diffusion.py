"The sampler of CompoDiff: schedule and steps by hand, guidance and sampling against loops, queries that do not fit."

import math
import shutil
from dataclasses import replace

import pytest
import torch
from cis_nb.backbones.denoiser import Denoiser, DenoiserShape
from cis_nb.methods import diffusion as M

SHAPE = DenoiserShape(D=16, depth=2, heads=4, cross_heads=2, head_dim=8, text_width=12, mask_side=4)
SEEDS = [3, 1, 4]


@pytest.fixture(scope='module')
def net():
    torch.manual_seed(0)
    return Denoiser(SHAPE).eval().requires_grad_(False).double()  # so that rounding hides no fault


def queries(**changes):
    "Three queries with random conditions."
    g = torch.Generator().manual_seed(1)
    given = dict(text=torch.randn(3, 5, 12, generator=g), null=torch.randn(1, 5, 12, generator=g))
    given |= dict(ref=torch.randn(3, 16, generator=g), mask=(torch.rand(3, 4, 4, generator=g) > 0.5).float())
    return M.GuidedQueries(**given | changes)


def near(a, b, eps=1e-5):
    torch.testing.assert_close(a, b, atol=eps, rtol=0, check_dtype=False)


def alpha_by_hand(t, T=1000):
    "One value of the schedule, as a product of clipped steps in plain numbers."
    out = 1.0
    for k in range(t + 1):
        f, g = (math.cos((i / T + 0.008) / 1.008 * math.pi / 2) ** 2 for i in (k, k + 1))
        out *= 1 - min(1 - g / f, 0.999)
    return out


def guided_by_hand(net, q, x, t, w_image, w_text):
    "One query at a time, three calls of the network, the printed formula."
    out = []
    for i in range(len(q)):
        j = i if len(q.null) > 1 else 0
        zero, ref = torch.zeros(1, 16), torch.zeros(1, 16) if q.ref is None else q.ref[i : i + 1]
        mask = None if q.mask is None else q.mask[i : i + 1]
        reads = None if q.text_mask is None else q.text_mask[i : i + 1]
        null_reads = None if q.null_mask is None else q.null_mask[j : j + 1]
        one, null = x[i : i + 1], q.null[j : j + 1]
        full = net(one, t, q.text[i : i + 1], ref, mask, reads)
        no_text = net(one, t, null, ref, mask, null_reads)
        nothing = net(one, t, null, zero, mask, null_reads)
        out.append(nothing + w_image * (no_text - nothing) + w_text * (full - no_text))
    return torch.cat(out)


def test_the_schedule_by_hand():
    alphas = M.cosine_alphas()
    assert alphas.shape == (1000,) and (alphas.diff() < 0).all()
    for t in (0, 1, 250, 998, 999):
        assert alphas[t].item() == pytest.approx(alpha_by_hand(t), rel=1e-9)
    assert alphas[0] > 0.9999 and alphas[999] < 1e-8


def test_noise_is_added_by_the_step_of_each_row():
    z, noise = torch.ones(2, 3), 2 * torch.ones(2, 3)
    found = M.add_noise(z, torch.tensor([0, 999]), noise)
    for row, t in zip(found, (0, 999)):
        a = alpha_by_hand(t)
        near(row, torch.full((3,), math.sqrt(a) + 2 * math.sqrt(1 - a)), 1e-6)
    assert M.add_noise(z.half(), torch.tensor([5, 5]), noise.half()).dtype == torch.float16


@pytest.mark.parametrize('n', [1, 2, 3, 7, 10, 25, 100, 1000])
def test_n_steps_are_n_evaluations_from_999_to_the_clean_one(n):
    pairs = M.step_pairs(n)
    assert len(pairs) == n and pairs[0][0] == 999 and pairs[-1][1] == -1
    assert all(t > after for t, after in pairs)
    assert all(a[1] == b[0] for a, b in zip(pairs, pairs[1:]))


def test_the_published_steps():
    assert M.step_pairs(10, literal=True)[0] == (899, 799) and M.step_pairs(10, literal=True)[-1] == (99, -1)
    for n in (2, 5, 10, 11, 26, 101):
        times = [int(-1 + i * 1001 / n) if i else -1 for i in range(n)][::-1]
        assert M.step_pairs(n, literal=True) == list(zip(times[:-1], times[1:]))


@pytest.mark.parametrize('w', [(1.5, 7.5), (0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (2.0, 2.0), (-1.0, 3.0)])
@pytest.mark.parametrize(
    'changes',
    [
        {},
        dict(ref=None),
        dict(mask=None),
        dict(null=torch.ones(3, 5, 12)),
        dict(null=torch.ones(1, 2, 12)),
        dict(text=torch.ones(3, 1, 12)),
        dict(null=torch.ones(3, 5, 12), null_mask=torch.tensor([[True, False, True, True, False]] * 3)),
        dict(text_mask=torch.tensor([[True] * 5, [True, True, False, False, False], [False] * 5])),
        dict(null_mask=torch.tensor([[True, False, False, False, False]])),
    ],
    ids='plain,no reference,no mask,negatives,short null,short text,masked negatives,masked text,masked null'.split(
        ','
    ),
)
def test_guidance_is_the_printed_formula(net, w, changes):
    x, q = torch.randn(3, 16), queries(**changes)
    near(M.guided_cache(net, q, *w).predict(net.denoise, x, 300), guided_by_hand(net, q, x, 300, *w))


@pytest.mark.parametrize(
    'w, branches',
    [((1.5, 7.5), 3), ((1.0, 1.0), 1), ((0.0, 0.0), 1), ((1.0, 7.5), 2), ((0.0, 1.0), 3), ((2.0, 0.0), 2)],
)
def test_branches_without_weight_are_not_computed(net, w, branches):
    guided = M.guided_cache(net, queries(), *w)
    assert len(guided.weights) == branches and len(guided.cache) == 3 * branches
    assert sum(guided.weights) == pytest.approx(1)


def test_a_negative_text_that_equals_the_text_takes_its_guidance_away(net):
    q, x = queries(null=queries().text), torch.randn(3, 16)
    found = [M.guided_cache(net, q, 1.5, w).predict(net.denoise, x, 300) for w in (0.0, 1.0, 7.5)]
    near(found[0], found[1])
    near(found[0], found[2], 1e-4)
    own = M.guided_cache(net, queries(), 1.5, 7.5).predict(net.denoise, x, 300)
    assert (own - found[2]).abs().max() > 0.1


def test_the_empty_text_is_the_null_text(net):
    q = queries(text=queries().null.expand(3, -1, -1))
    near(
        M.sample_embeddings(net, q, SEEDS, M.SamplerSettings(steps=3)),
        M.sample_embeddings(net, q, SEEDS, M.SamplerSettings(steps=3, w_text=0.0)),
        1e-4,
    )


def sampled_by_hand(net, q, s):
    "Query by query and sample by sample, with the tables written out."
    out = []
    for i in range(len(q)):
        g = torch.Generator().manual_seed(SEEDS[i])
        draws = [torch.randn(s.samples, 16, generator=g) for _ in range(s.steps + 1)]
        part = {name: v if v is None or len(v) == 1 else v[i : i + 1] for name, v in vars(q).items()}
        one, results = M.GuidedQueries(**part), []
        for k in range(s.samples):
            noises = [d[k : k + 1] for d in draws]
            x = noises.pop(0)
            for t, after in M.step_pairs(s.steps, s.literal):
                clean = guided_by_hand(net, one, x, t, s.w_image, s.w_text)
                implied = (x / alpha_by_hand(t) ** 0.5 - clean) / (1 / alpha_by_hand(t) - 1) ** 0.5
                if after < 0:
                    x = clean
                    continue
                shift = 1 if s.literal else 0
                old, new = alpha_by_hand(t - shift), alpha_by_hand(after - shift)
                c1 = s.noise_share * math.sqrt((1 - old / new) * (1 - new) / (1 - old))
                x = new**0.5 * clean + math.sqrt(1 - new - c1**2) * implied
                if s.noise_share:
                    x = x + c1 * noises.pop(0)
            results.append(x)
        mean = torch.stack(results).mean(0)
        out.append((1 - s.mix) * mean + (s.mix * one.ref if s.mix else 0))
    return torch.cat(out)


@pytest.mark.parametrize(
    'given',
    [
        {},
        dict(steps=1),
        dict(steps=4, samples=3),
        dict(steps=4, eta=1.0, samples=2),
        dict(steps=4, eta=0.5),
        dict(steps=5, literal=True),
        dict(steps=5, literal=True, eta=0.0),
        dict(steps=2, literal=True, samples=2, mix=0.1),
        dict(steps=4, w_image=1.0, w_text=1.0),
        dict(steps=4, w_image=0.0, w_text=0.0),
    ],
    ids=str,
)
def test_sampling_is_what_the_loops_give(net, given):
    s = M.SamplerSettings(**given)
    near(M.sample_embeddings(net, queries(), SEEDS, s), sampled_by_hand(net, queries(), s))


def test_the_published_sampler_has_eta_1():
    assert M.SamplerSettings().noise_share == 0
    assert M.SamplerSettings(literal=True).noise_share == 1
    assert M.SamplerSettings(literal=True, eta=0.0).noise_share == 0


@pytest.mark.parametrize('given, calls', [({}, 10), (dict(literal=True), 9), (dict(steps=1), 1)])
def test_evaluations_and_projections_are_counted(net, monkeypatch, given, calls):
    seen, projected = [], []
    plain = Denoiser.conditions

    def conditions(self, text, *args, **kw):
        projected.append(len(text))
        return plain(self, text, *args, **kw)

    def denoise(x, t, cache):
        seen.append(len(x))
        return net.denoise(x, t, cache)

    monkeypatch.setattr(Denoiser, 'conditions', conditions)
    M.sample_embeddings(net, queries(), SEEDS, M.SamplerSettings(samples=2, **given), denoise)
    assert seen == [18] * calls and projected == [3, 1]


@pytest.mark.parametrize('eta', [0.0, 1.0])
def test_a_query_does_not_depend_on_its_batch(net, eta):
    s, q = M.SamplerSettings(steps=4, samples=2, eta=eta), queries()
    together = M.sample_embeddings(net, q, SEEDS, s)
    for order in ([2, 0, 1], [1], [0, 0]):
        part = M.GuidedQueries(q.text[order], q.null, q.ref[order], q.mask[order])
        near(M.sample_embeddings(net, part, [SEEDS[i] for i in order], s), together[order])
    assert not torch.allclose(M.sample_embeddings(net, q, [9, 9, 9], s), together, atol=1e-3)


def test_seeds_depend_on_id_and_seed():
    assert M.query_seeds(['a', 7]) == M.query_seeds(['a', '7'])
    found = M.query_seeds(map(str, range(500))) + M.query_seeds(map(str, range(500)), seed=1)
    assert len(set(found)) == 1000
    torch.Generator().manual_seed(max(found))  # torch takes it


def test_global_seeds_are_neither_read_nor_changed(net):
    torch.manual_seed(5)
    before, first = torch.get_rng_state(), M.sample_embeddings(net, queries(), SEEDS, M.SamplerSettings(eta=1.0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(M.sample_embeddings(net, queries(), SEEDS, M.SamplerSettings(eta=1.0)), first)


def of_length(n: int, B: int = 3) -> M.GuidedQueries:
    "The first B queries with texts n times as long."
    q = queries()
    return M.GuidedQueries(q.text[:B].repeat(1, n, 1), q.null.repeat(1, n, 1), q.ref[:B], q.mask[:B])


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_a_compiled_sampler_gives_the_same_with_one_program_for_all_times_batches_and_lengths(net, backend):
    graphs, found = torch._dynamo.utils.counters['stats'], []
    torch._dynamo.reset()
    for q, given in ((of_length(2), dict(steps=2)), (of_length(4), dict(steps=12)), (of_length(3, 2), dict(eta=1.0))):
        s, seeds = M.SamplerSettings(**given), SEEDS[: len(q)]
        compiled = M.sample_embeddings(net, q, seeds, replace(s, compile=backend))
        near(compiled, M.sample_embeddings(net, q, seeds, s), eps=1e-5)
        found.append(graphs['unique_graphs'])
    assert found[0] == found[2] > 0, found


@pytest.mark.e2e
def test_a_step_that_inductor_compiles_gives_the_same():
    if not (shutil.which('c++') or shutil.which('g++')):
        pytest.skip('inductor compiles C++, and there is no C++ compiler here')
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Denoiser(replace(SHAPE, depth=1)).eval().requires_grad_(False)
    s = M.SamplerSettings(steps=2)
    compiled = M.sample_embeddings(net, queries(), SEEDS, replace(s, compile='inductor'))
    near(compiled, M.sample_embeddings(net, queries(), SEEDS, s), eps=1e-4)


@pytest.mark.parametrize('eta', [0.0, 1.0])
def test_a_gaussian_is_sampled_with_its_mean_and_variance(eta):
    "With the exact denoiser of N(3, 0.5^2), in one dimension."
    g = torch.Generator().manual_seed(0)

    def exact(x, t):
        a = alpha_by_hand(t)
        return 3 + a**0.5 * 0.25 / (a * 0.25 + 1 - a) * (x - a**0.5 * 3)

    x = torch.randn(20_000, 1, generator=g)
    out = M.run_steps(exact, x, M.step_pairs(200), eta, lambda: torch.randn(20_000, 1, generator=g))
    assert out.mean().item() == pytest.approx(3, abs=0.02)
    assert out.std().item() == pytest.approx(0.5, abs=0.02)


NAN = torch.tensor(float('nan'))


@pytest.mark.parametrize(
    'changes, said',
    [
        (dict(text=NAN.expand(3, 5, 12)), r'text: rows \[0, 1, 2\] hold NaN'),
        (dict(null=NAN.expand(1, 5, 12)), r'null: rows \[0\] hold NaN'),
        (
            dict(ref=torch.tensor([0, 0, math.inf]).repeat_interleave(16).view(3, 16)),
            r'ref: rows \[2\] hold NaN or inf',
        ),
        (dict(mask=NAN.expand(3, 4, 4)), r'mask: rows \[0, 1, 2\] hold NaN'),
        (dict(mask=torch.full((3, 4, 4), 255.0)), 'mask: values must lie from 0 to 1'),
        (dict(mask=torch.zeros(3, 8, 8)), r'mask: must be a tensor \(3,4,4\).*got float32 \(3, 8, 8\)'),
        (dict(mask=torch.zeros(3, 4, 4).int()), r'mask: must be a tensor .*got int32'),
        (dict(text=torch.zeros(3, 0, 12)), 'text: must be states .* no text is the states of the empty string'),
        (dict(null=torch.zeros(1, 12)), 'null: must be states'),
        (dict(null=torch.zeros(2, 5, 12)), 'null: must be one text or one for each of the 3 queries, got 2'),
        (dict(ref=torch.zeros(3, 15)), r'reference: must be a tensor \(3,16\)'),
        (dict(text_mask=torch.ones(3, 4, dtype=bool)), r'text_mask: must be a tensor \(3,5\) of bool'),
        (dict(null_mask=torch.ones(3, 5, dtype=bool)), r'text_mask: must be a tensor \(1,5\) of bool'),
    ],
)
def test_queries_that_do_not_fit_are_refused(net, changes, said):
    with pytest.raises(ValueError, match=said):
        M.sample_embeddings(net, queries(**changes), SEEDS)


def test_masks_of_bool_and_numbers_are_the_same(net):
    s = M.SamplerSettings(steps=2)
    as_bool = queries(mask=queries().mask.bool())
    near(M.sample_embeddings(net, as_bool, SEEDS, s), M.sample_embeddings(net, queries(), SEEDS, s), 0)


@pytest.mark.parametrize(
    'given, said',
    [
        (dict(steps=0), 'steps: must be an integer from 1 to 1000, got 0'),
        (dict(steps=1001), 'steps: must be an integer from 1 to 1000, got 1001'),
        (dict(steps=1, literal=True), 'steps: must be an integer from 2 to 1000, got 1'),
        (dict(samples=0), 'samples: must be an integer of at least 1, got 0'),
        (dict(steps=2.5), 'steps: must be an integer from 1 to 1000, got 2.5'),
        (dict(steps=True), 'steps: must be an integer from 1 to 1000, got True'),
        (dict(samples=1.5), 'samples: must be an integer of at least 1, got 1.5'),
        (dict(first='x'), "first: must be an integer from 0 to 999, got 'x'"),
        (dict(eta='x'), "eta: must be a finite number from 0 to 1, got 'x'"),
        (dict(w_image='x'), "w_image: must be a finite number, got 'x'"),
        (dict(eta=-0.1), 'eta: must be a finite number from 0 to 1'),
        (dict(mix=1.5), 'mix: must be a finite number from 0 to 1'),
        (dict(w_image=math.inf), 'w_image: must be a finite number'),
        (dict(w_text=math.nan), 'w_text: must be a finite number'),
    ],
)
def test_settings_that_no_sampler_has_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        M.SamplerSettings(**given)


def test_what_does_not_fit_together_is_refused(net):
    with pytest.raises(ValueError, match='seeds: must be one a query, 3, got 2'):
        M.sample_embeddings(net, queries(), [1, 2])
    with pytest.raises(ValueError, match='mix: 0.1 of the reference, but the queries have none'):
        M.sample_embeddings(net, queries(ref=None), SEEDS, M.SamplerSettings(mix=0.1))
    with pytest.raises(ValueError, match='net: is in training mode'):
        M.sample_embeddings(Denoiser(SHAPE), queries(), SEEDS)


@pytest.mark.parametrize('given', [{}, dict(w_image=1.0, w_text=1.0), dict(steps=1), dict(steps=3, eta=1.0, samples=2)])
def test_a_network_that_predicts_the_noise_gives_the_samples_of_the_one_that_predicts_the_clean_embedding(net, given):
    "The noise that a prediction of the clean embedding implies, branch by branch, is guided to the same samples."
    alphas = M.cosine_alphas()

    def noise(x, t, cache):
        a = alphas[t]
        return (x - a.sqrt() * net.denoise(x, t, cache)) / (1 - a).sqrt()

    settings = dict(steps=4, first=899) | given
    clean = M.sample_embeddings(net, queries(), SEEDS, M.SamplerSettings(**settings))
    predicted = M.SamplerSettings(**settings, predicts='noise')
    near(M.sample_embeddings(net, queries(), SEEDS, predicted, noise), clean, eps=1e-4)
    begun = []
    M.sample_embeddings(net, queries(), SEEDS, predicted, lambda x, t, cache: begun.append(t) or noise(x, t, cache))
    assert begun[0] == 899 and len(begun) == settings['steps']
