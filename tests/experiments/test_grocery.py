"Groups of queries, families of products and the choice of a weight, on lines made by hand."

from types import SimpleNamespace

import numpy as np
import pandas as pd

from cis_nb.experiments.comparison import compare
from cis_nb.experiments.grocery import grouped_lines

PRODUCTS = pd.DataFrame(dict(product=['a', 'b', 'c'], category=['X', 'Y', 'Y'], image=['ia', 'ib', 'ic']))


def made_up():
    "Three products of two categories with two photographs each."
    photos = [dict(image=f'{p}{k}', split='test', product=p) for p in 'abc' for k in range(2)]
    return SimpleNamespace(products=PRODUCTS, photos=pd.DataFrame(photos))


def lines_of(ranks: dict) -> pd.DataFrame:
    "A line for each method, task and photograph; `ranks`: (method, task) -> ranks."
    photos = made_up().photos.image
    rows = [
        dict(method=m, seed=0, draw=0, task=t, query_id=i, reference=i, rank=r)
        for (m, t), found in ranks.items()
        for i, r in zip(photos, found)
    ]
    return pd.DataFrame(rows)


def test_groups_and_filtered_methods():
    lines = lines_of({(m, t): [1] * 6 for m in ('vit', 'sum') for t in ('category', 'filtered')})
    found = grouped_lines(lines, made_up(), ['a', 'b'], ['vit'])
    assert found.task.value_counts().to_dict() == {'all': 18, 'several': 12, 'new': 6}
    assert set(found.method) == {'vit', 'sum', 'vit_filtered'}
    assert set(found.family[found.task == 'several']) == {'b', 'c'} and set(found.family[found.task == 'new']) == {'c'}
    assert 'new' not in set(grouped_lines(lines, made_up(), list('abc'), ['vit']).task)


def test_products_are_redrawn_with_all_their_photographs():
    "One product of three is found: with whole products the interval reaches from none to all."
    lines = lines_of({('vit', 'category'): [1, 1, 2, 2, 2, 2], ('sum', 'category'): [2] * 6})
    found = grouped_lines(lines, made_up(), ['a'], [])
    c = compare(found, 'vit', 'sum', tasks=['all'])
    assert np.isclose(c['diff'], 100 / 3) and (c['low'], c['high']) == (0, 100)
    alone = compare(found.drop(columns='family'), 'vit', 'sum', tasks=['all'])
    assert alone['high'] < 100  # photographs as families of their own
