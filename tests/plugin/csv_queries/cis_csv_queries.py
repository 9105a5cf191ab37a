"""A benchmark for the CIS book: a folder with queries.csv (reference, condition, target) and images/ of any names."""

import pandas as pd
from PIL import Image

from cis_nb.api import BenchmarkPlugin, MainMetric
from cis_nb.core.store import fingerprint
from cis_nb.data.roots import data_root, is_world
from cis_nb.retrieval.protocol import Benchmark, Protocol, Task, reachable


class CsvQueriesPlugin(BenchmarkPlugin):
    name, title = 'csv_queries', 'Queries of a CSV file'
    main = {'csv_queries': MainMetric('CSV R@1', 'csv', 'recall', 1)}

    def load(self, data='world', size=0, seed=0, ks=(1, 3)):
        if is_world(data):
            raise FileNotFoundError('csv_queries has no version in the world; give the folder that holds queries.csv')
        root = data_root(data)
        files = {p.name: p for p in sorted((root / 'images').iterdir())}
        table = pd.read_csv(root / 'queries.csv', dtype=str)
        queries = pd.DataFrame(dict(query_id=table.index.astype(str), reference=table.reference))
        queries = queries.assign(condition=table.condition, targets=[[t] for t in table.target])
        queries, left_out = reachable(queries, list(files))
        extra = f'{len(left_out)} queries without their target left out' if left_out else ''
        protocol = Protocol('csv_queries', reference='removed', split='test', extra=extra)
        key = fingerprint([str(root), {name: p.stat().st_mtime_ns for name, p in files.items()}])

        def image(name):
            return Image.open(files[name]).convert('RGB')

        task = Task('csv_queries', 'csv', queries, image, protocol, list(files), list(files), key, ks=tuple(ks))
        return Benchmark('csv_queries', {'csv': task})
