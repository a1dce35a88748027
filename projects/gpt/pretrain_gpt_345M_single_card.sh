#!/usr/bin/env bash
# GPT 345M on one card.
#   bash projects/gpt/pretrain_gpt_345M_single_card.sh -- -o Data.Train.dataset.input_dir=/data/corpus
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml 1 "$@"
