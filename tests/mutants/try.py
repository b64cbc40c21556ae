#!/usr/bin/env python3
"""Runs the test programs against mutants that insert.py made, for a number of minutes.

try.py TREE MUTANTS OUT MINUTES [NAME ...]
  NAME  test programs to run, beside the unit tests; all, if none is given
  OUT/unreached.txt  mutants that no test program gets to
  OUT/missed.txt     mutants that no program noticed, with the programs that ran
  OUT/caught.txt     mutants that a program noticed

First, all programs run once without a mutant, to see which mutants each of them reaches. Then mutants are taken at random,
and each is run against the programs that reach it, the quickest first, until one fails or PROGRAM_SECONDS are over.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LANES = 3
# The most time of all programs together for one mutant.
PROGRAM_SECONDS = 240
# Not mounted by tests, and they compile or download.
LEFT_OUT = {"tidy", "schema", "packaged", "burst_buffer", "burst_buffer_nodes", "burst_buffer_results", "slurm", "page"}

printing = threading.Lock()


def programs_of(tree, names):
    # For the tests of `packaged`, cargo makes the program.
    tests = [word for name in ["packaged", *names] for word in ("--test", name)]
    some = ["--lib", "--bins", *tests] if names else []
    built = subprocess.run(
        ["cargo", "test", "--release", "--workspace", "--no-run", "--message-format=json", *some],
        cwd=tree, stdout=subprocess.PIPE, text=True, check=True,
    )
    programs = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message.get("executable"):
            name = message["target"]["name"]
            if name not in LEFT_OUT and name != "forebay_mutants":
                programs.append((name, Path(message["manifest_path"]).parent, message["executable"]))
    return programs


def end_processes_of(mark):
    """Ends what a program left behind: processes with this in their environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                pass


def run(program, environment, limit, log):
    """Returns the exit status, or None after the limit, and the seconds."""
    name, folder, path = program
    began = time.monotonic()
    mark = f"FOREBAY_MUTANTS_RUN={os.getpid()}-{threading.get_ident()}-{began}"
    key, value = mark.split("=")
    with log.open("w") as output:
        child = subprocess.Popen(
            [path], cwd=folder, env=os.environ | environment | {key: value},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    end_processes_of(mark.encode())
    return status, time.monotonic() - began


def unmount_dead():
    """Unmounts what has no daemon any more."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind.startswith("fuse"):
            try:
                os.stat(place)
            except OSError:
                subprocess.run(["umount", "-l", place], stderr=subprocess.DEVNULL, check=False)


def main():
    tree, out, minutes = Path(sys.argv[1]), Path(sys.argv[3]), float(sys.argv[4])
    seed = os.environ.get("FOREBAY_SEED") or str(random.randrange(1 << 32))
    mutants = {}
    for line in Path(sys.argv[2]).read_text().splitlines():
        number, rest = line.split("\t", 1)
        mutants[int(number)] = rest.replace("\t", "  ")
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o777)
    programs = programs_of(tree, sys.argv[5:])
    size = max(mutants) + 1

    def look(index):
        program = programs[index]
        reached = out / f"reached-{index}"
        reached.write_bytes(bytes(size))
        reached.chmod(0o666)
        status, took = run(program, {"FOREBAY_MUTANTS_REACHED": str(reached)}, 900, out / f"log-{index}")
        with printing:
            print(f"{program[0]}: exit {status}, {took:.0f} s", flush=True)
        return status, took, reached.read_bytes()

    known = out / "looked.json"
    if known.exists():
        looked = [(status, took, (out / f"reached-{i}").read_bytes()) for i, (status, took) in enumerate(json.loads(known.read_text()))]
    else:
        with ThreadPoolExecutor(LANES) as lanes:
            looked = list(lanes.map(look, range(len(programs))))
        known.write_text(json.dumps([(status, took) for status, took, _ in looked]))
    # A program that fails without a mutant says nothing.
    useful = sorted((i for i, (status, _, _) in enumerate(looked) if status == 0), key=lambda i: looked[i][1])
    reaching = {number: [i for i in useful if looked[i][2][number]] for number in mutants}
    unreached = [mutants[number] for number, by in reaching.items() if not by]
    (out / "unreached.txt").write_text("".join(f"{what}\n" for what in unreached))
    print(f"{len(unreached)} of {len(mutants)} mutants are reached by no program", flush=True)

    order = sorted(number for number, by in reaching.items() if by)
    random.Random(seed).shuffle(order)
    print(f"seed {seed}", flush=True)
    deadline = time.monotonic() + 60 * minutes
    counts = {"caught": 0, "missed": 0}

    def try_mutant(number):
        if time.monotonic() > deadline:
            return
        ran, spent, by = [], 0.0, None
        for index in reaching[number]:
            if spent > 0 and spent + looked[index][1] > PROGRAM_SECONDS:
                break
            limit = 60 + 4 * looked[index][1]
            log = out / f"log-mutant-{number}"
            status, took = run(programs[index], {"FOREBAY_MUTANT": str(number)}, limit, log)
            ran.append(programs[index][0])
            spent += took
            if status != 0:
                by = f"{programs[index][0]} ({'time limit' if status is None else f'exit {status}'})"
                break
            log.unlink()
        verdict = "caught" if by else "missed"
        with printing:
            unmount_dead()
            counts[verdict] += 1
            line = f"{number}  {mutants[number]}  {by or 'ran: ' + ' '.join(ran)}"
            print(f"{verdict}  {line}", flush=True)
            with (out / f"{verdict}.txt").open("a") as file:
                file.write(f"{line}\n")

    with ThreadPoolExecutor(LANES) as lanes:
        list(lanes.map(try_mutant, order))
    print(f"{counts['caught']} caught, {counts['missed']} missed", flush=True)


if __name__ == "__main__":
    main()
