"""Documents from files."""

from __future__ import annotations

import gzip
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data.documents import Meter, Reading, find_files, read_documents


def documents_of(path, **options):
    return list(read_documents([path], Reading(**options)))


@pytest.mark.parametrize(
    "split_by, documents",
    [
        ("file", ["a  b\r\n\n\n c\nd\n\n"]),
        ("line", ["a  b", "", "", " c", "d", ""]),
        ("blank-line", ["a  b", " c\nd"]),
    ],
)
def test_plain_text(tmp_path, split_by, documents):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a  b\r\n\n\n c\nd\n\n")
    assert documents_of(path, split_by=split_by) == documents


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.ndjson", "a.JSONL", "a.NdJson.GZ"])
def test_json_lines(tmp_path, name):
    content = b'{"text": "one\\ntwo", "id": 3}\n\n{"text": ""}\r\n{"text": "\\u00e9"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    assert documents_of(tmp_path / name) == ["one\ntwo", "", "é"]
    assert find_files([tmp_path]) == [tmp_path / name]


def test_json_key_and_compressed_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}')
    assert documents_of(tmp_path / "a.jsonl", json_key="content") == ["x"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfx\n"))
    assert documents_of(tmp_path / "a.txt.gz") == ["x\n"]


@pytest.mark.parametrize(
    "line, told",
    [
        (b'{"text": "x"', "every line must be one JSON object"),
        (b'["x"]', "not list"),
        (b'{"content": "x"}', "must have the key 'text'; it has 'content'"),
        (b"{}", "it has none"),
        (b'{"text": null}', "must be text, not NoneType"),
        (b'{"text": "\xff"}', "utf-8"),
        (b"[" * 100_000, "every line must be one JSON object"),
        (b'{"text": "\\ud800"}', "UTF-8 can write"),
    ],
)
def test_bad_json_line_is_named_by_file_and_number(tmp_path, line, told):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=told) as caught:
        documents_of(path)
    assert caught.value.problems[0].value == f"{path} line 3"


@pytest.mark.parametrize(
    "content",
    [b'[{"text": "a"},\n {"text": "b"}]', b'[\n{"text": "a"}\n]\n', b'{\n  "text": "a"\n}\n', b'[{"text": "a"}]'],
)
@pytest.mark.parametrize("ending", ["json", "JSON", "jsonl"])
def test_w30_one_array_or_object_over_lines_is_refused_with_the_way_out(tmp_path, content, ending):
    (tmp_path / f"a.{ending}").write_bytes(content)
    with pytest.raises(UserError, match="every line must be one JSON object") as caught:
        documents_of(tmp_path / f"a.{ending}")
    assert "jq -c" in caught.value.problems[0].fix and caught.value.problems[0].value.endswith("line 1")


@pytest.mark.parametrize("name", ["a", "a.txt", "a.jsonlines", "a.txt.gz"])
def test_w30_json_that_is_read_as_text_is_told(tmp_path, caplog, name):
    content = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert documents_of(tmp_path / name) == [content.decode()]
    assert f"{tmp_path / name} is read as plain text" in caplog.text and "--input-format json" in caplog.text
    caplog.clear()
    assert documents_of(tmp_path / name, kind="json") == ["one", "two"]
    assert documents_of(tmp_path / name, kind="text") == [content.decode()]
    assert not caplog.text


@pytest.mark.parametrize("content", [b"{x}\n", b"{\n}\n", b"[1]\n", b"{}\nx", b'{"a" b}\n', b"", b'x {"text": "a"}\n'])
def test_text_that_is_no_json_is_not_suspected(tmp_path, caplog, content):
    (tmp_path / "a.py").write_bytes(content)
    assert documents_of(tmp_path / "a.py") == [content.decode()]
    assert not caplog.text


def test_a_meter_counts_bytes_as_they_lie_on_the_disk(tmp_path):
    content = b'{"text": "one"}\n' * 20_000
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.txt").write_bytes(content)
    files = find_files([tmp_path])
    meter, seen = Meter(files), []
    for _ in read_documents(files, Reading(kind="json"), meter):
        seen.append(meter.done)
    assert meter.done == meter.total == sum(file.stat().st_size for file in files)
    assert seen == sorted(seen) and 0 < seen[0] < seen[-1]
    meter = Meter([tmp_path / "c.txt"])
    assert list(read_documents([tmp_path / "c.txt"], meter=meter)) == [content.decode()]
    assert meter.done == len(content)
    os.mkfifo(tmp_path / "pipe")
    assert Meter([*files, tmp_path / "pipe"]).total is None


@pytest.mark.parametrize("kind, told", [("text", "text must be UTF-8"), ("json", "every line must be one JSON object")])
def test_bad_bytes_of_a_pipe_are_told_without_reading_it_again(tmp_path, kind, told):
    """A second reading would wait for a writer for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as writer:
        writer.submit(pipe.write_bytes, b"caf\xe9\n")
        with pytest.raises(UserError, match=told):
            documents_of(pipe, kind=kind)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é\n".encode() * 3 + b"caf\xe9\n")
    with pytest.raises(UserError, match=r"latin\.txt line 4'\n  rule: text must be UTF-8; byte 0xe9"):
        documents_of(tmp_path / "latin.txt")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(UserError, match=r"cut\.txt\.gz"):
        documents_of(tmp_path / "cut.txt.gz")


def test_files_of_a_folder_are_sorted_and_chosen_by_ending(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/x.txt.gz", "c.pyc", ".git/d.txt", ".e.txt", "f.dat"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert find_files([tmp_path]) == [tmp_path / name for name in ("a/x.txt.gz", "a/z.jsonl", "b.txt")]
    assert find_files([tmp_path], [".dat"]) == [tmp_path / "f.dat"]
    assert find_files([tmp_path / "f.dat", tmp_path / "b.txt"]) == [tmp_path / "f.dat", tmp_path / "b.txt"]


def test_linked_folders_count_once_and_what_is_left_out_is_told(tmp_path, caplog):
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    for name in ("in/a.txt", "in/sub/b.txt", "out/c.txt", "in/d.txt.xz", "in/e.xz", "in/F.TXT"):
        (tmp_path / name).write_text("x")
    (tmp_path / "in/linked").symlink_to(tmp_path / "out")
    (tmp_path / "in/sub/loop").symlink_to(tmp_path / "in")
    found = find_files([tmp_path / "in"])
    assert found == [tmp_path / "in" / name for name in ("F.TXT", "a.txt", "linked/c.txt", "sub/b.txt")]
    assert "2 files are left out" in caplog.text and ".xz: 2" in caplog.text
    (tmp_path / "in/gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt"):
        list(read_documents(find_files([tmp_path / "in"])))


def test_the_sidecar_of_a_corpus_is_no_text(tmp_path, write_corpus):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "other_meta.json").write_text("{}")
    write_corpus(tmp_path / "c", [[1, 2]])
    write_corpus(tmp_path / "d", [[1, 2]], "fleetx")
    assert find_files([tmp_path]) == [tmp_path / "a.txt", tmp_path / "other_meta.json"]


def test_a_file_that_comes_twice_is_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    assert len(find_files([tmp_path / "a.txt"])) == 1 and not caplog.text
    assert len(find_files([tmp_path])) == 2
    assert "--input names 1 files more than once" in caplog.text


def test_missing_input(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        find_files([tmp_path / "none"])
    with pytest.raises(UserError, match=r"must hold files ending in \.txt"):
        find_files([tmp_path])
