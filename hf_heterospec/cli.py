"""`heterospec`: the command line. Every room brings its own subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, demo
from .benchmarking import cli as benchmarking
from .policy import cli as policy
from .training import cli as training


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; wrong arguments exit with 2, bad input with 1 and one line."""
    parser = argparse.ArgumentParser(prog="heterospec", description="Speculative decoding for transformers.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for room in (demo, policy, benchmarking, training):
        room.add_parsers(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError) as error:
        print(f"heterospec: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
