#!/usr/bin/env bash
# A cache node, of a pool and as a reverse proxy, against nginx (proxy_cache, sendfile) in front of the same files: requests per
# second and CPU per request of resident objects, measured in turns by wrk. Prints one line for each size: the medians of both,
# and the range of the ratio.
#   benches/http.sh [ROUNDS [SECONDS]]
# FOREBAY_BIN: the program.
# No `tcp_nopush` for nginx: with it, 64 KiB over loopback wait for a delayed acknowledgement (200 requests per second).
set -euo pipefail
rounds=${1:-5}
seconds=${2:-4}
connections=8
work=$(mktemp -d /var/tmp/forebay-http-XXXXXX)
chmod 755 "$work"
pids=()
ended() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap ended EXIT

mkdir -p "$work"/{pool,fast,cache,logs}
for size in 4096 65536 8388608; do head -c "$size" /dev/urandom >"$work/pool/$size"; done
chmod -R a+rX "$work/pool"

cat >"$work/nginx.conf" <<END
worker_processes $(nproc);
pid $work/nginx.pid;
error_log $work/logs/error.log;
events { worker_connections 4096; }
http {
    access_log off;
    sendfile on;
    keepalive_requests 1000000000;
    client_body_temp_path $work/logs; proxy_temp_path $work/cache/tmp; fastcgi_temp_path $work/logs;
    uwsgi_temp_path $work/logs; scgi_temp_path $work/logs;
    proxy_cache_path $work/cache/files keys_zone=all:10m max_size=1g inactive=1d;
    server { listen 127.0.0.1:8871; root $work/pool; add_header Cache-Control max-age=86400; }
    server {
        listen 127.0.0.1:8872;
        location / { proxy_pass http://127.0.0.1:8871; proxy_cache all; proxy_cache_valid 200 1d; }
    }
}
END
nginx -c "$work/nginx.conf" -g 'daemon off; user root;' &
pids+=($!)
nginx_pid=$!
"${FOREBAY_BIN:-forebay}" serve "$work/pool" --fast "$work/fast" --immutable --name "http-bench-$$" --listen 127.0.0.1:8873 \
    >"$work/logs/forebay" 2>&1 &
pids+=($!)
forebay_pid=$!
"${FOREBAY_BIN:-forebay}" serve http://127.0.0.1:8871 --reverse-proxy --fast "$work/fast2" --name "http-bench-proxy-$$" \
    --listen 127.0.0.1:8874 >"$work/logs/proxy" 2>&1 &
pids+=($!)
proxy_pid=$!
for port in 8872 8873 8874; do
    for size in 4096 65536 8388608; do
        for _ in $(seq 100); do
            curl -sf -o "$work/got" "http://127.0.0.1:$port/$size" && break
            sleep 0.1
        done
        cmp "$work/got" "$work/pool/$size"
        curl -sf -o "$work/got" "http://127.0.0.1:$port/$size"
    done
done

# Clock ticks of user and kernel time of a process and its children that run now.
ticks() {
    local sum=0 pid
    for pid in $1 $(pgrep -P "$1" || true); do
        sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat")))
    done
    echo "$sum"
}
# Prints requests per second, and microseconds of the server's CPU for each request.
measure() {
    local before after requests
    before=$(ticks "$2")
    wrk -t1 -c"$connections" -d"${seconds}s" "http://127.0.0.1:$1/$3" >"$work/wrk"
    after=$(ticks "$2")
    ! grep -q 'Non-2xx\|Socket errors' "$work/wrk" || { cat "$work/wrk" >&2; exit 1; }
    requests=$(awk '/requests in/ { print $1 }' "$work/wrk")
    awk -v t=$((after - before)) -v hz="$(getconf CLK_TCK)" -v n="$requests" -v s="$seconds" \
        'BEGIN { printf "%.0f %.2f\n", n / s, t / hz * 1e6 / n }'
}
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

echo "bytes     of       nginx r/s  forebay r/s  ratio (range)        nginx us  forebay us  of CPU per request"
for size in 4096 65536 8388608; do
    for kind in pool:8873:$forebay_pid proxy:8874:$proxy_pid; do
        IFS=: read -r name port pid <<<"$kind"
        : >"$work/a"
        : >"$work/b"
        for _ in $(seq "$rounds"); do
            measure 8872 "$nginx_pid" "$size" >>"$work/a"
            measure "$port" "$pid" "$size" >>"$work/b"
        done
        paste -d' ' "$work/a" "$work/b" | awk '{ print $3 / $1 }' >"$work/r"
        printf '%-9s %-8s %9s  %11s  %.2f (%.2f-%.2f)     %8s  %10s\n' "$size" "$name" "$(cut -d' ' -f1 "$work/a" | median)" \
            "$(cut -d' ' -f1 "$work/b" | median)" "$(median <"$work/r")" "$(sort -g "$work/r" | head -1)" \
            "$(sort -g "$work/r" | tail -1)" "$(cut -d' ' -f2 "$work/a" | median)" "$(cut -d' ' -f2 "$work/b" | median)"
    done
done
