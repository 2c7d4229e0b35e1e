"""`gym-rm doctor`: what is installed, what works on this machine, and what to do about the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer

import gym_rm
from gym_rm.cli.scorer_arguments import Options, RewardModel, ScorerArguments
from gym_rm.config import override_values
from gym_rm.errors import ConfigError, brief
from gym_rm.scorer import provenance_of

Findings: TypeAlias = Iterator[tuple[str, ...]]  # marks, what was found, and perhaps what to do about it

OK, WARNING, PROBLEM = "ok", "warning", "problem"
ASKED: Any = {"role": "user", "content": "Which is the largest, 12, 30 or 27?"}
ANSWERED: Any = [ASKED, {"role": "assistant", "content": "It is 30."}]
NEIGHBOURS: Any = [[ASKED, {"role": "assistant", "content": "It is 9, of course. " * n}] for n in range(1, 8)]
KNOWN_SCORE = float.fromhex("0x1.1e6e84p+1")  # of `ANSWERED` by the embedded reward model, on a CPU
LARGEST_DIFFERENCE = 1e-4
REPORT = "install gym-rm again; if that does not help, report it with this output"


def doctor(
    replay: Annotated[
        Path | None, typer.Option(help="Run a batch again that GYM_RM_SAVE_FAILED saved, and nothing else.")
    ] = None,
    reward_model: RewardModel = None,
    option: Options = None,
    server: Annotated[str | None, typer.Option(help="URL whose scores to compare with --reward-model, only.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of the server; env:NAME reads a variable.")] = None,
    request: Annotated[list[str] | None, typer.Option(help="NAME=VALUE that clients send to it.")] = None,
    rows: Annotated[str | None, typer.Option(help="File of conversations to compare.")] = None,
    other: Annotated[list[str] | None, typer.Option(help="Folder of a model that it may have instead.")] = None,
) -> None:
    """Show what is installed and what works on this machine, and what to do about the rest.

    With --reward-model, also load it, and show how far its scores are from those of its stored weights.

    With --server, show whether a gym-rm serve, vLLM or SGLang (or URL/pooling, OpenRLHF's URL/get_reward) gives the
    scores of the reward model, and if not, which fault explains the difference.

    Exit codes: 0 what is needed works; 1 there is a problem.
    """
    if replay is not None:
        raise typer.Exit(not _tell("replay", _replay(replay)))
    if server is not None:
        arguments, fields = ScorerArguments.parse(reward_model, option), override_values(request or [])
        found = _served(arguments, rows, other or [], url=server, key=key, fields=fields)
        raise typer.Exit(not _tell(f"scores of {server}", found))
    parts = (_versions, _devices, _sandbox, _debugging, _self_test)
    worked = [_tell(part.__name__.strip("_").replace("_", " "), part(), REPORT) for part in parts]
    if reward_model is not None:
        worked.append(_tell("reward model", _reward_model(ScorerArguments.parse(reward_model, option))))
    raise typer.Exit(not all(worked))


def _tell(title: str, findings: Findings, *advice: str) -> bool:
    """Print findings, with advice under each problem; return whether there is no problem."""
    typer.echo(f"\n{title}")
    marks = []
    try:
        for mark, *texts in findings:
            marks.append(mark)
            typer.echo(f"  {mark:<9}" + "\n           -> ".join([*texts, *advice] if mark == PROBLEM else texts))
    except Exception as error:  # what is broken must not hide what else there is to see
        marks.append(PROBLEM)
        told = () if isinstance(error, ConfigError) else advice  # whose message says what to do
        typer.echo(f"  {PROBLEM:<9}" + "\n           -> ".join([brief(error), *told]))
    return PROBLEM not in marks


def _versions() -> Findings:
    import torch

    yield OK, f"gym_rm {gym_rm.__version__}, Python {platform.python_version()}, {platform.platform()}"
    others = ", ".join(f"{name} {version(name)}" for name in ("transformers", "gymnasium", "numpy"))
    yield OK, f"torch {torch.__version__} (built for CUDA: {torch.version.cuda}), {others}"


def _devices() -> Findings:
    import torch

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield OK, f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads of torch, {memory:.1f} GiB of memory"
    for index in range(torch.cuda.device_count()):
        free, total = (f"{size / 2**30:.1f}" for size in torch.cuda.mem_get_info(index))
        kind = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        name = torch.cuda.get_device_name(index)
        yield OK, f"cuda:{index} {name}, {free} of {total} GiB free, {kind}, flex attention"
    if not torch.cuda.is_available():
        advice = ["if this machine has a GPU, see whether nvidia-smi shows it"] if torch.version.cuda else []
        yield WARNING if advice else OK, "no GPU is seen: float32 on the CPU, without flex attention", *advice


def _sandbox() -> Findings:
    from gym_rm.sandbox.layers import choose

    try:
        yield OK, f"programs that a model writes run in {choose('auto', False, None)[0]}"
    except ConfigError as error:
        yield WARNING, str(error), "only kind='code' and the tool 'python' need it"


def _debugging() -> Findings:
    from gym_rm.engine.debugging import Switches, failed_folder, read_switches, replay_command

    switches, folder = read_switches(), failed_folder()
    if switches != Switches():
        yield WARNING, f"GYM_RM_DEBUG is set: {switches}", "unset it to score as usual"
    if folder is None:
        yield OK, "failed batches are not saved; set GYM_RM_SAVE_FAILED to a folder to save them"
    else:
        files = sorted(folder.glob("batch-*.safetensors"))
        advice = [f"to run the last one again: {replay_command(files[-1])}"] if files else []
        yield WARNING if files else OK, f"{len(files)} failed batches are saved in {folder}", *advice


def _replay(file: Path) -> Findings:
    from gym_rm.engine.debugging import saving_nothing
    from gym_rm.engine.executors.failed_batches import read_failed, spec_of, weights_digest
    from gym_rm.engine.executors.local import LocalExecutor

    failed = read_failed(file)
    before, weights = failed.about.get("info", {}), failed.about.get("weights")
    yield OK, f"{failed.about['type']} of {failed.batch.num_tokens} tokens, saved for: {failed.about['reason']}"
    executor = LocalExecutor()
    info = executor.load(spec_of(failed))
    if weights is not None and weights_digest(executor.models) != weights:
        yield WARNING, "the weights differ: those that failed were changed after the load, or the files were since"
    for name in ("quantization", "layout", "fused", "rows", "dtype", "device", "torch", "transformers"):
        if (now := getattr(info, name)) != before.get(name):
            yield WARNING, f"{name} was {before.get(name)!r}, and is {now!r} here"
    with saving_nothing():
        (result,) = executor.run([failed.batch])
    if result.values is None:
        yield PROBLEM, f"it fails again: {result.error}"
    elif bad := int((~np.isfinite(result.values)).sum()):
        yield PROBLEM, f"{bad} of {result.values.size} values are not finite again"
    else:
        low, high = result.values.min(), result.values.max()
        yield OK, f"{result.values.size} values, all finite, from {low:.4g} to {high:.4g}"


def _reward_model(arguments: ScorerArguments) -> Findings:
    made = provenance_of(arguments.load())
    found = None if made is None else made.fidelity
    measured = found is not None and found.mean_error is not None
    yield OK if measured else WARNING, f"{made and made.model}: {found or 'has no weights here'}"


def _served(local: ScorerArguments, rows: str | None, others: list[str], **server: Any) -> Findings:
    from gym_rm.evaluation.served_scores import ServedScores, probe_rows
    from gym_rm.scorers.remote.asked import AskedServer

    for found in ServedScores(local.model, probe_rows(rows), others, **local.options).compare(AskedServer(**server)):
        if found.refused:
            yield WARNING, f"{found.form}: {len(found.refused)} rows have no score, such as: {found.refused[0]}"
        said = (
            f"{found.form}: {found.rows} scores differ by up to {found.difference:.2g}, {found.allowed:.2g} is rounding"
        )
        why = found.cause.name if found.cause else f"none of these; the scores correlate by {found.correlation:.3f}"
        shown = [each for each in found.causes if each.exact or each.explained > 0.001][:5]
        lines = (f"explains {each.explained:6.1%}, leaves {each.left:.2g}: {each.name}" for each in shown)
        equal = found.difference <= found.allowed
        yield (OK, said) if equal else (PROBLEM, f"{said}. Cause: {why}", *lines)


def _self_test() -> Findings:
    import gymnasium as gym

    scorer = gym_rm.load_scorer()
    scores = scorer.score([ANSWERED])
    difference = abs(float(scores.rewards[0]) - KNOWN_SCORE)
    text = f"the score of a known conversation, {difference:.1e} beside the stored one (devices round differently)"
    yield OK if difference <= LARGEST_DIFFERENCE else PROBLEM, text
    equal = scorer.score([*NEIGHBOURS, ANSWERED]).rewards[-1] == scores.rewards[0]
    promised = scores.provenance.batch_invariance if scores.provenance else None
    text = f"its bits beside other conversations are {'equal' if equal else 'others'}; checked at load: {promised}"
    yield OK if equal else PROBLEM if promised == "bit-equal" else WARNING, text
    yield OK, f"its fidelity: {scores.provenance.fidelity if scores.provenance else None}"
    envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=lambda conversations: [1.0] * len(conversations))
    envs.reset(seed=0)
    rewards = envs.step(("It is 30.", "It is 12."))[1].tolist()
    envs.close()
    yield OK if rewards == [1.0, 1.0] else PROBLEM, f"a step of RewardModel-v0 with a function: {rewards}"
