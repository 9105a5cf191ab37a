"Readers of photographs with captions: layouts, faults, hostile input, packing."
import csv, gzip, io, json, os, random, signal, subprocess, sys, tarfile, textwrap, time
from pathlib import Path
import numpy as np, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from torchvision import transforms as T
from cis_nb.data import PhotoPairs, open_photo, pack, packed, square
from cis_nb.readers import Place, Skipped, clean_caption, read_photos, tar_members, with_splits

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
flickr = Path(os.environ.get('CIS_DATA', '/nowhere'))/'flickr8k'
coco_mini = Path(os.environ.get('CIS_DATA', '/nowhere'))/'coco_mini'

@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path/'store'))

def image(i=0, size=(40, 30), mode='RGB', fmt='JPEG'):
    "The bytes of a small picture that depends on `i`."
    pixels = np.random.default_rng(i).integers(0, 255, (size[1]//5+1, size[0]//5+1, 3), dtype=np.uint8)
    buf = io.BytesIO(); Image.fromarray(pixels).resize(size).convert(mode).save(buf, fmt)
    return buf.getvalue()

def write_tar(path, files):
    with tarfile.open(path, 'w') as t:
        for name, data in files:
            info = tarfile.TarInfo(name); info.size = len(data); t.addfile(info, io.BytesIO(data))

def side_by_side(n, start=0):
    return [f for i in range(start, start+n) for f in [(f'{i:03}.jpg', image(i)), (f'{i:03}.json', json.dumps(dict(split='train' if i%3 else 'test', captions=[f'caption {i}', f'number {i}'])).encode())]]

def folder(root, n, table, text):
    root.mkdir(parents=True, exist_ok=True)
    for i in range(n): (root/f'{i:03}.jpg').write_bytes(image(i))
    (root/table).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root

# ---- layouts

def test_every_table_spelling_reads_the_same(tmp_path):
    want = [(f'{i:03}', [f'a thing, number {i}', f'"{i}" again']) for i in range(4)]
    lines = [(f'{i:03}.jpg', c) for i in range(4) for c in want[i][1]]
    buf = io.StringIO(); csv.writer(buf).writerows([('image', 'caption'), *lines])
    as_json = '\n'.join(json.dumps(dict(image=f'{i:03}.jpg', captions=c)) for i,(_, c) in enumerate(want))
    spellings = {'captions.csv': buf.getvalue(), 'captions.txt': '\n'.join(f'{n}#{k%2}\t{c}' for k,(n,c) in enumerate(lines)),
                 'captions.jsonl': as_json, 'captions.jsonl.gz': gzip.compress(as_json.encode()), 'metadata.csv': buf.getvalue().replace('image,caption', 'file_name,text'),
                 'captions.csv.bom': '\ufeff'+buf.getvalue(), 'captions.csv.crlf': buf.getvalue().replace('\n', '\r\n')}
    for k,(name, text) in enumerate(spellings.items()):
        got = read_photos(folder(tmp_path/str(k), 4, name.removesuffix('.bom').removesuffix('.crlf'), text))
        assert [(r.key, r.captions) for r in got.table.itertuples()] == want, name
        assert not got.skipped, name

def test_side_by_side_in_folders_and_subfolders(tmp_path):
    (tmp_path/'a').mkdir(); (tmp_path/'b').mkdir()
    for d in 'ab':
        (tmp_path/d/'1.JPG').write_bytes(image(1)); (tmp_path/d/'1.txt').write_text('first\n\nsecond\n')
    got = read_photos(tmp_path)
    assert list(got.table.key)==['a/1', 'b/1'] and got.table.captions[0]==['first', 'second'] and got.skipped.counts()=={'empty caption': 2}

def test_coco_with_annotations_folder_and_karpathy_like_names(tmp_path):
    (tmp_path/'annotations').mkdir(); (tmp_path/'val2017').mkdir()
    for i in (3, 4): (tmp_path/'val2017'/f'{i:012}.jpg').write_bytes(image(i))
    coco = dict(images=[dict(id=i, file_name=f'{i:012}.jpg') for i in (3, 4, 5)], annotations=[dict(id=i, image_id=i, caption=f'c{i}') for i in (3, 4, 5, 9)])
    (tmp_path/'annotations'/'captions_val2017.json').write_text(json.dumps(coco))
    got = read_photos(tmp_path)
    assert got.layout=='COCO captions' and len(got.table)==2
    assert got.skipped.counts()=={'caption of an image that is not listed': 1, 'caption of a photo that is not there': 1}

@pytest.mark.parametrize('content, message', [('{"images": 3, "annotations": []}', "field 'images'"), ('[1]', "field 'images'"), ('{', "field 'images'"), ('{"images": []}', "field 'annotations'")])
def test_a_broken_coco_file_is_an_error_with_file_and_field(tmp_path, content, message):
    folder(tmp_path/'c', 1, 'captions_val2017.json', content)
    with pytest.raises(ValueError, match='captions_val2017.json') as e: read_photos(tmp_path/'c')
    assert message in str(e.value)

def test_nothing_found_says_what_was_looked_for(tmp_path):
    (tmp_path/'x.jpg').write_bytes(image()); (tmp_path/'x.json').write_text('{broken')
    with pytest.raises(ValueError) as e: read_photos(tmp_path)
    for words in ('1 of them images', 'captions_<split>.json', 'captions.jsonl', '.tar', 'caption file that is no JSON record'): assert words in str(e.value)
    with pytest.raises(FileNotFoundError, match='CIS_DATA'): PhotoPairs('no-such-folder-here')

def test_utf16_and_broken_gzip_name_the_file(tmp_path):
    with pytest.raises(ValueError, match='captions.csv: is UTF-16'): read_photos(folder(tmp_path/'a', 1, 'captions.csv', 'image,caption\n000.jpg,x\n'.encode('utf-16')))
    with pytest.raises(ValueError, match='captions.jsonl.gz: cannot be unpacked'): read_photos(folder(tmp_path/'b', 1, 'captions.jsonl.gz', gzip.compress(b'{}'*99)[:20]))

# ---- captions

def test_bad_captions_are_counted_by_reason(tmp_path):
    rows = [dict(image='000.jpg', captions=['good', '', None, 5, ['x'], '\ud800']), dict(image='001.jpg', caption='  '), dict(image=None, caption='lost'), dict(image=7, caption='lost'), dict(caption='lost'),
            dict(image='002.jpg', split='train', caption='a'), dict(image='002.jpg', split='test', caption='b'), dict(image='003.jpg', split=4, caption='fine')]
    got = read_photos(folder(tmp_path/'d', 4, 'captions.jsonl', '\n'.join(map(json.dumps, rows))))
    assert got.skipped.counts()=={'empty caption': 2, 'caption that is not text': 3, 'caption that is not UTF-8': 1, 'caption of a photo that is not there': 3,
                                  'caption in a second split': 1, 'photo without a caption': 1}
    assert list(got.table.key)==['000', '002', '003']

@quick
@given(st.one_of(st.text(), st.none(), st.integers(), st.binary().map(lambda b: b.decode('utf8', 'surrogateescape'))))
def test_a_clean_caption_is_text_or_counted(caption):
    skipped = Skipped()
    out = clean_caption(caption, 'x', skipped)
    assert bool(out) != bool(skipped)
    out.encode(); assert out==' '.join(out.split())
    assert clean_caption(out, 'x', Skipped())==out

@quick
@given(data=st.binary(max_size=300), name=st.sampled_from(['captions.jsonl', 'captions.csv', 'captions.txt', '000.json', '000.txt', 'captions_train2017.json', 'captions.jsonl.gz']))
def test_any_bytes_as_a_caption_file(tmp_path_factory, data, name):
    root = folder(tmp_path_factory.mktemp('fuzz'), 1, name, data)
    try: got = read_photos(root)
    except ValueError as e: assert str(e)
    else: assert all(c and c.encode() for cs in got.table.captions for c in cs)

value = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(['image', 'captions', 'caption', 'split', 'id', 'file_name', 'image_id']), v, max_size=4), max_leaves=12)

@quick
@given(record=value, images=st.lists(value, max_size=3), notes=st.lists(value, max_size=3))
def test_any_json_as_a_record(tmp_path_factory, record, images, notes):
    root = tmp_path_factory.mktemp('json')
    for k,(name, content) in enumerate([('captions.jsonl', record), ('000.json', record), ('captions_val2017.json', dict(images=images, annotations=notes))]):
        try: read_photos(folder(root/str(k), 1, name, json.dumps(content)))
        except ValueError as e: assert str(root/str(k)) in str(e)

def test_key_collisions_and_ambiguous_names(tmp_path):
    for d in 'ab': (tmp_path/d).mkdir(); (tmp_path/d/'1.jpg').write_bytes(image(1))
    (tmp_path/'2.jpg').write_bytes(image(2)); (tmp_path/'2.png').write_bytes(image(3, fmt='PNG'))
    (tmp_path/'captions.csv').write_text('image,caption\n1.jpg,which one?\na/1.jpg,this one\n2.jpg,x\n2.png,y\n')
    got = read_photos(tmp_path)
    assert list(got.table.key)==['2', 'a/1']
    assert got.skipped.counts()=={'caption of a photo that is not there': 1, 'photo without a caption': 1, 'second photo of the same key': 1}

def test_the_same_key_in_two_tars(tmp_path):
    write_tar(tmp_path/'a.tar', side_by_side(3)); write_tar(tmp_path/'b.tar', side_by_side(3, 2))
    got = read_photos(tmp_path)
    assert len(got.table)==5 and got.skipped.counts()=={'second file of the same name': 2}

# ---- tars

def test_odd_tar_members_stay_out(tmp_path):
    with tarfile.open(tmp_path/'x.tar', 'w') as t:
        for name, kind, link in [('/abs.jpg', tarfile.REGTYPE, ''), ('../up.jpg', tarfile.REGTYPE, ''), ('a/../../up.jpg', tarfile.REGTYPE, ''), ('C:\\x.jpg', tarfile.REGTYPE, ''),
                                 ('..\\win.jpg', tarfile.REGTYPE, ''), ('link.jpg', tarfile.SYMTYPE, '/etc/passwd'), ('hard.jpg', tarfile.LNKTYPE, '000.jpg'), ('pipe.jpg', tarfile.FIFOTYPE, ''), ('dir', tarfile.DIRTYPE, '')]:
            info = tarfile.TarInfo(name); info.type, info.linkname = kind, link; t.addfile(info)
        for name, data in side_by_side(2): info = tarfile.TarInfo('./'+name); info.size = len(data); t.addfile(info, io.BytesIO(data))
    got = read_photos(tmp_path)
    assert list(got.table.key)==['000', '001']
    assert got.skipped.counts()=={'tar member named outside its folder': 5, 'tar member that is not a plain file': 3}

def test_a_tar_cut_anywhere_loses_only_what_is_gone_and_says_so(tmp_path):
    write_tar(tmp_path/'whole.tar', side_by_side(6))
    whole, root = (tmp_path/'whole.tar').read_bytes(), tmp_path/'cut'
    root.mkdir(); seen = []
    end = max(p.start+p.size for _,p in tar_members(tmp_path/'whole.tar', Skipped()))
    for at in random.Random(0).sample(range(end), 40) + [0, 512, end]:
        (root/'x.tar').write_bytes(whole[:at])
        try: got = read_photos(root)
        except ValueError as e: assert 'tar cut short or damaged' in str(e); continue
        seen.append(len(got.table))
        assert got.skipped.counts()['tar cut short or damaged']==1
        assert list(got.table.key)==[f'{i:03}' for i in range(len(got.table))]
    assert max(seen)==6 and min(seen)<=2

@quick
@given(st.data())
def test_a_tar_with_flipped_bytes_never_crashes(tmp_path_factory, data):
    root = tmp_path_factory.mktemp('flip')
    write_tar(root/'x.tar', side_by_side(3))
    raw = bytearray((root/'x.tar').read_bytes())
    for _ in range(data.draw(st.integers(1, 6))): raw[data.draw(st.integers(0, len(raw)-1))] = data.draw(st.integers(0, 255))
    (root/'x.tar').write_bytes(raw)
    try: PhotoPairs(root, 'train', 16, workers=1)
    except ValueError as e: assert str(e)

def test_a_compressed_tar_is_named_in_the_error(tmp_path):
    write_tar(tmp_path/'x.tar', side_by_side(2))
    (tmp_path/'y').mkdir(); (tmp_path/'y'/'x.tar').write_bytes(gzip.compress((tmp_path/'x.tar').read_bytes()))
    with pytest.raises(ValueError, match='have to be unpacked first'): read_photos(tmp_path/'y')

# ---- images

def bomb(side=12_000):
    buf = io.BytesIO(); Image.new('1', (side, side)).save(buf, 'PNG')
    return buf.getvalue()

@pytest.mark.parametrize('mode, fmt', [('L', 'JPEG'), ('CMYK', 'JPEG'), ('RGBA', 'PNG'), ('P', 'PNG'), ('LA', 'PNG'), ('1', 'PNG'), ('I;16', 'PNG'), ('RGB', 'WEBP'), ('RGB', 'BMP'), ('P', 'GIF')])
def test_every_kind_of_picture_becomes_rgb(mode, fmt):
    img = Image.fromarray(np.arange(40*30, dtype=np.uint16).reshape(30, 40)) if mode=='I;16' else Image.open(io.BytesIO(image(1))).convert(mode)
    buf = io.BytesIO(); img.save(buf, fmt)
    assert square(open_photo(buf.getvalue()), 16).shape==(3, 16, 16)

def test_a_portrait_stands_upright():
    exif = Image.Exif(); exif[0x112] = 6
    buf = io.BytesIO(); Image.new('RGB', (40, 20)).save(buf, 'JPEG', exif=exif)
    assert open_photo(buf.getvalue()).size==(20, 40)

def test_bad_images_are_skipped_by_reason(tmp_path):
    root = folder(tmp_path/'r', 7, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(7)))
    for i, data in enumerate([image(0)[:300], b'<html>', bomb(), b'', image(4)[:-2], Image.MAX_IMAGE_PIXELS.to_bytes(4, 'big')]): (root/f'{i:03}.jpg').write_bytes(data)
    packed_ = read_photos(root), packed(root, 16)
    about = json.loads((packed_[1]/'photos.json').read_text())
    assert {k: len(v) for k,v in about['skipped'].items()}['file that is no image']==3
    assert len(about['skipped']['damaged image'])>=1 and len(about['skipped'][f'image of more than {Image.MAX_IMAGE_PIXELS:,} pixels'])==1

def test_no_photo_at_all_can_be_opened(tmp_path):
    root = folder(tmp_path/'r', 2, 'captions.csv', 'image,caption\n000.jpg,a\n001.jpg,b\n')
    for i in range(2): (root/f'{i:03}.jpg').write_bytes(b'no image')
    with pytest.raises(ValueError, match='none of 2 photos could be opened'): PhotoPairs(root)
    assert not list((tmp_path/'store').rglob('manifest.json'))

@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 80))
def test_the_square_is_clips(w, h, size):
    img = Image.open(io.BytesIO(image(w*1000+h, (w, h), fmt='PNG'))).convert('RGB')
    two = np.asarray(T.CenterCrop(size)(T.Resize(size, T.InterpolationMode.BICUBIC)(img))).transpose(2, 0, 1)
    assert np.array_equal(square(img, size), two)

def test_a_strip_does_not_explode():
    start = time.perf_counter()
    assert square(Image.new('RGB', (2_000_000, 3)), 224).shape==(3, 224, 224)    # resized whole it would be 33 billion pixels
    assert time.perf_counter()-start < 20

@quick
@given(st.binary(max_size=200), st.integers(0, 3000))
def test_any_bytes_as_an_image(tmp_path_factory, noise, cut):
    d = tmp_path_factory.mktemp('img')
    (d/'a').write_bytes(noise); (d/'b').write_bytes(image(2)[:cut] + noise)
    assert 0 in pack([Place(str(d/'a')), Place(str(d/'b'))], d/'x.npy', 16, workers=1)

# ---- packing

def test_workers_and_chunks_change_nothing(tmp_path):
    torch.ones(300, 300)@torch.ones(300, 300)                                     # threads exist before the processes do
    root = folder(tmp_path/'r', 23, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(23)))
    (root/'007.jpg').write_bytes(b'x')
    places = [Place(*p) for p in read_photos(root).table[list(Place._fields)].itertuples(index=False)]
    made = [(pack(places, tmp_path/f'{w}{c}.npy', 16, workers=w, chunk=c), np.load(tmp_path/f'{w}{c}.npy')) for w,c in [(1, 256), (1, 5), (2, 4), (3, 1)]]
    for failed, rows in made:
        assert failed=={7: 'file that is no image'}
        assert np.array_equal(rows, made[0][1])

def test_packed_once_and_again_when_a_file_changes(tmp_path):
    write_tar(tmp_path/'x.tar', side_by_side(9)); root = tmp_path/'root'; root.mkdir(); (tmp_path/'x.tar').rename(root/'x.tar')
    a, b = PhotoPairs(root, 'train', 16), PhotoPairs(root, 'test', 16)
    assert a.folder==b.folder and a.key==b.key and len(a)+len(PhotoPairs(root, 'val', 16))==12    # val is cut out of train by hash
    os.utime(root/'x.tar', (1, 1))
    c = PhotoPairs(root, 'train', 16)
    assert c.folder!=a.folder and c.key==a.key                                     # touched: packed again; same content: same key
    write_tar(root/'x.tar', side_by_side(8))
    assert PhotoPairs(root, 'train', 16).key!=a.key

def test_pairs_are_all_pairs_once(tmp_path):
    rows = [dict(image=f'{i:03}.jpg', split='train' if i else 'val', captions=[f'{i}.{k}' for k in range(1+i%3)]) for i in range(7)]
    p = PhotoPairs(folder(tmp_path/'r', 7, 'captions.jsonl', '\n'.join(map(json.dumps, rows))), 'train', 16)
    images, texts = p.batch(range(len(p)))
    assert sorted(texts)==sorted(c for r in rows[1:] for c in r['captions']) and images.shape==(len(texts), 3, 16, 16)
    assert len(set(p.owner[:6]))==6 and [t.split('.')[0] for t in texts]==[str(o+1) for o in p.owner]
    again = p.batch(np.array([3, 1])); assert again[1]==[texts[3], texts[1]] and torch.equal(again[0], images[[3, 1]])

@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(['train', 'dev', 'validation', 'Test', '', ' val ']), min_size=1, max_size=20))
def test_splits_are_known_names(names):
    import pandas as pd
    got = with_splits(pd.DataFrame(dict(key=[f'k{i}' for i in range(len(names))], split=names))).split
    assert set(got) <= {'train', 'val', 'test', 'unassigned'}

def child(code, tmp_path, **kw):
    return subprocess.Popen([sys.executable, '-c', textwrap.dedent(code)], env=dict(os.environ, CIS_STORE=str(tmp_path/'store'), PYTHONPATH=os.pathsep.join(sys.path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)

def test_a_kill_while_packing_leaves_nothing_finished(tmp_path):
    root = folder(tmp_path/'r', 5, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(5)))
    p = child(f'''
        import time, cis_nb.data as d
        d.square = lambda img, size: print('packing', flush=True) or time.sleep(60)
        d.packed({str(root)!r}, 16, workers=1)''', tmp_path)
    assert p.stdout.readline()=='packing\n'
    p.send_signal(signal.SIGKILL); p.wait()
    assert not list((tmp_path/'store').rglob('manifest.json'))
    assert len(PhotoPairs(root, 'train', 16, workers=1).table)>0

@pytest.mark.skipif(not hasattr(os, 'posix_fallocate'), reason='no posix_fallocate here')
def test_a_full_disk_is_an_error_with_a_remedy(tmp_path):
    root = folder(tmp_path/'r', 60, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(60)))
    p = child(f'''
        import resource, signal, cis_nb.data as d
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        d.packed({str(root)!r}, 64, workers=1)''', tmp_path)
    err = p.communicate()[1]
    assert p.returncode==1 and 'CIS_STORE' in err and 'disk full' in err
    assert not list((tmp_path/'store').rglob('manifest.json'))

def test_two_processes_pack_once(tmp_path):
    root = folder(tmp_path/'r', 8, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(8)))
    code = f'import cis_nb.data as d; print(d.packed({str(root)!r}, 16, workers=1))'
    runs = [child(code, tmp_path) for _ in range(2)]
    said = [r.communicate()[0].strip() for r in runs]
    assert said[0]==said[1] and len(list((tmp_path/'store').rglob('manifest.json')))==1

# ---- real data

@pytest.mark.skipif(not flickr.is_dir(), reason='needs CIS_DATA with flickr8k')
def test_flickr8k_is_read_whole():
    got = read_photos(flickr)
    assert got.layout=='photo and caption file side by side' and not got.skipped
    assert got.table.split.value_counts().to_dict()==dict(train=6000, val=1000, test=1000, unassigned=91)
    assert got.table.captions.map(len).sum()==40455
    one = got.table[got.table.key=='1000268201_693b08cb0e'].iloc[0]
    assert one.captions[1]=='A girl going into a wooden building .' and open_photo(Place(one.file, one.start, one['size']).read()).size==(144, 144)

@pytest.mark.skipif(not coco_mini.is_dir(), reason='needs CIS_DATA with coco_mini')
def test_coco_mini_is_read_and_packed():
    p = PhotoPairs(coco_mini, 'val', 32)
    assert p.layout=='COCO captions' and p.splits==dict(train=80, val=79) and len(p)==395
    assert p.skipped.counts()=={'photo without a caption': 80}
    assert p.batch([0])[0].float().std()>10
