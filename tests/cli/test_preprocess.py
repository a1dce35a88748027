"""tools/train_tokenizer.py and tools/preprocess_data.py as a user runs them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def run(folder, tool, *arguments):
    """Run a tool from another folder than the clone's, as a script."""
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def assert_user_error(done, *told):
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    for words in told:
        assert words in done.stderr


def test_text_to_corpus(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    done = run(tmp_path, "train_tokenizer.py", "--input", "texts", "--vocab-size", 400, "--output", "data/spm")
    assert done.returncode == 0 and done.stderr.startswith("training a bpe model of 400 tokens on ")
    assert done.stderr.count("\n") == 1  # bars are for terminals
    assert done.stdout == "wrote data/spm.model: 400 tokens (bpe)\n"

    arguments = ["--input", "texts", "--tokenizer", "data/spm.model", "--output_prefix", "data/c"]
    done = run(tmp_path, "preprocess_data.py", *arguments, "--append_eos", "--format", "fleetx", "--shuffle", 7)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote data/c (fleetx): 3 documents, ")
    ids, index = np.load(tmp_path / "data/c_ids.npy"), np.load(tmp_path / "data/c_idx.npz")
    assert ids.dtype == np.uint16 and index["lens"].sum() == len(ids) and (ids == 2).sum() == 3
    meta = json.loads((tmp_path / "data/c_meta.json").read_text())
    assert (meta["tokenizer"], meta["eos_id"], meta["shuffle_seed"]) == ("data/spm.model", 2, 7)
    assert done.stdout.endswith("\ndocuments: each ends with '</s>' (id 2, the model), shuffled with seed 7\n")

    assert_user_error(run(tmp_path, "preprocess_data.py", *arguments), "--output-prefix = 'data/c'", "--overwrite")
    done = run(tmp_path, "preprocess_data.py", *arguments, "--overwrite")
    assert done.returncode == 0 and (tmp_path / "data/c.bin").exists() and not (tmp_path / "data/c_ids.npy").exists()


def test_options_that_name_tokens_seeds_and_kinds(tmp_path):
    (tmp_path / "a").write_text('{"text": "x"}\n{"text": "yz"}\n')
    base = ["--input", "a", "--tokenizer", "bytes", "--output-prefix", "out/c", "--append-eos"]
    for wrong in ("x", "1.5", ""):
        done = run(tmp_path, "preprocess_data.py", *base, f"--shuffle={wrong}")
        assert done.returncode == 2 and "argument --shuffle: invalid int value" in done.stderr
    assert_user_error(run(tmp_path, "preprocess_data.py", *base, "--shuffle", "-1"), "--shuffle = -1", "a whole number")
    assert_user_error(run(tmp_path, "preprocess_data.py", *base, "--eos-token", "x"), "--eos-token = 'x'", "byte 0")
    assert_user_error(
        run(tmp_path, "preprocess_data.py", *base, "--prepend-bos"), "--prepend-bos = True", "--bos-token"
    )
    assert not (tmp_path / "out").exists()
    done = run(tmp_path, "preprocess_data.py", *base)
    assert done.returncode == 0 and done.stderr.startswith("a is read as plain text, though it begins like JSON lines")
    done = run(tmp_path, "preprocess_data.py", *base, "--overwrite", "--input-format", "json")
    assert (done.returncode, done.stderr) == (0, "") and " 2 documents, 5 tokens " in done.stdout


def test_w30_json_lines_from_a_pipe(tmp_path):
    """`<(command)` of the shell: a name without an ending, and nothing that could be read twice."""
    tool = f"{sys.executable} {ROOT / 'tools'}"
    lines = '<(for i in $(seq 300); do echo \'{"text": "some words"}\'; done)'
    script = f"""set -e
    {tool}/train_tokenizer.py --input {lines} --input-format json --vocab-size 268 --output spm
    {tool}/preprocess_data.py --input {lines} --input-format json --tokenizer spm.model --output-prefix c --shuffle 1"""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "training a bpe model of 268 tokens on 300 lines" in done.stderr
    assert "300 documents, " in done.stdout and "shuffled with seed 1" in done.stdout


def test_bars_on_a_terminal(tmp_path):
    """Bytes read of all bytes, documents and tokens; then the shuffle."""
    (tmp_path / "a.txt").write_text("word " * 1000)
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", "a.txt", "--tokenizer", "bytes"]
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    command += ["--output-prefix", "c", "--shuffle", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=end, stderr=end) as process:
        os.close(end)
        output = b""
        try:
            while chunk := os.read(terminal, 1 << 16):
                output += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(terminal)
    assert process.returncode == 0
    told = output.decode()
    assert "tokenizing: 100%" in told and "5.00k/5.00k" in told and "1 documents, 0.0M tokens" in told
    assert "shuffling: 100%" in told and "1 of 1 documents" in told


def test_c29_empty_vocabulary(tmp_path):
    (tmp_path / "vocab.json").write_text("")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "a.txt").write_text("x")
    done = run(tmp_path, "preprocess_data.py", "--input", "a.txt", "--tokenizer", ".", "--output-prefix", "out/c")
    assert_user_error(done, "--tokenizer = '.'", "vocab.json is empty")
    assert not (tmp_path / "out").exists()


def test_vocabulary_too_large_for_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n")
    done = run(tmp_path, "train_tokenizer.py", "--input", "a.txt", "--vocab-size", 5000, "--output", "spm")
    said, _, done.stderr = done.stderr.partition("\n")
    assert said.startswith("training a bpe model of 5000 tokens on 1 lines")
    assert_user_error(done, "--vocab-size = 5000", "the text yields at most")
    assert not (tmp_path / "spm.model").exists()


def test_a_run_that_is_ended_leaves_nothing(tmp_path):
    """Ctrl-C and SIGTERM while documents are read (from a pipe that gives none)."""
    for sent, code, more in (
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, []),
        (signal.SIGTERM, 143, ["--shuffle=1"]),
    ):
        pipe = tmp_path / f"pipe{code}{len(more)}"
        os.mkfifo(pipe)
        arguments = ["--input", pipe, "--tokenizer", "bytes", "--output-prefix", "out/c", *more]
        command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, arguments)]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            with open(pipe, "w"):  # blocks until the tool opens it
                time.sleep(0.5)  # until it waits in read(): Python notices a signal just before that only afterwards
                process.send_signal(sent)
                assert process.wait(30) == code
            assert "Traceback" not in process.stderr.read()
        assert list((tmp_path / "out").iterdir()) == []


def test_workers_end_with_a_killed_run(tmp_path):
    """Else the pipe of standard error, which they hold open, would never end."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    arguments = ["--input", pipe, "--tokenizer", "bytes", "--output-prefix", "c", "--workers", "2"]
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, arguments)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process, open(pipe, "w") as documents:
        documents.write('{"text": "x"}\n' * 1500)  # more than two batches: two workers start
        documents.flush()
        time.sleep(1.5)
        process.kill()
        process.communicate(timeout=30)
    assert not (tmp_path / "c.idx").exists()


def test_training_a_tokenizer_can_be_interrupted(tmp_path):
    """While it reads, with a word; while SentencePiece works in C++, where Python would notice nothing, at once."""
    tool = [sys.executable, str(ROOT / "tools/train_tokenizer.py"), "--vocab-size=8000", "--output=spm", "--input"]
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen([*tool, "pipe"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        with open(tmp_path / "pipe", "w"):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        assert process.stderr.read() == "interrupted: spm.model is not written\n"
    words = random.Random(0)
    with open(tmp_path / "a.txt", "w") as text:  # unigram takes seconds
        text.writelines(f"{words.randrange(1 << 40):x} {words.randrange(1 << 40):x}\n" for _ in range(60_000))
    command = [*tool, "a.txt", "--model-type", "unigram"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("training a unigram model of 8000 tokens on 60,000 lines")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT  # not 130: Python had no say
        assert "Traceback" not in process.stderr.read()
    assert not list(tmp_path.glob("spm*"))
