import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gym_rm.cli import plan as command
from gym_rm.cli.console import WIDTH
from gym_rm.cli.plan_requests import EXAMPLE, divide_change, read_request
from gym_rm.config import load_config
from gym_rm.planning.hardware import calibration
from gym_rm.planning.hardware.devices import device_of_kind
from gym_rm.planning.plan import load_plan
from gym_rm.planning.refusals import Infeasible
from gym_rm.planning.request_settings import PlanSettings
from gym_rm.policy.grpo_settings import GRPOSettings
from tests.cli.command import runner
from tests.planning.plans import together

REQUEST = "cluster: {gpus_per_node: 8}\npolicy: {model: Qwen/Qwen3-8B}\n"
CONFIGS = Path(__file__).parents[2] / "configs" / "plan"
run = runner("plan")


def error_of(*arguments, code=2):
    result = run(*arguments, code=code)
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    return result.stderr


@pytest.fixture
def request_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "request.yaml").write_text(REQUEST)
    return "request.yaml"


@pytest.fixture
def planned(monkeypatch):
    """Settings that were planned; every plan is made by hand, on the nodes that the settings have."""
    found = []

    def plan(settings):
        found.append(settings)
        cluster = settings.cluster
        if cluster.nodes * cluster.gpus_per_node == 1:
            fixes = [("cluster.gpu={like: l4, memory: 99 GiB}",), ("policy.lora.rank=16", "pools=auto")]
            raise Infeasible([f"it needs {size} GiB more" for size in (3, 4)], fixes, name=settings.name)
        gpus = cluster.nodes * cluster.gpus_per_node
        return replace(together(gpus), name=settings.name, step_seconds=80 / gpus)

    monkeypatch.setattr(command, "make_plan", plan)
    return found


# --- one plan --------------------------------------------------------------------------------------------------------


def test_a_request_shows_the_answer_and_its_tables(request_file, planned):
    shown = run(request_file).stdout
    assert "fits on by hand" in shown
    assert "Slowest: generate of generation" in shown
    for title in ("Placement", "Memory of one GPU", "Time of one step"):
        assert title in shown
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_without_a_request_an_example_is_planned_and_explained():
    result = run()
    assert "8B policy, 8B reward model: fits on 1 x 8 h100_sxm" in result.stdout
    assert "This is an example" in result.stderr
    assert "gym-rm plan gpus=16" in result.stderr


def test_the_request_in_the_hint_is_valid(tmp_path):
    lines = [line.strip() for line in command.HINT.splitlines() if re.match(r"  \w+: \{", line)]
    file = tmp_path / "request.yaml"
    file.write_text("\n".join(lines))
    settings = read_request(file, [])
    assert settings.policy.model in " ".join(EXAMPLE)
    assert set(settings.reward_models) == {"helpful"}


def test_the_example_is_the_file_of_one_node():
    assert load_config(PlanSettings, None, EXAMPLE) == load_config(PlanSettings, CONFIGS / "h100_1x8.yaml")


@pytest.mark.parametrize(
    ("base", "changes", "nodes", "per_node"),
    [
        ([], ["gpus=4"], 1, 4),
        ([], ["gpus=8"], 1, 8),
        ([], ["gpus=32"], 4, 8),
        (["cluster.nodes=2", "cluster.gpus_per_node=4"], ["gpus=16"], 4, 4),
        (["cluster.gpus_per_node=16"], ["gpus=32"], 2, 16),
        ([], ["nodes=3", "gpus_per_node=2"], 3, 2),
    ],
)
def test_a_number_of_gpus_is_divided_over_nodes(base, changes, nodes, per_node):
    cluster = read_request(None, ["policy.model=x", *base, *changes]).cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, per_node)


def test_a_change_of_memory_keeps_the_kind_of_gpu():
    cluster = read_request(None, ["gpu=l40s", "memory=64 GiB"]).cluster
    assert cluster.gpu == {"like": "l40s", "memory": "64 GiB"}
    again = read_request(None, ["gpu=l40s", "memory=64 GiB", "memory=80 GiB"]).cluster
    assert again.gpu == {"like": "l40s", "memory": "80 GiB"}


def test_plans_and_pictures_are_written(request_file, planned):
    stderr = run(request_file, "-o", "new/plan.json", "-o", "plan.yaml", "-o", "plan.svg").stderr
    assert load_plan("new/plan.json") == load_plan("plan.yaml") == replace(together(), name="plan")
    assert Path("plan.svg").read_text().startswith("<svg")
    assert "wrote new/plan.json" in stderr


# --- other libraries -------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_as_flags_with_the_work_of_a_step(request_file):
    lines = run(request_file, "reward_models.rm.model=Qwen/Qwen3-4B", "--for", "verl").stdout.splitlines()
    assert all(line.startswith("# ") or re.match(r"[+\w.]+=", line) for line in lines)
    assert "actor_rollout_ref.rollout.n=8" in lines


def test_the_settings_of_the_agent_are_printed_as_its_file(request_file):
    shown = run(str(CONFIGS / "laptop.yaml"), "--for", "gym-rm").stdout
    Path("run.yaml").write_text(shown)
    settings = load_config(GRPOSettings, "run.yaml")
    assert (settings.policy.model, settings.policy.lora.rank) == ("Qwen/Qwen3-0.6B", 16)
    assert shown.startswith("# gym-rm grpo --config run.yaml")


# --- several plans ---------------------------------------------------------------------------------------------------


def test_what_if_shows_the_plan_and_each_change(request_file, planned):
    shown = run(request_file, "--what-if", "gpus=16", "--what-if", "nodes=4 memory=141 GiB").stdout
    assert re.search(r"as it is +8 of 8", shown)
    assert re.search(r"gpus=16 +16 of 16 +5 s \(-50%\)", shown)
    assert planned[2].cluster.nodes == 4
    assert planned[2].cluster.gpu == {"like": "h100_sxm", "memory": "141 GiB"}


def test_a_change_that_is_a_mistake_leaves_the_others(request_file, planned):
    changes = ("gpus=16", "gpuz=16", "nodes=x", "nodes=2")
    result = run(request_file, *(part for change in changes for part in ("--what-if", change)), code=2)
    assert [name for name in changes if re.search(rf"{name} +\d+ of", result.stdout)] == ["gpus=16", "nodes=2"]
    assert "gpuz=16: " in result.stderr
    assert "nodes=x: " in result.stderr


def test_what_if_as_json_has_plans_and_reasons(request_file, planned):
    values = json.loads(run(request_file, "--json", "--what-if", "gpus=1").stdout)
    assert load_plan(values["as it is"]).used_gpus == 8
    assert values["gpus=1"]["reasons"][1] == "it needs 4 GiB more"
    assert values["gpus=1"]["fixes"][1] == ["policy.lora.rank=16", "pools=auto"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("gpus=16", ["gpus=16"]),
        ("nodes=2 gpu=h200_sxm", ["nodes=2", "gpu=h200_sxm"]),
        ("nodes=2, memory=141 GiB", ["nodes=2", "memory=141 GiB"]),
        ("workload.reply_tokens={p50: 1, max: 2}", ["workload.reply_tokens={p50: 1, max: 2}"]),
    ],
)
def test_a_change_of_several_settings_is_divided(change, parts):
    assert divide_change(change) == parts


# --- lists -----------------------------------------------------------------------------------------------------------


def test_planning_loads_no_torch():
    code = """
import sys, gym_rm.cli.main
gym_rm.cli.main.app(["plan", "reward_models.rm.model=Qwen/Qwen3-0.6B"], standalone_mode=False)
assert not {"torch", "transformers", "matplotlib", "ray"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_all_reasons_are_listed_and_settings_to_paste(request_file, planned):
    message = error_of(request_file, "gpus=1", code=1)
    assert message.splitlines() == [
        "error: plan has no plan, for 2 reasons:",
        "  it needs 3 GiB more",
        "  it needs 4 GiB more",
        "There is a plan with any of:",
        "  'cluster.gpu={like: l4, memory: 99 GiB}'",
        "  policy.lora.rank=16 pools=auto",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nofile.yaml"], "there is no file 'nofile.yaml' with settings"),
        (["16"], "A single setting is written name=value"),
        (["--gpus", "16"], "there is no file '16' with settings"),
        (["gpus=12"], "nodes of 8 GPUs do not make 12"),
        (["gpus=0"], "gpus must be an integer of at least 1, got 0"),
        (["memory=much"], "must be a size such as '80 GiB'"),
        (["gpus=many"], "gpus must be an integer of at least 1, got str 'many'"),
        (["cluster=ray"], "cluster must be a mapping of settings"),
        (["-o", "plan.txt"], "-o must end in .json, .yaml, .yml, .svg, got 'plan.txt'"),
        (["request.yaml", "-o", "request.yaml"], "output must not be the input 'request.yaml'"),
        (["request.yaml", "second.yaml"], "expected one request, got"),
        (["--what-if", "16"], "--what-if must be settings such as 'gpus=16'"),
        (["--what-if", "gpuz=16"], "gpuz: unknown setting"),
        (["plan.json", "gpus=16"], "holds a plan, which has no settings to change"),
        (["broken.yaml"], "cannot read the settings"),
        (["list.yaml"], "must be a mapping with the settings"),
        (["cut.json"], "is not a plan"),
    ],
)
def test_a_mistake_in_the_command_is_one_clear_message(request_file, arguments, message):
    together().save("plan.json")
    Path("second.yaml").write_text(REQUEST)
    Path("broken.yaml").write_text("cluster: {")
    Path("list.yaml").write_text("- a\n")
    Path("cut.json").write_text('{"format": 3, "name": "x"}')
    assert message in error_of(*arguments)


# --- simulation ------------------------------------------------------------------------------------------------------


def test_a_request_and_a_written_plan_are_simulated(request_file, planned):
    changes = ("--simulate", "simulation.num_steps=30", "simulation.gpu_hours=5")
    shown = run(request_file, *changes, "-o", "plan.json").stdout
    assert "30 steps, simulated" in shown
    assert re.search(r"conversations/s +\d+\.?\d* \([-+]\d+\.\d% of the plan\)", shown)
    assert run("plan.json", *changes).stdout == shown
    values = json.loads(run("plan.json", *changes, "--json").stdout)
    assert len(values["simulation"]["step_seconds"]) == 30


def test_calibration_measures_and_says_how_to_use_it(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda: device_of_kind("cpu"))
    result = run("--calibrate")
    assert "gpu=here" in result.stderr
    assert re.search(r"cpu +16\.0 GiB +0\.1 +40 ", result.stdout)


def test_plans_of_this_machine_need_its_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "calibration_path", lambda: tmp_path / "none.json")
    assert "--calibrate" in error_of("gpu=here", "policy.model=Qwen/Qwen3-0.6B")
