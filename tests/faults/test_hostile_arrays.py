"Arrays of the store, each changed in every way: work is made again where a size has changed, else the error tells."

import io
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hostile import attack, byte_changes
from lrvsf_files import Hand
from PIL import Image
from photo_folders import folder

from cis_nb.backbones.features import corpus_features, text_features
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks.lrvsf_training import lrvsf_training_images
from cis_nb.core.store import store_root
from cis_nb.data.datasets import captions_root
from cis_nb.data.image_sources import ImageSource, folder_images, folder_squares
from cis_nb.data.packed import CaptionedImages
from cis_nb.data.products import white_squares
from cis_nb.methods import searle
from cis_nb.methods.compodiff import StoredStates
from cis_nb.mining import synthetic
from cis_nb.mining.concreteness import concreteness
from cis_nb.mining.corpora import MARK, Corpus
from cis_nb.mining.synthetic import Replacements
from cis_nb.mining.triplets import mine_triplets, read_triplets

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures('store')]


def saved(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def same_bytes(array) -> np.ndarray:
    "The bytes of an array as numbers of another type."
    size = array.dtype.itemsize
    return array.view(f'S{size}' if array.dtype.kind == 'V' else f'i{size}' if array.dtype.kind in 'fu' else f'u{size}')


def array_changes(data: bytes):
    "(name, bytes): other shapes and types, in as many bytes and in others."
    a = np.load(io.BytesIO(data))
    yield 'a dimension more', saved(a[None])
    yield 'one dimension', saved(a.reshape(-1))
    yield 'another type of the same bytes', saved(same_bytes(a))
    yield 'another order of bytes', saved(a.astype(a.dtype.newbyteorder('>')))
    yield 'half the rows', saved(a[: len(a) // 2])
    yield 'twice the rows', saved(np.concatenate([a, a]))
    yield 'zeros', bytes(len(data))
    yield 'objects', saved(np.array([None] * len(a)))
    yield 'a header of another kind', data.replace(b"'descr'", b"'descx'")
    yield 'a header that never ends', data.replace(b"'shape': (", b"'shape': ((")
    yield from byte_changes(data)


def of_the_same_size(data: bytes):
    "(name, bytes): so that the folder counts as finished."
    yield 'zeros', bytes(len(data))
    yield 'noise', np.random.default_rng(0).bytes(len(data))
    yield 'zeros in front', (bytes(64) + data[64:])[: len(data)]
    yield 'zeros behind', data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


class Backbone:
    "Features of four numbers, without a network."

    name, D, W, fingerprint, dtype, context = 'made-up', 4, 4, 'x', torch.float32, 9

    def encode_text(self, texts):
        return torch.tensor([[float(len(t))] * 4 for t in texts])

    def encode_ids(self, ids):
        return ids[:, :4].float()


class Captions:
    "A corpus of eight captions."

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 8

    def whole(self, ids, context):
        return torch.tensor(list(ids))[:, None].repeat(1, context)


def images() -> ImageSource:
    return ImageSource([f'i{k}' for k in range(8)], lambda i: Image.new('RGB', (9, 7), int(i[1:])), 'key', 'made-up')


def features(tmp_path):
    return lambda: text_features(Backbone(), [f'{10**k}' for k in range(8)]).array


def captions(tmp_path):
    (tmp_path / 'captions').mkdir()
    return lambda: corpus_features(Backbone(), Captions(tmp_path / 'captions'))


def squares(tmp_path):
    return lambda: images().pixels(4)


def squares_on_white(tmp_path):
    return lambda: white_squares(images(), 4)


def packed(tmp_path):
    root = folder(tmp_path / 'photos', 4, 'captions.csv', ''.join(f'{i:03}.jpg,a {i}\n' for i in range(4)))

    def read():
        pairs = CaptionedImages(root, 'train', 8)
        return folder_squares(root, 8), pairs.batch([0])[0], pairs.texts, folder_images(root, 8).key

    return read


def words(tmp_path):
    "Pseudo-words of SEARLE; the search itself is left out."
    config = SimpleNamespace(num_concepts_inversion=1, search_steps=1, search_lr=0.1, seed=0)
    near, phrases = np.zeros((8, 1), int), SimpleNamespace(folder='phrases')
    return lambda: searle.inverted_tokens(Backbone(), 'key', np.eye(8, 4, dtype='f4'), phrases, near, config, block=2)


MAKERS = dict(
    features=features, captions=captions, squares=squares, squares_on_white=squares_on_white, packed=packed, words=words
)


@pytest.mark.parametrize('name', MAKERS)
def test_stored_arrays(tmp_path, monkeypatch, name):
    monkeypatch.setattr(searle, 'invert', lambda backbone, some, *a, **kw: torch.as_tensor(np.asarray(some)))
    make = MAKERS[name](tmp_path)
    make()
    (path,) = store_root().rglob('*.npy')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for file in sorted(p for p in path.parent.iterdir() if p.is_file()):
            changes = array_changes if file == path else of_the_same_size
            assert attack('stored arrays', file, lambda: (make(), {}), [changes], places=file == path) == []


def ratings(tmp_path):
    return lambda: concreteness.__wrapped__('world')


def mined(tmp_path):
    folder = mine_triplets(captions_root('world', 60), n=4, captions='all', parser='world')
    return lambda: read_triplets(folder)[0]


def phrases(tmp_path):
    return lambda: searle.read_phrases(Backbone(), searle.phrase_folder(n=2)).written


def terms(tmp_path):
    (tmp_path / 'captions').mkdir()
    row = dict(caption='a cat and a dog', terms=[[2, 5], [12, 15]])
    (tmp_path / 'captions' / 'shards.json').write_text('{}')
    with pytest.MonkeyPatch.context() as m:
        m.setattr(synthetic, 'shard_rows', lambda folder: [row] * 5)
        synthetic.term_list(tmp_path / 'captions')
    return lambda: synthetic.term_list(tmp_path / 'captions')


FILES = dict(
    ratings=(ratings, 'ratings.parquet'),
    mined_triplets=(mined, 'triplets.parquet'),
    mined_counts=(mined, 'counts.json'),
    phrases=(phrases, 'phrases.json'),
    terms=(terms, 'terms.json'),
)


@pytest.mark.parametrize('name', FILES)
def test_stored_tables_and_documents(tmp_path, name):
    maker, file = FILES[name]
    make = maker(tmp_path)
    make()
    (path,) = store_root().rglob(file)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert attack('stored arrays', path, lambda: (make(), {}), [of_the_same_size], places=False) == []


def test_states_of_texts():
    backbone, texts = load_backbone('tiny_xs', device='cpu'), ['a red dress', 'the left of two lamps', 'a cat']

    def read():
        states = StoredStates(backbone, texts)
        return [states[t] for t in texts], {}

    read()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name, changes in {'starts.npy': array_changes, 'states.f32': bare_changes}.items():
            (path,) = store_root().rglob(name)
            assert attack('stored arrays', path, read, [changes], names=['states.f32']) == []


def bare_changes(data: bytes):
    "(name, bytes): fewer and more numbers; the same number of others is found by `make verify` alone."
    yield 'empty', b''
    yield 'half', data[: len(data) // 2]
    yield 'a byte more', data + b'x'


def test_squares_of_shards(tmp_path):
    Hand(split='train').tar(tmp_path / 'lrvsf/TRAIN/0.tar')

    def read():
        found = lrvsf_training_images(tmp_path, 'train', 8)
        return found.squares, {}

    read()
    (path,) = store_root().rglob('squares.u8')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert attack('stored arrays', path, read, [bare_changes]) == []
    rows = next(path.parent.glob('images-*.parquet'))
    (path.parent / 'images-99999.parquet').write_bytes(rows.read_bytes())  # more rows than there are squares
    with pytest.raises(ValueError, match='squares.u8 cannot be read as an array .* made again'):
        read()


def test_corpora(tmp_path):
    np.save(tmp_path / 'marks.npy', np.zeros(6, MARK))
    np.save(tmp_path / 'literal.npy', np.arange(6, dtype='<u2'))
    for name in ('marks-starts', 'literal-starts'):
        np.save(tmp_path / f'{name}.npy', np.array([0, 2, 5, 6]))
    (tmp_path / 'corpus.json').write_text(json.dumps(dict(captions=3, left={})))

    def read():
        corpus = Corpus(tmp_path)
        return (corpus.marks, corpus.starts, corpus.literal, corpus.literal_starts), {}

    for path in sorted(tmp_path.glob('*.npy')):
        also = [path.name.replace('-starts', '')]
        assert attack('stored arrays', path, read, [array_changes], names=also) == []


def test_replacements(tmp_path):
    np.save(tmp_path / 'starts.npy', np.array([0, 2, 5, 6]))
    np.save(tmp_path / 'items.npy', np.arange(6, dtype=np.int32))
    (tmp_path / 'terms.json').write_text(json.dumps(['a', 'b', 'c']))

    def read():
        found = Replacements(tmp_path)
        return (found.starts, found.items), {}

    for name in ('starts.npy', 'items.npy'):
        assert attack('stored arrays', tmp_path / name, read, [array_changes]) == []
