"""What the command lines of the data room share."""

from __future__ import annotations

import argparse
import sys

from ppfleetx.config.errors import EXIT_USER_ERROR, UserError
from ppfleetx.data.documents import DEFAULT_SUFFIXES, KINDS


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Which texts are read, and how: `inputs`, `input_format`, `json_key` and `suffixes`."""
    parser.add_argument(
        "--input",
        dest="inputs",
        nargs="+",
        action="extend",
        required=True,
        metavar="PATH",
        help="files and folders of text; .json, .jsonl and .ndjson hold one object a line",
    )
    parser.add_argument(
        "--input-format",
        "--input_format",
        choices=KINDS,
        default="auto",
        help="text, or json (one object a line), for all files; auto goes by their endings (default: %(default)s)",
    )
    parser.add_argument(
        "--json-key",
        "--json_key",
        default="text",
        metavar="KEY",
        help="key of the text in JSON lines (default: %(default)s)",
    )
    parser.add_argument(
        "--suffix",
        dest="suffixes",
        nargs="+",
        default=list(DEFAULT_SUFFIXES),
        metavar=".EXT",
        help=f"files taken from folders (default: {' '.join(DEFAULT_SUFFIXES)})",
    )


def report(error: UserError) -> int:
    """Prints a user's mistakes to standard error; the exit code."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_USER_ERROR
