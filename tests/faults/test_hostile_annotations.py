"Annotation files of all data sets, each changed in every way: a clear error with the file, or handled and counted."

import gzip
import json

import pytest
from annotations import coco_root, random_instances, random_scenes, vaw_root
from hostile import attack, json_changes, text_changes, gz_changes, value_changes
from lrvsf_files import Hand

from cis_nb.benchmarks.circo import circo_image_names, check_circo_submission, read_circo
from cis_nb.benchmarks.cirr import check_cirr_submission, load_cirr, read_cirr
from cis_nb.benchmarks.coco_captions import (
    CAPTION_FILES,
    captions_and_truths,
    read_coco_captions,
    read_ground_truth,
    read_split_ids,
)
from cis_nb.benchmarks.domain_conversion import read_lists
from cis_nb.benchmarks.fashioniq import read_fashioniq
from cis_nb.benchmarks.genecis import read_templates, templates_file
from cis_nb.benchmarks.genecis_construction import Rules, build_genecis, read_panoptic, read_vaw
from cis_nb.benchmarks.lrvsf import lrvsf_task, read_lrvsf
from cis_nb.benchmarks.lrvsf_search import bootstrap_of, read_bootstrap
from cis_nb.benchmarks.mit_states import for_test, read_states
from cis_nb.benchmarks.object_composition import read_instances
from cis_nb.methods.task_specific import attribute_types

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures('store')]
JSON = (json_changes, value_changes, text_changes)
# another id, name or text is valid where nothing else in the file depends on it; where one may be empty, too
TEXT, NUMBER = '(empty text|text zzz)', '(zero|minus one|largest integer)'


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding='utf-8')
    return path


# an audit counts empty conditions, and a task of which none could be built has no template
OTHER_TEMPLATE = rf'empty root|condition: {TEXT}|image_id: (text zzz|zero|largest integer)'


def test_genecis(tmp_path):
    coco_root(tmp_path, random_scenes(5))
    vaw_root(tmp_path, random_instances(5))
    built = build_genecis(tmp_path, n=2, rules=Rules(6, 4), seed=1)
    for task in ('focus_attribute', 'change_object'):
        path = write(tmp_path / 'genecis' / f'{task}.json', read_templates(templates_file(built, task)))
        read = lambda: (read_templates(path), {})  # noqa: E731
        assert attack('GeneCIS templates', path, read, JSON, valid_too=OTHER_TEMPLATE) == []
    packed = path.with_suffix('.json.gz')
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert attack('GeneCIS templates', packed, lambda: (read_templates(packed), {}), [gz_changes]) == []


def test_panoptic(tmp_path):
    coco_root(tmp_path, random_scenes(5, n=6))
    path = tmp_path / 'annotations/panoptic_val2017.json'

    def read():
        found = read_panoptic(tmp_path)
        return found, found.notes

    free = r'categories\.0\.name: text zzz'
    assert attack('COCO panoptic', path, read, JSON, names=['panoptic_val2017'], valid_too=free) == []


def number_changes(data: bytes):
    "(name, bytes): numbers of the right type that cannot be."
    for name, value in (('zero', 0), ('negative', -5), ('too large', 10**9)):
        doc = json.loads(data)
        doc['annotations'][0]['segments_info'][0]['area'] = value
        yield f'area {name}', json.dumps(doc).encode()
    for name, value in (('zero', 0), ('negative', -640), ('too small', 1)):
        doc = json.loads(data)
        doc['images'][0]['width'] = value
        yield f'width {name}', json.dumps(doc).encode()
    for field in ('images', 'annotations', 'categories'):
        doc = json.loads(data)
        doc[field].append(doc[field][0])
        yield f'{field}: the first one twice', json.dumps(doc).encode()


def label_changes(data: bytes):
    "(name, bytes): labels that do not fit together."

    def changed(change):
        doc = json.loads(data)
        change(doc, doc['annotations'][0]['segments_info'])
        return json.dumps(doc).encode()

    yield 'a segment id twice', changed(lambda doc, found: found[1].update(id=found[0]['id']))
    yield 'a segment twice', changed(lambda doc, found: found.append(dict(found[0])))
    yield 'segments larger than their image', changed(lambda doc, found: [s.update(area=5001) for s in found])
    yield 'a segment 0', changed(lambda doc, found: found[0].update(id=0))
    for name, box in dict(
        negative=[-5, 0, 5, 5], empty=[0, 0, 0, 5], outside=[10**6, 0, 5, 5], wide=[1, 0, 100, 5]
    ).items():
        yield f'bbox {name}', changed(lambda doc, found, box=box: found[0].update(bbox=box))
    for number in (7, -1):
        yield f'isthing {number}', changed(lambda doc, found, n=number: doc['categories'][0].update(isthing=n))
        yield f'iscrowd {number}', changed(lambda doc, found, n=number: found[0].update(iscrowd=n))
    for name in ('c1', 'c1-other'):
        yield f'a category {name} twice', changed(lambda doc, found, n=name: doc['categories'][0].update(name=n))
    mask = json.loads(data)['annotations'][0]['file_name']
    yield 'a mask twice', changed(lambda doc, found: doc['annotations'][1].update(file_name=mask))
    yield (
        'labels without segments of no image',
        changed(
            lambda doc, found: doc['annotations'].append(dict(image_id=10**6, file_name='x.png', segments_info=[]))
        ),
    )


def test_panoptic_numbers(tmp_path):
    coco_root(tmp_path, random_scenes(5, n=6))
    path = tmp_path / 'annotations/panoptic_val2017.json'

    def read():
        found = read_panoptic(tmp_path)
        return found, found.notes

    assert attack('COCO panoptic', path, read, [number_changes, label_changes], places=False) == []


KEYS = r'\S+: missing$'  # keys of an object that are data, such as names: without one the file holds less
TYPES = rf'{KEYS}|: empty list|\.0: text zzz'  # a type may have no attribute
LABELS = r'(image_id|object_name): text zzz|_attributes: empty list'  # an object may have no label


def test_vaw(tmp_path):
    vaw_root(tmp_path, random_instances(5, n=30))

    def read():
        found = read_vaw(tmp_path)
        return (found.table, found.labels, found.types), found.notes

    for name in ('val', 'attribute_types'):
        free = TYPES if name == 'attribute_types' else LABELS
        assert attack('VAW', tmp_path / f'vaw/{name}.json', read, JSON, valid_too=free) == []
    path = tmp_path / 'vaw/attribute_types.json'
    assert attack('VAW', path, lambda: (attribute_types(tmp_path), {}), JSON, valid_too=TYPES) == []


def cirr_root(root):
    names = [f'dev-{i}-0-img0' for i in range(6)]
    entry = dict(
        pairid=7,
        reference=names[0],
        target_hard=names[1],
        target_soft={names[1]: 1.0},
        caption='is red',
        img_set=dict(id=1, members=names, reference_rank=0, target_rank=1),
    )
    other = dict(entry, pairid=8, reference=names[2], target_hard=names[3], target_soft={names[3]: 1.0})
    for split in ('val', 'test1'):
        write(root / f'cirr/captions/cap.rc2.{split}.json', [entry, other])
        write(root / f'cirr/image_splits/split.rc2.{split}.json', {n: f'./dev/{n}.png' for n in names})
    write(root / 'cirr/targets.test1.json', {'7': names[1], '8': names[3]})
    return root, names


def test_cirr(tmp_path):
    root, names = cirr_root(tmp_path)
    for split, files in dict(val=('captions', 'image_splits'), test1=('captions', 'image_splits', 'targets')).items():
        for file in files:
            prefix = dict(captions='cap.rc2.', image_splits='split.rc2.', targets='').get(file)
            path = root / 'cirr' / (f'targets.{split}.json' if file == 'targets' else f'{file}/{prefix}{split}.json')

            def read():
                found = read_cirr(root, split)
                return (found.entries, found.files, found.targets), {}

            files = ['cap.rc2', 'split.rc2', 'targets.test1']
            free = unread(split) + r'|targets\.test1\.json, gone'  # without the file the targets are secret
            assert attack('CIRR', path, read, JSON, names=files, valid_too=free) == []


def pair_changes(data: bytes):
    "(name, bytes): an entry or an image that is another one."
    doc = json.loads(data)
    if isinstance(doc, dict):
        first, second, *rest = doc
        yield 'two names of one file', json.dumps(doc | {second: doc[first]}).encode()
        yield 'one file in two spellings', json.dumps(doc | {second: doc[first].removeprefix('./')}).encode()
        return
    for name, change in dict(
        pairid=dict(pairid=doc[1]['pairid']),
        condition=dict(caption=' '),
        target=dict(target_hard=doc[0]['reference']),
    ).items():
        yield f'another {name}', json.dumps([doc[0] | change, *doc[1:]]).encode()


def test_cirr_entries(tmp_path):
    root, _ = cirr_root(tmp_path)

    def read():
        task = load_cirr(root, images=False)
        return task.queries.drop(columns='condition'), task.protocol.extra

    for file in ('captions/cap', 'image_splits/split'):
        assert attack('CIRR', root / f'cirr/{file}.rc2.val.json', read, [pair_changes], places=False) == []


def unread(split: str) -> str:
    "Fields that no number depends on: they are kept as they are in the file; and other pairs, sentences and files."
    hard = r'|target_hard' if split == 'test1' else ''
    other = rf'pairid: {NUMBER}|caption: {TEXT}|img\d: text zzz'
    return rf'(img_set\.(id|reference_rank|target_rank)|target_soft\S*{hard}): |{other}'


def test_cirr_submission(tmp_path):
    root, names = cirr_root(tmp_path)
    c = read_cirr(root, 'val')
    path = write(
        tmp_path / 'lists.json',
        dict(version='rc2', metric='recall_subset', **{'7': names[1:4], '8': names[:2] + names[4:5]}),
    )
    assert attack('submissions', path, lambda: (check_cirr_submission(path, c), {}), JSON) == []


def circo_root(root):
    entry = dict(
        id=0,
        reference_img_id=10,
        target_img_id=11,
        gt_img_ids=[11, 12],
        relative_caption='is red',
        shared_concept='a dog',
        semantic_aspects=['addition'],
    )
    write(root / 'circo/annotations/val.json', [entry, dict(entry, id=1)])
    secret = ('target_img_id', 'gt_img_ids', 'semantic_aspects')
    write(root / 'circo/annotations/test.json', [{k: v for k, v in entry.items() if k not in secret}])
    write(root / 'circo/annotations/targets.test.json', {'0': [11, 12]})
    images = [dict(id=i, file_name=f'{i:012d}.jpg') for i in range(10, 70)]
    write(root / 'circo/annotations/image_info_unlabeled2017.json', dict(images=images))
    return root


def test_circo(tmp_path):
    root = circo_root(tmp_path)

    def read():
        found = read_circo(root, 'val')
        return (found.entries, found.targets, circo_image_names(found)), {}

    other = rf'id: {NUMBER}|(relative_caption|shared_concept): {TEXT}|semantic_aspects: empty list|file_name: text zzz'
    for name in ('val', 'image_info_unlabeled2017'):
        file = root / f'circo/annotations/{name}.json'
        assert attack('CIRCO', file, read, JSON, names=['image_info_unlabeled2017'], valid_too=other) == []
    read = lambda: ((found := read_circo(root, 'test')).targets, circo_image_names(found))  # noqa: E731
    for ids in ([11, 11], [10, 11], [-3], [99999]):
        path = write(root / 'circo/annotations/targets.test.json', {'0': ids})
        with pytest.raises(ValueError, match=r'targets\.test\.json, query 0: |image 99999 of test query 0 is not in'):
            read()
    write(path, {'0': [11, 12]})
    free = r'targets\.test\.json, gone'  # without the file the targets are secret
    assert attack('CIRCO', path, lambda: (read(), {}), JSON, names=['image_info_unlabeled2017'], valid_too=free) == []
    path = write(tmp_path / 'lists.json', {str(q): list(range(11, 61)) for q in range(2)})
    c, another = read_circo(root, 'val'), r'\.0: (zero|largest)'  # image
    read = lambda: (check_circo_submission(path, c), {})  # noqa: E731
    assert attack('submissions', path, read, JSON, valid_too=another) == []


def test_fashioniq(tmp_path):
    folder = tmp_path / 'fashioniq'
    entry = dict(candidate='B0', target='B1', captions=['is red', 'is long'])
    write(folder / 'captions/cap.dress.val.json', [entry, dict(entry, candidate='B2')])
    write(folder / 'image_splits/split.dress.val.json', ['B0', 'B1', 'B2'])

    def read():
        found = read_fashioniq(tmp_path, 'dress', 'val')
        return (found.entries, found.names, found.targets), {}

    for path in folder.glob('*/*.json'):
        assert attack('FashionIQ', path, read, JSON, valid_too=rf'captions\.0: {TEXT}') == []
    write(folder / 'captions/cap.dress.test.json', [dict(candidate='B0', captions=['is red', 'is long'])])
    write(folder / 'image_splits/split.dress.test.json', ['B0', 'B1', 'B2'])
    path = write(folder / 'captions/targets.dress.test.json', ['B1'])
    read = lambda: (read_fashioniq(tmp_path, 'dress', 'test').targets, {})  # noqa: E731
    # without the file the targets are secret
    assert attack('FashionIQ', path, read, JSON, valid_too=r'targets\.dress\.test\.json, gone') == []


def test_coco_captions(tmp_path):
    images = [dict(id=i, file_name=f'{i}.jpg') for i in (1, 2)]
    captions = [dict(id=10 * i, image_id=i, caption=f'image {i}') for i in (1, 2)]
    path = write(tmp_path / 'captions_val2014.json', dict(images=images, annotations=captions))
    other = rf'annotations\.0\.id: {NUMBER}|(file_name|caption): text zzz'
    assert attack('COCO captions', path, lambda: (read_coco_captions(path), {}), JSON, valid_too=other) == []
    c = read_coco_captions(path)
    for way, found in dict(image_to_caption={'1': [10], '2': [20]}, caption_to_image={'10': [1], '20': [2]}).items():
        write(tmp_path / f'cxc_{way}.json', found)
    for way in ('image_to_caption', 'caption_to_image'):
        file = tmp_path / f'cxc_{way}.json'
        read = lambda: (read_ground_truth(tmp_path, 'cxc', c), {})  # noqa: E731
        assert attack('COCO captions', file, read, JSON, valid_too=KEYS) == []
    path = write(
        tmp_path / 'dataset_coco.json', dict(images=[dict(cocoid=3, split='test'), dict(cocoid=4, split='val')])
    )
    assert attack('COCO captions', path, lambda: (read_split_ids(path), {}), JSON, valid_too=rf'cocoid: {NUMBER}') == []


def test_files_beside_coco_captions(tmp_path):
    "Captions and split as a benchmark finds them by their names."
    images = [dict(id=i, file_name=f'{i}.jpg') for i in (1, 2)]
    captions = [dict(id=10 * i, image_id=i, caption=f'image {i}') for i in (1, 2)]
    notes = tmp_path / 'annotations'
    other = write(notes / CAPTION_FILES[0], dict(images=images, annotations=captions))
    split = write(notes / 'dataset_coco.json', dict(images=[dict(cocoid=2, split='test')]))

    def read():
        c, truths, _ = captions_and_truths(tmp_path)
        return (c.images, [t.name for t in truths]), {}

    assert attack('COCO captions', other, read, []) == []
    assert attack('COCO captions', split, read, [], valid_too='gone') == []


def test_coco_captions_twice(tmp_path):
    "An id or a file name that is used twice."

    def changes(data):
        for field, key in (('images', 'id'), ('images', 'file_name'), ('annotations', 'id')):
            doc = json.loads(data)
            doc[field][1][key] = doc[field][0][key]
            yield f'{field}.{key} twice', json.dumps(doc).encode()

    images = [dict(id=i, file_name=f'{i}.jpg') for i in (1, 2)]
    captions = [dict(id=10 * i, image_id=i, caption=f'image {i}') for i in (1, 2)]
    path = write(tmp_path / 'captions_val2014.json', dict(images=images, annotations=captions))
    assert attack('COCO captions', path, lambda: (read_coco_captions(path), {}), [changes], places=False) == []


def test_instances(tmp_path):
    doc = dict(
        images=[dict(id=1, file_name='1.jpg', width=20, height=10)],
        annotations=[
            dict(
                id=1,
                image_id=1,
                category_id=3,
                bbox=[1.5, 1.0, 5.0, 5.0],
                iscrowd=0,
                segmentation=[[1.0, 1.0, 5.0, 1.0, 5.0, 5.0]],
            ),
            dict(
                id=2,
                image_id=1,
                category_id=3,
                bbox=[1.0, 1.0, 5.0, 5.0],
                iscrowd=1,
                segmentation=dict(counts=[100, 100], size=[10, 20]),
            ),
        ],
        categories=[dict(id=3, name='dog')],
    )
    path = write(tmp_path / 'coco/annotations/instances_val2017.json', doc)

    def read():
        found = read_instances(tmp_path, 'val')
        return (found.images, found.objects, found.names), found.left_out.counts()

    other = rf'annotations\.0\.id: {NUMBER}|iscrowd: zero|(file_name|categories\.0\.name): text zzz'
    assert attack('COCO instances', path, read, JSON, valid_too=other) == []
    doc['annotations'].reverse()
    write(path, doc)
    assert attack('COCO instances', path, read, JSON, valid_too=other) == []


SHORTER = '(cut in half|zeros in front)'  # a list with fewer or other lines is a list, too


def number_texts(data: bytes):
    "(name, bytes): numbers that are too long, or written in other digits."
    line = data.decode().split('\n')[0]
    old = line.split()[0 if line[0].isdigit() else -1]
    for name, new in (('5,000 digits', '1' * 5000), ('an Arabic digit', '\u0661'), ('a superscript', '\u00b2')):
        yield name, data.replace(old.encode(), new.encode(), 1)


def test_mit_states(tmp_path):
    for pair in ('broken camera', 'old camera', 'wet dog', 'dry dog'):
        (tmp_path / 'mit-states/images' / pair).mkdir(parents=True)
        (tmp_path / 'mit-states/images' / pair / '0.jpg').touch()
    path = write(tmp_path / 'mit-states/test_nouns.txt', 'camera\ndog\n')

    def read():
        found = for_test(read_states(tmp_path))
        return found.table, found.left_out

    # without a list of nouns, the official 49, of which one is here
    assert attack('MIT-States', path, read, [text_changes], valid_too=f'gone|{SHORTER}') == []


def test_domain_lists(tmp_path):
    folder = tmp_path / 'imgnet'
    write(folder / 'imgnet_real_query.txt', 'imgnet/real/a.jpg 1\nimgnet/real/b.jpg 2\n')
    write(folder / 'imgnet_targets.txt', 'imagenet-r/c.jpg 1\nimagenet-r/d.jpg 1002\nimgnet/real/a.jpg 6001\n')
    write(folder / 'domains.txt', '0 cartoon\n1 origami\n6 real\n')

    def read():
        found = read_lists(tmp_path)
        return (found.table, found.queries, found.real), found.left_out

    for path in folder.iterdir():
        names = {p.name for p in folder.iterdir()}
        # without a list of names, the official ones
        free = f'domains.txt, gone|{SHORTER}'
        changes = [text_changes, number_texts]
        assert attack('domain lists', path, read, changes, names=names, valid_too=free) == []


def test_bootstrap(tmp_path):
    path = write(
        tmp_path / 'bootstrap.json', dict(test_subsets=[['a', 'b'], ['b', 'c']], dist_2_subsets=[['0', 1], ['2', '3']])
    )
    assert attack('LRVS-F', path, lambda: (read_bootstrap(path), {}), JSON, valid_too=rf'{KEYS}|\.0: {TEXT}') == []


def test_bootstrap_of_a_data_set(tmp_path):
    root = Hand(12, 30).write(tmp_path / 'lrvsf')
    task = lrvsf_task(read_lrvsf(root))
    ids = task.queries.query_id.tolist()
    path = write(root / 'bootstrap_IDs.json', dict(test_subsets=[ids[:3], ids[2:5]]))
    assert attack('LRVS-F', path, lambda: (bootstrap_of(root, task), {}), [], valid_too='gone') == []
