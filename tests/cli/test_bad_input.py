"""A mistake in what a run is given: exit code 2, one message (key, value, rule, fix), no traceback, nothing written over."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time

import numpy as np
import paddle
import pytest

from ppfleetx.config.layouts import parse_layout
from tests.launch import launch
from tests.training import REPO, TINY, arguments, train
from tools import parity
from tools.train import main


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs with overrides that must be refused and gives the message."""

    def run(*overrides: str) -> str:
        assert train(tmp_path / "out", "Engine.max_steps=1", *overrides).code == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: "), captured
        assert "Traceback" not in captured.err + captured.out
        assert not (tmp_path / "out").exists()
        return captured.err

    return run


def corpus(folder, documents, vocab_size=256):
    from ppfleetx.data import CorpusWriter

    folder.mkdir(exist_ok=True)
    with CorpusWriter(folder / "part", "megatron", vocab_size) as writer:
        for document in documents:
            writer.append(np.array(document))
        writer.finish(eos_id=0)
    return folder


def test_missing_data_folder(refused):
    text = refused("Data.Train.dataset.input_dir=no/such/folder")
    assert "Data.Train.dataset.input_dir = 'no/such/folder'" in text and "rule:" in text


def test_empty_data_folder(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused(f"Data.Train.dataset.input_dir={tmp_path / 'empty'}")


def test_ids_beyond_the_vocabulary(refused):
    text = refused("Model.vocab_size=100")
    assert "Model.vocab_size = 100" in text and "fix:" in text


def test_c22_split_without_documents(refused, tmp_path):
    folder = corpus(tmp_path / "ten", [[1] * 100] * 10)
    began = time.monotonic()
    text = refused(
        *(f"Data.{mode}.dataset.{key}" for mode in ("Train", "Eval") for key in (f"input_dir={folder}", "split=[969,30,1]")),
        "Engine.eval_freq=2", "Engine.eval_iters=1",
    )  # fmt: skip
    assert "Data.Eval.dataset.split" in text and "10 documents" in text and time.monotonic() - began < 30


def test_too_few_tokens_for_a_sample(refused, tmp_path):
    folder = corpus(tmp_path / "short", [[1] * 20])
    assert "33" in refused(f"Data.Train.dataset.input_dir={folder}", "Data.Train.dataset.split=[1,0,0]")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("Distributed.mp_degree=3", ["Distributed", "mp_degree 3", "world size 1"]),
        ("Global.micro_batch_size=3", ["Global.micro_batch_size", "3", "8"]),
        ("Model.hiden_size=64", ["Model.hiden_size", "no such key", "did you mean", "hidden_size"]),
        ("Model.num_layers=four", ["Model.num_layers", "'four'", "whole number"]),
        ("Global.device=tpu", ["Global.device", "gpu, xpu, rocm, npu, cpu, mlu"]),
        ("Engine.max_steps=0", ["Engine.max_steps"]),
        ("Global.flags.FLAGS_none=1", ["Global.flags.FLAGS_none = 1", "Paddle must have a flag"]),
        ("Global.flags.FLAGS_check_nan_inf=abc", ["Global.flags.FLAGS_check_nan_inf", "takes this value"]),
        ("Model.num_attention_heads=6", ["64", "6"]),
    ],
)
def test_bad_values(refused, override, words):
    text = refused(override)
    assert all(word in text for word in words), text


def test_all_problems_come_at_once(refused):
    text = refused("Model.hiden_size=64", "Global.micro_batch_size=3", "Optimizer.lr.max_lr=fast")
    assert text.startswith("error: 3 problems") and text.count("rule:") == 3


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="needs a CPU build of Paddle")
def test_c102_gpu_on_a_cpu_build(refused, capsys):
    text = refused("Global.device=gpu")
    assert "Global.device = 'gpu'" in text and "-o Global.device=cpu" in text
    # but it can be looked at
    assert main(["-c", str(REPO / TINY), "-o", "Global.device=gpu", "--dry-run"]) == 0
    capsys.readouterr()


SEQ_31 = "Data.Train.dataset.max_seq_len=31"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (("Distributed.mp_degree=2", "Model.num_attention_heads=1"), ["num_attention_heads 1", "mp_degree 2"]),
        (("Distributed.pp_degree=2", "Model.virtual_pp_degree=2"), ["virtual_pp_degree", "pp_degree above 2"]),
        (
            ("Distributed.mp_degree=2", "Model.sequence_parallel=true", "Data.Train.dataset.max_seq_len=31"),
            ["31", "mp_degree 2"],
        ),
        (("Model.use_recompute=true", "Model.recompute_granularity=ful"), ["'ful'", "full, full_attn, core_attn"]),
    ],
)
def test_bad_layouts_are_refused_on_all_ranks_with_one_message(tmp_path, bad, words):
    began = time.monotonic()
    result = launch([REPO / "tools/train.py", *arguments(tmp_path / "out", *bad)], 2, cwd=REPO)
    assert result.returncode == 2 and result.orphans == 0 and time.monotonic() - began < 30
    assert all(word in result.logs[0] for word in words), result.logs[0]
    assert "Traceback" not in "".join(result.logs) and "rule:" not in result.logs[1]


def test_c15_stage_3_with_mp_and_stage_2_with_pp_are_accepted():
    """That they train with the right numbers is in tests/parity/test_sharding.py."""
    from ppfleetx.config import load_config

    for layout in ("mp2sharding2s3", "pp2sharding2s2"):
        load_config([str(REPO / TINY)], parse_layout(layout).overrides, 4)


def launch_with(folder, rank1, *overrides):
    """Two processes, of which rank 1 has further overrides, as a node with another file has."""
    script = folder / "rank.py"
    script.write_text(
        "import os, sys\n"
        "from tools.train import main\n"
        "arguments = sys.argv[1:]\n"
        "if os.environ['PADDLE_TRAINER_ID'] == '1':\n"
        f"    arguments += {list(rank1)!r}\n"
        "raise SystemExit(main(arguments))\n"
    )
    result = launch([script, *arguments(folder / "out", "Engine.max_steps=1", *overrides)], 2, cwd=REPO, timeout=60)
    assert result.returncode == 2 and result.orphans == 0, result.logs
    assert "Traceback" not in "".join(result.logs)
    return result.logs[0]


def test_a_fault_that_one_rank_sees_ends_all_with_2(tmp_path):
    """Rank 1 alone cannot see the data: a folder that exists on one node only."""
    assert "only/on/rank/0" in launch_with(tmp_path, ["Data.Train.dataset.input_dir=only/on/rank/0"])


def test_a_node_with_another_layout_and_rate_is_refused(tmp_path):
    """Before any group is made, which would never come together."""
    text = launch_with(tmp_path, ["Distributed.mp_degree=2", "Optimizer.lr.max_lr=2.0e-3"])
    assert "Distributed.mp_degree = 2" in text and "rank 0 has 1," in text
    assert "Optimizer.lr.max_lr = 0.002" in text and "rank 0 has 0.001," in text


def test_a_node_with_other_data_is_refused(tmp_path):
    other = corpus(tmp_path / "other", [[*range(1, 100), 0]] * 30)
    text = launch_with(tmp_path, [f"Data.Train.dataset.input_dir={other}"])
    assert "hash of the corpus of Data.Train.dataset.input_dir" in text and "Data.Eval" not in text.split("rule:")[0]


def test_c33_read_only_data_folder_works(tmp_path):
    folder = corpus(tmp_path / "data", [[*range(1, 100), 0]] * 30)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        inputs = [f"Data.{mode}.dataset.input_dir={folder}" for mode in ("Train", "Eval")]
        assert train(tmp_path / "out", "Engine.max_steps=2", *inputs).code == 0
    finally:
        folder.chmod(stat.S_IRWXU)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    code = train(tmp_path / "file" / "out", "Engine.max_steps=1").code
    assert code == 2
    text = capsys.readouterr().err
    assert "Engine.save_load.output_dir" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("recipe", "world_size", "parameters"),
    [
        ("gpt/pretrain_gpt_175B_mp8_pp16", "128", "174,603,264,000"),
        ("llama/pretrain_llama3_70B_mp8_pp8_sharding4", "256", "70,553,706,496"),
    ],
)
def test_dry_run_needs_no_paddle_and_is_quick(tmp_path, recipe, world_size, parameters):
    """Paddle is blocked by a module of its name that cannot be imported."""
    (tmp_path / "paddle.py").write_text("raise ImportError('blocked')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [
        sys.executable,
        "tools/train.py",
        "-c",
        f"configs/nlp/{recipe}.yaml",
        "--dry-run",
        "--world-size",
        world_size,
    ]
    times = []
    for _ in range(3):
        began = time.monotonic()
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=30)
        times.append(time.monotonic() - began)
        assert done.returncode == 0, done.stderr
    assert f"{parameters} parameters" in done.stderr
    assert min(times) < 1.5


def test_an_empty_key_to_explain_starts_no_run(tmp_path, capsys):
    assert main([*arguments(tmp_path / "out"), "--explain", ""]) == 2
    assert "--explain = ''" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_world_size_option_is_for_looking_only(capsys):
    assert main(["-c", str(REPO / TINY), "--world-size", "2"]) == 2
    assert "--world-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (["--steps", "0"], ["--steps = 0", "at least 1"]),
        (["--json", "/no/such/folder/verdicts.json"], ["--json = '/no/such/folder/verdicts.json'"]),
        (["-o", "Model.num_attention_heads=3"], ["hidden_size 64", "num_attention_heads 3"]),
    ],
)
def test_parity_refuses_before_the_first_run(capsys, bad, words):
    assert parity.main(["-c", str(REPO / TINY), "--layouts", "dp2", *bad]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words) and "running" not in text, text


def test_resolved_file_is_saved_and_runs_again(tmp_path):
    first = train(tmp_path / "first", "Engine.max_steps=2", "Model.num_layers=1")
    code = main(["-c", str(first.output / "config.yaml"), "-o", f"Engine.save_load.output_dir={tmp_path / 'second'}"])
    assert code == 0
    second = [json.loads(line)["loss"] for line in (tmp_path / "second/metrics.jsonl").read_text().splitlines()]
    assert second == first.losses()
