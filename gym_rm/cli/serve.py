"""`gym-rm serve`: answer reward requests of OpenRLHF over HTTP."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from gym_rm.cli.console import choose_threads, fail, loading, warn_if_embedded
from gym_rm.config import override_values
from gym_rm.errors import ConfigError, GymRMError


def serve(
    policy_tokenizer: Annotated[str, typer.Option(help="Folder or hub id of the policy's tokenizer.")],
    reward_model: Annotated[
        str | None, typer.Option(help="Folder, hub id or module:function. Default: the embedded reward model.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="Whether the policy's chat template wrote the prompts; otherwise they are plain texts.")
    ] = True,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any option of the scorer, see below; may be repeated."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads. Default: 1 for a small model, else the number that torch chooses."),
    ] = None,
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
    arguments: dict[str, Any] = {"policy_tokenizer": policy_tokenizer, "apply_chat_template": chat_template}
    try:
        options = override_values(option or [])
        if taken := sorted(options.keys() & {*arguments, "reward_model"}):
            raise ConfigError(f"--option {taken[0]}=... has its own name: see gym-rm serve --help.")
        with loading(reward_model):
            reward_function = RewardFunction(reward_model, **arguments, **options)
    except (GymRMError, OSError) as error:
        fail(error, code=2)
    try:
        server = RewardServer(reward_function, host=host, port=port, key=key)
    except GymRMError as error:
        fail(error, code=2)
    except OSError as error:
        fail(ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}."), code=2)
    warn_if_embedded(reward_function.scorer.scorer)
    choose_threads(reward_function.scorer.scorer, threads)
    typer.echo(f"listening at {server.url}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.close()
