import dataclasses
import json

from rich.console import Console

from agents import grpo
from gym_rm.config import load_config
from gym_rm.evaluation.audit import AuditRecord


def test_a_run_prints_the_warning_of_the_audit_once(tmp_path):
    record = AuditRecord(2, ("first word dropped",), (), "embedded", None, "embedded prompts")
    (tmp_path / "audit.json").write_text(json.dumps(dataclasses.asdict(record)))
    small = ("steps=1", "env.num_prompts=2", "env.group_size=2", "eval.num_prompts=4")
    named = (f"env.audit={tmp_path / 'audit.json'}", f"output={tmp_path / 'run'}")
    settings = grpo.fill_defaults(load_config(grpo.GRPOSettings, overrides=(*small, *named)))
    console = Console(width=1000, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    grpo.train(settings, console)
    text = console.export_text()
    assert text.count("Audit, warning level 2 of 2") == 1
    assert "do not make them better: first word dropped." in text
