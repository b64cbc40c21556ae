#!/usr/bin/env bash
# Builds libfuse's example passthrough_hp, with passthrough (libfuse 3.17), from Debian's source package into DIR, and
# prints the path of the program. Needs apt, a C++ compiler, Python and the network; the benches also run without it.
#   benches/passthrough_hp.sh DIR
set -euo pipefail
dir=$(realpath -m "${1:?a directory to build in}")
program=$dir/build/example/passthrough_hp
if [ ! -x "$program" ]; then
    mkdir -p "$dir/lists/partial" "$dir/parts"
    cd "$dir"
    # The mirror of this system, with a later release.
    sed -e '/^$/q' -e 's/^Types:.*/Types: deb-src/' -e 's/^Suites:.*/Suites: trixie/' \
        /etc/apt/sources.list.d/debian.sources > parts/trixie.sources
    apt() {
        timeout 300 apt-get -o Dir::Etc::sourcelist=- -o Dir::Etc::sourceparts="$dir/parts" \
            -o Dir::State::lists="$dir/lists" "$@" >&2
    }
    apt update -qq
    rm -rf fuse3-*/ build
    apt source -qq fuse3
    python3 -m venv venv
    timeout 300 venv/bin/pip -q install meson ninja >&2
    export PATH="$dir/venv/bin:$PATH"
    meson setup build fuse3-*/ --buildtype=release -Ddefault_library=static -Dutils=false -Dtests=false -Duseroot=false >&2
    timeout 600 ninja -C build example/passthrough_hp >&2
fi
echo "$program"
