"""``python -m tide_backend.simulate SUBJECT``: one module per subject, imported only when asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Subject: module with add_arguments(parser) and run(args) -> exit code. The first line of its docstring is
# the help shown in the list of subjects.
SUBJECTS = {
    "repack": "tide_backend.simulate.repack",
    "solver-bench": "tide_backend.simulate.solver_bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m tide_backend.simulate", description="Simulations; none of them needs a GPU."
    )
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, path in SUBJECTS.items():
        # Only the subject that was named is imported; listing them all is what --help is for.
        wanted = not arguments or arguments[0] in (name, "-h", "--help")
        module = importlib.import_module(path) if wanted else None
        text = (module.__doc__ or "").strip() if module else ""
        sub = subjects.add_parser(
            name,
            help=text.split("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
