# Sourced by the scripts of the recipes. What stands before `--` goes to Paddle's launcher, what stands after it to
# tools/train.py:
#   bash projects/gpt/pretrain_gpt_175B_mp8_pp16.sh --nnodes 16 --master 10.10.10.1:8099 -- -o Engine.max_steps=1000

# launch CONFIG CARDS_OF_A_NODE [launcher arguments] [-- training arguments]
launch() {
    local config=$1 cards=$2
    shift 2
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local launcher=()
    while [ $# -gt 0 ] && [ "$1" != "--" ]; do
        launcher+=("$1")
        shift
    done
    if [ "${1:-}" = "--" ]; then shift; fi
    # a repeated option counts as given last, so that --log_dir and --devices of the caller win
    exec python -m paddle.distributed.launch --log_dir "log/$(basename "$config" .yaml)" \
        --devices "$(seq -s, 0 $((cards - 1)))" "${launcher[@]}" tools/train.py -c "$config" "$@"
}
