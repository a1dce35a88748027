"""What `tools/parity.py` starts."""

from __future__ import annotations

from ppfleetx.config.layouts import Layout
from ppfleetx.engine.parity import Runner


def test_every_run_has_one_thread(tmp_path):
    """Else one process would have all cores and each of several a share: other last bits, though the layout changes none."""
    script = tmp_path / "train.py"
    script.write_text("import sys; print(*sys.argv[1:])\n")
    runner = Runner(script, ("-c", "file", "-o", "Global.cpu_threads=8"), tmp_path)
    words = (runner.run(Layout("one", 1, ()), "steps", ()) / "console.txt").read_text().split()
    threads = [word for word in words if word.startswith("Global.cpu_threads=")]
    assert threads == ["Global.cpu_threads=8", "Global.cpu_threads=1"], "the last one counts"
