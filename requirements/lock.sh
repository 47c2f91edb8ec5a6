#!/usr/bin/env bash
# Remakes base.txt and test.txt from the ranges in pyproject.toml: `make lock` calls it.
#
# A fresh environment gets torch first, then the ranges, and `pip freeze` says what came of it.
# Run it with the oldest Python supported (3.11): what installs there installs on newer ones, while
# the newest releases may already have dropped it.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${PYTHON:=python3}" "${TORCH_INDEX:=}"
: "${TORCH:?torch to lock for, such as torch==X.Y.Z}" "${TRITON:?triton that TORCH requires}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$PYTHON" -m venv "$work/env"
python="$work/env/bin/python"
install=("$python" -m pip install --quiet --use-pep517)

# torch stays out of the lock: which build is right depends on the machine. So do the CUDA
# libraries that a CUDA build brings.
"${install[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
printf '%s\n' "torch==$torch" "$TRITON" >"$work/torch.txt"
echo "setuptools" >"$work/without.txt"
"$python" -m pip freeze --all | grep -oiE '^(torch|pip|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)\b' \
  >>"$work/without.txt"
echo "taylor-calibrate" >>"$work/without.txt"

# Only what the resolver reads is copied, so that the build leaves nothing in the work tree.
mkdir -p "$work/src/tc"
cp pyproject.toml README.md LICENSE "$work/src/"
cp tc/__init__.py "$work/src/tc/"

frozen() {
  # The packages beside those in without.txt and those named as arguments, sorted by name.
  local options=() name
  for name in $(cat "$work/without.txt") "$@"; do options+=(--exclude "$name"); done
  "$python" -m pip freeze "${options[@]}" | LC_ALL=C sort -f
}

header() {
  # The first line says what the file is for, the rest how it was made.
  echo "# $1"
  echo "# Made by \`make lock\` (requirements/lock.sh) with Python" \
    "$("$python" -c 'import platform; print(platform.python_version())') and torch ${torch%%+*}:"
  echo "# pip install of the ranges in pyproject.toml in a fresh environment, then pip freeze."
  echo "# Do not edit: change the ranges, then \`make lock\`."
}

echo "Resolving what a CPU run needs ..."
"${install[@]}" -c "$work/torch.txt" "$work/src"
frozen triton flash-linear-attention fla-core >"$work/base"

echo "Resolving what the tests add ..."
"${install[@]}" -c "$work/torch.txt" -c "$work/base" "$work/src[gpu,eval,wandb,slurm,dev]"
frozen >"$work/all"
# triton has wheels for Linux alone.
LC_ALL=C comm -13 <(LC_ALL=C sort "$work/base") <(LC_ALL=C sort "$work/all") |
  LC_ALL=C sort -f | sed "s/^\(triton==.*\)/\1 ; sys_platform == 'linux'/" >"$work/added"

# A package installed from a path freezes to a line that no other machine could follow.
if grep -n ' @ \|^-e' "$work/base" "$work/added"; then
  echo "lock: the lines above name no release; install from an index and try again" >&2
  exit 1
fi

{ header "All that a CPU run needs beside torch."; cat "$work/base"; } >"$work/base.txt"
{
  header "What the tests and checks add to base.txt."
  echo "-r base.txt"
  cat "$work/added"
} >"$work/test.txt"
cp "$work/base.txt" "$work/test.txt" requirements/
echo "Wrote requirements/base.txt and requirements/test.txt"
