"""What a run counts, logs and writes, seen from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.launch import launch
from tests.training import REPO, TINY, arguments, rewrite, same_weights, train, train_on
from tools.eval import main as evaluate
from tools.train import main

ONE_LAYER = ("Model.num_layers=1",)
LINE = re.compile(
    r"\[train\] epoch: (\d+), batch: (\d+), loss: (\d+\.\d{9}), avg_batch_cost: [\d.]+ sec, speed: [\d.]+ step/s, "
    r"ips_total: (\d+) tokens/s, ips: (\d+) tokens/s[^,]*, learning rate: (\d\.\d{5}e[-+]\d\d), grad_norm: ([\d.]+), "
    r"loss_scale: 1.0, found_inf: 0, mfu: -, mem: [\d.]+ MB"
)


def corpus(folder, tokens, eos=0):
    """A corpus of one document without EOS inside, ids 1…255."""
    from ppfleetx.data import CorpusWriter

    folder.mkdir()
    with CorpusWriter(folder / "part", "megatron", 256) as writer:
        writer.append(np.random.default_rng(0).integers(1, 256, tokens))
        writer.finish(eos_id=eos)
    return f"Data.Train.dataset.input_dir={folder}", "Data.Train.dataset.split=[1,0,0]", "Data.Eval=null"


def test_as_the_readme_says_loss_falls_and_a_second_run_is_bit_identical(tmp_path, monkeypatch):
    """The shipped file, unchanged but for where it writes, from the repository's root."""
    monkeypatch.chdir(REPO)
    losses = []
    for name in ("a", "b"):
        assert main(["-c", TINY, "-o", f"Engine.save_load.output_dir={tmp_path / name}", "Engine.visualdl=false"]) == 0
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records])
        assert sum(record["kind"] == "eval" for record in records) == 3
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(np.log(256), abs=0.05)
    assert losses[0][-1] < 0.9 * losses[0][0]


def test_the_log_line_has_paddlefleetxs_form(tmp_path, capsys):
    run = train(tmp_path, *ONE_LAYER, "Engine.max_steps=6", "Engine.logging_freq=2")
    found = [LINE.search(line) for line in capsys.readouterr().out.splitlines() if "[train]" in line]
    assert all(found) and [int(line[2]) for line in found] == [1, 3, 5]
    for line, record in zip(found, run.records(), strict=True):
        assert float(line[3]) == pytest.approx(record["loss"], abs=1e-9)
        assert float(line[7]) == pytest.approx(record["grad_norm"], abs=1e-9)
        assert record["step"] == int(line[2]) + 1


def test_values_are_means_over_the_window(tmp_path):
    every = train(tmp_path / "1", *ONE_LAYER, "Engine.max_steps=6").records()
    third = train(tmp_path / "3", *ONE_LAYER, "Engine.max_steps=6", "Engine.logging_freq=3").records()
    for name in ("loss", "grad_norm"):
        means = [np.mean([record[name] for record in every[at : at + 3]]) for at in (0, 3)]
        assert [record[name] for record in third] == pytest.approx(means, rel=1e-12)


def test_c64_logged_learning_rates(tmp_path):
    """Rule B24, independent of the batch size."""
    schedule = [f"Optimizer.lr.{pair}" for pair in ("max_lr=1e-3", "min_lr=1e-4", "warmup_rate=0.1", "decay_steps=20")]
    right = {1: 5e-4, 2: 1e-3, 3: 9.931635e-4, 4: 9.728617e-4, 5: 9.397114e-4, 11: 5.5e-4, 20: 1e-4, 21: 1e-4}
    for size in (4, 8):
        run = train(
            tmp_path / str(size), *ONE_LAYER, *schedule, "Engine.max_steps=21", f"Global.global_batch_size={size}"
        )
        rates = {record["step"]: record["learning_rate"] for record in run.records()}
        assert {step: rates[step] for step in right} == pytest.approx(right, rel=1e-6)


def test_c04_floats_without_a_dot_train(tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("Optimizer:\n  lr: {max_lr: 1e-3}\n  epsilon: 1e-8\n  betas: [9e-1, 9.99e-1]\n")
    run = ["-c", str(overlay), *arguments(tmp_path / "out", *ONE_LAYER, "Engine.max_steps=3")]
    assert main([*run[2:4], *run[:2], *run[4:]]) == 0
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert max(record["learning_rate"] for record in records) == 1e-3


@pytest.mark.parametrize(
    "override",
    ["Engine.eval_freq=0", "Engine.eval_freq=-1", "Engine.eval_freq=null", "Engine.eval_iters=0", "Data.Eval=null"],
)
def test_c93_training_without_evaluation(tmp_path, override):
    run = train(tmp_path, *ONE_LAYER, "Engine.max_steps=3", "Engine.eval_freq=1", "Engine.eval_iters=1", override)
    assert run.code == 0 and len(run.losses()) == 3 and not run.records("eval")


@pytest.mark.parametrize(
    ("mode", "max_steps", "epochs", "updates"),
    [
        ("step", 5, 3, 5),
        ("step", 25, 3, 25),
        ("epoch", 5, 3, 5),
        ("epoch", 100, 1, 10),
        ("epoch", 25, 3, 25),
        ("epoch", -1, 2, 20),
    ],
)
def test_c108_what_ends_a_run(tmp_path, capsys, mode, max_steps, epochs, updates):
    """10 updates an epoch: 80 samples of 32 tokens and one more token make 2561."""
    data = corpus(tmp_path / "data", 2561)
    run = train(
        tmp_path / "out", *ONE_LAYER, *data, f"Engine.run_mode={mode}", f"Engine.max_steps={max_steps}",
        f"Engine.num_train_epochs={epochs}", "Optimizer.lr.decay_steps=null", "Engine.logging_freq=1",
    )  # fmt: skip
    assert run.code == 0 and len(run.losses()) == updates
    assert run.records()[-1]["learning_rate"] == pytest.approx(1e-4)  # decay_steps is the true number of updates
    assert f"{updates} updates of 8 samples read {updates * 8} samples" in capsys.readouterr().out


@pytest.mark.parametrize(("decay_steps", "warned"), [(9, True), (20, False), (30, False)])
def test_a_rate_that_stays_at_its_lowest_is_warned_of_where_epochs_end_the_run(tmp_path, capsys, decay_steps, warned):
    """2 epochs of 10 updates: known only with the data."""
    run = train(
        tmp_path / "out", *ONE_LAYER, *corpus(tmp_path / "data", 2561), "Engine.run_mode=epoch", "Engine.max_steps=-1",
        "Engine.num_train_epochs=2", f"Optimizer.lr.decay_steps={decay_steps}",
    )  # fmt: skip
    text, rates = capsys.readouterr().out, [record["learning_rate"] for record in run.records()]
    said = "Optimizer.lr.decay_steps 9 is less than the updates of these epochs, 20: from update 10 on the learning rate stays"
    assert (said in text) is warned and text.count("is less than the updates") == warned
    if warned:  # a record tells the rate of the next update
        assert rates[7] > rates[8] == rates[19] == 1e-4


def test_c108_data_repeats_to_max_steps_and_the_log_says_so(tmp_path, capsys):
    run = train(tmp_path / "out", *ONE_LAYER, *corpus(tmp_path / "data", 2561), "Engine.max_steps=12")
    assert len(run.losses()) == 12 and "1.20 epochs (the data repeats)" in capsys.readouterr().out
    assert [record["epoch"] for record in run.records()] == [0] * 10 + [1] * 2


@pytest.mark.parametrize(("drop_last", "updates"), [("true", 1), ("false", 2)])
def test_c36_last_partial_batch(tmp_path, capsys, drop_last, updates):
    """10 samples in batches of 8: the two left over are dropped, or trained on alone (the rest is padding)."""
    data = corpus(tmp_path / "data", 321)
    run = train(
        tmp_path / "out", *ONE_LAYER, *data, "Engine.run_mode=epoch", f"Data.Train.sampler.drop_last={drop_last}",
        "Debug.log_sample_ids=true",
    )  # fmt: skip
    assert run.code == 0 and len(run.losses()) == updates
    ids = [json.loads(found) for found in re.findall(r"\[sample_ids\].* ids: (\[.*\])", capsys.readouterr().out)]
    assert ids[0] == list(range(8))
    if drop_last == "false":
        assert ids[1] == [8, 9, -1, -1, -1, -1, -1, -1]


def test_a_padded_batch_gives_the_mean_over_its_real_samples(tmp_path):
    """The same two samples alone in a batch of two."""
    data = corpus(tmp_path / "data", 321)
    common = (*ONE_LAYER, *data, "Engine.run_mode=epoch", "Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0",
              "Optimizer.lr.max_lr=0", "Optimizer.lr.min_lr=0")  # fmt: skip
    padded = train(tmp_path / "8", *common, "Data.Train.sampler.drop_last=false")
    pairs = train(tmp_path / "2", *common, "Global.global_batch_size=2")
    assert padded.losses()[1] == pytest.approx(pairs.losses()[4], rel=1e-6)


def test_epoch_mode_evaluates_and_saves_at_the_end_of_each_epoch(tmp_path):
    folder, split, _ = corpus(tmp_path / "data", 2561)
    run = train(
        tmp_path / "out", *ONE_LAYER, folder, split, "Engine.run_mode=epoch", "Engine.num_train_epochs=3",
        "Engine.max_steps=-1", folder.replace("Train", "Eval"), "Data.Eval.dataset.split=[0,1,0]", "Engine.eval_freq=2",
        "Engine.eval_iters=1", "Engine.save_load.save_epoch=1",
    )  # fmt: skip
    assert run.code == 0
    assert [record["step"] for record in run.records("eval")] == [20]
    assert sorted(path.name for path in run.output.glob("step_*")) == [
        "step_00000010",
        "step_00000020",
        "step_00000030",
    ]


def test_c94_zero_weights_give_perplexity_256(tmp_path, capsys):
    """A checkpoint of zeros, evaluated by tools/eval.py."""
    run = train(tmp_path, *ONE_LAYER, "Engine.max_steps=1")
    rewrite(run.checkpoint(1), {name: np.zeros_like(weight) for name, weight in run.weights(1).items()})
    capsys.readouterr()
    command = arguments(
        tmp_path, *ONE_LAYER, "Engine.eval_freq=1", "Engine.eval_iters=2", "Engine.save_load.ckpt_dir=auto"
    )
    before = sorted(path.name for path in tmp_path.iterdir())
    assert evaluate(command) == 0
    text = capsys.readouterr().out
    assert "loss: 5.545177" in text and "ppl: 256.000" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_evaluation_without_a_checkpoint_is_refused(tmp_path, capsys):
    assert evaluate(arguments(tmp_path, *ONE_LAYER, "Engine.eval_freq=1", "Engine.eval_iters=2")) == 2
    assert "ckpt_dir" in capsys.readouterr().err


def test_evaluation_repeats_what_training_logged(tmp_path, capsys):
    common = (*ONE_LAYER, "Engine.max_steps=2", "Engine.eval_freq=2", "Engine.eval_iters=2")
    run = train(tmp_path, *common)
    capsys.readouterr()
    assert evaluate(arguments(tmp_path, *common, f"Engine.save_load.ckpt_dir={tmp_path / 'step_00000002'}")) == 0
    assert f"loss: {run.records('eval')[0]['loss']:.9f}" in capsys.readouterr().out


def test_c82_one_process_and_a_launch_of_one_are_bit_identical(tmp_path):
    alone = train(tmp_path / "alone", *ONE_LAYER, "Engine.max_steps=3")
    launched = train_on(1, tmp_path / "launched", *ONE_LAYER, "Engine.max_steps=3")
    assert launched.code == 0 and launched.losses() == alone.losses()
    assert same_weights(alone.weights(3), launched.weights(3))


def test_c91_visualdl_has_one_point_a_step_on_two_processes_with_resume(tmp_path):
    from visualdl import LogReader

    common = (*ONE_LAYER, "Engine.visualdl=true", "Engine.save_load.save_steps=6")
    assert train_on(2, tmp_path, *common, "Engine.max_steps=7").code == 0  # logs step 7, which the resume does again
    resume = f"Engine.save_load.ckpt_dir={tmp_path / 'step_00000006'}"
    run = train_on(2, tmp_path, *common, "Engine.max_steps=8", resume)
    assert run.code == 0
    files = list((tmp_path / "visualdl").iterdir())
    assert len(files) == 1
    reader = LogReader(file_path=str(files[0]))
    for tag, field in (("loss", "loss"), ("learning_rate", "learning_rate"), ("grad_norm", "grad_norm"),
                       ("tokens_per_second", "tokens_per_second")):  # fmt: skip
        points = reader.get_data("scalar", f"train/{tag}")
        assert [point.id for point in points] == list(range(1, 9)), tag
        assert [point.value for point in points] == pytest.approx([record[field] for record in run.records()], rel=1e-6)


def test_profiler_writes_a_trace(tmp_path, capfd):
    assert (
        train(tmp_path, *ONE_LAYER, "Engine.max_steps=3", "Profiler.enable=true", "Profiler.scheduler=[1,2]").code == 0
    )
    assert list((tmp_path / "profiler_log").glob("*.json"))
    capfd.readouterr()


def test_mixed_precision_on_a_cpu_is_float32_with_one_warning(tmp_path, capsys):
    plain = train(tmp_path / "plain", *ONE_LAYER, "Engine.max_steps=2")
    capsys.readouterr()
    mixed = train(tmp_path / "mixed", *ONE_LAYER, "Engine.max_steps=2", "Engine.mix_precision.enable=true")
    assert capsys.readouterr().out.count("running in float32") == 1
    assert mixed.losses() == plain.losses()


def test_c02_false_really_switches_recompute_off(tmp_path, capsys):
    for word, value in (("false", False), ("False", False), ("true", True), ("True", True)):
        assert main([*arguments(tmp_path, f"Model.use_recompute={word}"), "--dry-run"]) == 0
        assert f"use_recompute: {str(value).lower()}" in capsys.readouterr().out


def test_c100_memory_does_not_creep(tmp_path):
    """300 updates in a process of its own: less than 30 MB between update 50 and update 300."""
    script = (
        "import sys, json, resource\n"
        "from ppfleetx.engine.engine import Engine\n"
        "sizes, update = {}, Engine._update\n"
        "def measured(self, *a):\n"
        "    result = update(self, *a)\n"
        "    sizes[self.progress.step] = int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()\n"
        "    return result\n"
        "Engine._update = measured\n"
        "from tools.train import main\n"
        "code = main(sys.argv[1:])\n"
        "print('GROWTH', sizes[300] - sizes[50])\n"
        "raise SystemExit(code)\n"
    )
    command = [
        sys.executable,
        "-c",
        script,
        *arguments(tmp_path, *ONE_LAYER, "Engine.max_steps=300", "Engine.logging_freq=50"),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=True)
    growth = int(re.search(r"GROWTH (-?\d+)", done.stdout)[1])
    assert growth < 30e6


def test_c79_two_jobs_at_once_do_not_collide(tmp_path):
    from tests.launch import Launch

    jobs = [
        Launch(
            [REPO / "tools/train.py", *arguments(tmp_path / str(number), *ONE_LAYER, "Engine.max_steps=2")], 2, cwd=REPO
        )
        for number in range(2)
    ]
    assert [job.wait(90).returncode for job in jobs] == [0, 0]


def test_help_says_what_there_is():
    done = subprocess.run(
        [sys.executable, "tools/train.py", "--help"], cwd=REPO, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--config", "--override", "--dry-run", "--world-size", "--explain"))


def test_c105_two_processes_end_without_a_word_of_complaint(tmp_path):
    result = launch([REPO / "tools/train.py", *arguments(tmp_path, *ONE_LAYER, "Engine.max_steps=2")], 2, cwd=REPO)
    text = "".join(result.logs).lower()
    assert result.returncode == 0 and result.orphans == 0
    assert not any(word in text for word in ("traceback", "error", "abort", "signal"))
