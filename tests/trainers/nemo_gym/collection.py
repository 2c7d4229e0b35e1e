"""NeMo Gym's rollout collection with its `simple_agent`, in this process; the model says what a table has."""

import asyncio
import json
import os
import socket
from pathlib import Path
from unittest import mock

import nemo_gym
import uvicorn
from environment_servers.legacy_agent.app import LegacyAgentEnvironmentServer
from environment_servers.single_agent_turn.app import SingleAgentTurnEnvironmentServer
from fastapi import FastAPI
from nemo_gym import global_config, server_utils
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from responses_api_agents.simple_agent.app import SimpleAgent

PACKAGES = Path(nemo_gym.__file__).parents[1]  # the servers are packages beside nemo_gym
ENVIRONMENTS = {"legacy_agent": LegacyAgentEnvironmentServer, "single_agent_turn": SingleAgentTurnEnvironmentServer}
LIMITS = {"max_concurrent_episodes": None, "queue_timeout_seconds": None}
LIMITS |= {"default_episode_timeout_seconds": 60, "cleanup_timeout_seconds": 10}


def response(text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    fixed = {"id": "resp_1", "created_at": 0, "model": "m", "object": "response", "parallel_tool_calls": True}
    return fixed | {"tool_choice": "auto", "tools": [], "output": [message]}


def policy(replies):
    """Return a model server that says the next of the replies to a question."""
    app, left = FastAPI(), {question: iter(texts) for question, texts in replies.items()}

    async def say(body: dict):
        return response(next(left[body["input"][-1]["content"]]))

    for path in ("/v1/responses", "/ng-rollout/{rollout}/v1/responses"):
        app.post(path)(say)
    return app


def collect(rewards, rows, replies, folder, environment="legacy_agent", **options):
    """Collect the rollouts of rows, and return what NeMo Gym writes: rollouts, failures and the metrics."""
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in ("policy", "rewards", "agent", "environment")}

    def section(name, group, kind, **settings):
        port = sockets[name].getsockname()[1]
        return {name: {group: {kind: {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, **settings}}}}

    resources = {"resources_server": {"type": "resources_servers", "name": "rewards"}}
    model, agent = {"type": "responses_api_models", "name": "policy"}, {"type": "responses_api_agents", "name": "agent"}
    own = resources if environment == "single_agent_turn" else {}
    config = {
        "head_server": {"host": "127.0.0.1", "port": 1},
        **section("policy", "responses_api_models", "policy"),
        **section("rewards", "resources_servers", "rewards"),
        **section("agent", "responses_api_agents", "simple_agent", model_server=model, **resources),
        **section("environment", "environment_servers", environment, agent_server=agent, **own, **LIMITS),
    }
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"input_jsonl_fpath": str(folder / "rows.jsonl"), "output_jsonl_fpath": str(folder / "rollouts.jsonl")}
    chosen = RolloutCollectionConfig(**files, disable_health_check=True, **options)
    with (
        mock.patch.dict(os.environ, {global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME: json.dumps(config)}),
        mock.patch.object(global_config, "_GLOBAL_CONFIG_DICT", None),
        mock.patch.object(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None),
    ):
        client = server_utils.ServerClient.load_from_global_config()
        apps = {"policy": policy(replies), "rewards": rewards}
        for name, kind in (("agent", SimpleAgent), ("environment", ENVIRONMENTS[environment])):
            ((settings,),) = [[*each.values()] for each in config[name].values()]
            server = kind(config={"name": name, **settings}, server_client=client)
            apps[name] = server.setup_webserver()
            server.setup_exception_middleware(apps[name])
        asyncio.run(_collect(chosen, apps, sockets))
    return {name: _read(folder, name) for name in ("rollouts", "failures", "aggregate_metrics")}


async def _collect(chosen, apps, sockets):
    servers = {
        name: uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off")) for name, app in apps.items()
    }
    running = [asyncio.create_task(server.serve([sockets[name]])) for name, server in servers.items()]
    try:
        await RolloutCollectionHelper().run_from_config(chosen)
    finally:
        await server_utils.get_global_aiohttp_client().close()
        for server in servers.values():
            server.should_exit = True
        await asyncio.gather(*running)


def _read(folder, name):
    files = {"rollouts": "rollouts.jsonl", "failures": "rollouts_failures.jsonl"}
    text = (folder / files.get(name, f"rollouts_{name}.json")).read_text()
    return [json.loads(line) for line in text.splitlines()] if name in files else json.loads(text)
