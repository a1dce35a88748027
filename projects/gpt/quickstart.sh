#!/usr/bin/env bash
# From nothing to a trained GPT on a CPU: bash projects/gpt/quickstart.sh
# Installs what it needs, makes a corpus, trains a tokenizer and a model, evaluates it. All results go to output/quickstart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=output/quickstart
log=$out/log.txt
config=projects/gpt/quickstart.yaml
step="set up"
trap 'code=$?; if [ $code -ne 0 ]; then echo "quickstart: failed at: $step (exit code $code)" >&2; fi' EXIT

begin() {
    step=$1
    echo "== $step  [$SECONDS s]"
}

begin "1/6 Python and packages"
. tools/env.sh
mkdir -p "$out"
export PYTHONWARNINGS=ignore GLOG_minloglevel=2 # Paddle's own notices

begin "2/6 corpus: the sources of Python's standard library"
python projects/gpt/collect_corpus.py --output "$out/corpus.jsonl"

begin "3/6 tokenizer: SentencePiece, 2048 tokens"
python tools/train_tokenizer.py --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"

begin "4/6 token files"
python tools/preprocess_data.py --input "$out/corpus.jsonl" --tokenizer "$out/tokenizer.model" --append-eos --shuffle 1024 \
    --output-prefix "$out/data/stdlib" --overwrite

begin "5/6 training: $config"
python tools/train.py -c "$config" | tee -a "$log"

begin "6/6 evaluation of the last checkpoint"
python tools/eval.py -c "$config" -o Engine.save_load.ckpt_dir=auto | tee -a "$log"

step="summary"
python projects/gpt/summary.py "$out/run"
echo "console log   $PWD/$log"
echo "all of it took $SECONDS s"
