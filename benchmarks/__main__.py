"""``python -m benchmarks VERB …``: any claim of belady's by one command."""

from __future__ import annotations

import argparse
import signal
import sys

from benchmarks import frontier, kernels, options, plot, records, run, tables
from benchmarks.errors import GivenError
from benchmarks.founders import verb as founders


def main() -> int:
    """Carry out the verb that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, module in (
        ("run", run),
        ("frontier", frontier),
        ("founders", founders),
        ("kernels", kernels),
        ("plot", plot),
        ("tables", tables),
    ):
        about = (module.__doc__ or "").split("\n", 1)[0]
        verb = verbs.add_parser(name, help=about.split(": ", 1)[1], description=module.__doc__)
        module.add_arguments(verb)
        verb.set_defaults(carry_out=module.run)
    merge = verbs.add_parser("merge", help="put the records of several files into one")
    merge.add_argument("files", type=options.existing, nargs="+")
    merge.add_argument("-o", "--out", type=options.writable, required=True)
    merge.set_defaults(carry_out=_merge)
    arguments = parser.parse_args()
    # As an exception, so that what measures is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        return int(arguments.carry_out(arguments))
    except GivenError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _merge(arguments: argparse.Namespace) -> int:
    records.write(arguments.out, records.merge(arguments.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
