#!/usr/bin/env bash
# Download the wheels that benchmarks/gpu_first.py and gpu_day.py need on a machine with torch and transformers but no
# network, for Python 3.12 on Linux x86_64, at the versions of constraints.txt.
#
#     scripts/gpu_wheels.sh FOLDER
#
# and on that machine: python -m pip install --no-index --no-deps --target site FOLDER/*.whl && export PYTHONPATH=$PWD/site
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
constraints=$(dirname "$0")/../constraints.txt
python=${PYTHON:-python3}
# What the core needs besides torch, transformers, accelerate, matplotlib, rich and typer.
names="gymnasium Farama-Notifications cloudpickle pydantic pydantic_core annotated-types typing-inspection
  typing_extensions ruamel.yaml"
wanted=()
for name in $names; do
  wanted+=("$(grep -i "^$name==" "$constraints")")
done
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${platform}_x86_64")
done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
  --python-version 3.12 "${platforms[@]}" --dest "$1" "${wanted[@]}"
du -sh "$1"
