#!/usr/bin/env bash
# Everything that needs a GPU, in a few calls that each end within a limit.
#
#   benchmarks/on_gpu.sh OUT all                 tests, one training of 100 epochs, benchmarks, paper
#   benchmarks/on_gpu.sh OUT tests [PATH..]      the tests that need CUDA
#   benchmarks/on_gpu.sh OUT benchmarks [NAME..] step, epoch
#   benchmarks/on_gpu.sh OUT cifar [SEED..]      CIFAR-10, ResNet20, 8 fast + 2 slow workers; several
#                                                seeds run at once. Time alone counts: one seed a call
#   benchmarks/on_gpu.sh OUT paper [CONFIG..]    one round of each of the paper's configs: 2c8g, 1c1g,
#                                                or single ones. In 1c1g a CPU does 16 steps of whole
#                                                batches, which takes minutes: a call of its own
#   benchmarks/on_gpu.sh OUT setup               only the packages
#   benchmarks/on_gpu.sh OUT tests,benchmarks    several parts; then none takes arguments
#
# OUT gets NAME-gpu.json (put them into benchmarks/results), gpu.log and nvidia-smi.csv. A part that
# the limit leaves no time for is named in the log; call again with that part.
#
# Packages that are missing are installed from wheels, without a network (README.md says how to
# collect them). They stay in $SITE for the next call on the same machine.
#
#   DEVICE=cuda    cpu: a dry run of all parts with tiny settings, into NAME-dry-run.json
#   LIMIT=600      seconds of a call; the last $RESERVE are kept for writing results
#   WHEELS=wheels  folder of the wheels
#   DATA=          folder of CIFAR-10 (default: data/cifar10 if it is there, else made-up images,
#                  which take the same time but have no accuracy)
#   EPOCHS=100     of `cifar`
#   SETTINGS=      more settings of `cifar`: "key=value key=value"
#   PYTHON=python3
#
# Exit code 1: some part failed or was left out; the others have their files all the same.
set -euo pipefail

usage() {
    sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
}

[ $# -ge 2 ] || usage
mkdir -p "$1"
OUT=$(cd "$1" && pwd)
PART=$2
shift 2
[ "$PART" != all ] || PART=tests,cifar,benchmarks,paper
IFS=, read -r -a PARTS <<<"$PART"
for part in "${PARTS[@]}"; do
    case $part in tests | benchmarks | cifar | paper | setup) ;; *) usage ;; esac
done
[ $# -eq 0 ] || [ ${#PARTS[@]} -eq 1 ] || usage

cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-cuda}
LIMIT=${LIMIT:-600}
RESERVE=${RESERVE:-25}
WHEELS=${WHEELS:-wheels}
SITE=${SITE:-${TMPDIR:-/tmp}/blsgd-site}
PYTHON=${PYTHON:-python3}
SETTINGS=${SETTINGS:-}
LOG=$OUT/gpu.log
FAILED=0
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

case $DEVICE in
cuda)
    WORKERS="8x cuda:0 fast; 2x cpu slow"
    EPOCHS=${EPOCHS:-100}
    QUICK=()
    SUFFIX=gpu
    ;;
cpu)
    WORKERS="2x cpu fast; 1x cpu slow"
    EPOCHS=${EPOCHS:-1}
    QUICK=(--quick)
    SUFFIX=dry-run
    ;;
*) usage ;;
esac

say() { echo "[${SECONDS} s] $*" | tee -a "$LOG"; }
fail() {
    say "$*"
    FAILED=1
}
left() { echo $((LIMIT - RESERVE - SECONDS)); }

# Run a command until the time is up: Ctrl-C first, so that it can write what it has.
limited() {
    local seconds
    seconds=$(left)
    if [ "$seconds" -lt 20 ]; then
        say "no time left for: $*"
        return 1
    fi
    timeout --signal=INT --kill-after=15 "$seconds" "$@"
}

setup() {
    if ! "$PYTHON" -c 'import flwr, tomli_w; from importlib.metadata import version; version("flower-blsgd")' \
        2>>"$LOG"; then
        compgen -G "$WHEELS/*.whl" >/dev/null || {
            say "flwr is not installed and $WHEELS has no wheels; see benchmarks/README.md"
            exit 1
        }
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$SITE" "$WHEELS"/*.whl 2>&1 | tee -a "$LOG"
    fi
    "$PYTHON" -c 'import flwr, torch, flower_blsgd.cli; print("torch", torch.__version__, "CUDA", torch.version.cuda)' \
        2>&1 | tee -a "$LOG"
    if [ "$DEVICE" = cuda ]; then
        "$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU; DEVICE=cpu for a dry run")' \
            2>&1 | tee -a "$LOG"
    fi
}

# What the card did meanwhile, every 5 seconds; ends with this script.
watch_card() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --format=csv -l 5 --query-gpu=timestamp,name,driver_version,memory.used,memory.total,utilization.gpu,clocks.sm,temperature.gpu,power.draw \
        >>"$OUT/nvidia-smi.csv" 2>&1 &
    WATCHER=$!
}

WATCHER=""
TEMPORARY=$(mktemp -d)
CHILDREN=()
# shellcheck disable=SC2329  # the trap calls it
finish() {
    local pid
    for pid in ${WATCHER:+"$WATCHER"} ${CHILDREN[@]+"${CHILDREN[@]}"}; do
        kill "$pid" 2>/dev/null || true
    done
    rm -rf "$TEMPORARY"
}
trap finish EXIT

tests() {
    local chosen=("$@")
    if [ "$DEVICE" = cpu ]; then
        chosen=(tests/benchmarks)
    elif [ $# -eq 0 ]; then # those that skip something without a GPU
        mapfile -t chosen < <(grep -rl --include='test_*.py' 'cuda.is_available' tests)
    fi
    say "tests: ${chosen[*]}"
    # The log has all of it: a test that fails must not cost the parts behind it.
    limited "$PYTHON" -m pytest -q -rs -p no:cacheprovider "${chosen[@]}" 2>&1 | tee -a "$LOG" ||
        fail "tests: some failed, or the time was up"
}

benchmarks() {
    local name more
    [ $# -gt 0 ] || set -- step epoch
    for name in "$@"; do
        more=()
        if [ ! -f "benchmarks/$name.py" ]; then
            fail "benchmark $name: there is no benchmarks/$name.py"
            continue
        fi
        if [ "$name" = epoch ] && [ -n "${DATA:-}" ]; then more=(--data "$DATA"); fi
        say "benchmark $name"
        limited "$PYTHON" -m "benchmarks.$name" --json "$OUT/$name-$SUFFIX.json" \
            ${QUICK[@]+"${QUICK[@]}"} ${more[@]+"${more[@]}"} 2>&1 | tee -a "$LOG" ||
            fail "benchmark $name: failed, or the time was up"
    done
}

paper() {
    local name seconds
    [ $# -gt 0 ] || set -- 2c8g 1c1g
    for name in "$@"; do
        # It ends by itself before the time is up, with a row for what had none.
        seconds=$(($(left) - 20))
        if [ "$seconds" -lt 20 ]; then
            fail "no time left for: paper $name"
            continue
        fi
        say "paper $name"
        limited "$PYTHON" -m benchmarks.paper_rounds "$name" --seconds "$seconds" \
            --json "$OUT/paper_rounds-$SUFFIX-$name.json" ${QUICK[@]+"${QUICK[@]}"} 2>&1 |
            tee -a "$LOG" || fail "paper $name: a config was not run"
    done
}

# Set IMAGES to the settings that name what `cifar` trains on.
choose_images() {
    local folder=${DATA:-data/cifar10}
    if [ "$DEVICE" = cpu ]; then
        IMAGES=(task=benchmarks.images:some_images data=512 model=resnet8 batch-size=8
            local-steps-fast=4)
    elif [ -d "$folder" ]; then
        IMAGES=("data=$(cd "$folder" && pwd)")
    elif [ -n "${DATA:-}" ]; then
        say "DATA=$DATA: there is no such folder"
        exit 1
    else
        say "no images in $folder: made-up ones, whose accuracy means nothing"
        IMAGES=(task=benchmarks.images:some_images data=50000 model=resnet20)
    fi
}

cifar() {
    local seed pid pair seconds settings=() folders=() failed=0
    [ $# -gt 0 ] || set -- 0
    choose_images
    # Evaluation is not timed, but the limit counts it. SETTINGS are words on purpose.
    # shellcheck disable=SC2086
    for pair in epochs="$EPOCHS" evaluate-every-epochs=10 "${IMAGES[@]}" $SETTINGS; do
        settings+=(-s "$pair")
    done
    say "cifar: seeds $*, ${settings[*]}"
    seconds=$(left)
    if [ "$seconds" -lt 20 ]; then
        fail "no time left for: cifar $*"
        return 0
    fi
    for seed in "$@"; do
        # What a script starts in the background ignores Ctrl-C unless told otherwise.
        timeout --signal=INT --kill-after=15 "$seconds" env --default-signal=INT \
            "$PYTHON" -m flower_blsgd run . -c cifar10-2c8g -s "workers=$WORKERS" \
            "${settings[@]}" -s "seed=$seed" -s "out=$TEMPORARY/$seed" \
            </dev/null >"$TEMPORARY/$seed.log" 2>&1 &
        CHILDREN+=($!)
    done
    for pid in "${CHILDREN[@]}"; do wait "$pid" || failed=1; done
    CHILDREN=()
    for seed in "$@"; do
        sed "s/^/seed $seed: /" "$TEMPORARY/$seed.log" | tail -n 25 | tee -a "$LOG"
        if [ -f "$TEMPORARY/$seed/summary.json" ]; then folders+=("$TEMPORARY/$seed"); fi
    done
    [ "$failed" = 0 ] || fail "cifar: a run failed, or the time was up"
    [ ${#folders[@]} -gt 0 ] || return 0
    # One seed alone is the figure; seeds that shared the card have a file of their own.
    local file=cifar10-$SUFFIX.json
    [ $# = 1 ] || file=cifar10-$SUFFIX-seeds.json
    "$PYTHON" -m benchmarks.summaries "${folders[@]}" --at-once $# --json "$OUT/$file" 2>&1 |
        tee -a "$LOG"
}

say "$PART on $DEVICE, $LIMIT s"
setup
watch_card
for part in "${PARTS[@]}"; do
    case $part in
    tests) tests "$@" ;;
    benchmarks) benchmarks "$@" ;;
    cifar) cifar "$@" ;;
    paper) paper "$@" ;;
    setup) ;;
    esac
done
say "done"
exit "$FAILED"
