#!/bin/sh
# in_root.sh ROOT SCRIPT [VARIABLE=VALUE...]: runs SCRIPT, a path in ROOT, by its shell as root, with
# these variables as its environment. Its mounts end with its namespace.
set -eu

# The loader finds a program's own folder in /proc; the sizes of caches are in /sys.
# shellcheck disable=SC2016  # that shell expands it
exec unshare -m sh -c 'root=$1 script=$2; shift 2
  mount -t proc proc "$root/proc" && mount -t sysfs -o ro sysfs "$root/sys" &&
    mount --rbind /dev "$root/dev" &&
    exec chroot "$root" /usr/bin/env -i HOME=/fftune PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@" \
      sh "$script"' in_root "$@"
