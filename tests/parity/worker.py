"""Runs several command lines of tools/train.py one after another in the same processes: a JSON list of argument lists."""

from __future__ import annotations

import json
import sys

from tools.train import main

codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
print("codes", codes, flush=True)
raise SystemExit(max(codes))
