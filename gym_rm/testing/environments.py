"""A conformance check for vector environments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from gym_rm.envs.spaces import ReplySpace
from gym_rm.errors import ActionError

Envs: TypeAlias = VectorEnv[Any, Any, Any]
Step: TypeAlias = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


def check_vector_env(envs: Envs | str, *, num_steps: int = 8, seed: int = 0, **options: Any) -> None:
    """Check that a vector environment follows Gymnasium's contract; `check_env` accepts only single environments.

    Checks spaces, shapes, dtypes, the format of `infos`, seeding, partial resets, and the rules of each autoreset
    mode. Text environments must raise ActionError for invalid replies, and accept messages. Those with tools are also
    stepped with calls of their tools, which must be answered unless the episode ends. An environment made from an id is
    also compared with `SyncVectorEnv` over the single environment of that id, with a tolerance of 1e-5.

    Args:
        envs: an environment, which is reset and stepped; or an id, which is made with `options` and closed.
        num_steps: number of steps with random actions in each check.
        seed: seed of the actions and of the resets.
        **options: options of `gymnasium.make_vec`, only for an id.

    Raises:
        AssertionError: the environment breaks the contract.

    Example:
        >>> import gym_rm
        >>> check_vector_env("RewardModel-v0", num_envs=3, reward_model=lambda conversations: map(len, conversations))
    """
    if isinstance(envs, str):
        made: Envs = gym.make_vec(envs, **options)
        check_vector_env(made, num_steps=num_steps, seed=seed)
        _check_against_sync(made, seed, num_steps)
        made.close()
        made.close()
        assert made.closed, "close() must set envs.closed to True."
        return
    assert isinstance(envs, VectorEnv), f"expected a gymnasium.vector.VectorEnv, got {type(envs).__name__}."
    assert not options, f"options must be empty unless envs is an id, got {sorted(options)}."
    mode = _check_declarations(envs)
    first = _rollout(envs, mode, seed, num_steps)
    second = _rollout(envs, mode, seed, num_steps)
    assert data_equivalence(first, second), "the same seed and actions must return the same data, but it differs."
    envs.reset(seed=seed)
    listed = envs.reset(seed=[seed + row for row in range(envs.num_envs)])  # type: ignore[arg-type]
    assert data_equivalence(listed, first[0]), f"seed={seed} must equal seed=[{seed}, {seed + 1}, ...]."
    _check_partial_reset(envs, seed)
    if isinstance(envs.single_action_space, ReplySpace):
        _check_replies(envs, seed)
    envs.reset(seed=seed)


def _check_declarations(envs: Envs) -> AutoresetMode:
    mode = envs.metadata.get("autoreset_mode")
    assert isinstance(mode, AutoresetMode), f"metadata['autoreset_mode'] must be an AutoresetMode, got {mode!r}."
    for name in ("observation", "action"):
        single, batched = getattr(envs, f"single_{name}_space"), getattr(envs, f"{name}_space")
        expected = batch_space(single, envs.num_envs)
        assert batched == expected, f"{name}_space must be batch_space(single_{name}_space, {envs.num_envs})."
    return mode


def _rollout(envs: Envs, mode: AutoresetMode, seed: int, num_steps: int) -> list[Any]:
    """Reset, take some steps and check them; return the data of every call."""
    envs.action_space.seed(seed)
    calls: list[Any] = [envs.reset(seed=seed)]
    observations, infos = calls[0]
    assert observations in envs.observation_space, "reset returned observations outside of observation_space."
    _check_infos(infos, envs.num_envs, "reset")
    over = np.zeros(envs.num_envs, dtype=np.bool_)
    for _ in range(num_steps):
        calls.append(envs.step(envs.action_space.sample()))
        _check_step(envs, mode, calls[-1], over)
        over = calls[-1][2] | calls[-1][3]
        if mode is AutoresetMode.DISABLED and over.any():
            calls.append(envs.reset(options={"reset_mask": over.copy()}))
    return calls


def _check_step(envs: Envs, mode: AutoresetMode, step: Step, was_over: NDArray[np.bool_]) -> None:
    observations, rewards, terminations, truncations, infos = step
    assert observations in envs.observation_space, "step returned observations outside of observation_space."
    columns = {"rewards": (rewards, np.float64), "terminations": (terminations, np.bool_)}
    for name, (values, dtype) in {**columns, "truncations": (truncations, np.bool_)}.items():
        assert isinstance(values, np.ndarray), f"{name} is a {type(values).__name__}, expected a numpy array."
        assert values.shape == (envs.num_envs,), f"{name} has the shape {values.shape}, expected ({envs.num_envs},)."
        assert values.dtype == dtype, f"{name} has the dtype {values.dtype}, expected {np.dtype(dtype)}."
    assert np.isfinite(rewards).all(), f"rewards must be finite, got {rewards}."
    _check_infos(infos, envs.num_envs, "step")
    done = terminations | truncations
    if mode is AutoresetMode.SAME_STEP and done.any():
        for name in ("final_obs", "_final_obs", "final_info", "_final_info"):
            assert name in infos, f"SAME_STEP: episodes ended, but infos have no {name!r}."
        for name in ("_final_obs", "_final_info"):
            assert np.array_equal(infos[name], done), f"SAME_STEP: infos[{name!r}] must be terminations | truncations."
        for row in np.flatnonzero(done):
            final = infos["final_obs"][row]
            assert final in envs.single_observation_space, f"SAME_STEP: final_obs[{row}] must be in its space."
    else:
        assert "final_obs" not in infos, "infos have final_obs, but no episode ended with a reset in this step."
    if mode is AutoresetMode.NEXT_STEP:
        assert not rewards[was_over].any(), f"NEXT_STEP: resetting rows must have reward 0, got {rewards[was_over]}."
        assert not done[was_over].any(), "NEXT_STEP: a row must not end in the step that resets it."


def _check_infos(infos: dict[str, Any], num_envs: int, where: str) -> None:
    assert isinstance(infos, dict), f"{where}: infos are a {type(infos).__name__}, expected a dict."
    for name, values in infos.items():
        if isinstance(values, dict):
            _check_infos(values, num_envs, f"{where}, infos[{name!r}]")
        else:
            assert isinstance(values, np.ndarray), (
                f"{where}: infos[{name!r}] is a {type(values).__name__}, not an array."
            )
            assert len(values) == num_envs, f"{where}: infos[{name!r}] has {len(values)} entries for {num_envs} rows."
        if not name.startswith("_"):
            mask = infos.get(f"_{name}")
            assert isinstance(mask, np.ndarray), f"{where}: infos[{name!r}] has no mask infos['_{name}']."
            assert mask.dtype == np.bool_, f"{where}: infos['_{name}'] has the dtype {mask.dtype}, expected bool."


def _check_partial_reset(envs: Envs, seed: int) -> None:
    mask = np.zeros(envs.num_envs, dtype=np.bool_)
    mask[0] = True
    before, _ = envs.reset(seed=seed)
    after, infos = envs.reset(options={"reset_mask": mask.copy()})
    earlier, later = (list(iterate(envs.observation_space, each))[1:] for each in (before, after))
    assert data_equivalence(earlier, later), "a partial reset must not change other rows."
    for name in (name for name in infos if name.startswith("_")):
        assert not infos[name][1:].any(), f"a partial reset has infos[{name!r}] for rows that were not reset."
    for value in (mask.tolist(), mask.astype(np.int64), np.zeros_like(mask), np.append(mask, True)):
        refusals = (TypeError, ValueError, AssertionError)  # older versions of SyncVectorEnv raise AssertionError
        _expect(refusals, f"reset_mask={value!r}", envs.reset, options={"reset_mask": value})


def _check_replies(envs: Envs, seed: int) -> None:
    """Check that an invalid reply raises ActionError with its row, and does not change the environment."""
    good = envs.action_space.sample()
    envs.reset(seed=seed)
    expected = envs.step(good)
    envs.reset(seed=seed)
    last = envs.num_envs - 1
    text = {"role": "assistant", "content": "text"}
    unnamed, half = {**text, "tool_calls": [{"name": "f"}]}, "half \ud800"
    for bad in (None, 3, b"bytes", ["text"], half, {**text, "role": "user"}, {**text, "weight": 1}, unnamed):
        error = _expect(ActionError, f"the reply {bad!r}", envs.step, [*good[:last], bad])
        assert str(last) in str(error), f"the error for the reply {bad!r} must name row {last}, got: {error}"
    for bad in ("text", [], [*good, "one more"], None):
        _expect(ActionError, f"the actions {bad!r:.60}", envs.step, bad)
    assert data_equivalence(envs.step(good), expected), (
        "a step that raises ActionError must not change the environment."
    )
    envs.reset(seed=seed)
    as_texts = envs.step(["text"] * envs.num_envs)
    envs.reset(seed=seed)
    assert data_equivalence(envs.step([dict(text)] * envs.num_envs), as_texts), (
        "a message with only a content must be the same reply as its text."
    )
    tools = envs.single_action_space.tools  # type: ignore[attr-defined]
    if tools:
        _check_calls(envs, tools, seed)


def _check_calls(envs: Envs, tools: Sequence[str], seed: int) -> None:
    """Check that the calls of a reply are answered in their order, unless they end the episode."""
    functions = [{"name": name, "arguments": {}} for name in (*tools, "no such tool")]
    calls = [{"type": "function", "id": f"id{k}", "function": function} for k, function in enumerate(functions)]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    envs.reset(seed=seed)
    observations, _, terminations, truncations, infos = envs.step([reply] * envs.num_envs)
    for row, observation in enumerate(iterate(envs.observation_space, observations)):
        if not (terminations[row] or truncations[row]):
            said, *results = observation[-1 - len(calls) :]
            assert said == reply, f"the reply must stand in the conversation as it is, expected {reply}, got {said}."
            found = [(result["role"], result.get("tool_call_id")) for result in results]
            expected = [("tool", call["id"]) for call in calls]
            assert found == expected, f"every call must have a result, expected {expected}, got {found}."
            assert infos["tool_calls"][row] == len(calls), f"infos['tool_calls'] of row {row} must be {len(calls)}."


def _check_against_sync(envs: Envs, seed: int, num_steps: int) -> None:
    spec, mode = copy.deepcopy(envs.spec), envs.metadata["autoreset_mode"]
    if spec is None or spec.entry_point is None or spec.kwargs.get("group_size", 1) != 1:
        return  # there is no single environment to compare with
    for name in ("vectorization_mode", "autoreset_mode"):
        spec.kwargs.pop(name, None)
    reference: Envs = gym.make_vec(spec, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    native, single = _rollout(envs, mode, seed, num_steps), _rollout(reference, mode, seed, num_steps)
    for call, (found, expected) in enumerate(zip(native, single, strict=True)):
        assert data_equivalence(found, expected), (
            f"call {call} differs from SyncVectorEnv over the single environment ({mode.name}):\n{found}\n{expected}"
        )
    reference.close()


def _expect(
    kinds: type[Exception] | tuple[type[Exception], ...], what: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Exception:
    try:
        call(*args, **kwargs)
    except kinds as error:
        return error
    raise AssertionError(f"{what} was accepted; expected {getattr(kinds, '__name__', kinds)}.")
