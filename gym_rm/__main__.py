"""Run the command `gym-rm`, also as `python -m gym_rm`."""

import gc
import sys


def main() -> None:
    """Run the command line; an interrupt while it is still imported ends it without a traceback."""
    gc.set_threshold(10_000)  # imports of torch and transformers make 400,000 objects that stay
    try:
        from gym_rm.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
