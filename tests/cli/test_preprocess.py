"""tools/train_tokenizer.py and tools/preprocess_data.py as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wrote data/spm.model: 400 tokens (unigram)\n"

    arguments = ["--input", "texts", "--tokenizer", "data/spm.model", "--output_prefix", "data/c"]
    done = run(tmp_path, "preprocess_data.py", *arguments, "--append_eos", "--format", "fleetx")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote data/c (fleetx): 3 documents, ")
    ids, index = np.load(tmp_path / "data/c_ids.npy"), np.load(tmp_path / "data/c_idx.npz")
    assert ids.dtype == np.uint16 and index["lens"].sum() == len(ids) and (ids == 2).sum() == 3
    assert json.loads((tmp_path / "data/c_meta.json").read_text())["tokenizer"] == "data/spm.model"

    assert_user_error(run(tmp_path, "preprocess_data.py", *arguments), "--output-prefix = 'data/c'", "--overwrite")
    done = run(tmp_path, "preprocess_data.py", *arguments, "--overwrite")
    assert done.returncode == 0 and (tmp_path / "data/c.bin").exists() and not (tmp_path / "data/c_ids.npy").exists()


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
    assert_user_error(done, "--vocab-size = 5000", "the text yields at most")
    assert not (tmp_path / "spm.model").exists()


def test_a_run_that_is_ended_leaves_nothing(tmp_path):
    """Ctrl-C and SIGTERM while documents are read (from a pipe that gives none)."""
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        pipe = tmp_path / f"pipe{code}"
        os.mkfifo(pipe)
        arguments = ["--input", pipe, "--tokenizer", "bytes", "--output-prefix", "out/c"]
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
