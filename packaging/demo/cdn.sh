#!/usr/bin/env bash
# Shows a cache node: an origin that is far away, and clients that fetch a real tree of files through the node, cold, warm,
# and after the origin has stopped. Ends with a picture of the node's page. Leaves nothing else behind.
set -euo pipefail

forebay=${FOREBAY_BIN:-forebay}
pace=${FOREBAY_DEMO_PACE:-100MB/s,2ms}
max_files=${FOREBAY_DEMO_FILES:-3000}
max_bytes=$((${FOREBAY_DEMO_MB:-120} * 1000 * 1000))
base=${FOREBAY_DEMO_DIR:-${CARGO_TARGET_DIR:-${TMPDIR:-/tmp}}}
clients=16

mkdir -p "$base"
work=$(mktemp -d "$(realpath "$base")/demo-cdn.XXXXXX")
picture=$(realpath "$base")/demo-cdn.png
chmod 755 "$work"
origin=$work/origin fast=$work/fast
node= nginx= driver=

finish() {
    local code=$?
    trap - EXIT INT TERM
    set +e
    [ "$code" = 0 ] || { tail -n 20 "$work/node.err" "$work/nginx.err" >&2; }
    for pid in $node $nginx $driver; do kill "$pid" 2>/dev/null; done
    wait
    rm -rf --one-file-system "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
fail() { echo "demo-cdn: $*" >&2; exit 1; }
mb() { awk -v bytes="$1" 'BEGIN { printf "%.0f MB", bytes / 1e6 }'; }
rows=()
row() { rows+=("$(printf '%-44s %8s  %s' "$1" "$2" "${3-}")"); }

# --- a real tree of files, and a web server in front of it -------------------------------------------------------
mkdir -p "$origin"
for dir in /usr/share/doc /usr/include /usr/lib/python3 /usr/share; do
    [ -d "$dir" ] || continue
    (cd "$dir" && find . -xdev -type f -readable -size -8000k -printf '%s %P\n' | grep -v '[^[:alnum:] ._/+-]' | sort -k2 |
        awk -v f="$max_files" -v b="$max_bytes" '$1 > 0 && NF == 2 && f > 0 && b > $1 { f--; b -= $1; print $2 }' |
        tar --no-recursion -T - -cf - | tar -C "$origin" -xf - --no-same-owner)
    [ "$(find "$origin" -type f | wc -l)" -lt "$max_files" ] || break
done
chmod -R a+rX "$origin"
files=$(find "$origin" -type f | wc -l)
bytes=$(find "$origin" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }')
[ "$files" -gt 100 ] || fail "no tree of files was found on this machine"

# Another user may not be able to pass through the directories above, such as /root.
nginx_user=
[ "$(id -u)" != 0 ] || nginx_user='user root;'
for _ in $(seq 20); do
    port=$((20000 + RANDOM % 20000))
    cat >"$work/nginx.conf" <<END
$nginx_user
pid $work/nginx.pid;
error_log $work/nginx.err;
events { }
http {
    access_log off;
    client_body_temp_path $work/tmp; proxy_temp_path $work/tmp; fastcgi_temp_path $work/tmp;
    uwsgi_temp_path $work/tmp; scgi_temp_path $work/tmp;
    server { listen 127.0.0.1:$port; root $origin; autoindex on; }
}
END
    nginx -c "$work/nginx.conf" -g 'daemon off;' 2>>"$work/nginx.err" &
    nginx=$!
    sleep 0.5
    kill -0 "$nginx" 2>/dev/null && break
    nginx=
done
[ -n "$nginx" ] || fail "nginx does not start: $(cat "$work/nginx.err")"

# --- the node ------------------------------------------------------------------------------------------------------
metrics=$((40000 + RANDOM % 20000))
"$forebay" --json serve "http://127.0.0.1:$port/" --fast "$fast" --name "demo-$$" --listen 127.0.0.1:0 \
    --metrics "$metrics" --throttle "$pace" >"$work/node.out" 2>"$work/node.err" &
node=$!
for _ in $(seq 100); do
    address=$(sed -n 's/.*"addresses":\["\([^"]*\)".*/\1/p' "$work/node.out")
    [ -z "$address" ] || break
    kill -0 "$node" 2>/dev/null || fail "the node does not start"
    sleep 0.1
done
[ -n "$address" ] || fail "the node does not start"
say "An origin of $files files ($(mb "$bytes")) at $pace, and a cache node in front of it: http://$address"

# Fetches every file through the node, and compares all with the origin's. Leaves the seconds in $took.
fetch() {
    local begin
    (cd "$origin" && find . -type f -printf '%P\n') |
        awk -v base="http://$address/" -v out="$work/got/" '{ print "url = \"" base $0 "\""; print "output = \"" out $0 "\"" }' \
            >"$work/list"
    rm -rf "$work/got"
    begin=$EPOCHREALTIME
    timeout 170 curl -sS --no-progress-meter --fail --create-dirs --parallel --parallel-max "$clients" -K "$work/list" ||
        fail "a file could not be fetched"
    took=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')
    diff -r "$origin" "$work/got" >/dev/null || fail "what came through the node is not what the origin has"
}
# Bytes that the node has read from the origin.
from_origin() { "$forebay" --json status "/forebay/demo-$$" | sed 's/.*"pool_read_bytes":\([0-9]*\).*/\1/'; }

fetch
cold=$took first=$(from_origin)
row "cold: every file once, $clients clients" "$cold s" "$(mb "$first") from the origin"
fetch
second=$(from_origin)
row "warm: the same again" "$took s" "$(mb $((second - first))) from the origin, $(awk -v a="$cold" -v b="$took" 'BEGIN { printf "%.1f", a / b }') x as fast"
kill "$nginx"
wait "$nginx" 2>/dev/null || true
nginx=
fetch
row "the origin is stopped: the same again" "$took s" "all $files files still served"

say "What the clients saw"
printf '%s\n' "${rows[@]}"
curl -sS -o /dev/null -D - "http://$address/$(head -1 "$work/list" | sed "s,.*$address/,,;s/\"$//")" | sed -n '/^cache-status\|^etag\|^age/Ip'

say "What the node says"
"$forebay" status "/forebay/demo-$$"

# The page is live: a browser looks at it for a few seconds, while the clients go on.
if command -v chromedriver >/dev/null; then
    driver_port=$((20000 + RANDOM % 20000))
    HOME=$work chromedriver --port="$driver_port" >"$work/driver.out" 2>&1 &
    driver=$!
    driver() { curl -sS -m 60 -H 'Content-Type: application/json' "http://127.0.0.1:$driver_port/session$1" "${@:2}"; }
    for _ in $(seq 50); do driver /none -o /dev/null 2>/dev/null && break; sleep 0.1; done
    session=$(driver '' -d '{"capabilities":{"alwaysMatch":{"goog:chromeOptions":{"args":["--headless=new","--no-sandbox",
        "--disable-gpu","--hide-scrollbars","--window-size=1280,1700"]}}}}' | sed -n 's/.*"sessionId":"\([^"]*\)".*/\1/p')
    if [ -n "$session" ]; then
        driver "/$session/url" -d "{\"url\":\"http://127.0.0.1:$metrics/\"}" -o /dev/null
        for _ in 1 2; do fetch; done
        driver "/$session/screenshot" | sed 's/^{"value":"//;s/"}$//' | base64 -d >"$picture"
        driver "/$session" -X DELETE -o /dev/null
        say "The node's page, as a picture: $picture"
    fi
fi
