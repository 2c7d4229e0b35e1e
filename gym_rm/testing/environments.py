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

from gym_rm.envs.infos import infos_of_row
from gym_rm.envs.numeric_views import TokenLevel
from gym_rm.envs.spaces import ReplySpace
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.errors import ActionError
from gym_rm.scorer import is_relative
from gym_rm.scores import ScoringError

Envs: TypeAlias = VectorEnv[Any, Any, Any]
Step: TypeAlias = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


def check_vector_env(envs: Envs | str, *, num_steps: int = 8, seed: int = 0, **options: Any) -> None:
    """Check that a vector environment follows Gymnasium's contract; `check_env` accepts only single environments.

    Checks spaces, shapes, dtypes, the format of `infos`, seeding, partial resets, and the rules of each autoreset
    mode. Text environments must raise ActionError for invalid replies, and accept messages. Those with tools are also
    stepped with calls of their tools, which must be answered unless the episode ends. Rows that are sent and received
    in a random order must be played as by `step`, with the same bits; groups are sent whole, and rows without a score
    are sent again. An environment made from an id is also compared with `SyncVectorEnv` over the single environment of
    that id, with a tolerance of 1e-5.

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
    if isinstance(envs, TokenLevel):
        _expect(ActionError, "send() of tokens", envs.send, envs.action_space.sample())
    elif isinstance(envs, RewardVectorEnv):
        _check_flights(envs, mode, seed, num_steps)
        _check_refused_flights(envs, seed)
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


def _check_flights(envs: RewardVectorEnv, mode: AutoresetMode, seed: int, num_steps: int) -> None:
    """Check that rows get from `send` and `recv`, in any order, what `step` returns for them."""
    envs.action_space.seed(seed)
    actions = [[*iterate(envs.action_space, envs.action_space.sample())] for _ in range(num_steps)]
    group_size = envs.num_envs if is_relative(envs.scorer) and envs.group_size == 1 else envs.group_size
    random, shape = np.random.default_rng(seed), (-1, group_size)

    def restart(over: NDArray[np.bool_]) -> list[Any]:
        if mode is not AutoresetMode.DISABLED or not over.any():
            return [None] * envs.num_envs
        began = _by_row(envs, envs.reset(options={"reset_mask": over}))
        return [each if was_over else None for each, was_over in zip(began, over, strict=True)]

    envs.reset(seed=seed)
    over = np.zeros(envs.num_envs, dtype=np.bool_)
    expected = []
    for replies in actions:
        restarted, step = restart(over), envs.step(replies)
        expected.append([*zip(restarted, _by_row(envs, step), strict=True)])
        over = step[2] | step[3]

    envs.reset(seed=seed)
    over, turns = np.zeros_like(over), np.zeros(envs.num_envs, dtype=np.int64)
    shown: list[Any] = [None] * envs.num_envs  # what a reset before the next step has returned
    while turns.min() < num_steps:
        flying = envs.in_flight
        turn = turns.reshape(shape).min(axis=1)
        free = np.flatnonzero((turn < num_steps) & ~flying.reshape(shape).any(axis=1))  # groups
        if len(free) and (not flying.any() or random.random() < 0.5):
            chosen = np.isin(np.arange(len(turn)), random.choice(free, random.integers(1, len(free) + 1)))
            rows = np.repeat(chosen, group_size) & (turns == np.repeat(turn, group_size))  # behind after a failure
            shown = [new or old for new, old in zip(restart(over & rows), shown, strict=True)]
            over = over & ~rows if mode is AutoresetMode.DISABLED else over
            envs.send([actions[turn % num_steps][row] for row, turn in enumerate(turns)], rows=rows)
            assert np.array_equal(envs.in_flight, flying | rows), f"send(rows={rows}) has sent other rows."
            continue
        limits = {"timeout": 0} if random.random() < 0.3 else {"min_rows": random.integers(1, flying.sum() + 1)}
        failed: list[int] = []
        try:
            step = envs.recv(**limits)
        except ScoringError as error:
            failed += error.rows
        if failed:
            assert not envs.in_flight[failed].any(), f"rows without a score must be out of flight, got {failed}."
            continue
        received = step[4].pop("rows")
        assert step[4].pop("_rows").all(), "infos['rows'] must have a value for every row."
        assert np.array_equal(received ^ envs.in_flight, flying), f"infos['rows'] {received} do not say what has come."
        _check_step(envs, mode, step, over & received)
        for row, found in enumerate(_by_row(envs, step)):
            if received[row]:
                result, plain, shown[row] = (shown[row], found), expected[turns[row]][row], None
                assert data_equivalence(result, plain, exact=True), (
                    f"step {turns[row]} of row {row} differs when it is sent and received:\n{result}\n{plain}"
                )
            else:
                assert not any(found[1:]), f"row {row} was not received, but has results: {found[1:]}"
        over = np.where(received, step[2] | step[3], over)
        turns += received


def _check_refused_flights(envs: RewardVectorEnv, seed: int) -> None:
    """Check that mistakes with `send` and `recv` raise errors and change nothing, as a send that is cancelled."""
    actions, mask = envs.action_space.sample(), np.ones(envs.num_envs, dtype=np.bool_)
    envs.reset(seed=seed)
    expected = envs.step(actions)
    envs.reset(seed=seed)
    _expect(ActionError, "recv() with nothing in flight", envs.recv)
    for rows in (mask.tolist(), mask.astype(np.int64), mask[1:], np.append(mask, True)):
        _expect((TypeError, ValueError), f"send(rows={rows!r})", envs.send, actions, rows=rows)
    assert not envs.in_flight.any(), "a send() that raises must not send anything."
    envs.send(actions)
    for name, call in {"send": envs.send, "step": envs.step}.items():
        _expect(ActionError, f"{name}() of rows in flight", call, actions)
    _expect(ActionError, "reset() of rows in flight", envs.reset)
    _expect(ValueError, "recv(min_rows=0)", envs.recv, 0)
    _expect(ActionError, "recv() of more rows than are in flight", envs.recv, envs.num_envs + 1)
    assert envs.in_flight.all(), "calls that raise must leave what is in flight."
    envs.cancel()
    assert not envs.in_flight.any(), "cancel() must take back what is in flight."
    assert data_equivalence(envs.step(actions), expected), "cancel() must leave the environment as before send()."


def _by_row(envs: Envs, result: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return what a step or a reset returned for each row."""
    observations, *columns, infos = result
    shown = iterate(envs.observation_space, observations)
    return [
        (each, *(column[row].item() for column in columns), infos_of_row(infos, row)) for row, each in enumerate(shown)
    ]


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
