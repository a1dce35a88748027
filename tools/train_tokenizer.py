"""Train a SentencePiece tokenizer on text.

    python tools/train_tokenizer.py --input texts/ --vocab-size 8000 --output data/spm

writes data/spm.model. Ids 0 to 3 are <unk>, <s>, </s> and <pad>; 4 to 259 are bytes. Text comes back exactly, newlines
and runs of spaces included. The same input gives the same model. Of more than 2 million lines, 2 million are chosen by chance.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.config.errors import UserError
from ppfleetx.data.command import add_reading_options, report
from ppfleetx.data.documents import Reading
from ppfleetx.data.progress import TerminalBar
from ppfleetx.data.train_tokenizer import DURATIONS, MODEL_TYPES, train_sentencepiece


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_reading_options(parser)
    add = parser.add_argument
    add(
        "--vocab-size",
        "--vocab_size",
        type=int,
        required=True,
        metavar="N",
        help="number of ids, the 260 fixed ones included",
    )
    add("--output", required=True, metavar="PREFIX", help="the model is written to PREFIX.model")
    add(
        "--model-type",
        "--model_type",
        choices=MODEL_TYPES,
        default=MODEL_TYPES[0],
        help="default: %(default)s; takes " + ", ".join(f"{name} {duration}" for name, duration in DURATIONS.items()),
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    reading = Reading(json_key=args.json_key, kind=args.input_format, suffixes=args.suffixes)
    try:
        with TerminalBar() as bar:
            model = train_sentencepiece(
                args.inputs,
                args.output,
                args.vocab_size,
                model_type=args.model_type,
                reading=reading,
                on_progress=bar,
            )
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print(f"interrupted: {args.output}.model is not written", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"wrote {model}: {args.vocab_size} tokens ({args.model_type})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
