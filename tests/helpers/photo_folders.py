"Small folders of images with captions, in every layout."

import errno
import io
import json
import os
import tarfile

import numpy as np
from PIL import Image


def image(i=0, size=(40, 30), mode='RGB', fmt='JPEG'):
    "The bytes of a small picture that depends on `i`."
    pixels = np.random.default_rng(i).integers(0, 255, (size[1] // 5 + 1, size[0] // 5 + 1, 3), dtype=np.uint8)
    buf = io.BytesIO()
    Image.fromarray(pixels).resize(size).convert(mode).save(buf, fmt)
    return buf.getvalue()


def write_tar(path, files):
    with tarfile.open(path, 'w') as t:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))


def side_by_side(n, start=0):
    return [
        f
        for i in range(start, start + n)
        for f in [
            (f'{i:03}.jpg', image(i)),
            (
                f'{i:03}.json',
                json.dumps(dict(split='train' if i % 3 else 'test', captions=[f'caption {i}', f'number {i}'])).encode(),
            ),
        ]
    ]


def folder(root, n, table, text):
    root.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        (root / f'{i:03}.jpg').write_bytes(image(i))
    (root / table).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def refuse(name):
    "`os.scandir` as it is for a user who may not read folders of that name."
    scandir = os.scandir

    def refusing(path='.'):
        if os.path.basename(path) == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    return refusing
