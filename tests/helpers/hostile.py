"Hostile input: one file of a small valid data set is changed in one way, the set is read, and the outcome is told."

import gzip
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pandas as pd

OUTCOMES = ('clear error', 'handled', 'counted', 'valid too', 'silent', 'raw', 'hang')
COUNTS = {}  # what is read -> Counter of outcomes, of the test at hand
CLEAR = (ValueError, FileNotFoundError)  # exactly these, so that none of Python's own errors passes
SECONDS, FIRST = 10, 120  # a case that takes longer hangs; the first reading imports modules too


class Hang(BaseException):
    "A case took too long."


def plain(value):
    "A result as text and numbers that can be compared."
    if isinstance(value, pd.DataFrame):
        return value.astype(str).to_csv(index=False)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in (sorted(value, key=str) if isinstance(value, set) else value)]
    return str(value)


def _alarm(*_):
    raise Hang


def call(read, seconds: int = SECONDS) -> tuple:  # content, counts, error
    "What a reader gives, or how it fails."
    before = signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(seconds)
    start = time.monotonic()
    try:
        content, counts = read()
        return plain(content), plain(counts), None
    except (Exception, Hang) as e:
        return None, None, e if time.monotonic() - start < seconds else Hang()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(found: tuple, valid: tuple, names: set, errors=()) -> str:
    "One of `OUTCOMES`; `names`: a clear error has one of them in its message; `errors`: further types of clear ones."
    content, counts, error = found
    if isinstance(error, Hang):
        return 'hang'
    if error is not None:
        clear = type(error) in (*CLEAR, *errors) and any(n in str(error) for n in names)
        return 'clear error' if clear else 'raw'
    if counts != valid[1]:
        return 'counted'
    return 'handled' if content == valid[0] else 'silent'


def steps_of(doc, depth=0):
    "Paths to one example of each place in a document: all keys of an object, the first entry of a list."
    if depth > 5:
        return
    items = list(doc.items())[:12] if isinstance(doc, dict) else list(enumerate(doc))[:1]
    for key, value in items:
        yield (key,)
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in steps_of(value, depth + 1))


RAW_TEXTS = {  # as they are written into JSON
    'null': 'null',
    'text': '"x"',
    'list': '[["x"]]',
    'object': '{"x": 1}',
    'true': 'true',
    'half': '0.5',
    'not a number': 'NaN',
    'huge integer': '1' + '0' * 5000,
    'integer of 70 bits': str(2**70),
    'infinite': '1e999',
    'lone surrogate': '"\\ud800"',
    'deep': '[' * 3000 + ']' * 3000,
}
SAME_TYPE = {
    str: {'empty text': '', 'text zzz': 'zzz'},
    list: {'empty list': []},
    dict: {'empty object': {}},
    int: {'zero': 0, 'minus one': -1, 'largest integer': 2**63 - 1},
}
KIND_OF = {str: ('text',), bool: ('true',), int: (), float: ('half',), list: ('list',), dict: ('object',)}
MARK = 'hostile-mark'


def replaced(doc, steps, value):
    "A copy of a document with another value at a place."
    if not steps:
        return value
    key, *rest = steps
    new = dict(doc) if isinstance(doc, dict) else list(doc)
    new[key] = replaced(doc[key], rest, value)
    return new


def without(doc, steps):
    "A copy of a document without one key."
    key, *rest = steps
    new = dict(doc) if isinstance(doc, dict) else list(doc)
    if rest:
        new[key] = without(doc[key], rest)
    else:
        del new[key]
    return new


def at(doc, steps):
    for s in steps:
        doc = doc[s]
    return doc


def of_the_same_type(value):
    "Another value of a type of JSON, which a reader that takes the last of two would accept."
    if isinstance(value, (list, dict, type(None))):
        return value and type(value)()
    return not value if isinstance(value, bool) else value + 'x' if isinstance(value, str) else value + 1


def json_changes(data: bytes):
    "(name, bytes): values of another type, missing keys, keys given twice, another root."
    doc = json.loads(data)
    for root in ('[]', '{}', '3', 'null', '"x"', '[[]]', '[3]', '{"x": [3]}'):
        if type(json.loads(root)) is not type(doc) or len(root) > 2:
            yield f'root {root}', root.encode()
    for steps in steps_of(doc):
        value = at(doc, steps)
        name = '.'.join(map(str, steps))
        marked = json.dumps(replaced(doc, steps, MARK))
        for kind, text in RAW_TEXTS.items():
            if kind not in KIND_OF.get(type(value), ()):
                yield f'{name}: {kind}', marked.replace(f'"{MARK}"', text, 1).encode()
        if isinstance(steps[-1], str):
            yield f'{name}: missing', json.dumps(without(doc, steps)).encode()
            if steps[-1].isdigit():
                longer = without(doc, steps)
                at(longer, steps[:-1])['1' * 5000] = value
                yield f'{name}: 5,000 digits for it', json.dumps(longer).encode()
            key, old = json.dumps(steps[-1]), f'{json.dumps(steps[-1])}: "{MARK}"'
            for order, words in {
                'null, then it': f'{key}: null, {old}',
                'it, then another': f'{old}, {key}: {json.dumps(of_the_same_type(value))}',
            }.items():
                text = marked.replace(old, words, 1).replace(f'"{MARK}"', json.dumps(value))
                yield f'{name}: given twice, {order}', text.encode()


def value_changes(data: bytes):
    "(name, bytes): another value of the same type, an empty root."
    doc = json.loads(data)
    yield 'empty root', json.dumps(type(doc)()).encode()
    for steps in steps_of(doc):
        value = at(doc, steps)
        for kind, other in SAME_TYPE.get(type(value), {}).items():
            if other != value:
                yield f'{".".join(map(str, steps))}: {kind}', json.dumps(replaced(doc, steps, other)).encode()


def byte_changes(data: bytes):
    "(name, bytes): another encoding, damage, nothing."
    yield 'empty', b''
    yield 'cut in half', data[: len(data) // 2]
    yield 'zeros in front', bytes(64) + data[64:]
    yield 'noise', np.random.default_rng(0).bytes(len(data))
    yield 'an image', b'\x89PNG\r\n\x1a\n' + bytes(100)


def text_changes(data: bytes):
    "(name, bytes): the same for files of text."
    yield from byte_changes(data)
    yield 'UTF-16', data.decode().encode('utf-16')
    yield 'a letter in latin-1', data[: len(data) // 2] + b'\xe9' + data[len(data) // 2 :]
    yield 'a byte-order mark', b'\xef\xbb\xbf' + data


def gz_changes(data: bytes):
    "(name, bytes): damage of a packed file."
    yield from byte_changes(data)
    middle = len(data) // 2
    yield 'damaged body', data[:middle] + bytes(b ^ 255 for b in data[middle : middle + 4]) + data[middle + 4 :]
    yield 'wrong sum', data[:-8] + bytes(4) + data[-4:]
    yield 'not packed', gzip.decompress(data)
    yield 'a bomb', gzip.compress(bytes(300 << 20), 1)
    yield 'rubbish behind', data + b'rubbish'


def as_pipe(path: Path):
    "A pipe; whoever still reads it when the time is over gets an end, also where no signal reaches the reader."
    os.mkfifo(path)
    timer = threading.Timer(SECONDS, lambda: os.close(os.open(path, os.O_RDWR)))
    timer.daemon = True
    timer.start()


def as_folder(path: Path):
    path.mkdir()


def as_link(path: Path):
    path.symlink_to('/nowhere/at/all')


def as_loop(path: Path):
    path.symlink_to(path.name)


def as_endless(path: Path):
    path.symlink_to('/dev/zero')


def as_nothing(path: Path):
    "No file."


PLACES = {
    'a pipe': as_pipe,
    'a folder': as_folder,
    'a link to nowhere': as_link,
    'a link to itself': as_loop,
    'an endless device': as_endless,
    'gone': as_nothing,
}


def remove(path: Path):
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def cases(path: Path, changes, places: bool):
    "(name, function that puts the changed file into place)."
    data = path.read_bytes()
    for kind in changes:
        for name, changed in kind(data):
            if changed != data:
                yield name, lambda p, changed=changed: p.write_bytes(changed)
    if places:
        yield from PLACES.items()


def attack(what: str, path: Path, read, changes, places=True, names=(), valid_too='', errors=()) -> list:
    """Read a set with `path` changed in every way; the outcomes are counted, and the faulty ones returned in words.
    `valid_too`: a pattern of changes after which the file is valid and holds other data."""
    data, valid, bad = path.read_bytes(), call(read, FIRST), []
    assert valid[2] is None, f'{what}: the valid set cannot be read: {valid[2]!r}'
    for name, put in cases(path, changes, places):
        remove(path)
        try:
            put(path)
            found = call(read)
        finally:
            remove(path)
            path.write_bytes(data)
        said = outcome(found, valid, {path.name, *names}, errors)
        if said == 'silent' and valid_too and re.search(valid_too, f'{path.name}, {name}'):
            said = 'valid too'
        COUNTS.setdefault(what, Counter())[said] += 1
        if said in OUTCOMES[4:]:
            bad.append(f'{path.name}, {name}: {said}: {found[2]!r:.300}')
    return bad
