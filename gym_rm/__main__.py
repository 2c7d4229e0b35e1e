"""`python -m gym_rm` is the command `gym-rm`."""

from gym_rm.cli.main import main

main()
