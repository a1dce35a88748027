"""Tokenize text into a corpus for training.

    python tools/preprocess_data.py --input texts/ --output-prefix data/corpus --tokenizer data/spm.model --append-eos

writes data/corpus.bin, data/corpus.idx and data/corpus_meta.json; training reads them with
`Data.Train.dataset.input_dir: data` (every corpus of the folder) or `data/corpus` (this one).
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.config.errors import UserError
from ppfleetx.data.command import add_reading_options, report
from ppfleetx.data.documents import SPLIT_BY
from ppfleetx.data.preprocess import PreprocessJob, preprocess_corpus
from ppfleetx.data.progress import TerminalBar
from ppfleetx.data.token_files import FORMATS


def parse_args(argv: list[str] | None) -> PreprocessJob:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_reading_options(parser)
    add = parser.add_argument
    add(
        "--output-prefix", "--output_prefix", required=True, metavar="PREFIX", help="path of the corpus, without suffix"
    )
    add(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="SentencePiece .model, tokenizer.json, a folder with vocab.json and merges.txt, or the word bytes",
    )
    add(
        "--format",
        choices=list(FORMATS),
        default="megatron",
        help="megatron: .bin/.idx; fleetx: _ids.npy/_idx.npz (default: %(default)s)",
    )
    _add_marks(parser)
    add(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="put the documents in a random order, so that the last ones, which evaluation reads, are like the others;"
        " the same seed and input give the same order. A corpus of more than 256 MiB needs its disk space twice meanwhile"
        " (default: the order of the input)",
    )
    add(
        "--split-by",
        "--split_by",
        choices=SPLIT_BY,
        default="file",
        help="what a document of plain text is (default: %(default)s)",
    )
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace a corpus that is there")
    return PreprocessJob(**vars(parser.parse_args(argv)))


def _add_marks(parser: argparse.ArgumentParser) -> None:
    """How documents begin and end."""
    add = parser.add_argument
    add("--append-eos", "--append_eos", action="store_true", help="end every document with the end-of-document token")
    add(
        "--eos-token",
        "--eos_token",
        metavar="TOKEN",
        help="the end-of-document token (default: what the tokenizer's files name, else a guess, which is said)",
    )
    add(
        "--prepend-bos",
        "--prepend_bos",
        action="store_true",
        help="begin every document with the begin-of-document token",
    )
    add("--bos-token", "--bos_token", metavar="TOKEN", help="that token (default: as for --eos-token)")


def main(argv: list[str] | None = None) -> int:
    job = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half written is removed
    try:
        with TerminalBar() as bar:
            summary = preprocess_corpus(job, bar)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print(f"interrupted: nothing is written to {job.output_prefix}", file=sys.stderr)
        return 128 + signal.SIGINT
    print(summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
