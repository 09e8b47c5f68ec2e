#!/bin/sh
# make_root.sh SUITE FOLDER PACKAGE,PACKAGE: a root of nothing but the distribution's base and these
# packages, below FOLDER; prints its path. SUITE is bookworm (Debian 12), trixie (Debian 13)
# or noble (Ubuntu 24.04). Needs root, debootstrap and the archive; a root that FOLDER holds already
# is used again. The archive's keyring must be installed; UNCHECKED=1 does without.
set -eu

suite=$1
packages=$3
root=$2/$suite-$packages

case $suite in
  bookworm | trixie)
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
    echo "make_root.sh: no suite '$suite': give bookworm, trixie or noble" >&2
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
  debootstrap --variant=minbase "--include=$packages" "$@" "$suite" "$root" "$mirror" $script \
    >"$root.log" 2>&1 || {
    tail -n 5 "$root.log" >&2
    exit 3
  }
  touch "$root/.complete"
fi
echo "$root"
