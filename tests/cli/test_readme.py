"""The READMEs: one text in two languages, whose commands work and whose shown output is what comes out (case C104)."""

from __future__ import annotations

import re
import time

import pytest

from ppfleetx.config import load_config
from ppfleetx.models.registry import num_parameters
from tests.cli.clone import REPO, copy_repository, environment, run

READMES = ("README.md", "README_zh.md")
#: run by other means: they install, or run everything
NOT_RUN = ("bash projects/gpt/quickstart.sh\n", "bash tests/run.sh\n")
LIMIT_S = 90


def blocks(readme, language):
    text = (REPO / readme).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def runnable():
    """The bash blocks that are run here, in order."""
    found = blocks("README.md", "bash")
    assert all(block in found for block in NOT_RUN)
    installs = [block for block in found if "-m venv" in block]
    assert len(installs) == 1
    return [block for block in found if block not in (*NOT_RUN, *installs)]


def shape(text):
    """Text with every number replaced, and the time stamp gone."""
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A function that runs commands in a fresh copy of the repository."""
    folder = tmp_path_factory.mktemp("clone")
    tree, env = copy_repository(folder / "tree"), environment(folder / "bin")
    return lambda command, timeout_s=LIMIT_S: run(command, tree, env, timeout_s)


def test_both_languages_have_the_same_blocks():
    english, chinese = (blocks(readme, "bash") for readme in READMES)
    assert len(english) >= 9 and english == chinese
    english, chinese = (blocks(readme, "text") for readme in READMES)
    assert [text.replace("--language zh", "--language en") for text in chinese] == english
    headings = [re.findall(r"^#+", (REPO / readme).read_text(encoding="utf-8"), re.MULTILINE) for readme in READMES]
    assert headings[0] == headings[1]


def test_links_lead_somewhere():
    for readme in READMES:
        text = (REPO / readme).read_text(encoding="utf-8")
        anchors = {re.sub(r"\s", "-", title.lower()) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            assert target[1:] in anchors if target.startswith("#") else (REPO / target).exists(), (readme, target)


def test_c104_every_block_runs_as_written(clone):
    end, output = time.monotonic() + LIMIT_S, ""
    for block in runnable():
        done = clone(block, timeout_s=max(end - time.monotonic(), 1))
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        output += done.stdout
    (shown,) = [text for text in blocks("README.md", "text") if "[train]" in text]
    assert shape(shown.strip()) in map(shape, output.splitlines())


def test_c104_shown_message_is_what_is_printed(clone):
    (shown,) = [text for text in blocks("README.md", "text") if text.startswith("$ ")]
    command, _, message = shown[2:].partition("\n")
    done = clone(command)
    assert done.returncode == 2
    assert done.stdout == message


@pytest.mark.parametrize("readme", READMES)
def test_parameter_counts_of_the_table(readme):
    text = (REPO / readme).read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[\w+(?:\.\w+)?\]\((configs/nlp/\S+\.yaml)\) \| ([\d,]+) \| (\d+)", text, re.MULTILINE)
    recipes = {path.relative_to(REPO).as_posix() for path in (REPO / "configs/nlp").glob("*/pretrain_*.yaml")}
    assert {file for file, _, _ in rows} == {file for file in recipes if not file.endswith("_base.yaml")}
    for file, count, world_size in rows:
        config = load_config([str(REPO / file)], world_size=int(world_size)).config
        assert f"{num_parameters(config):,}" == count, file


def test_visualdl_command_is_the_one_that_works():
    for readme in READMES:
        (shown,) = [text for text in blocks(readme, "text") if text.startswith("visualdl")]
        assert "--language " in shown  # without it VisualDL answers some browsers with status 500
