"The grocery store data: files written by hand, and bad input."

import tarfile

import pandas as pd
import pytest
from lrvsf_files import dots, noise_jpeg, write_tar

from cis_nb.benchmarks.grocery import grocery_benchmark, grocery_pairs, grocery_task, products_beside, read_grocery
from cis_nb.data.products import white_squares
from cis_nb.data.roots import find_data
from cis_nb.retrieval.protocol import evaluate

CLASSES = [('Gala', 'Apple'), ('Granny-Smith', 'Apple'), ('Lemon', 'Lemon'), ('Red-Leaf', 'Passion-Fruit')]


class Shelves:
    "The rows and files of a data set by hand; a test changes them before `write`."

    def __init__(self):
        coarse = list(dict.fromkeys(c for _, c in CLASSES))
        self.classes, self.photos, self.files = [], [], {}
        for n, (name, category) in enumerate(CLASSES):
            row = dict(class_id=n, class_name=name, coarse_id=coarse.index(category), coarse_name=category)
            self.classes.append(row | dict(iconic_path=f'iconic/{name}.jpg', description=f'about {name}'))
            for split, k in (('train', 2), ('val', 1), ('test', 2)):
                paths = [f'natural/{split}/{name}_{i}.jpg' for i in range(k)]
                self.photos += [dict(path=p, split=split, class_id=n, coarse_id=row['coarse_id']) for p in paths]
        names = [r['iconic_path'] for r in self.classes] + [r['path'] for r in self.photos]
        self.files = {name: noise_jpeg(n) for n, name in enumerate(names)}

    def write(self, folder, tar=True):
        "Two tables, and the images in a tar or as files."
        folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(self.classes).to_csv(folder / 'classes.csv', index=False)
        pd.DataFrame(self.photos).to_csv(folder / 'natural.csv', index=False)
        if tar:
            write_tar(folder / 'grocery.tar', self.files)
            return folder
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


@pytest.fixture
def shelves(store):
    return Shelves()


@pytest.mark.parametrize('tar', [True, False])
def test_both_forms_are_read(shelves, tmp_path, tar):
    g = read_grocery(shelves.write(tmp_path / 'grocery', tar))
    assert g.products['product'].tolist() == ['Gala', 'Lemon', 'Red Leaf', 'Granny Smith']  # one of each category first
    assert g.products.category.tolist() == ['Apple', 'Lemon', 'Passion Fruit', 'Apple']
    assert len(g.photos) == 20 and g.present == set(shelves.files) and not g.skipped
    assert g.source.load('natural/test/Lemon_1.jpg').size == (24, 24)
    assert products_beside(g) == {'Gala': 2, 'Granny Smith': 2, 'Lemon': 1, 'Red Leaf': 1}


def test_queries_of_a_split_and_their_galleries(shelves, tmp_path):
    tasks = grocery_benchmark(shelves.write(tmp_path / 'grocery'), ks=(1,)).tasks
    q = tasks['category'].queries
    assert q.reference.str.startswith('natural/test/').all() and len(q) == 8
    assert q.targets.str[0].tolist()[:2] == ['iconic/Gala.jpg'] * 2
    own = dict(zip(tasks['filtered'].queries.condition, tasks['filtered'].queries.gallery))
    assert own['Apple'] == ['iconic/Gala.jpg', 'iconic/Granny-Smith.jpg'] and own['Lemon'] == ['iconic/Lemon.jpg']


def test_pairs_leave_the_test_alone_and_take_the_first_products(shelves, tmp_path):
    g = read_grocery(shelves.write(tmp_path / 'grocery'))
    pairs = grocery_pairs(g, 'train', 3)
    assert pairs.products == ['Gala', 'Lemon', 'Red Leaf'] and pairs.categories == ('Apple', 'Lemon', 'Passion Fruit')
    assert {i.split('/')[1] for i in pairs.complex.image} == {'train'}
    assert grocery_pairs(g, 'val', 2, distractors=9).distractors == ['iconic/Red-Leaf.jpg', 'iconic/Granny-Smith.jpg']
    assert pairs.key != grocery_pairs(g, 'train', 2).key


# Bad input


def refused(shelves, tmp_path, change, match):
    change(shelves)
    with pytest.raises(ValueError, match=match):
        read_grocery(shelves.write(tmp_path / 'grocery'))


BAD_ROWS = {
    'duplicate product': (
        lambda s: s.classes[1].update(class_id=0),
        r"classes.csv, line 3: class_id is '0'; an earlier",
    ),
    'same name': (lambda s: s.classes[1].update(class_name='Gala'), "class_name is 'Gala'; an earlier line has it too"),
    'no name': (lambda s: s.classes[2].update(coarse_name=' '), "line 4: coarse_name is ' '; a name is needed"),
    'two names': (
        lambda s: s.classes[1].update(coarse_name='Pear'),
        "coarse_name is 'Pear'; an earlier line has another",
    ),
    'path': (lambda s: s.classes[3].update(iconic_path='../x.jpg'), "iconic_path is '../x.jpg'; allowed: a path below"),
    'no product': (
        lambda s: s.photos[4].update(class_id=77),
        "natural.csv, line 6: class_id is '77'; no line of classes",
    ),
    'category': (lambda s: s.photos[4].update(coarse_id=2), "line 6: coarse_id is '2'; classes.csv has another one"),
    'split': (lambda s: s.photos[0].update(split='dev'), "line 2: split is 'dev'; allowed: train, val, test"),
    'same photo': (
        lambda s: s.photos.append(s.photos[0]),
        'line 22: path is .*; an earlier line has it too; leave one',
    ),
    'photo path': (lambda s: s.photos[0].update(path='/etc/x'), "path is '/etc/x'; allowed: a path below the folder"),
}


@pytest.mark.parametrize('case', BAD_ROWS)
def test_a_faulty_line_is_named(case, shelves, tmp_path):
    refused(shelves, tmp_path, *BAD_ROWS[case])


def test_tables_that_are_missing_cut_or_lack_a_column(shelves, tmp_path):
    folder = shelves.write(tmp_path / 'grocery')
    path = folder / 'natural.csv'
    pd.read_csv(path).drop(columns='split').to_csv(path, index=False)
    with pytest.raises(ValueError, match="natural.csv: column 'split' is missing; needed: path, split, class_id"):
        read_grocery(folder)
    path.write_text('path,split,class_id,coarse_id\n')
    with pytest.raises(ValueError, match='natural.csv has no line below the heading'):
        read_grocery(folder)
    for content, why in {
        b'': ' has no line below the heading',
        b'\xff\xfe\x00a,b': ' is no CSV file in UTF-8',
        b'path,split,class_id,coarse_id\nx,natural/a.jpg,train,0,0\n': ', line 2: has 5 cells, the heading 4',
        b'path,split,class_id,coarse_id,split\na,train,0,0,val\n': ": 'split' is the name of two columns",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f'natural.csv{why}'):
            read_grocery(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match='natural.csv is missing; Get it from https://github.com/marcusklasson'):
        read_grocery(folder)


@pytest.mark.parametrize('name', ['../natural/a.jpg', '/tmp/a.jpg'])
def test_a_tar_member_outside_its_folder_is_refused(shelves, tmp_path, name):
    shelves.files[name] = b'x'
    refused(shelves, tmp_path, lambda s: None, 'tar member named outside its folder.*not to be trusted')
    assert not (tmp_path / 'natural').exists()


def test_entries_of_a_folder_that_are_no_images_are_counted(shelves, tmp_path):
    shelves.files['natural/\udcff.jpg'] = b'x'
    folder = shelves.write(tmp_path / 'grocery')
    (folder / 'notes.txt').symlink_to('/nowhere')
    counts = read_grocery(folder).skipped.counts()
    assert counts == {'neither a file nor a folder': 1, 'file name that is not UTF-8': 1}


def test_a_tar_that_was_cut_is_refused(shelves, tmp_path):
    folder = shelves.write(tmp_path / 'grocery')
    with open(folder / 'grocery.tar', 'r+b') as f:
        f.truncate(3000)
    with pytest.raises(ValueError, match='tar cut short or damaged'):
        read_grocery(folder)
    with tarfile.open(folder / 'grocery.tar', 'w') as tar:
        tar.add(folder / 'classes.csv', 'other.txt')
    with pytest.raises(ValueError, match='no catalogue image of classes.csv can be read.*missing image'):
        read_grocery(folder)


def test_a_corrupt_jpeg_is_skipped_and_counted(shelves, tmp_path):
    lost = ['natural/test/Gala_0.jpg', 'natural/train/Lemon_1.jpg', 'iconic/Red-Leaf.jpg']
    for name in lost[:2]:
        shelves.files[name] = shelves.files[name][:200]
    del shelves.files[lost[2]]  # a product without a simple image
    g = read_grocery(shelves.write(tmp_path / 'grocery'))
    assert g.skipped == {'missing image': lost[2:], 'damaged image': lost[:2]} and not set(lost) & g.present
    task = grocery_task(g, ks=(1,))
    assert len(task) == 8 - 1 - 2 and len(task.shared_gallery) == 3 and 'partial' in str(task.protocol)
    pairs = grocery_pairs(g)
    assert pairs.products == ['Gala', 'Lemon', 'Granny Smith'] and len(pairs.complex) == 5
    assert white_squares(pairs.images, 16)[0].shape == (8, 3, 16, 16)


def test_a_gallery_smaller_than_k_is_refused(shelves, tmp_path):
    task = grocery_benchmark(shelves.write(tmp_path / 'grocery'), ks=(1, 5)).tasks['category']
    with pytest.raises(ValueError, match='a gallery of 4 has no R@5; use smaller ks'):
        evaluate(dots(), task)


@pytest.mark.data
@pytest.mark.skipif(not find_data('grocery'), reason='needs grocery below CIS_DATA')
def test_the_published_photographs_are_read_whole(store):
    g = read_grocery(find_data('grocery'))
    assert g.photos.split.value_counts().to_dict() == dict(train=1296, test=1280, val=296)
    assert (len(g.products), g.products.category.nunique(), g.skipped) == (81, 43, {})
    assert sum(n == 1 for n in products_beside(g).values()) == 31
