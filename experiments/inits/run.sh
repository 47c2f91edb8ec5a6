#!/usr/bin/env bash
# Every init on the embedded teacher, then the table. From the repository's root, after `make env`.
set -euo pipefail
.venv/bin/python run.py -m paths.output_dir=out/inits \
  init=copy_only,zero_gate,phase1,phase2,full,taylor,paper
.venv/bin/python experiments/inits/collect.py out/inits
