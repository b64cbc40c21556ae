#!/usr/bin/env bash
# Shows the main use on real files: programs read a slow pool cold, warm and staged; writes are absorbed and written
# back; the daemon is killed in the middle of writing. Leaves nothing behind.
set -euo pipefail

forebay=${FOREBAY_BIN:-forebay}
pace=${FOREBAY_DEMO_PACE:-100MB/s,2ms}
max_files=${FOREBAY_DEMO_FILES:-10000}
max_bytes=$((${FOREBAY_DEMO_MB:-250} * 1000 * 1000))
base=${FOREBAY_DEMO_DIR:-${CARGO_TARGET_DIR:-${TMPDIR:-/tmp}}}

mkdir -p "$base"
work=$(mktemp -d "$(realpath "$base")/demo.XXXXXX")
pool=$work/pool mnt=$work/mnt fast=$work/fast source=$work/source
writer=

daemon_log() {
    local state
    for state in /run/forebay/*/state.json "${XDG_RUNTIME_DIR:-/nonexistent}"/forebay/*/state.json; do
        if grep -qF "\"$mnt\"" "$state" 2>/dev/null; then tail -n 40 "${state%state.json}daemon.log"; fi
    done
}

finish() {
    local code=$?
    trap - EXIT INT TERM
    set +e
    cd /
    [ -n "$writer" ] && kill "$writer" 2>/dev/null
    if grep -qF " $mnt " /proc/self/mountinfo; then
        [ "$code" = 0 ] || daemon_log
        timeout 60 "$forebay" umount "$mnt" >/dev/null 2>&1 || timeout 60 "$forebay" umount --lazy "$mnt"
    fi
    grep -qF " $mnt " /proc/self/mountinfo || rm -rf --one-file-system "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
fail() { echo "demo: $*" >&2; exit 1; }

# Runs a command and leaves its time in seconds in $took.
timed() {
    local begin=$EPOCHREALTIME
    if [ "$(type -t "$1")" = function ]; then
        timeout 170 bash -c '"$@"' bash "$@" || fail "failed or took too long: $*"
    else
        timeout 170 "$@" || fail "failed or took too long: $*"
    fi
    took=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')
}

rows=()
row() { rows+=("$(printf '%-58s %8s  %s' "$1" "$2" "${3-}")"); }
times() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.1f x", a / (b > 0.005 ? b : 0.005) }'; }
mb() { awk -v bytes="$1" 'BEGIN { printf "%.0f MB", bytes / 1e6 }'; }

# Both read every byte of every file. Their output must go through a pipe: if it is /dev/null, grep and tar do not read
# the files.
search() { grep -r -c -F 'unsafe' "$1" 2>/dev/null | awk -F: '{ n += $NF } END { print n + 0 }' >"$work/answer"; }
archive() { tar -C "$1" --sort=name -cf - . | sha256sum | cut -c1-64 >"$work/answer"; }
export -f search archive
export work

# --- a real tree of files ---------------------------------------------------------------------------------------
candidates() {
    local toolchain
    toolchain=$(rustc --print sysroot 2>/dev/null || true)
    printf '%s\n' "${CARGO_HOME:-$HOME/.cargo}/registry/src" "${toolchain:+$toolchain/share/doc/rust/html}" \
        /usr/lib/python3 /usr/lib/python3.* /usr/share /usr/include | grep -v '^$'
}

collect() {
    mkdir -p "$source"
    local dir files=0 bytes=0
    while read -r dir; do
        [ -d "$dir" ] && [ "$files" -lt "$max_files" ] && [ "$bytes" -lt "$max_bytes" ] || continue
        # Copies one directory after the other, so that names and nesting stay as they are; awk ends the list at the
        # limits.
        (cd "$dir" && find . -xdev -type f -readable -printf '%s %p\0' | sort -z -k2 |
            awk -v RS='\0' -v ORS='\0' -v f="$((max_files - files))" -v b="$((max_bytes - bytes))" '
                f > 0 && b > 0 && $1 < 8e6 { f--; b -= $1; sub(/^[0-9]+ /, ""); print }' |
            tar --null --no-recursion -T - -cf - | tar -C "$source" -xf - --no-same-owner)
        files=$(find "$source" -type f | wc -l)
        bytes=$(du -sb "$source" | cut -f1)
    done < <(candidates)
    [ "$files" -gt 100 ] || fail "no tree of files was found on this machine"
    tree_files=$files tree_bytes=$bytes
}

say "Collecting a real tree of files"
collect
mkdir -p "$pool" "$mnt"
mv "$source" "$pool/tree"
echo "$tree_files files, $(mb "$tree_bytes"); the pool is slowed down to $pace"

timed search "$pool/tree"; local_grep=$took; expected_grep=$(<"$work/answer")
timed archive "$pool/tree"; local_tar=$took; expected_tar=$(<"$work/answer")

# --- read: cold, warm, staged -----------------------------------------------------------------------------------
say "Mounting"
# For input data that does not change during a job. By default every open confirms the version with the pool.
cat >"$work/policy.toml" <<END
[default]
consistency = "ttl:1h"
metadata-ttl = "1h"
END
timed "$forebay" mount "$pool" "$mnt" --fast "$fast" --throttle "$pace" --policy "$work/policy.toml"
echo "serves after $took s"

same() { [ "$(<"$work/answer")" = "$1" ] || fail "$2 read other bytes through the mount than from the pool"; }

say "Reading cold: grep -r at the pool's pace"
timed search "$mnt/tree"; cold_grep=$took; same "$expected_grep" grep
echo "$took s"

say "The same again: warm"
timed search "$mnt/tree"; warm_grep=$took; same "$expected_grep" grep
echo "$took s"

say "Evicting, and staging for the next job"
timed "$forebay" evict "$mnt/tree" --release-leases
timed "$forebay" stage "$mnt/tree" --owner demo; stage=$took
timed search "$mnt/tree"; staged_grep=$took; same "$expected_grep" grep
timed archive "$mnt/tree"; staged_tar=$took; same "$expected_tar" tar
"$forebay" du --summarize "$mnt/tree"

# --- write: absorbed, then written back -------------------------------------------------------------------------
say "Writing: unpacking an archive into the mount"
part=$(cd "$pool/tree" && find . -type f | sort | awk 'NR <= 2000')
tar -C "$pool/tree" -cf "$work/part.tar" -T - <<<"$part"
mkdir "$work/local"
timed tar -C "$work/local" -xf "$work/part.tar"; local_untar=$took
mkdir "$mnt/out"
timed tar -C "$mnt/out" -xf "$work/part.tar"; absorb=$took
echo "$(wc -l <<<"$part") files, $(mb "$(stat -c %s "$work/part.tar")") absorbed in $took s"
timed "$forebay" flush --wait "$mnt/out"; flush=$took
diff -r "$work/local" "$pool/out" || fail "the pool does not hold what was written"
echo "in the pool after $flush s; diff -r finds no difference"

# --- the daemon is killed ---------------------------------------------------------------------------------------
say "kill -9 of the daemon in the middle of writing"
worker() { "$forebay" status --json "$mnt" | sed -n 's/.*"worker":{"pid":\([0-9]*\),.*/\1/p'; }
mkdir "$mnt/killed"
victim=$(worker)
[ -n "$victim" ] || fail "the worker is not known"
timeout 120 tar -C "$mnt/killed" -xf "$work/part.tar" &
writer=$!
sleep "$(awk -v t="$absorb" 'BEGIN { printf "%.2f", t / 3 }')"
kill -0 "$writer" || fail "the writer was done before the kill"
kill -9 "$victim"
wait "$writer" || fail "the writer saw an error"
writer=
[ "$(worker)" != "$victim" ] || fail "the worker was not replaced"
diff -r "$work/local" "$mnt/killed" || fail "the mount does not hold what was written"
timed "$forebay" flush --wait "$mnt/killed"
diff -r "$work/local" "$pool/killed" || fail "the pool does not hold what was written"
echo "killed $victim, $(worker) took over; the writer saw no error, and nothing differs"

timed "$forebay" umount "$mnt"

# --- the table --------------------------------------------------------------------------------------------------
row "" "seconds" "against the pool's pace"
row "grep -r, cold through Forebay: the pool's pace" "$cold_grep" "1.0 x"
row "grep -r, staged" "$staged_grep" "$(times "$cold_grep" "$staged_grep")"
row "grep -r, warm" "$warm_grep" "$(times "$cold_grep" "$warm_grep")"
row "grep -r, local directory without Forebay (page cache)" "$local_grep" "$(times "$cold_grep" "$local_grep")"
row "tar and checksum, staged" "$staged_tar"
row "tar and checksum, local directory without Forebay (page cache)" "$local_tar"
row "staging all of it, before the job" "$stage"
row "unpack, written back to the pool afterwards" "$flush" "1.0 x"
row "unpack, absorbed: what the job waits for" "$absorb" "$(times "$flush" "$absorb")"
row "unpack, local directory without Forebay (page cache)" "$local_untar" "$(times "$flush" "$local_untar")"
say "$tree_files files, $(mb "$tree_bytes"), pool at $pace"
printf '%s\n' "${rows[@]}"
echo
echo "Demo passed: the same bytes in every run, nothing lost when the daemon was killed."
