#!/usr/bin/env bash
# GPT 1.3B on 8 cards, data parallel.
#   bash projects/gpt/pretrain_gpt_1.3B_dp8.sh -- -o Data.Train.dataset.input_dir=/data/corpus
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml 8 "$@"
