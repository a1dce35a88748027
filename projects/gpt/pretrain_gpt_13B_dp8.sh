#!/usr/bin/env bash
# GPT 13B, mp 2 × pp 8: 16 cards a copy (2 nodes of 8); run it on every node.
#   bash projects/gpt/pretrain_gpt_13B_dp8.sh --nnodes 2 --master 10.10.10.1:8099
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/gpt/pretrain_gpt_13B_dp8.yaml 8 "$@"
