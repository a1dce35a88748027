"""Looking into a checkpoint needs no Paddle."""

from __future__ import annotations

import subprocess
import sys


def test_manifest_and_reader_import_no_paddle():
    code = "import sys; sys.modules['paddle'] = None; import ppfleetx.checkpoint.manifest, ppfleetx.checkpoint.reader"
    subprocess.run([sys.executable, "-c", code], check=True)
