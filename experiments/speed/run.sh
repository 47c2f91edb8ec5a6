#!/usr/bin/env bash
# Measures on a CPU what has no result in out/speed yet, then makes result.json, table.md and
# plot.png. From the repository's root, after `make test-env`.
#
# With names (operator, statistics, decoding, recovery) it measures these parts, again if need be.
set -euo pipefail
here=$(dirname "$0")
parts=("$@")
if [ $# -eq 0 ]; then
  for part in operator statistics decoding recovery; do
    [ -e "out/speed/$part.json" ] || parts+=("$part")
  done
fi
for part in "${parts[@]}"; do
  .venv/bin/python "$here/time_$part.py" --output "out/speed/$part.json"
done
.venv/bin/python "$here/collect.py" out/speed
