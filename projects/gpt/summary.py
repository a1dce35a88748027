"""Says how a run went and where its results are: python projects/gpt/summary.py output/quickstart/run"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppfleetx.metrics import visualdl_command


def main() -> int:
    """The command; returns its exit code."""
    run = Path(sys.argv[1]).resolve()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    evaluation = [record for record in records if record["kind"] == "eval"]
    program, *options = visualdl_command(str(run))
    print()
    for name, record in (("first", train[0]), ("last", train[-1]), ("evaluation", evaluation[-1])):
        loss, step = record["loss"], record["step"]
        print(f"{name:13} step {step:>3}: loss {loss:.3f}, perplexity {math.exp(loss):.1f}")
    print(f"checkpoint    {max(run.glob('step_*'))}")
    print(f"metrics       {run / 'metrics.jsonl'}")
    print(f"curves        {shlex.join([shutil.which(program) or program, *options, '--port', '8040'])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
