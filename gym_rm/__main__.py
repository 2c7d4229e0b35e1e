"""Run the command `gym-rm` as `python -m gym_rm`."""

from gym_rm.cli.main import main

main()
