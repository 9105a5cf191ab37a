# The graph of the book: one rule for one kind of thing. What an experiment needs and watches is known to cis_nb.core.experiment_files.
import os
import sys
from cis_nb.book import runner as book
from cis_nb.book.live import typical_seconds
from cis_nb.core.experiment_files import experiments

PROFILE, DATA = os.environ['BOOK_PROFILE'], os.environ['BOOK_DATA']   # as typed; no shell reads what is in them
PLAN = experiments(PROFILE, DATA)
FIRST = book.priorities(PLAN, typical_seconds(PROFILE))

rule book:
    input: [f'reports/{PROFILE}/{name}/receipt.json' for name in PLAN]

rule experiment:
    input:
        lambda w: [f'reports/{PROFILE}/{need}/receipt.json' for need in PLAN[w.name].needs]
    output: f'reports/{PROFILE}/{{name}}/receipt.json'
    threads: lambda w: book.threads(PLAN[w.name], workflow.cores)
    priority: lambda w: FIRST[w.name]
    params: python=sys.executable
    shell: '{params.python:q} -m cis_nb.book.preload cis_nb.book.command_line --data="$BOOK_DATA" --cores {threads} -- run "$BOOK_PROFILE" {wildcards.name:q}'
