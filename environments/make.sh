#!/usr/bin/env bash
# environments/make.sh NAME LINK CHECK [PIP ARGUMENT...]
#
# Lay the environment of an engine from what environments/NAME.txt asks for and the PIP ARGUMENTs (options, or folders
# of packages of this project), see whether the Python code CHECK runs in it, and make LINK a link to it. It lies
# outside the checkout, under a key of all that decides what is in it, so that another checkout finds it:
# $EAGLE3X_ENVIRONMENTS, else ~/.cache/eagle3x/environments.
# PYTHON (python3) chooses the interpreter.
set -euo pipefail

name=$1 link=$2 check=$3
shift 3
python=${PYTHON:-python3}
asked=$(dirname "$0")/$name.txt
root=${EAGLE3X_ENVIRONMENTS:-${XDG_CACHE_HOME:-$HOME/.cache}/eagle3x/environments}

if [ -e "$link" ] && [ ! -L "$link" ]; then
    echo "$link is a folder of its own, not a link that this script made: remove it, or choose another place" >&2
    exit 1
fi

folders=()
for argument; do [ ! -d "$argument" ] || folders+=("$argument"); done
content() {
    "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
    echo "$@"
    cat "$asked"
    [ ${#folders[@]} -eq 0 ] || find "${folders[@]}" -type f ! -path '*/__pycache__/*' ! -name 'test_*' -print0 |
        sort -z | xargs -0 tail -v -n +1
}
key=$(content "$@" | sha256sum)
place=$root/$name-${key:0:12}
mkdir -p "$root"
exec 9>"$place.lock"
flock --nonblock 9 || { echo "another run makes $place: waiting for it" >&2; flock 9; }

# The marker comes last: what an interrupted run left is not taken for an environment.
if [ ! -e "$place/.ready" ] || ! "$place/bin/python" -c ''; then
    echo "making $place (some minutes, some GB)" >&2
    rm -rf "$place"
    "$python" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$@" -r "$asked"
    "$place/bin/python" -c "$check"
    touch "$place/.ready"
fi
ln -sfn "$place" "$link"
