#!/usr/bin/env bash
# http-cache-tests, the public conformance suite for HTTP caches, against a reverse proxy of this program and against nginx,
# Varnish and Squid, one after the other in front of the same server. Prints one line for each: tests passed of those that
# are required, optimal and to be known.
#   benches/cache_tests.sh
# FOREBAY_BIN, FOREBAY_TOOLS: the program, and where `make test` installs the suite.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
suite=$(dirname "$(readlink -f "${FOREBAY_TOOLS:-$HOME/.cache/forebay/tools/bin}/http-cache-tests")")
work=$(mktemp -d /var/tmp/forebay-cache-tests-XXXXXX)
chmod 755 "$work"
pids=()
ended() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap ended EXIT
mkdir -p "$work"/{fast,cache,logs,squid,varnish}
chmod 777 "$work"/{cache,logs,squid,varnish}

(cd "$suite" && npm_config_protocol=http npm_config_port=8880 npm_config_pidfile="$work/pid" \
    exec node --require "$here/tests/cache_tests/loopback.cjs" server/server.mjs) >"$work/logs/origin" 2>&1 &
pids+=($!)

"${FOREBAY_BIN:-forebay}" serve http://127.0.0.1:8880 --reverse-proxy --forward-changes --stale-if-error 60s --fast "$work/fast" \
    --name "cache-tests-$$" --listen 127.0.0.1:8881 >"$work/logs/forebay" 2>&1 &
pids+=($!)

cat >"$work/nginx.conf" <<END
worker_processes 2;
pid $work/nginx.pid;
error_log $work/logs/error.log;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path $work/cache/t; proxy_temp_path $work/cache/t; fastcgi_temp_path $work/cache/t;
    uwsgi_temp_path $work/cache/t; scgi_temp_path $work/cache/t;
    proxy_cache_path $work/cache/files keys_zone=all:10m;
    server {
        listen 127.0.0.1:8882;
        location / {
            proxy_pass http://127.0.0.1:8880; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_cache all; proxy_cache_revalidate on;
        }
    }
}
END
nginx -c "$work/nginx.conf" -g 'daemon off; user root;' &
pids+=($!)

varnishd -F -n "$work/varnish" -a 127.0.0.1:8883 -b 127.0.0.1:8880 -T none -s malloc,64m >"$work/logs/varnish" 2>&1 &
pids+=($!)

cat >"$work/squid.conf" <<END
http_port 127.0.0.1:8884 accel defaultsite=127.0.0.1 no-vhost
cache_peer 127.0.0.1 parent 8880 0 no-query originserver name=origin
http_access allow all
cache_mem 64 MB
pid_filename $work/squid/pid
access_log none
cache_log $work/squid/log
coredump_dir $work/squid
shutdown_lifetime 1 seconds
visible_hostname cache-tests
END
squid -N -f "$work/squid.conf" >"$work/logs/squid" 2>&1 &
pids+=($!)

for port in 8880 8881 8882 8883 8884; do
    for _ in $(seq 100); do
        curl -s -o /dev/null "http://127.0.0.1:$port/" && break
        sleep 0.1
    done
done
printf '%-10s %10s %10s %10s\n' cache required optimal check
for cache in forebay:8881 nginx:8882 varnish:8883 squid:8884; do
    (cd "$suite" && timeout 300 node --no-warnings "$here/tests/cache_tests/run.mjs" "$suite" "http://127.0.0.1:${cache#*:}") \
        >"$work/out" 2>"$work/logs/run"
    tail -1 "$work/out" | jq -r --arg name "${cache%:*}" '
        def of(kind): [.[] | select(.kind == kind)] | "\([.[] | select(.verdict == "pass")] | length)/\(length)";
        [$name, of("required"), of("optimal"), of("check")] | @tsv' |
        awk -F'\t' '{ printf "%-10s %10s %10s %10s\n", $1, $2, $3, $4 }'
done
