#!/usr/bin/env bash
# English text to measure on and another to calibrate on, from Debian's manuals; licences: docs/quality.md.
#   fetch_text.sh [FOLDER]
# writes measure.txt (the Debian FAQ) and calibrate.txt (the Debian Developer's Reference) into FOLDER, by default
# ~/.cache/kvpool/text, and leaves those that are there.
set -euo pipefail
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool/text}

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "fetch_text.sh: needs $tool, of Debian or Ubuntu" >&2; exit 1; }
done
mkdir -p "$folder"
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

# fetch NAME PACKAGE PATH: the gzipped file PATH of PACKAGE becomes NAME.
fetch() {
  if [ ! -s "$folder/$1" ]; then
    mkdir "$work/$2"
    (cd "$work/$2" && apt-get -qq download "$2" 2>/dev/null) || {
      echo "fetch_text.sh: apt-get download $2 failed; try apt-get update" >&2
      exit 1
    }
    dpkg-deb -x "$work/$2"/*.deb "$work/$2/tree"
    gunzip -c "$work/$2/tree/$3" >"$work/$1"
    mv "$work/$1" "$folder/$1"
  fi
  echo "$folder/$1"
}

fetch measure.txt debian-faq usr/share/doc/debian/FAQ/debian-faq.en.txt.gz
fetch calibrate.txt developers-reference usr/share/developers-reference/developers-reference.txt.gz
