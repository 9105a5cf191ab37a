"A training is named by all that it learns from and is chosen by: captions and targets, not the images alone."

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
import pandas as pd
import pytest
from projects import ROOT
from cis_nb import api
from cis_nb.methods import combiner, combiner_products, compodiff, condvit, lincir, pic2word, searle
from cis_nb.retrieval.protocol import Protocol, Task

TABLE = dict(query_id=['q'], reference=['a'], condition=['is red'], targets=[['b']])


def task(**changed) -> Task:
    "One query among three images; `changed` are columns of its table."
    gallery = ['a', 'b', 'c']
    return Task(
        'cirr', 'full', pd.DataFrame(TABLE | changed), None, Protocol('cirr'), shared_gallery=gallery, key='images'
    )


def learned_sum(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tests/plugin/learned_sum'))
    import cis_learned_sum

    return cis_learned_sum


def your_own_method(monkeypatch):
    "The cells of the page up to the registration of its plugin."
    monkeypatch.setattr(api, 'register', lambda *_: None)
    cells = json.loads((ROOT / 'nbs/06_evaluation/your_own_method.ipynb').read_text(encoding='utf-8'))['cells']
    texts = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    first = next(t for t in texts if 'from cis_nb.benchmarks.cirr' in t)
    defined = [t for t in texts if t.removeprefix('#| code-fold: false\n').startswith('class ')]
    page = type(sys)('your_own_method_page')
    for text in [first, *defined]:
        exec(text, vars(page))
    return page


PLUGINS = dict(
    combiner=(lambda _: combiner, 'CombinerPlugin', dict(triplets='cirr', start='sum')),
    lincir=(lambda _: lincir, 'LinCIRPlugin', {}),
    pic2word=(lambda _: pic2word, 'Pic2WordPlugin', {}),
    searle=(lambda _: searle, 'SearlePlugin', dict(target_pad=False)),
    condvit=(lambda _: condvit, 'CondViTPlugin', dict(texts='captions', condition='category')),
    combiner_products=(lambda _: combiner_products, 'ProductCombinerPlugin', {}),
    compodiff=(
        lambda _: compodiff,
        'CompoDiffPlugin',
        dict(stage='finetune', start='none', triplets='cirr', text_encoder=''),
    ),
    learned_sum=(learned_sum, 'LearnedSumPlugin', {}),
    your_own_method=(your_own_method, 'SumPlugin', {}),
)
READERS = dict(
    cirr_root=lambda *_: 'cirr',
    corpus_of=lambda _: 'corpus',
    training_images=lambda *_: SimpleNamespace(key='photos'),
    phrase_sources=lambda *_: [],
)


@pytest.mark.parametrize('method', PLUGINS)
def test_other_captions_or_targets_are_another_training(method, monkeypatch):
    module_of, name, given = PLUGINS[method]
    module = module_of(monkeypatch)
    settings = dict(data='world', cirr=1, world_images=1, vocabulary='', phrase_generator='', validation='') | given
    config = SimpleNamespace(insert_before=1, **settings)
    backbone = SimpleNamespace(image_size=64, image_tower=SimpleNamespace(blocks=[None]))

    def inputs(made):
        found = READERS | dict(cirr_of=lambda *_: made, load_cirr=lambda *_: made)
        found |= dict(training_products=lambda *_: (SimpleNamespace(key='pairs'), dict(products=made)))
        for reader in found.keys() & vars(module).keys():
            monkeypatch.setattr(module, reader, found[reader])
        return getattr(module, name)().inputs(backbone, config)

    before = inputs(task())
    assert inputs(task()) == before
    changed = [task(condition=['is blue']), task(targets=[['c']]), replace(task(), key='other images')]
    assert all(inputs(other) != before for other in changed)
