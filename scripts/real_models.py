"""Fetch the small real models of the tests and benchmarks into the user's cache (630 MB), and print their folders."""

from gym_rm.cli.real_models import MODELS, fetch
from gym_rm.errors import ConfigError

if __name__ == "__main__":
    for name in MODELS:
        try:
            print(f"{name:8} {fetch(name)}", flush=True)
        except ConfigError as error:
            raise SystemExit(f"{name}: {error}") from None
