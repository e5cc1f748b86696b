#!/usr/bin/env bash
# Run every command of docs/how-to/deployment.md for a SuperLink and SuperNodes on one machine.
# A test compares the commands, so change them in both places. See README.md.
# PARTS="here" or "lab" runs one half, without or with TLS.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -f .venv/bin/activate ]; then
    source .venv/bin/activate
fi

work=$(mktemp -d)
if [ -n "${KEEP:-}" ]; then
    mkdir -p "$KEEP"
    rmdir "$work"
    work=$(cd "$KEEP" && pwd)
fi
export FLWR_HOME=$work/flwr
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
settings=${RUN_CONFIG:-epochs=2}
parts=${PARTS:-here lab}
read -r first last < <(python -c "
from flower_blsgd.devices.machine import usable_cores
print(usable_cores()[0], usable_cores()[-1])")

free_port() {
    python -c "
import socket
probe = socket.socket()
probe.bind(('127.0.0.1', 0))
print(probe.getsockname()[1])"
}

# --- taking everything down

started=()

start() { # NAME COMMAND...: start in the background, with a log
    local name=$1
    shift
    "$@" > "$work/$name.log" 2>&1 &
    started+=($!)
}

family() { # PID...: these processes and all below them
    local pid
    for pid in "$@"; do
        echo "$pid"
        family $(pgrep -P "$pid" || true)
    done
}

is_alive() { # zombies are not
    [[ "$(ps -o stat= -p "$1" 2> /dev/null)" == [!Z]* ]]
}

stop_all() {
    local everybody pid deadline=$((SECONDS + 20))
    [ ${#started[@]} -gt 0 ] || return 0
    everybody=$(family "${started[@]}")
    kill -TERM "${started[@]}" 2> /dev/null || true
    for pid in $everybody; do
        while is_alive "$pid"; do
            if ((SECONDS > deadline)); then
                kill -KILL "$pid" 2> /dev/null || true
            fi
            sleep 0.1
        done
    done
    wait || true
    started=()
}

finish() {
    local code=$?
    trap - EXIT INT TERM
    stop_all
    if [ $code -ne 0 ]; then
        tail -n 20 "$work"/*.log || true
        echo "run_all.sh failed"
    fi
    [ -n "${KEEP:-}" ] || rm -rf "$work"
    exit $code
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

wait_for_port() {
    local deadline=$((SECONDS + 120))
    until (exec 3<> "/dev/tcp/127.0.0.1/$1") 2> /dev/null; do
        if ((SECONDS > deadline)); then
            echo "nobody listens on port $1"
            exit 1
        fi
        sleep 0.2
    done
}

wait_for_line() { # NAME TEXT TIMES: until a log has it so often
    local deadline=$((SECONDS + 120))
    until [ "$(grep -c "$2" "$work/$1.log")" -ge "$3" ]; do
        if ((SECONDS > deadline)); then
            echo "no line '$2' in the log of $1"
            exit 1
        fi
        sleep 0.2
    done
}

check_results() {
    for file in summary.json rounds.jsonl epochs.csv model.safetensors; do
        [ -s "$1/$file" ] || { echo "$1/$file is missing" && exit 1; }
    done
}

export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1

if [[ $parts == *here* ]]; then
    echo "=== on one machine, without TLS"
    port=$(free_port)
    export SUPERLINK=127.0.0.1:$port
    start superlink flower-superlink --insecure --host 127.0.0.1 --port $port
    wait_for_port $port
    start supernodes blsgd supernode --superlink $SUPERLINK --insecure --one-node-per-device \
        --workers "1x cpu:$first fast; 1x cpu:$last slow slowdown=4"
    mkdir -p ${FLWR_HOME:-~/.flwr}
    cat >> ${FLWR_HOME:-~/.flwr}/config.toml <<TOML

[superlink.here]
address = "127.0.0.1:$port"
insecure = true
TOML
    wait_for_line supernodes "SuperNode ID" 2
    flwr run . here --stream -c "$settings out='$work/results-here'"
    check_results "$work/results-here"
    stop_all
fi

if [[ $parts == *lab* ]]; then
    echo "=== with TLS and registered SuperNodes"
    export TLS=$work/tls
    export SAN="DNS:localhost,IP:127.0.0.1"
    mkdir -p $TLS
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -sha256 -days 365 \
        -subj "/O=flower-blsgd/CN=authority" -keyout $TLS/ca.key -out $TLS/ca.crt
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -sha256 \
        -subj "/O=flower-blsgd/CN=superlink" -keyout $TLS/server.key -out $TLS/server.csr
    echo "subjectAltName=$SAN" > $TLS/server.ext
    openssl x509 -req -in $TLS/server.csr -CA $TLS/ca.crt -CAkey $TLS/ca.key -CAcreateserial \
        -sha256 -days 365 -extfile $TLS/server.ext -out $TLS/server.crt

    bind=127.0.0.1 # 0.0.0.0 on several machines
    port=$(free_port)
    export SUPERLINK=127.0.0.1:$port
    start superlink-tls flower-superlink --ssl-ca-certfile $TLS/ca.crt --ssl-certfile $TLS/server.crt \
        --ssl-keyfile $TLS/server.key --enable-supernode-auth --host $bind --port $port
    wait_for_port $port
    mkdir -p ${FLWR_HOME:-~/.flwr}
    cat >> ${FLWR_HOME:-~/.flwr}/config.toml <<TOML

[superlink.lab]
address = "$SUPERLINK"
root-certificates = "$TLS/ca.crt"
TOML

    ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f $TLS/node-1
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f $TLS/node-2
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f $TLS/stranger
    flwr supernode register $TLS/node-1.pub lab
    flwr supernode register $TLS/node-2.pub lab
    start node-1 blsgd supernode --superlink $SUPERLINK --root-certificates $TLS/ca.crt \
        --auth-supernode-private-key $TLS/node-1 --name node-1 --workers "1x cpu:$first fast"
    node_port=$(free_port)
    start node-2 flower-supernode --superlink $SUPERLINK --root-certificates $TLS/ca.crt \
        --auth-supernode-private-key $TLS/node-2 --host 127.0.0.1 --port $node_port \
        --node-config "device='cpu:$last' tier='slow' slowdown=4.0 superlink='$SUPERLINK'"
    code=0
    blsgd supernode --superlink $SUPERLINK --root-certificates $TLS/ca.crt \
        --auth-supernode-private-key $TLS/stranger --workers "1x cpu:$last slow" || code=$?
    if [ $code -ne 2 ]; then
        echo "a SuperNode that is not registered must be refused with exit code 2, not $code"
        exit 1
    fi
    wait_for_line node-1 "SuperNode ID" 1
    wait_for_line node-2 "SuperNode ID" 1
    flwr supernode list lab
    flwr run . lab --stream -c "$settings out='$work/results-lab'"
    check_results "$work/results-lab"
    blsgd evaluate "$work/results-lab"
    stop_all
fi
echo "=== all of it worked"
