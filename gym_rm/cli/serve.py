"""`gym-rm serve`: answer reward requests over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import threading
from pathlib import Path
from typing import Annotated

import typer

from gym_rm.cli.console import fail, warn
from gym_rm.cli.scorer_arguments import ScorerArguments, warn_of_embedded
from gym_rm.errors import ConfigError, GymRMError

KEY_VARIABLE = "GYM_RM_KEY"
OPEN_FILES = 8192 + 1024  # connections of clients, and files of the scorer
SECONDS_TO_CLOSE = 2.0  # for a scorer that was still running
OF_SERVER = ("fallback_reward", "max_batch_size", "max_wait")


def serve(
    reward_model: Annotated[
        str | None, typer.Argument(help="Folder, hub id or module:function. Default: the embedded reward model.")
    ] = None,
    policy_tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of the policy's tokenizer; to read texts of OpenRLHF, slime, LLaMA-Factory."
        ),
    ] = None,
    chat_template: Annotated[
        bool, typer.Option(help="Whether the policy's chat template wrote these texts; else prompts are plain.")
    ] = True,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the scorer (gym-rm settings); also max_queue, request_timeout and the other limits and "
            "options of the server (docs/server.md). May be repeated.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address other than loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 5000,
    key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the key that requests need. Without it, the variable {KEY_VARIABLE} is read."),
    ] = None,
    allow_weight_updates: Annotated[
        bool, typer.Option("--allow-weight-updates", help="Let callers with the key replace the weights.")
    ] = False,
) -> None:
    """Answer reward requests over HTTP until SIGTERM or Ctrl-C.

    The command prints its address when it is ready. POST /v1/rewards takes conversations.
    vLLM, SGLang, OpenRLHF, slime and LLaMA-Factory have their own paths (docs/server.md).
    """
    try:
        from gym_rm.server.options import ServerLimits, ServerOptions, check_host
        from gym_rm.server.serve import RewardServer

        scoring = ScorerArguments.parse(reward_model, option)
        of_scorer = dict(scoring.options)
        of_server = {name: of_scorer.pop(name) for name in OF_SERVER if name in of_scorer}
        limits = {field.name for field in dataclasses.fields(ServerLimits)} & of_scorer.keys()
        server_options = ServerOptions(
            **of_server,
            limits=ServerLimits(**{name: of_scorer.pop(name) for name in limits}),
            key=_key(key_file),
            policy_tokenizer=policy_tokenizer,
            apply_chat_template=chat_template,
            allow_weight_updates=allow_weight_updates,
        )
        check_host(host, server_options.key)
        _allow_connections()
        scorer = dataclasses.replace(scoring, options=of_scorer).load(warn_if_embedded=False)
        server = RewardServer(scorer, server_options, host=host, port=port)
    except (GymRMError, OSError) as error:
        fail(error, code=2)
    warn_of_embedded(scorer)
    typer.echo(f"listening at {server.url}")
    typer.echo(f"try: {curl_line(server.url, with_key=server_options.key is not None)}")
    answered = server.serve_forever()
    closing = threading.Thread(target=getattr(scorer, "close", bool), daemon=True)
    closing.start()
    closing.join(None if answered else SECONDS_TO_CLOSE)
    if not answered:
        warn("accepted requests were not answered within drain_timeout.")
        os._exit(1)  # a scorer that is still running would keep the process


def _allow_connections() -> None:
    """Raise the limit of open files, which is often 1024, so that every client can keep its connection open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def curl_line(url: str, *, with_key: bool) -> str:
    """Return a command that sends a request; the key is taken from the variable."""
    messages = '[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]'
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if with_key else ""
    return f"curl {url}/v1/rewards -H 'Content-Type: application/json'{key} -d '{{\"conversations\": [{messages}]}}'"


def _key(file: Path | None) -> str | None:
    """Return the key from the file, or else from the environment."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    text = file.read_text(encoding="utf-8").strip()
    if not text:
        raise ConfigError(f"the key file {str(file)!r} is empty.")
    return text
