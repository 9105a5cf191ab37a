"Construction of LRVS-Fashion: addresses, labels, captions, splits."

from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from lrvsf_files import noise_jpeg
from PIL import Image

from cis_nb.backbones.features import l2_normalize
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks import lrvsf_construction as lc
from cis_nb.benchmarks.near_duplicates import WITHIN
from cis_nb.data.packed import open_image

seeds = st.integers(0, 10**6)
quiet = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])
RULES = {'shop.example': r'/p/(?P<product>\d+)', 'fr.shop.example': r'[?&]id=(?P<product>\w+)'}


# --- addresses


@pytest.mark.parametrize(
    'url, product, reason',
    [
        ('https://shop.example/p/17/2.jpg', 'shop.example/17', ''),
        ('HTTP://CDN.Shop.Example:8080/p/17?x=1#top', 'shop.example/17', ''),
        ('https://shop.example/%70/17', 'shop.example/17', ''),
        ('https://fr.shop.example/p/17?id=A9', 'fr.shop.example/A9', ''),  # the longest domain
        ('https://img.fr.shop.example/p/17', '', 'no product id'),
        ('https://shop.example.evil.example/p/17', '', 'unknown domain'),
        ('https://myshop.example/p/17', '', 'unknown domain'),
        ('//shop.example/p/17', '', 'not a URL'),
        ('javascript:alert(17)', '', 'not a URL'),
        ('https://[shop.example/p/17', '', 'not a URL'),
        ('https://shop.example:99999/p/17', '', 'not a URL'),
        ('', '', 'not a URL'),
        (None, '', 'not a URL'),
        (float('nan'), '', 'not a URL'),
        (b'https://shop.example/p/17', '', 'not a URL'),
    ],
)
def test_product_of_an_address(url, product, reason):
    found = lc.product_ids([url], RULES).iloc[0]
    assert (found['product'], found.reason) == (product, reason)


def test_unknown_domains_are_shown_by_name():
    found = lc.product_ids(['https://a.example/1', 'https://a.example/2', 'https://shop.example/p/3'], RULES)
    assert found[found.reason == 'unknown domain'].domain.value_counts().to_dict() == {'a.example': 2}


def test_an_optional_group_that_did_not_match_is_no_product():
    found = lc.product_ids(['https://a.example/p'], {'a.example': r'/p(?:/(?P<product>\d+))?'})
    assert list(found.reason) == ['no product id']


@pytest.mark.parametrize('pattern, words', [('(', 'no regular expression'), (r'/(\d+)', 'needs a group')])
def test_a_bad_rule_names_its_domain(pattern, words):
    with pytest.raises(ValueError, match=f'rule of shop.example.*{words}'):
        lc.product_ids([], {'shop.example': pattern})


@given(st.text(max_size=40))
@settings(max_examples=150, **quiet)
def test_no_text_breaks_the_reading_of_addresses(text):
    for url in (text, f'https://{text}', f'https://shop.example/{text}'):
        found = lc.product_ids([url], RULES).iloc[0]
        assert (found['product'] == '') == (found.reason != '')


def test_the_shops_of_the_world_fit_their_rules():
    urls = [u.format(product=1234, shot=s) for u in lc.SHOP_URLS.values() for s in (0, 7, 42)]
    found = lc.product_ids(urls, lc.WORLD_RULES)
    assert set(found.reason) == {''} and found['product'].nunique() == len(lc.SHOP_URLS)
    assert set(found.domain) == set(lc.SHOP_URLS) == set(lc.WORLD_RULES)


# --- files


def test_corrupt_files_are_skipped_and_counted(store):
    files = [noise_jpeg(0), noise_jpeg(1)[:200], b'<html>', b'', noise_jpeg(2)]
    found = lc.embed_files(files, load_backbone('tiny'))
    assert found.ids == [0, 4] and found.counts == {'encoded': 2, 'skipped': 3}
    assert sorted(found.skipped.id) == [1, 2, 3] and found.skipped.reason.str.len().min() > 0


def test_no_readable_file_is_an_error(store):
    with pytest.raises(ValueError, match='none of 2 images could be read'):
        lc.embed_files([b'', b'x'], load_backbone('tiny'))


# --- labels


@given(seeds, st.integers(2, 5))
@settings(max_examples=25, **quiet)
def test_the_gradient_of_the_loss(seed, n_classes):
    rng = np.random.default_rng(seed)
    z, onehot = np.c_[rng.normal(size=(12, 3)), np.ones(12)], np.eye(n_classes)[rng.integers(0, n_classes, 12)]
    at, step = rng.normal(size=4 * n_classes), rng.normal(size=4 * n_classes)
    gradient = lc.logistic_loss(at, z, onehot, 0.3)[1]
    two = [lc.logistic_loss(at + h * step, z, onehot, 0.3)[0] for h in (1e-5, -1e-5)]
    assert gradient @ step == pytest.approx((two[0] - two[1]) / 2e-5, rel=1e-4, abs=1e-6)


def blobs(seed=0, n=60):
    "Three well separated clouds with their names."
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    return rng.normal(size=(n, 4)) + 6 * np.eye(4)[labels], np.array(list('abc'))[labels]


def test_the_classifier_does_not_depend_on_the_order_of_rows():
    x, labels = blobs()
    shuffled = np.random.default_rng(1).permutation(len(x))
    one = lc.fit_classifier(x, labels, 'abc').probabilities(x)
    two = lc.fit_classifier(x[shuffled], labels[shuffled], 'abc').probabilities(x)
    np.testing.assert_allclose(one, two, atol=1e-3)
    assert (lc.fit_classifier(x, labels, 'abc').predict(x) == labels).all()


def test_one_label_is_enough_and_a_class_without_examples_is_not_predicted():
    x, labels = blobs()
    assert set(lc.fit_classifier(x[:1], labels[:1], 'abc').predict(x)) == {labels[0]}
    two = labels != 'c'
    assert 'c' not in lc.fit_classifier(x[two], labels[two], 'abc').predict(x[two])


@pytest.mark.parametrize(
    'x, labels, words',
    [
        (np.zeros((0, 2)), [], 'at least one'),
        (np.zeros((2, 2)), ['a'], '2 embeddings and 1 labels'),
        (np.full((1, 2), np.nan), ['a'], 'NaN'),
        (np.zeros((1, 2)), ['z'], "label: 'z' is none of a, b"),
    ],
)
def test_what_cannot_be_fitted(x, labels, words):
    with pytest.raises(ValueError, match=words):
        lc.fit_classifier(x, labels, 'ab')


@pytest.mark.parametrize('strategy', lc.STRATEGIES)
def test_active_learning_asks_for_each_row_once_and_never_for_held_out_ones(strategy):
    x, labels = blobs()
    run = lc.active_learning(x, labels.__getitem__, 'abc', 8, 5, strategy, seed=3)
    asked = np.concatenate(run.asked)
    assert len(set(asked)) == 40 == run.curve.labels.iloc[-1]
    assert not set(asked) & set(run.held_out) and len(asked) + len(run.held_out) == len(x)
    complete, spent = lc.complete_labels(run, x), np.concatenate([asked, run.held_out])
    assert (complete[spent] == labels[spent]).all() and set(run.known) == set(spent)
    other = lc.active_learning(x, labels.__getitem__, 'abc', 8, 5, strategy, seed=3)
    assert other.curve.equals(run.curve)


def test_only_labels_that_were_asked_for_are_used():
    x, labels = blobs()
    run = lc.active_learning(x, labels.__getitem__, 'abc', 5, 4, seed=1)
    hidden = labels.copy()
    hidden[np.setdiff1d(np.arange(len(x)), np.concatenate(run.asked))] = 'a'  # those of the test rows do not train
    again = lc.active_learning(x, hidden.__getitem__, 'abc', 5, 4, seed=1)
    assert [list(a) for a in again.asked] == [list(a) for a in run.asked]
    np.testing.assert_array_equal(again.classifier.weights, run.classifier.weights)


def test_margin_sampling_asks_for_what_is_undecided():
    p = np.array([[0.9, 0.1, 0], [0.4, 0.35, 0.25], [0.5, 0.5, 0], [0.34, 0.33, 0.33]])
    assert list(lc.margin_order(p, None)) == [2, 3, 1, 0]


@pytest.mark.parametrize('per_round, rounds', [(0, 3), (30, 2), (5, 0), (-5, -2)])
def test_rounds_must_fit_the_rows(per_round, rounds):
    x, labels = blobs()
    with pytest.raises(ValueError, match='must be from 1 to 40 labels'):
        lc.active_learning(x, labels.__getitem__, 'abc', per_round, rounds)


def test_people_are_asked_for_each_row_once_and_for_no_other_one():
    x, labels = blobs()
    asked = []

    def label(rows):
        asked.extend(rows)
        return labels[rows]

    run = lc.active_learning(x, label, 'abc', 4, 3, test_labels=10)
    assert len(asked) == len(set(asked)) == 12 + 10 == len(run.known)
    assert len(run.held_out) == 10 and set(asked) == set(run.known)


@pytest.mark.parametrize(
    'label, words',
    [(lambda rows: ['a'], '1 names for 20 rows'), (lambda rows: ['z'] * len(rows), "'z' is none of a, b")],
)
def test_answers_that_are_no_labels_are_refused(label, words):
    with pytest.raises(ValueError, match=words):
        lc.active_learning(blobs()[0], label, 'abc', 4, 3)


def bare_table(n=40):
    """A table of (url, text, image) and nothing else: each product has a grey image on white and one without white;
    every other grey is dark. Two files are damaged, one address is of no rule."""
    rows = []
    for k in range(n):
        grey = 40 if k % 2 else 170
        for shot in range(2):
            pixels = np.full((48, 48, 3), 255 if shot == 0 else grey // 2, np.uint8)
            pixels[4 + k % 20 : 40, 6 : 30 + k % 16] = grey
            rows.append((f'https://shop.example/p/{k}/{shot}.jpg', '', lc.shop_jpeg(Image.fromarray(pixels))))
    rows[5] = (*rows[5][:2], b'<html>')
    rows[8] = ('https://else.example/4.jpg', *rows[8][1:])
    return pd.DataFrame(rows, columns=['url', 'text', 'image'])


@pytest.mark.skipif(not (find_spec('imagehash') and find_spec('datasketch')), reason='the extra dedup is not installed')
def test_a_bare_table_becomes_a_benchmark_with_the_answers_of_people(store):
    table, asked = bare_table(), {'complexity': [], 'category': []}

    def label(task, rows):
        asked[task].extend(rows)
        images = [np.asarray(open_image(table.image[r])) for r in rows]
        if task == 'complexity':
            return ['SIMPLE' if image[0, 0, 0] > 200 else 'COMPLEX' for image in images]
        return ['Bags' if image[38, 20, 0] < 100 else 'Head' for image in images]

    sizes = dict(test=dict(Bags=2, Head=2))
    learning = dict(per_round=5, rounds=3, test_labels=6)
    found = lc.construct_table(table, RULES, load_backbone('tiny'), label, sizes, learning)
    assert {task: len(set(rows)) for task, rows in asked.items()} == {'complexity': 21, 'category': 21}
    assert found.labels_spent == 42 and list(found.skipped.id) == [5]
    called_simple = found.rows.index[found.rows.complexity == 'SIMPLE']
    assert set(asked['category']) <= set(found.asked_of['category']) == set(called_simple)  # no label of a worn image
    assert len(found.rows) == len(table) == len(found.made.rows) + sum(found.made.left_out.values())
    assert found.made.left_out['no product'] == 1 and found.made.left_out['unreadable image'] == 1
    assert (found.rows.complexity[1::2].drop(5) == 'COMPLEX').mean() > 0.9
    test = found.made.rows[found.made.rows.split == 'test']
    assert (
        len(test) == 8
        and not found.made.lacking
        and set(test.category[test.complexity == 'SIMPLE']) == {'Bags', 'Head'}
    )


# --- captions


def test_empty_captions_are_skipped_and_counted():
    clip = load_backbone('tiny')
    image = np.asarray(l2_normalize(clip.encode_text(['a red ball']).detach()))
    lists = [['', None, 'a green house', 'a red ball', '\ud800']]
    chosen, skipped = lc.choose_captions(image, lists, clip)
    assert chosen.captions[0] == ['a red ball', 'a green house']
    assert chosen.similarities[0] == sorted(chosen.similarities[0], reverse=True)
    counts = {'empty caption': 1, 'caption that is not text': 1, 'caption that is not UTF-8': 1}
    assert skipped.counts() == counts


def test_an_image_without_a_usable_caption_is_counted():
    clip = load_backbone('tiny')
    chosen, skipped = lc.choose_captions(np.eye(2, clip.D), [[], [' ']], clip)
    assert chosen.captions.tolist() == [[], []]
    assert skipped.counts()['image without a usable caption'] == 2


# --- products and splits


def labelled(seed=0, n=60):
    "Rows of random products."
    rng, rows = np.random.default_rng(seed), []
    for k in range(n):
        category = rng.choice(['Bags', 'Feet', lc.NON_CLOTHING], p=[0.5, 0.4, 0.1])
        for complexity, most in zip(lc.COMPLEXITIES, (3, 4, 2)):
            for shot in range(rng.integers(0, most)):
                named = '' if complexity != 'SIMPLE' else lc.NON_CLOTHING if shot > 1 else category
                rows.append((f's/{k}', complexity, named, ''))
    table = pd.DataFrame(rows, columns=['product', 'complexity', 'category', 'duplicate'])
    table.loc[rng.random(len(table)) < 0.05, 'product'] = ''
    table.loc[rng.random(len(table)) < 0.05, 'complexity'] = ''
    table.loc[rng.random(len(table)) < 0.05, 'duplicate'] = WITHIN
    return table


@given(seeds)
@settings(max_examples=30, **quiet)
def test_every_row_is_used_or_counted_and_no_product_is_in_two_splits(seed):
    rows = labelled(seed)
    made = lc.construct(rows, dict(test={'Bags': 4, 'Feet': 2}, val={'Bags': 1}), 0.3, seed)
    assert len(made.rows) + sum(made.left_out.values()) == len(rows)
    assert made.rows.groupby('product').split.nunique().max() == 1 and set(made.rows.split) <= set(lc.SPLITS)
    assert (made.rows['product'] != '').all() and (rows.duplicate[made.rows.index] == '').all()
    chosen = made.rows[made.rows.split.isin(['val', 'test'])]
    for _, mine in chosen.groupby('product'):
        assert sorted(mine.complexity) == ['COMPLEX', 'SIMPLE'] and mine.category[mine.complexity == 'SIMPLE'].all()
    train = made.rows[made.rows.split == 'train']
    assert len(lc.product_table(train)) == train['product'].nunique()
    assert not (made.rows.category[made.rows.split.isin(['train', 'val', 'test'])] == lc.NON_CLOTHING).any()
    distractors = made.rows[made.rows.split.str.endswith('distractors')]
    assert set(distractors.complexity) <= {'SIMPLE'}
    n_test = chosen[chosen.split == 'test']['product'].nunique()
    assert n_test + made.lacking.get('test', 0) == 6


def test_the_share_of_validation_distractors():
    rows = labelled(3)
    splits = [set(lc.construct(rows, {}, share).rows.split) - {'train'} for share in (0, 1)]
    assert splits == [{'test_distractors'}, {'val_distractors'}]
    half = lc.construct(labelled(3, 400), {}, 0.5).rows
    products = half[half.split != 'train'].drop_duplicates('product').split.value_counts(normalize=True)
    assert 0.3 < products['val_distractors'] < 0.7


def test_counts_in_the_layout_of_table_3():
    rows = pd.DataFrame(
        [('s/1', 'SIMPLE', 'Bags', 'train'), ('s/1', 'SIMPLE', 'Bags', 'train'), ('s/1', 'COMPLEX', '', 'train')]
        + [('s/2', 'SIMPLE', lc.NON_CLOTHING, 'test_distractors')],
        columns=['product', 'complexity', 'category', 'split'],
    )
    counts = lc.simple_counts(rows)
    assert list(counts.index) == [*lc.LRVSF_CATEGORIES, lc.NON_CLOTHING, 'Total'] and list(counts) == list(lc.SPLITS)
    assert counts.train['Bags'] == counts.train['Total'] == 2
    assert counts.test_distractors[lc.NON_CLOTHING] == 1 and counts.to_numpy().sum() == 6


def test_a_product_without_a_simple_image_is_left_out_and_counted():
    rows = pd.DataFrame([('s/1', 'COMPLEX', '', '')], columns=['product', 'complexity', 'category', 'duplicate'])
    made = lc.construct(rows, {})
    assert len(made.rows) == 0 and made.left_out == {'worn image of a product without a simple one': 1}


def test_a_drawn_crawl_has_all_faults_and_copies_of_both_kinds():
    crawl = lc.draw_crawl(['Bags'] * 12, ['Feet'] * 20 + [lc.NON_CLOTHING] * 20, 5)
    found = lc.product_ids(crawl.table.url, lc.WORLD_RULES)
    assert len(crawl.table) == len(crawl.truth) and set(found.reason) >= {'', 'unknown domain'}
    copies = np.flatnonzero(crawl.truth.original != np.arange(len(crawl.truth)))
    origin = crawl.truth.original[copies].to_numpy()
    known = (found['product'][copies].to_numpy() != '') & (found['product'][origin].to_numpy() != '')
    same = found['product'][copies].to_numpy()[known] == found['product'][origin].to_numpy()[known]
    assert same.any() and not same.all()
