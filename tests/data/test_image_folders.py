"Folders of images with captions: layouts, faults, hostile input."

import csv
import gzip
import io
import json
import os
import random
import tarfile
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from projects import DATA, needs_data
from cis_nb.data import image_folders
from cis_nb.data.packed import CaptionedImages, open_image
from cis_nb.data.image_folders import Place, Skipped, clean_caption, folder_key, read_photos, tar_members, with_splits
from photo_folders import image, refuse, write_tar, side_by_side, folder

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
flickr = DATA / 'flickr8k'


pytestmark = pytest.mark.usefixtures('store')


# ---- layouts


def test_every_table_spelling_reads_the_same(tmp_path):
    want = [(f'{i:03}', [f'a thing, number {i}', f'"{i}" again']) for i in range(4)]
    lines = [(f'{i:03}.jpg', c) for i in range(4) for c in want[i][1]]
    buf = io.StringIO()
    csv.writer(buf).writerows([('image', 'caption'), *lines])
    as_json = '\n'.join(json.dumps(dict(image=f'{i:03}.jpg', captions=c)) for i, (_, c) in enumerate(want))
    spellings = {
        'captions.csv': buf.getvalue(),
        'captions.txt': '\n'.join(f'{n}#{k % 2}\t{c}' for k, (n, c) in enumerate(lines)),
        'captions.jsonl': as_json,
        'captions.jsonl.gz': gzip.compress(as_json.encode()),
        'metadata.csv': buf.getvalue().replace('image,caption', 'file_name,text'),
        'captions.csv.bom': '\ufeff' + buf.getvalue(),
        'captions.csv.crlf': buf.getvalue().replace('\n', '\r\n'),
    }
    for k, (name, text) in enumerate(spellings.items()):
        got = read_photos(folder(tmp_path / str(k), 4, name.removesuffix('.bom').removesuffix('.crlf'), text))
        assert [(r.key, r.captions) for r in got.table.itertuples()] == want, name
        assert not got.skipped, name


def test_side_by_side_in_folders_and_subfolders(tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'b').mkdir()
    for d in 'ab':
        (tmp_path / d / '1.JPG').write_bytes(image(1))
        (tmp_path / d / '1.txt').write_text('first\n\nsecond\n')
    got = read_photos(tmp_path)
    assert (
        list(got.table.key) == ['a/1', 'b/1']
        and got.table.captions[0] == ['first', 'second']
        and got.skipped.counts() == {'empty caption': 2}
    )


def test_coco_with_annotations_folder_and_karpathy_like_names(tmp_path):
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'val2017').mkdir()
    for i in (3, 4):
        (tmp_path / 'val2017' / f'{i:012}.jpg').write_bytes(image(i))
    coco = dict(
        images=[dict(id=i, file_name=f'{i:012}.jpg') for i in (3, 4, 5)],
        annotations=[dict(id=i, image_id=i, caption=f'c{i}') for i in (3, 4, 5, 9)],
    )
    (tmp_path / 'annotations' / 'captions_val2017.json').write_text(json.dumps(coco))
    got = read_photos(tmp_path)
    assert got.layout == 'COCO captions' and len(got.table) == 2
    assert got.skipped.counts() == {
        'caption of an image that is not listed': 1,
        'caption of an image that is not there': 1,
    }


@pytest.mark.parametrize(
    'content, message',
    [
        ('{"images": 3, "annotations": []}', ': images is 3, not list; get it again; a COCO captions file has'),
        ('[1]', ': is list, not an object'),
        ('{"images": []}', ": has no 'annotations'"),
        ('{', ' is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))'),
        ('{"images": [{"id": 1', " is not JSON (Expecting ',' delimiter: line 1 column 21 (char 20)): it may be cut"),
        ('{"images": [{"id": NaN}], "annotations": []}', ' is not JSON (NaN is no number of JSON)'),
    ],
)
@pytest.mark.parametrize('inside', ['', 'all.tar'])
def test_a_broken_coco_file_is_an_error_with_folder_place_and_field(tmp_path, content, message, inside):
    root = folder(tmp_path / 'c', 1, 'captions_val2017.json', content)
    if inside:
        write_tar(root / inside, [('captions_val2017.json', (root / 'captions_val2017.json').read_bytes())])
        (root / 'captions_val2017.json').unlink()
    with pytest.raises(ValueError) as e:
        read_photos(root)
    where = root / f'{inside}: captions_val2017.json' if inside else root / 'captions_val2017.json'
    assert str(e.value).startswith(f'{where}{message}')


def two_images(tmp_path, images, file='captions_val.json', more=()):
    "A folder with the images 000.jpg and 001.jpg in COCO's files of captions: a caption of each listed image."
    for name, listed in ((file, images), *more):
        notes = [dict(id=i['id'], image_id=i['id'], caption=f'a {i["id"]}') for i in listed]
        root = folder(tmp_path / 'c', 2, name, json.dumps(dict(images=listed, annotations=notes)))
    return read_photos(root)


SECOND = 'second image of the same file name'
UNLISTED = 'caption of an image that is not listed'


@pytest.mark.parametrize('name', ['000.jpg', './000.jpg', 'val/000.jpg'])
def test_an_image_with_two_numbers_in_a_coco_file_keeps_the_captions_of_the_first(tmp_path, name):
    images = [dict(id=1, file_name='000.jpg'), dict(id=2, file_name=name), dict(id=3, file_name='001.jpg')]
    got = two_images(tmp_path, images)
    assert got.table.captions.tolist() == [['a 1'], ['a 3']]
    assert got.skipped == {SECOND: [f'captions_val.json, images[1]: {name!r}'], UNLISTED: ['captions_val.json: 2']}


def test_an_image_with_two_numbers_in_two_coco_files(tmp_path):
    more = [('captions_val_b.json', [dict(id=1, file_name='000.jpg'), dict(id=2, file_name='000.jpg')])]
    got = two_images(tmp_path, [dict(id=1, file_name='000.jpg')], 'captions_val_a.json', more)
    assert got.table.captions.tolist() == [['a 1', 'a 1']]
    assert got.skipped.counts() == {SECOND: 1, UNLISTED: 1, 'image without a caption': 1}


def test_images_of_a_coco_file_without_a_file_are_not_taken_for_one(tmp_path):
    images = [dict(id=1, file_name='000.jpg'), dict(id=2), dict(id=3), dict(id=4, file_name='no.jpg')]
    got = two_images(tmp_path, [*images, dict(id=5, file_name='no.jpg')])
    gone = {UNLISTED: 2, 'caption of an image that is not there': 2, 'image without a caption': 1}
    assert got.skipped.counts() == gone


def test_nothing_found_says_what_was_looked_for(tmp_path):
    (tmp_path / 'x.jpg').write_bytes(image())
    (tmp_path / 'x.json').write_text('{broken')
    with pytest.raises(ValueError) as e:
        read_photos(tmp_path)
    for words in (
        '1 of them images',
        'captions_<split>.json',
        'captions.jsonl',
        '.tar',
        'caption file that is no JSON record',
    ):
        assert words in str(e.value)
    with pytest.raises(FileNotFoundError, match='CIS_DATA'):
        CaptionedImages('no-such-folder-here')


def test_one_unreadable_caption_file_beside_a_photo_is_skipped_and_counted(tmp_path):
    texts = {'a.txt': b'a cat', 'b.txt': 'a dog'.encode('utf-16'), 'c.json': '{"caption": "x"}'.encode('utf-16')}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).with_suffix('.jpg').write_bytes(image())
    found = read_photos(tmp_path)
    assert found.skipped.counts()['caption file that is no UTF-8'] == 2


def test_utf16_and_broken_gzip_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=f'{tmp_path}/a/captions.csv: is UTF-16'):
        read_photos(folder(tmp_path / 'a', 1, 'captions.csv', 'image,caption\n000.jpg,x\n'.encode('utf-16')))
    with pytest.raises(ValueError, match=f'{tmp_path}/b/captions.jsonl.gz: cannot be unpacked'):
        read_photos(folder(tmp_path / 'b', 1, 'captions.jsonl.gz', gzip.compress(b'{}' * 99)[:20]))


@pytest.mark.parametrize('more', ['"caption": "b"', '"size": NaN', '"id": 1e999', '"note": "\\ud800"'])
def test_a_record_with_a_name_twice_or_without_a_value_of_json_is_counted(tmp_path, more):
    lines = f'{{"image": "000.jpg", "caption": "a", {more}}}\n{{"image": "001.jpg", "caption": "c"}}\n'
    got = read_photos(folder(tmp_path / 'r', 2, 'captions.jsonl', lines))
    assert got.table.captions.tolist() == [['c']]
    assert got.skipped['line that is no JSON record'] == ['captions.jsonl, line 1']


# ---- rows of a table

CELL = 'line of a cell that has several: close the quote'


def table_of(tmp_path, text, name='captions.csv'):
    return read_photos(folder(tmp_path / 't', 6, name, text))


def rows(first=0):
    return [f'{i:03}.jpg,a {i}' for i in range(first, 6)]


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('head', [[], ['image,caption']])
@pytest.mark.parametrize('quote', [1, 3, 5])
def test_lines_behind_a_quote_that_is_not_closed_are_counted(tmp_path, quote, head, end):
    lines = rows()
    lines[quote] = lines[quote].replace(',', ',"')
    got = table_of(tmp_path, end.join([*head, *lines, '']))
    assert got.table.captions.tolist() == [[f'a {i}'] for i in range(quote)]
    assert got.skipped[CELL] == [f'captions.csv, line {n + len(head) + 1}' for n in range(quote, 6)]
    assert got.skipped['image without a caption'] == [f'{i:03}.jpg' for i in range(quote, 6)]


def test_a_quote_that_a_later_one_closes(tmp_path):
    got = table_of(tmp_path, '000.jpg,"a 0\n001.jpg,a 1"\n\n' + '\n'.join(rows(2)))
    assert got.table.key.tolist() == ['002', '003', '004', '005']
    assert got.skipped[CELL] == ['captions.csv, line 1', 'captions.csv, line 2']


def test_a_quote_that_is_not_closed_in_a_long_table(tmp_path):
    "The csv module gives up on a cell of 128 KiB; the lines until then are counted."
    long = ''.join(f'{i:06}.jpg,a {i}\n' for i in range(9000))
    got = table_of(tmp_path, '000.jpg,a 0\n001.jpg,"a 1\n' + long + rows(2)[0] + '\n')
    assert got.table.key.tolist() == ['000', '002']
    (unreadable,) = (why for why in got.skipped if why.startswith('unreadable line'))
    lost = got.skipped[unreadable] + got.skipped['caption of an image that is not there']
    assert len(lost) == 9001 and got.skipped[unreadable][0] == 'captions.csv, line 2'


def test_quoted_cells_of_one_line_and_lines_of_a_text_with_tabs_are_as_before(tmp_path):
    got = table_of(tmp_path, 'image,caption\n"000.jpg","a ""big"", red, dog"\n001.jpg,5" wide\n')
    assert got.table.captions.tolist() == [['a "big", red, dog'], ['5" wide']]
    got = read_photos(folder(tmp_path / 'tabs', 2, 'captions.txt', '000.jpg\t"a 0\n001.jpg\ta 1"\n'))
    assert got.table.captions.tolist() == [['"a 0'], ['a 1"']]


def test_a_caption_with_commas_is_whole_in_the_last_column_and_counted_in_another(tmp_path):
    got = table_of(tmp_path, 'split,image,caption\ntrain,000.jpg,a cat, in a box\n')
    assert got.table.captions.tolist() == [['a cat, in a box']]
    got = table_of(tmp_path, 'image,caption,split\n000.jpg,a cat, in a box,train\n001.jpg,a dog,train\n')
    assert got.table.captions.tolist() == [['a dog']]
    assert got.skipped['row with more cells than columns: quote its caption'] == ['captions.csv, line 2']


@pytest.mark.parametrize('head', ['image,caption,caption', 'image, Caption ,split,caption', 'image\tcaption\tcaption'])
def test_two_columns_of_one_name_are_refused(tmp_path, head):
    with pytest.raises(ValueError, match="captions.csv, line 1: 'caption' is the name of two columns; give each its"):
        table_of(tmp_path, f'{head}\n')


def test_columns_without_a_name_are_none(tmp_path):
    assert table_of(tmp_path, ',image,split,,caption\n0,000.jpg,val,,a 0\n').table.captions.tolist() == [['a 0']]


# ---- captions


def test_bad_captions_are_counted_by_reason(tmp_path):
    rows = [
        dict(image='000.jpg', captions=['good', '', None, 5, ['x'], '\udcff']),
        dict(image='001.jpg', caption='  '),
        dict(image=None, caption='lost'),
        dict(image=7, caption='lost'),
        dict(caption='lost'),
        dict(image='002.jpg', split='train', caption='a'),
        dict(image='002.jpg', split='test', caption='b'),
        dict(image='003.jpg', split=4, caption='fine'),
    ]
    lines = '\n'.join(json.dumps(row, ensure_ascii=False) for row in rows).encode('utf8', 'surrogateescape')
    got = read_photos(folder(tmp_path / 'd', 4, 'captions.jsonl', lines))
    assert got.skipped.counts() == {
        'empty caption': 2,
        'caption that is not text': 3,
        'caption that is not UTF-8': 1,
        'split that is not text': 1,
        'caption of an image that is not there': 3,
        'caption in a second split': 1,
        'image without a caption': 1,
    }
    assert list(got.table.key) == ['000', '002', '003']


@quick
@given(st.one_of(st.text(), st.none(), st.integers(), st.binary().map(lambda b: b.decode('utf8', 'surrogateescape'))))
def test_a_clean_caption_is_text_or_counted(caption):
    skipped = Skipped()
    out = clean_caption(caption, 'x', skipped)
    assert bool(out) != bool(skipped)
    out.encode()
    assert out == ' '.join(out.split())
    assert clean_caption(out, 'x', Skipped()) == out


@quick
@given(
    data=st.binary(max_size=300),
    name=st.sampled_from(
        [
            'captions.jsonl',
            'captions.csv',
            'captions.txt',
            '000.json',
            '000.txt',
            'captions_train2017.json',
            'captions.jsonl.gz',
        ]
    ),
)
def test_any_bytes_as_a_caption_file(tmp_path_factory, data, name):
    root = folder(tmp_path_factory.mktemp('fuzz'), 1, name, data)
    try:
        got = read_photos(root)
    except ValueError as e:
        assert str(e)
    else:
        assert all(c and c.encode() for cs in got.table.captions for c in cs)


value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(
            st.sampled_from(['image', 'captions', 'caption', 'split', 'id', 'file_name', 'image_id']), v, max_size=4
        )
    ),
    max_leaves=12,
)


@quick
@given(record=value, images=st.lists(value, max_size=3), notes=st.lists(value, max_size=3))
def test_any_json_as_a_record(tmp_path_factory, record, images, notes):
    root = tmp_path_factory.mktemp('json')
    for k, (name, content) in enumerate(
        [
            ('captions.jsonl', record),
            ('000.json', record),
            ('captions_val2017.json', dict(images=images, annotations=notes)),
        ]
    ):
        try:
            read_photos(folder(root / str(k), 1, name, json.dumps(content)))
        except ValueError as e:
            assert str(root / str(k)) in str(e)


def test_key_collisions_and_ambiguous_names(tmp_path):
    for d in 'ab':
        (tmp_path / d).mkdir()
        (tmp_path / d / '1.jpg').write_bytes(image(1))
    (tmp_path / '2.jpg').write_bytes(image(2))
    (tmp_path / '2.png').write_bytes(image(3, fmt='PNG'))
    (tmp_path / 'captions.csv').write_text('image,caption\n1.jpg,which one?\na/1.jpg,this one\n2.jpg,x\n2.png,y\n')
    got = read_photos(tmp_path)
    assert list(got.table.key) == ['2', 'a/1']
    assert got.skipped.counts() == {
        'caption of an image that is not there': 1,
        'image without a caption': 1,
        'second image of the same key': 1,
    }


def test_the_same_key_in_two_tars(tmp_path):
    write_tar(tmp_path / 'a.tar', side_by_side(3))
    write_tar(tmp_path / 'b.tar', side_by_side(3, 2))
    got = read_photos(tmp_path)
    assert len(got.table) == 5 and got.skipped.counts() == {'second file of the same name': 2}


# ---- linked and closed folders


def beside(folder, name, caption):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{name}.jpg').write_bytes(image(len(caption)))
    (folder / f'{name}.txt').write_text(caption)


def test_linked_folders_are_read_once(tmp_path):
    root, more = tmp_path / 'root', tmp_path / 'more'
    beside(root, 'a', 'a cat')
    beside(root / 'z', 'c', 'a cow')
    beside(more / 'deep', 'b', 'a dog')
    (root / 'link').symlink_to(more)
    (more / 'back').symlink_to(root)  # a loop
    (root / '1').symlink_to('z')  # a link that is met before its folder
    got = read_photos(root)
    assert list(got.table.key) == ['a', 'link/deep/b', 'z/c']
    assert got.skipped == {'folder that is listed under another name': ['1', 'link/back']}
    (root / 'link').unlink()
    (root / 'link').symlink_to(tmp_path / 'nowhere')
    got = read_photos(root)
    assert list(got.table.key) == ['a', 'z/c'] and got.skipped['neither a file nor a folder'] == ['link']


def test_files_behind_a_link_are_in_the_key_of_a_folder(tmp_path):
    beside(tmp_path / 'root', 'a', 'a cat')
    beside(tmp_path / 'more', 'b', 'a dog')
    alone = folder_key(tmp_path / 'root')
    (tmp_path / 'root' / 'link').symlink_to(tmp_path / 'more')
    linked = folder_key(tmp_path / 'root')
    beside(tmp_path / 'more', 'b', 'a pig')
    assert len({alone, linked, folder_key(tmp_path / 'root')}) == 3


def test_reading_of_many_files_goes_on_where_it_was_stopped(tmp_path, store, monkeypatch):
    paths = {f'{i}.txt': tmp_path / 'files' / f'{i}.txt' for i in range(6)}
    (tmp_path / 'files').mkdir()
    for name, path in paths.items():
        path.write_text(name)
        os.utime(path, (1e9, 1e9))
    read, whole = [], image_folders.path_hash

    def stopped_at_the_last(path):
        if path.name == '5.txt':
            raise KeyboardInterrupt
        return whole(path)

    monkeypatch.setattr(image_folders, 'path_hash', stopped_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        image_folders.contents_key(paths, 2)
    monkeypatch.setattr(image_folders, 'path_hash', lambda path: read.append(path.name) or whole(path))
    key = image_folders.contents_key(paths, 2)
    assert sorted(read) == ['4.txt', '5.txt'] and image_folders.contents_key(paths, 2) == key and len(read) == 2


def test_a_folder_without_permission_is_counted(tmp_path, monkeypatch):
    beside(tmp_path, 'a', 'a cat')
    beside(tmp_path / 'shut', 'b', 'a dog')
    monkeypatch.setattr(os, 'scandir', refuse('shut'))
    got = read_photos(tmp_path)
    assert list(got.table.key) == ['a']
    assert got.skipped == {'folder that cannot be read (Permission denied)': ['shut']}


# ---- tars


def test_odd_tar_members_stay_out(tmp_path):
    with tarfile.open(tmp_path / 'x.tar', 'w') as t:
        for name, kind, link in [
            ('/abs.jpg', tarfile.REGTYPE, ''),
            ('../up.jpg', tarfile.REGTYPE, ''),
            ('a/../../up.jpg', tarfile.REGTYPE, ''),
            ('C:\\x.jpg', tarfile.REGTYPE, ''),
            ('..\\win.jpg', tarfile.REGTYPE, ''),
            ('link.jpg', tarfile.SYMTYPE, '/etc/passwd'),
            ('hard.jpg', tarfile.LNKTYPE, '000.jpg'),
            ('pipe.jpg', tarfile.FIFOTYPE, ''),
            ('dir', tarfile.DIRTYPE, ''),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            t.addfile(info)
        for name, data in side_by_side(2):
            info = tarfile.TarInfo('./' + name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    got = read_photos(tmp_path)
    assert list(got.table.key) == ['000', '001']
    assert got.skipped.counts() == {'tar member named outside its folder': 5, 'tar member that is not a plain file': 3}


def test_a_tar_cut_anywhere_loses_only_what_is_gone_and_says_so(tmp_path):
    write_tar(tmp_path / 'whole.tar', side_by_side(6))
    whole, root = (tmp_path / 'whole.tar').read_bytes(), tmp_path / 'cut'
    root.mkdir()
    seen = []
    end = max(p.start + p.size for _, p in tar_members(tmp_path / 'whole.tar', Skipped()))
    for at in random.Random(0).sample(range(end), 40) + [0, 512, end]:
        (root / 'x.tar').write_bytes(whole[:at])
        try:
            got = read_photos(root)
        except ValueError as e:
            assert 'tar cut short or damaged' in str(e)
            continue
        seen.append(len(got.table))
        assert got.skipped.counts()['tar cut short or damaged'] == 1
        assert list(got.table.key) == [f'{i:03}' for i in range(len(got.table))]
    assert max(seen) == 6 and min(seen) <= 2


@quick
@given(st.data())
@pytest.mark.e2e
def test_a_tar_with_flipped_bytes_never_crashes(tmp_path_factory, data):
    root = tmp_path_factory.mktemp('flip')
    write_tar(root / 'x.tar', side_by_side(3))
    raw = bytearray((root / 'x.tar').read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (root / 'x.tar').write_bytes(raw)
    try:
        CaptionedImages(root, 'train', 16, workers=1)
    except ValueError as e:
        assert str(e)


def test_a_compressed_tar_is_named_in_the_error(tmp_path):
    write_tar(tmp_path / 'x.tar', side_by_side(2))
    (tmp_path / 'y').mkdir()
    (tmp_path / 'y' / 'x.tar').write_bytes(gzip.compress((tmp_path / 'x.tar').read_bytes()))
    with pytest.raises(ValueError, match='have to be unpacked first'):
        read_photos(tmp_path / 'y')


# ---- splits


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(['train', 'dev', 'validation', 'Test', '', ' val ']), min_size=1, max_size=20))
def test_splits_are_known_names(names):
    import pandas as pd

    got = with_splits(pd.DataFrame(dict(key=[f'k{i}' for i in range(len(names))], split=names))).split
    assert set(got) <= {'train', 'val', 'test', 'unassigned'}


# ---- real data


@needs_data('flickr8k')
def test_flickr8k_is_read_whole():
    got = read_photos(flickr)
    assert got.layout == 'image and caption file side by side' and not got.skipped
    assert got.table.split.value_counts().to_dict() == dict(train=6000, val=1000, test=1000, unassigned=91)
    assert got.table.captions.map(len).sum() == 40455
    one = got.table[got.table.key == '1000268201_693b08cb0e'].iloc[0]
    assert one.captions[1] == 'A girl going into a wooden building .' and open_image(
        Place(one.file, one.start, one['size']).read()
    ).size == (144, 144)


def test_a_file_name_that_is_not_utf8_is_counted_and_stops_nothing(tmp_path):
    root = folder(
        tmp_path / 'r', 3, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,a {i}\n' for i in range(3))
    )
    (root / os.fsdecode(b'caf\xe9.jpg')).write_bytes(image(1))
    got = read_photos(root)
    assert len(got.table) == 3 and got.skipped.counts() == {'file name that is not UTF-8': 1}
    assert len(folder_key(root)) == 16
