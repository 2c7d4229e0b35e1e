import subprocess
import sys

import gym_rm


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def test_the_version_is_printed_without_loading_torch():
    code = """
import sys, gym_rm.cli.main
gym_rm.cli.main.app(["--version"], standalone_mode=False)
assert "torch" not in sys.modules
"""
    assert python("-c", code) == f"gym-rm {gym_rm.__version__}\n"


def test_python_m_gym_rm_runs_the_command():
    shown = python("-m", "gym_rm", "--help")
    assert "score" in shown
    assert "serve" in shown
