#!/bin/sh
# Takes the picture of a report that the README shows.
# usage: [HEIGHT=780] report_picture.sh FFTUNE OUT.png [PATH...]
# It needs Chromium; without a path it draws ffn on an H200.
set -eu
fftune=$(realpath "$1")
out=$(realpath "$2")
shift 2
[ "$#" -gt 0 ] || set -- docs/measurements/h200/ffn-1024-2048.json
browser=$(command -v chromium-headless-shell || command -v chromium || command -v google-chrome) || {
  echo "there is no Chromium here: ./dev deps --browser installs one" >&2
  exit 3
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$fftune" report "$@" -o "$folder/report.html"
HOME=$folder "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars \
  --user-data-dir="$folder/browser" --window-size="1100,${HEIGHT:-780}" --virtual-time-budget=20000 \
  --screenshot="$out" "file://$folder/report.html"
