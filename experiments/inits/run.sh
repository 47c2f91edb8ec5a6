#!/usr/bin/env bash
# Every init of config.yaml on the embedded teacher, then the table. From the repository's root,
# after `make env`.
set -euo pipefail
here=$(dirname "$0")
inits=$(sed -n 's/^init: \[\(.*\)\]$/\1/p' "$here/config.yaml" | tr -d ' ')
.venv/bin/python run.py -m paths.output_dir=out/inits "init=$inits"
.venv/bin/python "$here/collect.py" out/inits
