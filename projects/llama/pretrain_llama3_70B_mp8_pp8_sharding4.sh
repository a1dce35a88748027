#!/usr/bin/env bash
# Llama 3 70B, mp 8 × pp 8 × sharding 4: 256 cards (32 nodes of 8); run it on every node.
#   bash projects/llama/pretrain_llama3_70B_mp8_pp8_sharding4.sh --nnodes 32 --master 10.10.10.1:8099
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/llama/pretrain_llama3_70B_mp8_pp8_sharding4.yaml 8 "$@"
