#!/usr/bin/env bash
# Submits one script twice to a real Slurm on this machine. The first run is observed; before the second one starts, the
# prolog stages what the first one read. Leaves nothing behind. Needs root, and the packages of `packaging/deps slurm`.
set -euo pipefail

forebay=$(realpath "$(command -v "${FOREBAY_BIN:-forebay}")")
pace=${FOREBAY_DEMO_PACE:-100MB/s,2ms}
base=${FOREBAY_DEMO_DIR:-/var/tmp}
scripts=$(realpath "$(dirname "$0")/../slurm")
files=3000

work=$(mktemp -d "$(realpath "$base")/demo-slurm.XXXXXX")
# slurmd and munged accept only directories that other users can enter and not change.
chmod 755 "$work"
pool=$work/pool mnt=$work/mnt fast=$work/fast
started=()

finish() {
    local code=$? pid
    trap - EXIT INT TERM
    set +e
    cd /
    [ "$code" = 0 ] || tail -n 20 "$work"/log/* 2>/dev/null
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null; done
    sleep 1
    for pid in "${started[@]}"; do kill -9 "$pid" 2>/dev/null; done
    if grep -qF " $mnt " /proc/self/mountinfo; then
        timeout 60 "$forebay" umount "$mnt" >/dev/null 2>&1 || timeout 60 "$forebay" umount --lazy "$mnt"
    fi
    grep -qF " $mnt " /proc/self/mountinfo || rm -rf --one-file-system "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
fail() { echo "demo: $*" >&2; exit 1; }
within() {
    local seconds=$1 begin=$SECONDS
    shift
    until "$@" 2>/dev/null; do
        [ $((SECONDS - begin)) -lt "$seconds" ] || fail "not within $seconds s: $*"
        sleep .1
    done
}

say "A pool with files of this machine, slowed down to $pace"
mkdir -p "$pool/tree" "$mnt" "$fast"
# awk reads the whole list: a list that is cut off ends find with an error.
(cd / && find usr/share usr/include -xdev -type f -readable -size -200k -print0 2>/dev/null |
    awk -v RS='\0' -v ORS='\0' -v files="$files" 'NR <= files' | tar --null --no-recursion -T - -cf -) |
    tar -C "$pool/tree" -xf - --no-same-owner
files=$(find "$pool/tree" -type f | wc -l)
[ "$files" -gt 100 ] || fail "no files were found on this machine"
"$forebay" mount "$pool" "$mnt" --fast "$fast" --throttle "$pace" -o allow_other
echo "$files files, $(du -sh --apparent-size "$pool/tree" | cut -f1)"

say "Slurm: munged, slurmctld and slurmd on loopback, with the scripts of packaging/slurm"
mkdir -m 755 "$work"/{munge,state,spool,log,hooks}
for hook in prolog epilog task-prolog; do
    sed -e "s|PATH=/usr/local/bin|PATH=$work/hooks|" -e "s|slurm $hook|slurm $hook --mount $mnt|" "$scripts/$hook" >"$work/hooks/$hook"
done
ln -s "$forebay" "$work/hooks/forebay"
chmod 755 "$work"/hooks/*
head -c 128 /dev/urandom >"$work/munge.key"
chmod 400 "$work/munge.key"
host=$(uname -n | cut -d. -f1)
port=$((20000 + $$ % 10000))
cat >"$work/slurm.conf" <<END
ClusterName=demo
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/log/slurmctld
SlurmdLogFile=$work/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
$("$forebay" slurm install --scripts "$work/hooks")
END
export SLURM_CONF=$work/slurm.conf
munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
    --log-file="$work/log/munged" --seed-file="$work/munge/seed" >/dev/null 2>&1 &
started+=($!)
within 20 test -S "$work/munge/socket"
slurmctld -D >/dev/null 2>&1 &
started+=($!)
slurmd -D -N n1 >/dev/null 2>&1 &
started+=($!)
idle() { [ "$(sinfo -h -o %T)" = idle ]; }
within 60 idle
sinfo

cat >"$work/job" <<'END'
#!/bin/bash
begin=$EPOCHREALTIME
grep -rc include "$FOREBAY_MOUNT/tree" | sort | sha256sum >"$FOREBAY_MOUNT/result-$SLURM_JOB_ID"
awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f\n", b - a }'
END

rows=()
for run in 1 2; do
    say "Submission $run of the same script"
    job=$(sbatch --parsable --output="$work/log/job-%j" "$work/job")
    over() { scontrol show job "$job" | grep -q JobState=COMPLETED && idle; }
    within 120 over
    cmp -s "$mnt/result-$job" "$pool/result-$job" || fail "the result is not in the pool"
    "$forebay" job show "slurm-$job" --mount "$mnt" | sed -n '1p; /^  read/p'
    rows+=("$(printf '%-10s %8s s' "$run" "$(<"$work/log/job-$job")")")
    # The second run finds nothing that the first one left by chance.
    "$forebay" evict "$mnt/tree" --release-leases >/dev/null
done
cmp -s "$pool"/result-1 "$pool"/result-2 || fail "the two runs read different bytes"

say "$files files, pool at $pace: the time that the script ran"
printf '%s\n' "${rows[@]}"
echo
echo "Demo passed: the second submission read what the prolog had staged, and both results are in the pool."
