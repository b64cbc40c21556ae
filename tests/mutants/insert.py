#!/usr/bin/env python3
"""Puts all mutants of `cargo mutants` that replace the body of a function into one copy of the code, each behind a switch.

insert.py TREE LIST OUT PACKAGE...
  TREE  a copy of the code, which is changed
  LIST  what `cargo mutants --list --json --workspace` says of it
  OUT   gets one line for each mutant that compiles: number, file:line, function, replacement
  PACKAGE  crates whose functions are changed

One build then serves all mutants, and the tests of mounts can be run against each of them. A replacement that does not
compile is removed again: `cargo check` tells its line.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SWITCH = re.compile(r"^if forebay_mutants::active\((\d+)\) \{ return .*\}$")
ROUNDS = 60


def insert(tree, mutants):
    """Writes the switches. Returns the files that have some."""
    by_file = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_file[mutant["file"]].append((number, mutant))
    for name, of_file in by_file.items():
        path = tree / name
        lines = path.read_text().split("\n")
        # From the end, so that the places of the others stay true.
        of_file.sort(key=lambda entry: (entry[1]["span"]["start"]["line"], entry[1]["span"]["start"]["column"]))
        for number, mutant in reversed(of_file):
            start = mutant["span"]["start"]
            line = lines[start["line"] - 1]
            at = start["column"] - 1
            replacement = " ".join(mutant["replacement"].split())
            switch = f"if forebay_mutants::active({number}) {{ return {replacement}; }}"
            lines[start["line"] - 1 : start["line"]] = [line[:at], switch, line[at:]]
        path.write_text("\n".join(lines))
    return sorted(by_file)


def add_crate(tree, switch_rs, files):
    """Makes the crate of the switches, and lets each crate with mutants depend on it."""
    crate = tree / "mutants"
    (crate / "src").mkdir(parents=True)
    (crate / "src/lib.rs").write_text(switch_rs)
    (crate / "Cargo.toml").write_text(
        '[package]\nname = "forebay-mutants"\nversion = "0.0.0"\nedition = "2024"\n[dependencies]\nlibc.workspace = true\n'
    )
    manifest = tree / "Cargo.toml"
    manifest.write_text(re.sub(r"^members = \[", 'members = [\n    "mutants",', manifest.read_text(), flags=re.M))
    for root in sorted({tree / name.split("/src/")[0] for name in files}):
        manifest = root / "Cargo.toml"
        depth = "../" * len(root.relative_to(tree).parts)
        dependency = f'[dependencies]\nforebay-mutants = {{ path = "{depth}mutants" }}'
        manifest.write_text(manifest.read_text().replace("[dependencies]", dependency, 1))


def errors(tree):
    """Returns the places of the errors of the compiler: (file, line) pairs for each error."""
    check = subprocess.run(
        ["cargo", "check", "--release", "--workspace", "--keep-going", "--message-format=json"],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    )
    found = []
    for line in check.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-message" and message["message"]["level"] == "error":
            spans = message["message"]["spans"]
            places = [(s["file_name"], n) for s in spans for n in range(s["line_start"], s["line_end"] + 1)]
            found.append((message["message"]["rendered"], places))
    return check.returncode, found


def main():
    tree, listed, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    packages = set(sys.argv[4:])
    # An empty iterator has another type than what the function returns, and the compiler says so far from the switch.
    mutants = [
        mutant
        for mutant in json.loads(listed.read_text())
        if mutant["genre"] == "FnValue" and mutant["package"] in packages and "::iter::" not in mutant["replacement"]
    ]
    files = insert(tree, mutants)
    add_crate(tree, (Path(__file__).parent / "switch.rs").read_text(), files)
    for round_number in range(ROUNDS):
        status, found = errors(tree)
        if status == 0:
            break
        removed, unexplained = 0, []
        for rendered, places in found:
            of_error = 0
            for name, number in places:
                path = tree / name
                if not path.exists():
                    continue
                lines = path.read_text().split("\n")
                if number <= len(lines) and SWITCH.match(lines[number - 1]):
                    # An empty line: the places of the other errors stay true.
                    lines[number - 1] = ""
                    path.write_text("\n".join(lines))
                    of_error += 1
            if of_error == 0:
                unexplained.append(rendered)
            removed += of_error
        print(f"round {round_number + 1}: {len(found)} errors, {removed} mutants do not compile", file=sys.stderr)
        if removed == 0:
            sys.exit("insert.py: the compiler reports errors that no mutant explains:\n" + "\n".join(unexplained))
    else:
        sys.exit(f"insert.py: still errors after {ROUNDS} rounds")
    stays = set()
    for name in files:
        for line in (tree / name).read_text().split("\n"):
            if switch := SWITCH.match(line):
                stays.add(int(switch.group(1)))
    with out.open("w") as table:
        for number, mutant in enumerate(mutants):
            if number in stays:
                place = f'{mutant["file"]}:{mutant["function"]["span"]["start"]["line"]}'
                replacement = " ".join(mutant["replacement"].split())
                table.write(f'{number}\t{place}\t{mutant["function"]["function_name"]}\t{replacement}\n')
    print(f"{len(stays)} of {len(mutants)} mutants", file=sys.stderr)


if __name__ == "__main__":
    main()
