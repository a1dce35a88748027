"""Evaluates a checkpoint: `python tools/eval.py -c configs/debug/tiny_gpt.yaml -o Engine.save_load.ckpt_dir=auto`.

Prints the loss and perplexity of `Data.Eval` over `Engine.eval_iters` global batches, or with `--split test` of `Data.Test`
over `Engine.test_iters`; changes nothing in `output_dir`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.config import Config
from ppfleetx.engine import command
from ppfleetx.models.registry import summary


def evaluate(config: Config, evaluated: str) -> int:
    """Restores a checkpoint and evaluates it on `Data.Eval` or `Data.Test`."""
    from ppfleetx.distributed import ParallelContext, get_rng_state_tracker, seed_streams
    from ppfleetx.engine import Engine, make_model, make_trainable, open_data_alike, section_to_evaluate, settings
    from ppfleetx.optim import build_optimizer

    section_to_evaluate(config, evaluated)  # what is missing is said before a model is built
    topology = command.topology_of(config)
    with ParallelContext.create(topology, config.Global.device, settings=settings(config)) as context:
        seed_streams(topology, config.Global.seed)
        tracker = get_rng_state_tracker()
        model = make_model(config, context, tracker)
        trainable = make_trainable(config, context, model)
        optimizer = build_optimizer(config, trainable.named)
        engine = Engine(config, context, tracker, model, trainable, optimizer)
        data = open_data_alike(config, topology, context, evaluated)
        engine.restore(data, weights_only=True)
        engine.report_evaluation(data)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = command.parser(__doc__ or "")
    options.add_argument(
        "--split", choices=("eval", "test"), default="eval", help="what is evaluated: Data.Eval (default) or Data.Test"
    )
    arguments = options.parse_args(argv)
    return command.run(arguments, summary, lambda config: evaluate(config, arguments.split.capitalize()))


if __name__ == "__main__":
    raise SystemExit(main())
