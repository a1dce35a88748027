#!/usr/bin/env bash
# GPT 6.7B on 16 cards (2 nodes of 8), states and gradients sharded; run it on every node.
#   bash projects/gpt/pretrain_gpt_6.7B_sharding16.sh --nnodes 2 --master 10.10.10.1:8099
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/gpt/pretrain_gpt_6.7B_sharding16.yaml 8 "$@"
