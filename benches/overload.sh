#!/usr/bin/env bash
# Programs that write ten times as fast as the pool takes it, for minutes: whether they are slowed to one smooth rate, and
# whether everything is in the pool at the end. Four programs write files of 8 MiB, together at most 320 MiB/s, through a
# mount of an S3 pool, to which the policy sends 32 MiB/s.
#   benches/overload.sh [none|pool [SECONDS [LIMIT [PACE_BELOW]]]]
#   none  nothing fails
#   pool  the pool's server is killed after a quarter of the time, and started again after three quarters
# FOREBAY_BIN: the program. FOREBAY_TOOLS: where `make` has put versitygw. Needs root.
set -euo pipefail
fault=${1:-none} seconds=${2:-120} limit=${3:-4G} pace_below=${4:-0.5}
export FOREBAY_BIN=${FOREBAY_BIN:-forebay} AWS_ACCESS_KEY_ID=forebay AWS_SECRET_ACCESS_KEY=forebay-secret
export PATH=${FOREBAY_TOOLS:-$HOME/.cache/forebay/tools/bin}:$PATH
work=$(mktemp -d /var/tmp/forebay-overload-XXXXXX)
port=$((20000 + $$ % 10000))
server=
ended() {
    "$FOREBAY_BIN" umount "$work/mnt" >/dev/null 2>&1 || umount -l "$work/mnt" 2>/dev/null || true
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap ended EXIT
mkdir -p "$work"/{data/pool,iam,versions,fast,mnt}

serve() {
    ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY versitygw --port "127.0.0.1:$port" --quiet \
        --keep-alive --iam-dir "$work/iam" posix --versioning-dir "$work/versions" "$work/data" >>"$work/server.log" 2>&1 &
    server=$!
    until curl -s -o /dev/null "http://127.0.0.1:$port/"; do sleep 0.05; done
}

printf '[default]\nflush = "idle:1s"\n[write-back]\nrate = "32MiB"\npace-below = %s\n' "$pace_below" >"$work/policy.toml"
serve
"$FOREBAY_BIN" mount "s3://pool?endpoint=http://127.0.0.1:$port" "$work/mnt" --fast "$work/fast" --limit "$limit" \
    --policy "$work/policy.toml" >/dev/null

cat >"$work/write.py" <<'END'
import hashlib, json, os, subprocess, sys, threading, time

mount, log, seconds, programs, mib = sys.argv[1], sys.argv[2], float(sys.argv[3]), 4, 8
# What each file has, so that the pool can be compared with it.
base = os.urandom((mib + 1) << 20)
each_second = 80 << 20
begun, lock = time.monotonic(), threading.Lock()
bytes_in, longest, slow, refused, written = [0] * (int(seconds) + 60), 0.0, 0, [], {}

def offset(program, at):
    return int.from_bytes(hashlib.sha256(f"{program}/{at}".encode()).digest()[:4], "big") % (1 << 20)

def program(number):
    global longest, slow
    sent, at = 0, 0
    while time.monotonic() - begun < seconds:
        name, start = f"{number}-{at}", offset(number, at)
        try:
            file = os.open(f"{mount}/{name}", os.O_CREAT | os.O_WRONLY)
            for step in range(mib):
                data = memoryview(base)[start + (step << 20):start + ((step + 1) << 20)]
                ahead = sent / each_second - (time.monotonic() - begun)
                if ahead > 0:
                    time.sleep(ahead)
                before = time.monotonic()
                while data:
                    count = os.write(file, data)
                    data, sent = data[count:], sent + count
                took = time.monotonic() - before
                with lock:
                    bytes_in[int(time.monotonic() - begun)] += 1 << 20
                    longest, slow = max(longest, took), slow + (took > 2)
            os.close(file)
            with lock:
                written[name] = start
        except OSError as error:
            refused.append(f"{name} after {time.monotonic() - begun:.0f} s: {error.strerror}")
        # A program that was not held up does not catch up later.
        sent = max(sent, (time.monotonic() - begun) * each_second)
        at += 1

most = 0
def watch():
    global most
    while any(thread.is_alive() for thread in threads):
        told = subprocess.run([os.environ["FOREBAY_BIN"], "status", "--json", mount], capture_output=True, text=True).stdout
        most = max(most, (json.loads(told).get("status") or {}).get("used_bytes", 0))
        time.sleep(0.5)

threads = [threading.Thread(target=program, args=(number,)) for number in range(programs)]
for thread in threads:
    thread.start()
watch()
ten = [sum(bytes_in[at:at + 10]) / 10 / (1 << 20) for at in range(0, int(seconds), 10)]
print("MiB/s in ten seconds: " + " ".join(f"{rate:.0f}" for rate in ten))
print(f"the longest write {longest:.2f} s; {slow} longer than 2 s; {len(written)} files; most in the fast pool {most >> 20} MiB")
print(f"writes that failed: {len(refused)}" + "".join(f"\n  {what}" for what in refused[:5]))
with open(log, "w") as out:
    json.dump(written, out)
open(f"{log}.base", "wb").write(base)
END
cat >"$work/compare.py" <<'END'
import json, os, sys

pool, log = sys.argv[1], sys.argv[2]
written, base = json.load(open(log)), open(f"{log}.base", "rb").read()
missing = [name for name in written if not os.path.exists(f"{pool}/{name}")]
other = [name for name, start in written.items()
         if name not in missing and open(f"{pool}/{name}", "rb").read() != base[start:start + (8 << 20)]]
print(f"in the pool: {len(written) - len(missing) - len(other)} as written, {len(missing)} missing, {len(other)} with other content")
sys.exit(bool(missing or other))
END

python3 "$work/write.py" "$work/mnt" "$work/written" "$seconds" &
writers=$!
if [ "$fault" = pool ]; then
    sleep "$((seconds / 4))"
    kill -9 "$server"
    sleep "$((seconds / 2))"
    serve
fi
wait "$writers"
"$FOREBAY_BIN" flush --wait "$work/mnt"
python3 "$work/compare.py" "$work/data/pool" "$work/written"
