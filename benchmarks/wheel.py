"""How large is the package? Builds the wheel and the sdist, and counts what is in the wheel.

python benchmarks/wheel.py [--save NAME]     # needs the package build
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import results

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_argument(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder, str(ROOT)], check=True, capture_output=True)
        (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
        files = zipfile.ZipFile(wheel).infolist()
        models = sum(each.compress_size for each in files if each.filename.endswith(".safetensors"))
        values = {
            "wheel MB": wheel.stat().st_size / 1e6,
            "of it embedded models MB": models / 1e6,
            "sdist MB": sdist.stat().st_size / 1e6,
            "files": len(files),
        }
    for name, value in values.items():
        print(f"{name}: {value:.1f}")
    results.save(args.save, values)


if __name__ == "__main__":
    main()
