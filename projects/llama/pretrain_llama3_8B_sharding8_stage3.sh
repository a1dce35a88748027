#!/usr/bin/env bash
# Llama 3 8B on 8 cards, fully sharded (stage 3).
#   bash projects/llama/pretrain_llama3_8B_sharding8_stage3.sh -- -o Data.Train.dataset.input_dir=/data/corpus
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/llama/pretrain_llama3_8B_sharding8_stage3.yaml 8 "$@"
