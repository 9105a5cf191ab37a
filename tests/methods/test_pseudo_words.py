"Pic2Word and SEARLE: resumed trainings, keys of runs, pseudo-words of another backbone."

import json
from dataclasses import replace
import numpy as np
import pytest
import torch
from published_files import MAPPER, PHI, tensors
from safetensors.torch import save_file
from cis_nb.methods import searle as S
from cis_nb import api
from cis_nb.backbones.loading import load_backbone
from cis_nb.methods.pseudo_words import padding_of
from cis_nb.core.code import import_closure
from cis_nb.methods.pic2word import Pic2Word
from cis_nb.methods.combiner import Combiner, CombinerMethod
from cis_nb.methods.pseudo_words import (
    Mapper,
    Phi,
    PseudoWord,
    export_published,
    load_pseudo_word,
    published_pseudo_word,
    read_published_net,
    save_phi,
)
from cis_nb.train import make_objective, settings as params_of
from cis_nb.training.loop import train

torch.set_num_threads(1)
tiny = load_backbone('tiny', device='cpu')


# ---- runs


@pytest.mark.parametrize(
    'name, more',
    [
        ('pic2word', {}),
        ('searle', dict(phrases=2, search_steps=2, num_concepts_inversion=3, num_concepts_distillation=5, width=64)),
    ],
)
@pytest.mark.e2e
def test_training_is_the_same_after_a_stop(store, name, more):
    p = params_of(
        dict(
            method=name,
            steps=6,
            batch_size=16,
            lr=1e-3,
            warmup=0,
            world_images=60,
            cirr=30,
            eval_every=2,
            log_every=1,
            **more,
        )
    )
    loop = {k: getattr(p, k) for k in ('steps', 'batch_size', 'lr', 'eval_every', 'log_every', 'seed')}
    train(make_objective(p), store / 'whole', **loop)
    o, calls = make_objective(p), []
    real = o.loss

    def dies(batch):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        return real(batch)

    o.loss = dies
    with pytest.raises(KeyboardInterrupt):
        train(o, store / 'killed', **loop)
    train(make_objective(p), store / 'killed', **loop)
    one, two = (load_pseudo_word(store / f, 'cpu', tiny).phi.state_dict() for f in ('whole', 'killed'))
    assert all(torch.equal(one[k], two[k]) for k in one)
    plugin = api.get('method', name)
    assert len(plugin.inputs(tiny, p)) >= 2
    assert 'cis_nb.methods.pseudo_words' in import_closure([type(plugin).__module__])


@pytest.mark.parametrize('name', ['lincir', 'pic2word', 'searle'])
def test_what_a_run_is_called_costs_no_look_at_a_picture(store, monkeypatch, name):
    p = params_of(dict(method=name, world_images=60, cirr=30))

    def never(*a, **kw):
        raise AssertionError('the name of a run was to be asked for, and something was computed')

    for f in ('encode_image', 'encode_text', 'encode_ids'):
        monkeypatch.setattr(tiny, f, never)
    monkeypatch.setattr(S, 'phrase_writer', never)
    inputs = api.get('method', name).inputs
    one = inputs(tiny, p)[0]
    assert one == inputs(tiny, p)[0]
    assert one != inputs(tiny, p.model_copy(update=dict(world_images=61)))[0]


def test_the_word_of_another_backbone_is_refused(tmp_path):
    o = Pic2Word(tiny, Mapper(tiny.D, tiny.W), np.zeros((4, tiny.D), np.float32), {})
    save_phi(tmp_path, o.method())
    other = load_backbone('tiny', 'none', device='cpu')
    with pytest.raises(ValueError, match=tiny.fingerprint) as e:
        load_pseudo_word(tmp_path, 'cpu', other)
    assert other.fingerprint in str(e.value)


@pytest.mark.parametrize('corpus, words', [('world + world', 'has no images'), ('captions.txt', 'has no images')])
def test_words_from_pictures_need_pictures(store, monkeypatch, corpus, words):
    (store / 'captions.txt').write_text('a red boat\n' * 40)
    monkeypatch.chdir(store)
    with pytest.raises(ValueError, match=words):
        given = dict(method='lincir', supervision='image', corpus=corpus, parser='world', world_images=60, cirr=30)
        make_objective(params_of(given))


# ---- keys of rankings


def word(seed: int, **given) -> PseudoWord:
    torch.manual_seed(seed)
    return PseudoWord(name='lincir', backbone=tiny, phi=Phi(tiny.D, tiny.W, 16).eval(), **given)


@pytest.mark.parametrize('run', ['', 'lincir-1'])
def test_another_network_or_setting_is_another_key(run):
    m = word(0, run=run)
    others = [
        word(1, run=run),
        word(0, run='other'),
        *(replace(m, **g) for g in (dict(prompt='$ , {condition}'), dict(unit_input=True))),
    ]
    assert word(0, run=run).fingerprint == m.fingerprint and len({o.fingerprint for o in [m, *others]}) == 5


def test_a_changed_field_of_a_trained_method_is_another_key():
    m = CombinerMethod(name='combiner', backbone=tiny, net=Combiner(tiny.D, 16, 16), run='combiner-1')
    others = [replace(m, tune='both'), replace(m, inputs={'key': np.ones(3)})]
    m.encoded['kept'] = 'features'
    assert len({o.fingerprint for o in [m, *others]}) == 3 and replace(m).fingerprint == m.fingerprint


# ---- published networks


def slow(net, t, x):
    "The networks as the facts describe them, without dropout."
    if net == 'phi':
        for k in ('layers.0', 'layers.3'):
            x = torch.nn.functional.gelu(x @ t[f'{k}.weight'].T + t[f'{k}.bias'])
        return x @ t['layers.6.weight'].T + t['layers.6.bias']
    for k in ('layers.0.0', 'layers.1.0'):
        x = (x @ t[f'{k}.weight'].T + t[f'{k}.bias']).relu()
    return x @ t['fc_out.weight'].T + t['fc_out.bias']


@pytest.mark.parametrize('net, shapes, inside', [('phi', PHI, 'Phi'), ('mapper', MAPPER, 'state_dict_img2text')])
@pytest.mark.parametrize('prefix', ['', 'module.'])
@pytest.mark.parametrize('ending', ['pt', 'safetensors'])
def test_published_files_are_read(tmp_path, net, shapes, inside, prefix, ending):
    file, t = tmp_path / f'net.{ending}', tensors(shapes)
    named = {prefix + k: v for k, v in t.items()}
    torch.save({inside: named, 'epoch': 3}, file) if ending == 'pt' else save_file(named, file)
    x = torch.randn(3, 768, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(read_published_net(file, net, 768, 768)(x), slow(net, t, x), atol=1e-5)


@pytest.mark.parametrize(
    'change, said',
    [
        (lambda t: t.pop('layers.3.bias'), 'net.pt: .* 1 missing: layers.3.bias'),
        (lambda t: t.update(more=torch.zeros(1)), '1 additional: more'),
        (lambda t: t.update({'layers.6.bias': torch.zeros(5)}), r'layers.6.bias \(5,\), needed \(768,\)'),
        (lambda t: (t.clear(), t.update(tensors(MAPPER))), 'net.pt: .* this is a file of Pic2Word'),
    ],
)
def test_other_files_are_named(tmp_path, change, said):
    t = tensors(PHI)
    change(t)
    torch.save(dict(Phi=t), tmp_path / 'net.pt')
    with pytest.raises(ValueError, match=said):
        read_published_net(tmp_path / 'net.pt', 'phi', 768, 768)


def test_a_pickle_that_runs_code_is_not_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / 'ran'), 'w'))

    torch.save(dict(Phi=Evil()), tmp_path / 'net.pt')
    with pytest.raises(ValueError, match='not opened because it can run code'):
        read_published_net(tmp_path / 'net.pt', 'phi', 768, 768)
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('ending', ['pt', 'safetensors'])
@pytest.mark.parametrize('method', ['lincir', 'searle', 'pic2word'])
def test_what_is_exported_is_read_again(tmp_path, method, ending):
    D, W = tiny.D, tiny.W
    phi = {k: tuple({3072: 4 * D, 768: D}[n] for n in s) for k, s in PHI.items()}
    phi |= {'layers.6.weight': (W, 4 * D), 'layers.6.bias': (W,)}
    mapper = MAPPER | {'layers.0.0.weight': (512, D), 'fc_out.weight': (W, 512), 'fc_out.bias': (W,)}
    save_file(tensors(mapper if method == 'pic2word' else phi), tmp_path / 'net.safetensors')
    m = published_pseudo_word(tmp_path / 'net.safetensors', method, tiny)
    again = published_pseudo_word(export_published(m, tmp_path / f'again.{ending}'), method, tiny)
    x = torch.randn(2, D)
    assert torch.equal(m.encode_query(x, ['is red', '']), again.encode_query(x, ['is red', '']))


def test_a_network_that_reads_unit_vectors_is_not_exported(tmp_path):
    phi = Phi(tiny.D, tiny.W, 4, norm=False).eval()
    m = PseudoWord(name='lincir', title='LinCIR', backbone=tiny, phi=phi, unit_input=True)
    with pytest.raises(ValueError, match='unit_input: .* train with unit_input: false'):
        export_published(m, tmp_path / 'phi.pt')
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize('given, ratio', [({}, 1.25), (dict(target_pad=0), 0), (dict(target_pad=1.5), 1.5)])
def test_images_are_padded_as_published_or_as_asked(tmp_path, given, ratio):
    m = PseudoWord(name='searle', title='SEARLE', backbone=tiny, phi=Phi(tiny.D, tiny.W, 4, norm=False).eval())
    again = published_pseudo_word(export_published(m, tmp_path / 'phi.pt'), 'searle', tiny, **given)
    assert padding_of(again.backbone) == ratio


@pytest.mark.parametrize('name, value', [('prompt', 3), ('prompt', 'no place'), ('unit_input', 'no'), ('title', None)])
def test_a_field_of_another_kind_in_a_description_is_refused(tmp_path, name, value):
    save_phi(tmp_path, PseudoWord(name='lincir', title='LinCIR', backbone=tiny, phi=Phi(tiny.D, tiny.W, 4).eval()))
    about = json.loads((tmp_path / 'phi.json').read_text())
    (tmp_path / 'phi.json').write_text(json.dumps(about | {name: value}))
    with pytest.raises(ValueError, match=rf'phi.json: {name} (?s:.*) train again'):
        load_pseudo_word(tmp_path, 'cpu', tiny)


def test_a_run_of_the_time_before_padding_is_read(tmp_path):
    m = PseudoWord(name='lincir', title='LinCIR', backbone=tiny, phi=Phi(tiny.D, tiny.W, 4).eval())
    save_phi(tmp_path, m)
    about = json.loads((tmp_path / 'phi.json').read_text())
    del about['target_pad']
    (tmp_path / 'phi.json').write_text(json.dumps(about))
    assert load_pseudo_word(tmp_path, 'cpu', tiny).settings() == m.settings()
