"""``python -m benchmarks VERB …``: any claim of belady's by one command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import records, run, tables


def main() -> int:
    """Carry out the verb that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run.add_arguments(verbs.add_parser("run", help=run.__doc__))
    merge = verbs.add_parser("merge", help="put the records of several files into one")
    merge.add_argument("files", type=Path, nargs="+")
    merge.add_argument("-o", "--out", type=Path, required=True)
    table = verbs.add_parser("tables", help=tables.__doc__)
    table.add_argument("--check", action="store_true", help="fail where a page differs")
    arguments = parser.parse_args()
    if arguments.verb == "run":
        return run.run(arguments)
    if arguments.verb == "tables":
        return tables.write(check=arguments.check)
    records.write(arguments.out, records.merge(arguments.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
