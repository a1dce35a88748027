"""tools/checkpoint.py as a user runs it, on what real runs have written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
import yaml
from safetensors.numpy import load_file

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.weights import WEIGHTS
from tests.training import NO_DROPOUT, Outcome, arguments, same_weights, train, train_on
from tools.checkpoint import main
from tools.eval import main as evaluate

REPO = Path(__file__).resolve().parents[2]
#: a vocabulary of 300 is padded to 384, and under mp2 to 512
MODEL = ("Model.num_layers=2", "Model.vocab_size=300", *NO_DROPOUT)
RUN = (*MODEL, "Engine.max_steps=2", "Engine.save_load.save_steps=1", "Engine.eval_freq=2", "Engine.eval_iters=2")
FIRST, LAST = "step_00000001", "step_00000002"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tool")


@pytest.fixture(scope="module")
def written(folder) -> dict[str, Outcome]:
    """The same two updates by one process and by four, saved after each, evaluated after the last."""
    layout = ("Distributed.mp_degree=2", "Distributed.pp_degree=2")
    outcomes = {"one": train(folder / "one", *RUN), "many": train_on(4, folder / "many", *RUN, *layout)}
    assert [outcome.code for outcome in outcomes.values()] == [0, 0], outcomes["many"].launched
    return outcomes


def said(capsys, code, *words):
    """Standard output (for a user's mistake, standard error) of the command, which must end with `code`."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if code == 2:
        assert captured.out == "" and captured.err.startswith("error: ")
        return captured.err
    return captured.out


def test_ls(written, folder, capsys):
    lines = said(capsys, 0, "ls", folder / "many").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[FIRST, "1"], [LAST, "2"]]
    assert all("pp2mp2" in line and line.endswith("complete") for line in lines[1:])
    assert "one process" in said(capsys, 0, "ls", folder / "one" / LAST)


def test_show(written, folder, capsys):
    text = said(capsys, 0, "show", folder / "many" / LAST)
    for words in ("step             2", "consumed_samples 16", "layout           pp2mp2", "paddle version"):
        assert words in text
    # 300·64 + 32·64 + 2·(12·64² + 13·64) + 2·64: vocabulary, positions, two blocks, the last norm
    assert "parameters       121,344 in 36 tensors" in text
    assert re.search(r"^embedding\.word\.weight +\[300, 64\] +F32 +moment1 F32", text, re.MULTILINE)
    config = yaml.safe_load(said(capsys, 0, "show", folder / "many" / LAST, "--config"))
    assert (config["Distributed"]["mp_degree"], config["_derived"]["world_size"]) == (2, 4)
    text = said(capsys, 0, "show", folder / "many" / LAST, "embedding.word.weight")
    values = written["many"].tensors(2)["embedding.word.weight"].astype("float64")
    assert "F32 [300, 64], stored in 2 parts" in text and f"least {values.min():.9g}, most {values.max():.9g}" in text


def test_verify_names_every_fault(written, folder, capsys, tmp_path):
    assert said(capsys, 0, "verify", folder / "many", folder / "one" / LAST).count(": whole") == 3
    broken = tmp_path / LAST
    shutil.copytree(folder / "many" / LAST, broken)
    (broken / "rank_00001.json").unlink()
    with open(broken / "shard_00002.safetensors", "r+b") as file:
        file.seek(-9, 2)
        file.write(b"?")
    text = said(capsys, 1, "verify", broken, folder / "one" / LAST)
    assert f"{broken}: rank_00001.json is missing" in text
    assert f"{broken}: shard_00002.safetensors was changed" in text and text.count(": whole") == 1
    for verb in (("consolidate", broken, tmp_path / "out"), ("to-hf", broken, tmp_path / "out")):
        assert main([str(word) for word in verb]) == 1  # damage does not travel
        assert "rank_00001.json is missing" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_diff(written, folder, capsys):
    one, many = folder / "one" / LAST, folder / "many" / LAST
    assert said(capsys, 0, "diff", many, many) == "0 tensors differ, 180 are equal to the bit\n"
    text = said(capsys, 1, "diff", folder / "one" / FIRST, one)
    assert "progress.step: 1 in A, 2 in B" in text and "180 tensors differ" in text
    text = said(capsys, 1, "diff", "--weights", one, many)
    assert "config.Distributed.mp_degree: 1 in A, 2 in B" in text and "moment1" not in text
    gaps = [float(gap) for gap in re.findall(r"largest difference ([^,]+),", text)]
    assert gaps and max(gaps) < 1e-5  # the layouts differ by rounding only


def test_hash_and_consolidate(written, folder, capsys, tmp_path):
    before = dict(line.split() for line in said(capsys, 0, "hash", folder / "many" / LAST).splitlines())
    assert before["weights"] != before["state"]
    text = said(capsys, 0, "consolidate", folder / "many" / LAST, tmp_path / "out")
    assert "36 tensors" in text and "Engine.save_load.weights_only=true" in text
    spaced = said(capsys, 0, "consolidate", folder / "many" / LAST, tmp_path / "my weights").split("-o ")[1]
    assert shlex.split(spaced) == [
        f"Engine.save_load.ckpt_dir={tmp_path / 'my weights'}", "Engine.save_load.weights_only=true",
    ]  # fmt: skip
    after = dict(line.split() for line in said(capsys, 0, "hash", tmp_path / "out").splitlines())
    assert after == {"weights": before["weights"], "state": before["weights"]}
    assert "weights only" in said(capsys, 0, "ls", tmp_path / "out")
    assert f"step 2 of {folder / 'many' / LAST}" in said(capsys, 0, "show", tmp_path / "out")
    digests = said(capsys, 0, "hash", "--tensors", tmp_path / "out").splitlines()
    assert len(digests) == 36 + 2 and digests[0].endswith("  blocks.0.attention.k.bias")


def test_c109_one_file_of_a_parallel_run(written, folder, capsys, tmp_path):
    """mp2·pp2 → one file, as one process would have saved it; its evaluation on one process is that of the parallel run."""
    said(capsys, 0, "consolidate", folder / "many" / LAST, tmp_path / "out")
    plain = load_file(tmp_path / "out" / WEIGHTS)
    expected, alone = written["many"].weights(2), written["one"].weights(2)
    assert {name: one.shape for name, one in plain.items()} == {name: one.shape for name, one in alone.items()}
    assert plain["embedding.word.weight"].shape == (300, 64)
    assert all(np.array_equal(one, expected[name]) for name, one in plain.items())
    use = (f"Engine.save_load.ckpt_dir={tmp_path / 'out'}", "Engine.eval_freq=2", "Engine.eval_iters=2")
    assert evaluate(arguments(tmp_path / "run", *MODEL, *use)) == 0
    captured = capsys.readouterr()
    (loss,) = re.findall(r"\[eval\] step: \d+, loss: ([\d.]+)", captured.out + captured.err)
    (record,) = written["many"].records("eval")
    assert float(loss) == pytest.approx(record["loss"], rel=1e-6)
    going_on = train(tmp_path / "on", *MODEL, f"Engine.save_load.ckpt_dir={tmp_path / 'out'}", "Engine.max_steps=3")
    assert going_on.code == 2 and "Engine.save_load.weights_only=true" in capsys.readouterr().err
    # fine-tuning starts with these weights, whichever form they are read from, and a new optimizer
    tuned = {}
    for name, path in (("file", tmp_path / "out"), ("parts", folder / "many" / LAST)):
        tune = (f"Engine.save_load.ckpt_dir={path}", "Engine.save_load.weights_only=true", "Engine.max_steps=2")
        tuned[name] = train(tmp_path / name, *MODEL, *tune)
    assert [record["step"] for record in tuned["file"].records()] == [1, 2]
    assert tuned["file"].losses() == tuned["parts"].losses()
    assert same_weights(tuned["file"].tensors(2), tuned["parts"].tensors(2))
    first, *_ = written["many"].losses()
    assert tuned["file"].losses()[0] < first - 0.05  # the same batch, after two updates


BLOCKED = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("paddle", "torch", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from tools.checkpoint import main
codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
print("codes", codes)
assert not {"paddle", "torch", "transformers"} & set(sys.modules)
"""


def test_no_verb_needs_paddle(written, folder, tmp_path):
    step, out = folder / "many" / LAST, tmp_path
    state = {"gpt.decoder.norm.bias": paddle.zeros([4])}
    paddle.save(state, str(tmp_path / "fleetx/model.pdparams"))
    (tmp_path / "model.yaml").write_text(
        yaml.safe_dump({"Model": {"vocab_size": 8, "hidden_size": 4, "num_layers": 1, "num_attention_heads": 2}})
    )
    runs = [
        ["ls", folder / "many"], ["verify", step], ["show", step], ["show", step, "norm.bias"], ["diff", step, step],
        ["hash", step], ["consolidate", step, out / "weights"], ["to-hf", step, out / "hf"],
        ["from-hf", out / "hf", out / "back"], ["diff", "--weights", out / "back", step],
        ["from-fleetx", tmp_path / "fleetx", out / "fleetx-out", "-c", tmp_path / "model.yaml"],
    ]  # fmt: skip
    text = json.dumps([[str(word) for word in words] for words in runs])
    done = subprocess.run([sys.executable, "-c", BLOCKED, text], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"codes {[0] * 10 + [2]}", done.stdout + done.stderr
    assert "the model needs and the files lack embedding.word.weight [8, 4]" in done.stderr
    assert Checkpoint(out / "back").shapes() == Checkpoint(step).shapes()


def test_there_and_back_and_on(written, folder, capsys, tmp_path):
    """A run's weights as Hugging Face's and back evaluate as they did, with the section Model that came along."""
    said(capsys, 0, "to-hf", folder / "one" / LAST, tmp_path / "hf", "--max-shard-bytes", 200_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    text = said(capsys, 0, "from-hf", tmp_path / "hf", tmp_path / "back")
    assert str(tmp_path / "back/model.yaml") in text and "Engine.save_load.ckpt_dir=" in text
    use = (f"Engine.save_load.ckpt_dir={tmp_path / 'back'}", "Engine.eval_freq=2", "Engine.eval_iters=2")
    command = arguments(tmp_path / "run", *use)
    assert evaluate([*command[:2], "-c", str(tmp_path / "back/model.yaml"), *command[2:]]) == 0
    text = capsys.readouterr().out
    (record,) = written["one"].records("eval")
    assert f"loss: {record['loss']:.9f}" in text
    assert "layout weights only → one process" in text and "config changed" not in text
    assert (
        evaluate([*command[:2], "-c", str(tmp_path / "back/model.yaml"), *command[2:], "Model.num_attention_heads=2"])
        == 2
    )
    assert "Model.num_attention_heads = 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls", "nowhere"], "there is no such folder"),
        (["show", "{step}/manifest.json"], "it is a file, and a checkpoint is a folder"),
        (["consolidate", "{step}", "{step}/manifest.json/out"], "manifest.json"),
        (["verify", "{many}/../"], "it is no checkpoint (no manifest.json) and holds none"),
        (["show", "{many}"], f"it holds {FIRST}, {LAST}: name one of them"),
        (["show", "{step}", "norm.wieght"], "did you mean norm.weight"),
        (["diff", "{step}", "nowhere"], "there is no such folder"),
        (["hash", "{many}"], "name one of them"),
        (["consolidate", "{step}", "{many}"], "nothing is overwritten"),
        (["to-hf", "{step}", "{many}"], "nothing is overwritten"),
        (["to-hf", "{step}", "out", "--max-shard-bytes", "0"], "--max-shard-bytes = 0"),
        (["from-hf", "{step}", "out"], "it has no config.json"),
        (["from-fleetx", "{step}", "out", "-c", str(REPO / "configs/debug/tiny_gpt.yaml")], "it has no model.pdparams"),
        (["from-fleetx", "{step}", "out", "-c", "nowhere.yaml"], "there is no such file"),
    ],
)  # fmt: skip
def test_wrong_use(written, folder, capsys, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    places = {"many": folder / "many", "step": folder / "many" / LAST}
    assert told in said(capsys, 2, *(word.format(**places) for word in words))
    assert list(tmp_path.iterdir()) == []


VERBS = ("ls", "verify", "show", "diff", "hash", "consolidate", "to-hf", "from-hf", "from-fleetx")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0 and re.match(rf"usage: .* {verb} ", capsys.readouterr().out)


@pytest.mark.parametrize("words", [[], ["pack"], ["ls"], ["from-fleetx", "a", "b"]])
def test_wrong_words(words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_a_reader_that_has_read_enough(written, folder):
    """`| head -1`: no traceback, and not the exit code of damage."""
    command = f"{sys.executable} tools/checkpoint.py show {folder / 'one' / LAST}"
    script = f"exec 3>&1; {{ {command}; echo $? >&3; }} | true"  # the reader ends before Python has started
    done = subprocess.run(["bash", "-c", script], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("141\n", "")
    done = subprocess.run(["bash", "-c", f"{command} >&-"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")  # nobody listens at all


def test_ctrl_c_leaves_nothing(written, folder, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
        raise KeyboardInterrupt

    monkeypatch.setattr("ppfleetx.checkpoint.weights.write_shard", interrupted)
    assert main(["consolidate", str(folder / "one" / LAST), str(tmp_path / "out")]) == 130
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")


def test_an_incomplete_checkpoint_is_damaged_not_a_mistake(written, folder, capsys, tmp_path):
    broken = tmp_path / LAST
    shutil.copytree(folder / "one" / LAST, broken)
    (broken / "manifest.json").unlink()
    assert "incomplete: there is no complete checkpoint here" in said(capsys, 0, "ls", tmp_path)
    for verb in ("verify", "show", "hash"):
        assert main([verb, str(broken)]) == 1
        captured = capsys.readouterr()
        assert f"{broken}: manifest.json cannot be read" in captured.out + captured.err
