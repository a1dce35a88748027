#!/usr/bin/env bash
# GPT 175B, mp 8 × pp 16: 128 cards a copy (16 nodes of 8); run it on every node.
#   bash projects/gpt/pretrain_gpt_175B_mp8_pp16.sh --nnodes 16 --master 10.10.10.1:8099
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch ./configs/nlp/gpt/pretrain_gpt_175B_mp8_pp16.yaml 8 "$@"
