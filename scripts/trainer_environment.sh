#!/usr/bin/env bash
# Install a trainer with this package into an environment of its own, unless it is there, and print the folder.
#
#     scripts/trainer_environment.sh verl    # what tests/trainers/verl/requirements.txt pins, into .venv-verl/HASH
#
# The folder is named by a hash of the pins; those of earlier pins are removed. PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=tests/trainers/$1/requirements.txt
folder=$PWD/.venv-$1/$(cat "$requirements" pyproject.toml scripts/trainer_environment.sh | sha256sum | cut -c1-12)
if [ ! -e "$folder/complete" ]; then
  rm -rf ".venv-$1"
  "${PYTHON:-python3}" -m venv "$folder"
  # The pins are complete; several trainers pin each other's dependencies out of one environment, so pip does not resolve.
  "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --ignore-requires-python -r "$requirements" >&2
  "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps -e . >&2
  touch "$folder/complete"
fi
echo "$folder"
