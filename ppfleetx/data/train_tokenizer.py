"""Training a SentencePiece tokenizer that gives every text back exactly: what tools/train_tokenizer.py does.

Ids 0 to 3 are <unk>, <s>, </s> (end of document) and <pad>, 4 to 259 the bytes, which spell whatever has no piece of
its own, newlines among them. Text is not normalised and runs of spaces can be pieces. The one text that does not come
back is U+2581, which SentencePiece uses for the space.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.documents import Meter, Reading, find_files, read_documents
from ppfleetx.data.progress import OnProgress, Progress

_LOG = logging.getLogger("ppfleetx")

#: the first is the default: unigram is no better on what was measured and takes many times as long
MODEL_TYPES = ("bpe", "unigram")

#: how long each takes: the 7.8 million characters of the quickstart, 2048 tokens, two cores of an AMD EPYC, SentencePiece 0.2.3
DURATIONS = {
    "bpe": "1.5 s for 8 million characters on two cores",
    "unigram": "21 s for 8 million characters on two cores",
}

#: lines that training sees at most; a larger corpus is sampled, every line with the same chance
MAX_LINES = 2_000_000
#: characters of a line that training sees in one piece: SentencePiece leaves out, unsaid, what has more than 4192 bytes
_MAX_LINE = 1024
#: lines read from one report of progress to the next
_LINES_A_REPORT = 10_000
#: <unk>, <s>, </s>, <pad>
_CONTROL_TOKENS = 4
#: the trainer's sums depend on the number of threads, so it is fixed: same input, same model, on every machine
_NUM_THREADS = 2


def train_sentencepiece(
    inputs: Sequence[str],
    output_prefix: str,
    vocab_size: int,
    *,
    model_type: str = MODEL_TYPES[0],
    reading: Reading | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Train a tokenizer on files and folders of text; the same input gives the same model, byte for byte.

    Args:
        inputs: files and folders, plain text or JSON lines.
        output_prefix: the model is written to `output_prefix`.model.
        vocab_size: number of ids, the 260 fixed ones included.
        model_type: "bpe" or "unigram".
        reading: how files are read; plain text is always taken line by line.
        on_progress: called from time to time, also from a thread of its own.

    Returns:
        Path of the model.

    Raises:
        UserError: bad input, or a vocabulary too large or too small for the corpus.
    """
    if vocab_size <= _CONTROL_TOKENS:  # SentencePiece itself tells what is needed, if it comes so far
        rule = f"256 bytes and {_CONTROL_TOKENS} control tokens alone take {256 + _CONTROL_TOKENS} ids"
        raise UserError(Problem("--vocab-size", vocab_size, rule))
    reading = replace(reading or Reading(), split_by="line")
    files = find_files(inputs, reading.suffixes)
    meter = Meter(files)
    read = _metered(_lines(read_documents(files, reading, meter)), meter, on_progress)
    lines, num_read = _sample(read, MAX_LINES)
    if not lines:
        raise UserError(Problem("--input", list(inputs), "there must be text to train on"))
    output = Path(f"{output_prefix}.model")
    aside = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    of = f" (of {num_read:,}, chosen by chance)" if num_read > len(lines) else ""
    told = f"{len(lines):,} lines{of}, {sum(map(len, lines)):,} characters"
    _LOG.info("training a %s model of %d tokens on %s (takes %s)", model_type, vocab_size, told, DURATIONS[model_type])
    with _clock(on_progress, told), _interruptible():
        model = _train(lines, vocab_size, model_type)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(model)
        os.replace(aside, output)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise UserError(Problem("--output", output_prefix, f"the folder must be writable: {error}")) from None
    return output


def _metered(lines: Iterable[str], meter: Meter, on_progress: OnProgress | None) -> Iterator[str]:
    """The same lines; tells how far they are read."""
    number = 0
    for number, line in enumerate(lines, start=1):
        if on_progress and number % _LINES_A_REPORT == 0:
            on_progress(Progress("reading", meter.done, meter.total, note=f"{number:,} lines"))
        yield line
    if on_progress:
        on_progress(Progress("reading", meter.done, meter.total, note=f"{number:,} lines"))
        on_progress(Progress("", 0, None))


@contextmanager
def _clock(on_progress: OnProgress | None, told: str) -> Iterator[None]:
    """Says twice a second that the trainer, which tells nothing, is still at work."""
    ended = threading.Event()

    def tick() -> None:
        while on_progress and not ended.wait(0.5):
            on_progress(Progress("training", 0, None, "", told))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process at once: Python would notice it when the trainer, C++ for minutes, has returned. There is
    nothing to remove then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        for line in document.splitlines():
            while len(line) > _MAX_LINE:
                # before a space, as pieces begin with theirs
                end = line.rfind(" ", 1, _MAX_LINE + 1)
                end = end if end > 0 else _MAX_LINE
                yield line[:end]
                line = line[end:]
            if line:
                yield line


def _sample(lines: Iterable[str], size: int) -> tuple[list[str], int]:
    """(at most `size` lines, each kept with the same chance, by a fixed seed; how many there were): reservoir sampling."""
    generator = random.Random(0)  # noqa: S311 - sampling, no secret
    kept: list[str] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        if number <= size:
            kept.append(line)
        elif (place := generator.randrange(number)) < size:
            kept[place] = line
    return kept, number


def _train(lines: list[str], vocab_size: int, model_type: str) -> bytes:
    """The serialised model."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(_explain(str(error), vocab_size)) from None
    return model.getvalue()


def _explain(message: str, vocab_size: int) -> Problem:
    """The trainer's C++ message in the user's words."""
    if match := re.search(r"Vocabulary size too high \(\d+\).*<= (\d+)", message):
        most = match.group(1)
        return Problem(
            "--vocab-size", vocab_size, f"the text yields at most {most} tokens", f"--vocab-size {most}, or more text"
        )
    if match := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        rule = f"256 bytes, 4 control tokens and the text's characters need at least {match.group(1)} tokens"
        return Problem("--vocab-size", vocab_size, rule, f"--vocab-size {match.group(1)} or more")
    return Problem("--vocab-size", vocab_size, f"SentencePiece cannot train on this text: {message}")
