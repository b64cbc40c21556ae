#!/usr/bin/env bash
# A job that starts on several nodes: all read the same files, once with peers and once without, in turns. The nodes are network
# namespaces around a switch; the link of the pool, a web server, has a limited rate, and the links between nodes have not.
# Prints the time until the last node has read everything, the bytes that left the pool, and the ratio of the times.
#   benches/peers.sh [ROUNDS [NODES [MIB_PER_SECOND]]]
# FOREBAY_BIN: the program. Needs root.
set -euo pipefail
rounds=${1:-3}
nodes=${2:-5}
rate=${3:-50}
forebay=${FOREBAY_BIN:-forebay}
work=$(mktemp -d /var/tmp/forebay-peers-XXXXXX)
chmod 755 "$work"
hub=forebay-bench-$$
nginx_pid=
ended() {
    for at in $(seq "$nodes"); do "$forebay" umount "$work/n$at/mnt" >/dev/null 2>&1 || true; done
    [ -z "$nginx_pid" ] || kill "$nginx_pid" 2>/dev/null || true
    wait 2>/dev/null || true
    for at in $(seq "$nodes"); do ip netns del "$hub-$at" 2>/dev/null || true; done
    ip netns del "$hub" 2>/dev/null || true
    rm -rf "$work"
}
trap ended EXIT

ip netns add "$hub"
ip -n "$hub" link set lo up
ip -n "$hub" link add switch type bridge
ip -n "$hub" addr add 10.78.0.254/24 dev switch
ip -n "$hub" link set switch up
for at in $(seq "$nodes"); do
    ip netns add "$hub-$at"
    ip -n "$hub-$at" link set lo up
    ip -n "$hub" link add "port$at" type veth peer name eth0 netns "$hub-$at"
    ip -n "$hub" link set "port$at" master switch up
    ip -n "$hub-$at" addr add "10.78.0.$at/24" dev eth0
    ip -n "$hub-$at" link set eth0 up
done
# What the switch itself sends is what the pool sends; what it forwards between nodes does not pass here.
tc -n "$hub" qdisc add dev switch root tbf rate "$((rate * 8))mibit" burst 256k latency 50ms

mkdir -p "$work"/{pool,logs}
for at in $(seq 4); do head -c 48M /dev/urandom >"$work/pool/large$at"; done
mkdir "$work/pool/small"
for at in $(seq 200); do head -c "$((RANDOM * 4 + 1000))" /dev/urandom >"$work/pool/small/$at"; done
chmod -R a+rX "$work/pool"
bytes=$(find "$work/pool" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
cat >"$work/nginx.conf" <<END
worker_processes 1;
pid $work/nginx.pid;
error_log $work/logs/error.log;
events { worker_connections 1024; }
http {
    access_log off; sendfile on;
    client_body_temp_path $work/logs; proxy_temp_path $work/logs; fastcgi_temp_path $work/logs;
    uwsgi_temp_path $work/logs; scgi_temp_path $work/logs;
    server { listen 10.78.0.254:8871; root $work/pool; autoindex on; autoindex_exact_size on; }
}
END
nsenter --net="/run/netns/$hub" nginx -c "$work/nginx.conf" -g 'daemon off; user root;' &
nginx_pid=$!

printf '%s-of-%s\n' "$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')" "$$" >"$work/token"
chmod 600 "$work/token"

# Mounts all nodes, lets them read everything, and prints seconds and bytes from the pool.
start() {
    local peers=$1 at began ended sum=0
    for at in $(seq "$nodes"); do
        local dir="$work/n$at" options=()
        mkdir -p "$dir/mnt"
        if [ "$peers" = yes ]; then
            {
                printf 'node = "n%s"\nlisten = "10.78.0.%s:7410"\ntoken-file = "../token"\n' "$at" "$at"
                for other in $(seq "$nodes"); do
                    printf '[[member]]\nnode = "n%s"\naddress = "10.78.0.%s:7410"\n' "$other" "$other"
                done
            } >"$dir/peers.toml"
            options=(--peers "$dir/peers.toml")
        fi
        nsenter --net="/run/netns/$hub-$at" "$forebay" mount http://10.78.0.254:8871/ "$dir/mnt" --fast "$dir/fast" \
            --limit 2G "${options[@]}" >/dev/null
    done
    local readers=()
    began=$(date +%s.%N)
    for at in $(seq "$nodes"); do
        tar -C "$work/n$at/mnt" -cf - . | tar -df - -C "$work/pool" &
        readers+=($!)
    done
    for at in "${readers[@]}"; do wait "$at"; done
    ended=$(date +%s.%N)
    for at in $(seq "$nodes"); do
        sum=$((sum + $("$forebay" --json status "$work/n$at/mnt" | jq .status.counters.pool_read_bytes)))
        "$forebay" umount "$work/n$at/mnt" >/dev/null
        rm -rf "$work/n$at"
    done
    echo "$(awk -v a="$began" -v b="$ended" 'BEGIN { printf "%.2f", b - a }') $sum"
}

ratios=()
for round in $(seq "$rounds"); do
    with=$(start yes)
    without=$(start no)
    ratio=$(awk -v a="${without% *}" -v b="${with% *}" 'BEGIN { printf "%.2f", a / b }')
    ratios+=("$ratio")
    awk -v n="$nodes" -v all="$bytes" -v round="$round" -v w="$with" -v o="$without" -v r="$ratio" 'BEGIN {
        split(w, with, " "); split(o, without, " ")
        printf "round %d, %d nodes, %.0f MiB: with peers %s s, %.2f copies from the pool; without %s s, %.2f copies; %s times as fast\n",
            round, n, all / 1048576, with[1], with[2] / all, without[1], without[2] / all, r
    }'
done
printf '%s\n' "${ratios[@]}" | sort -n | awk -v all="$bytes" -v rate="$rate" '{ v[NR] = $1 } END {
    printf "median %.2f (%.2f to %.2f); the pool sends one copy in %.2f s\n", v[int((NR + 1) / 2)], v[1], v[NR], all / 1048576 / rate
}'
