#!/bin/sh
# bare_root.sh WHEEL SUITE FOLDER: installs the wheel into an empty environment in a root of nothing
# but the distribution's base and Python, below FOLDER, and runs the tool and an op there. SUITE is
# bookworm (Debian 12) or noble (Ubuntu 24.04). Needs root, debootstrap and the archive; a root that
# FOLDER holds already is used again. The archive's keyring must be installed; UNCHECKED=1 does
# without.
set -eu

wheel=$1
suite=$2
root=$3/$suite
tests=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

case $suite in
  bookworm)
    set --
    keyring=debian
    mirror=http://deb.debian.org/debian
    script=sid
    ;;
  noble)
    set -- --components=main,universe
    keyring=ubuntu
    mirror=http://archive.ubuntu.com/ubuntu
    script=gutsy
    ;;
  *)
    echo "bare_root.sh: no suite '$suite': give bookworm or noble" >&2
    exit 2
    ;;
esac
if [ -n "${UNCHECKED:-}" ]; then
  set -- "$@" --no-check-gpg
else
  set -- "$@" "--keyring=/usr/share/keyrings/$keyring-archive-keyring.gpg"
fi
if [ ! -e "$root/.complete" ]; then
  rm -rf "$root"
  mkdir -p "$root"
  debootstrap --variant=minbase --include=python3,python3-venv "$@" "$suite" "$root" "$mirror" $script \
    >"$root.log" 2>&1 || {
    tail -n 5 "$root.log" >&2
    exit 3
  }
  touch "$root/.complete"
fi

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
# The loader finds a program's own folder in /proc. The mount ends with its namespace.
# shellcheck disable=SC2016  # that shell expands it
unshare -m sh -c 'mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/env -i HOME=/fftune \
  PATH=/usr/bin:/bin sh /fftune/run.sh' run "$root"
rm -rf "$root/fftune"
