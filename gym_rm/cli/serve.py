"""`gym-rm serve`: answer reward requests of OpenRLHF over HTTP."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from gym_rm.cli.console import fail, find_own_modules, quiet_loading
from gym_rm.errors import ConfigError, GymRMError


def serve(
    policy_tokenizer: Annotated[str, typer.Option(help="Folder or hub id of the policy's tokenizer.")],
    reward_model: Annotated[
        str | None, typer.Option(help="Folder, hub id or module:function. Default: the embedded reward model.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="Whether the policy's chat template wrote the prompts; otherwise they are plain texts.")
    ] = True,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address other than loopback needs --key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 5000,
    key: Annotated[str | None, typer.Option(help="Required as a bearer token, or as the password of the URL.")] = None,
) -> None:
    """Answer OpenRLHF's POST /get_reward requests until interrupted.

    The command prints its address when it is ready. Pass the address to OpenRLHF as --reward.remote_url.
    """
    from gym_rm.adapters.openrlhf import RewardFunction
    from gym_rm.server.get_reward import RewardServer

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # containers are stopped with SIGTERM
    quiet_loading()
    find_own_modules()
    try:
        reward_function = RewardFunction(
            reward_model, policy_tokenizer=policy_tokenizer, apply_chat_template=chat_template
        )
    except (GymRMError, OSError) as error:
        fail(error, code=2)
    try:
        server = RewardServer(reward_function, host=host, port=port, key=key)
    except GymRMError as error:
        fail(error, code=2)
    except OSError as error:
        fail(ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}."), code=2)
    typer.echo(f"listening at {server.url}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.close()
