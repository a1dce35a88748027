"""Runs several command lines of tools/eval.py one after another in the same processes: a JSON list of argument lists."""

from __future__ import annotations

import json
import sys

from tools.eval import main

raise SystemExit(max([main(arguments) for arguments in json.loads(sys.argv[1])]))
