#!/usr/bin/env bash
# Makes the virtual environment that the Makefile's targets use: `make setup` (or bash scripts/setup.sh).
#
#   VENV=.venv  CONSTRAINTS=constraints.txt  EXTRAS=report  PYTHON=python3.12   what to make, and with what
#   TORCH_INDEX=URL   where torch comes from, for example PyTorch's index of CPU builds; without it pip's own
#
# Quick and offline the second time: a stamp in the environment holds a hash of everything that decides its content.
# Two at once wait for each other. Problems are told in one line.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

VENV=${VENV:-.venv}
CONSTRAINTS=${CONSTRAINTS:-constraints.txt}
EXTRAS=${EXTRAS:-}
STAMP=$VENV/.ready
NEEDED_KB=$((4 * 1024 * 1024))

fail() {
    echo "setup: $*" >&2
    exit 1
}

usable() { # is $1 a Python that we support?
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' >/dev/null 2>&1
}

content_hash() {
    { cat pyproject.toml "$CONSTRAINTS" scripts/setup.sh && echo "$EXTRAS ${PYTHON:-} ${TORCH_INDEX:-} $PWD"; } | cksum
}

find_python() {
    local name found=
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.10 to 3.14: name one that is"
        "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || fail "$PYTHON has no venv module: install it (Debian, Ubuntu: apt install python3-venv)"
        echo "$PYTHON"
        return
    fi
    for name in python3.14 python3.13 python3.12 python3.11 python3.10 python3; do
        usable "$name" || continue
        found=$name
        "$name" -c 'import venv, ensurepip' 2>/dev/null && echo "$name" && return
    done
    [ -n "$found" ] && fail "$found has no venv module: install it (Debian, Ubuntu: apt install python3-venv)"
    fail "needs Python 3.10 to 3.14, found $(python3 --version 2>/dev/null || echo no python3): install one, or name it with PYTHON=/path/to/python3"
}

[ "$(uname -s)" = Linux ] || fail "runs on Linux only; elsewhere use the container: docker run --rm -it -v \"\$PWD\":/src -w /src python:3.12 make ${GOAL:-demo}"
case $(uname -m) in x86_64 | aarch64 | arm64) ;; *) fail "needs x86-64 or arm64, this is $(uname -m)" ;; esac

if command -v flock >/dev/null; then # one at a time: the lock is this file
    exec 9<scripts/setup.sh
    flock 9
fi
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(content_hash)" ] && usable "$VENV/bin/python"; then
    touch "$STAMP"
    exit 0
fi

python=$(find_python) || exit 1
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
[ "$free_kb" -ge "$NEEDED_KB" ] || fail "needs 4 GB of free disk in $PWD, $((free_kb / 1024)) MB are free: free some"

LOG=$(mktemp "${TMPDIR:-/tmp}/ridethrough-setup.XXXXXX") || fail "cannot write to ${TMPDIR:-/tmp}"
trap 'rm -f "$LOG"' EXIT
rm -f "$STAMP"
if ! usable "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "setup: making $VENV with $("$python" --version)" >&2
    "$python" -m venv --clear "$VENV" >"$LOG" 2>&1 || { cat "$LOG" >&2; fail "cannot make $VENV with $python: see above"; }
fi

install() { # pip install, quietly; on failure one line that says what to do
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$LOG" 2>&1 9<&- && return
    grep -q -i -E 'No space left|Errno 28' "$LOG" && fail "the disk is full: free at least 4 GB and call it again"
    grep -q -i -E 'Retrying|name resolution|connection|timed out|unreachable|ProxyError' "$LOG" &&
        fail "no network: the package index cannot be reached; connect, or set PIP_INDEX_URL to a mirror, and call it again"
    tail -n 20 "$LOG" >&2
    fail "pip could not install what is needed: see above"
}

index=()
if [ -n "${TORCH_INDEX:-}" ]; then
    index=(--extra-index-url "$TORCH_INDEX")
fi

echo "setup: installing into $VENV (minutes the first time)" >&2
# Dependency groups need pip 25.1; this also tells early that there is no network.
"$VENV/bin/python" -c 'import pip; raise SystemExit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' ||
    install --retries 1 --upgrade 'pip>=25.1'
install ${index[@]+"${index[@]}"} --retries 2 -c "$CONSTRAINTS" -e ".${EXTRAS:+[$EXTRAS]}" --group dev
content_hash >"$STAMP"
echo "setup: done" >&2
