#!/bin/sh
# bare_root.sh SUITE FOLDER PACKAGE...: installs the Debian packages in a root of nothing but the
# distribution's base and a compiler, below FOLDER; runs the tool there, builds programs in C and C++
# by pkg-config, and runs them. SUITE is bookworm (Debian 12) or noble (Ubuntu 24.04). Needs root;
# make_root.sh says what else.
set -eu

suite=$1
folder=$2
shift 2
tests=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$("$tests/../support/make_root.sh" "$suite" "$folder" g++,pkgconf)

rm -rf "$root/fftune"
mkdir "$root/fftune"
cp "$@" "$tests/packaged/consumer.c" "$tests/packaged/consumer.cpp" "$root/fftune"
cat >"$root/fftune/run.sh" <<'TEXT'
set -eu
cd /fftune
dpkg --install ./*.deb >install.log 2>&1 || { cat install.log; exit 1; }
. /etc/os-release
printf '%s\n' "$PRETTY_NAME"
fftune --version
fftune devices
# shellcheck disable=SC2046
cc -std=c99 -Wall -Werror consumer.c -o from_c $(pkg-config --cflags --libs fftune)
c++ -std=c++17 -Wall -Werror consumer.cpp -o from_cpp $(pkg-config --cflags --libs fftune)
./from_c
./from_cpp
dpkg --purge fftune libfftune-dev "$(dpkg-query -W -f '${Package}\n' 'libfftune0*')" >purge.log 2>&1 ||
  { cat purge.log; exit 1; }
if find /usr -name '*fftune*' | grep .; then
  echo 'purging leaves files behind'
  exit 1
fi
TEXT
"$tests/../support/in_root.sh" "$root" /fftune/run.sh
rm -rf "$root/fftune"
