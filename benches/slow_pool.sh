#!/usr/bin/env bash
# Programs that write faster than the pool takes it: how long one write waits once the fast pool is full. Writes files of one size
# through a mount with a limit of 512 MiB, while the pool gets 32 MiB per second. Prints for each size the time of all
# writes, the longest write, and how many took more than a second. With a second program, both are measured in turns.
#   benches/slow_pool.sh [ROUNDS [SIZE_IN_MIB ...]]
# FOREBAY_BIN: the program. OTHER_BIN: another one. PACE_BELOW: values of the setting `pace-below`, which are measured in
# turns, too. Needs root.
set -euo pipefail
rounds=${1:-2}
[ $# -gt 0 ] && shift
sizes=("$@")
[ ${#sizes[@]} -gt 0 ] || sizes=(1 16 64)
total=1024
programs=("${FOREBAY_BIN:-forebay}")
[ -z "${OTHER_BIN:-}" ] || programs+=("$OTHER_BIN")
work=$(mktemp -d /var/tmp/forebay-slow-XXXXXX)
ended() {
    "${programs[0]}" umount "$work/mnt" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap ended EXIT
mkdir "$work"/{pool,fast,mnt}

# Writes files, one MiB at a time.
cat >"$work/write.py" <<'END'
import os, sys, time
directory, size, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data, longest, slow, begun = os.urandom(1 << 20), 0, 0, time.monotonic()
for at in range(total // size):
    file = os.open(f"{directory}/file{at}", os.O_CREAT | os.O_WRONLY)
    for _ in range(size):
        before, left = time.monotonic(), data
        while left:
            left = left[os.write(file, left):]
        took = time.monotonic() - before
        longest, slow = max(longest, took), slow + (took > 1)
    os.close(file)
print(f"{time.monotonic() - begun:8.1f} s  {longest:10.2f} s  {slow:12}")
END

for size in "${sizes[@]}"; do
    echo "files of $size MiB, $total MiB in all"
    echo "        all writes   the longest   longer than 1 s"
    for round in $(seq "$rounds"); do
        for case in $(for program in "${programs[@]}"; do printf "$program:%s " ${PACE_BELOW:-0.1}; done); do
            program=${case%:*}
            printf '[default]\nflush = "idle:1s"\n[write-back]\nrate = "32MiB"\npace-below = %s\n' "${case##*:}" \
                >"$work/policy.toml"
            "$program" mount "$work/pool" "$work/mnt" --fast "$work/fast" --limit 512M --policy "$work/policy.toml" >/dev/null
            printf '%2d  ' "$round"
            [ ${#programs[@]} = 1 ] || printf '%s  ' "$program"
            [ -z "${PACE_BELOW:-}" ] || printf 'pace-below %-4s ' "${case##*:}"
            python3 "$work/write.py" "$work/mnt" "$size" "$total"
            "$program" flush --wait "$work/mnt" >/dev/null
            "$program" umount "$work/mnt" >/dev/null
            rm -rf "$work"/pool/* "$work"/fast/*
        done
    done
done
