#!/bin/sh
# bare_root.sh SUITE FOLDER WHEEL: installs the wheel into an empty environment in a root of nothing
# but the distribution's base and Python, below FOLDER, and runs the tool and an op there. SUITE is
# bookworm (Debian 12) or noble (Ubuntu 24.04). Needs root; make_root.sh says what else.
set -eu

suite=$1
folder=$2
wheel=$3
tests=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$("$tests/../../tests/support/make_root.sh" "$suite" "$folder" python3,python3-venv)

rm -rf "$root/fftune"
mkdir "$root/fftune"
cp "$wheel" "$tests/rmsnorm_by_hand.py" "$root/fftune"
cat >"$root/fftune/run.sh" <<'TEXT'
set -eu
cd /fftune
python3 -m venv venv
venv/bin/pip install --quiet --no-index --no-deps ./*.whl
. /etc/os-release
ldd --version >libc.txt
printf '%s, %s\n' "$PRETTY_NAME" "$(head -n 1 libc.txt)"
venv/bin/fftune --version
venv/bin/fftune devices
[ "$(venv/bin/python rmsnorm_by_hand.py)" = 2.0 ]
echo 'an op runs'
TEXT
"$tests/../../tests/support/in_root.sh" "$root" /fftune/run.sh
rm -rf "$root/fftune"
