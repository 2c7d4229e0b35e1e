"""`gym-rm serve`: answer reward requests over HTTP."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_rm.cli.console import choose_threads, fail, prepare_loading, warn, warn_if_embedded
from gym_rm.config import override_values
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.scorer import load_scorer

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

KEY_VARIABLE = "GYM_RM_KEY"
OPEN_FILES = 8192 + 1024  # connections of clients, and files of the scorer
SECONDS_TO_CLOSE = 2.0  # for a scorer that was still running
OF_SERVER = ("fallback_reward", "input_template", "max_batch_size", "max_wait")


def serve(
    reward_model: Annotated[
        str | None,
        typer.Argument(help="Folder, hub id or module:function. Default: the embedded reward model."),
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--reward-model", help="The same as the argument REWARD_MODEL.")
    ] = None,
    policy_tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id of the policy's tokenizer; needed for OpenRLHF's /get_reward.")
    ] = None,
    chat_template: Annotated[
        bool,
        typer.Option(help="Whether the policy's chat template wrote OpenRLHF's prompts; else plain texts."),
    ] = True,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Any option of the scorer, see below; also fallback_reward, input_template, max_batch_size and "
            "max_wait of the server. May be repeated.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads. Default: 1 for a small model, else the number that torch chooses."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address other than loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 5000,
    key: Annotated[
        str | None,
        typer.Option(
            help=f"Key that requests need. Others can see it in the list of processes; {KEY_VARIABLE} "
            "and --key-file hide it."
        ),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help=f"File with the key. Without it, the variable {KEY_VARIABLE} is read.")
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(min=1, help="Maximum size of a request body. Default: 16 MiB.")
    ] = None,
    max_conversations: Annotated[
        int | None, typer.Option(min=1, help="Maximum conversations of a request. Default: 1024.")
    ] = None,
    max_conversation_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a conversation. Default: the model's own limit.")
    ] = None,
    max_request_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a request. Default: 2,000,000.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(min=1, help="Maximum conversations that wait; more get status 429. Default: 8192.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds until a request without a score gets status 503. Default: 150.")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds after SIGTERM to answer accepted requests. Default: 30.")
    ] = None,
    allow_weight_updates: Annotated[
        bool, typer.Option("--allow-weight-updates", help="Let callers with the key replace the weights.")
    ] = False,
) -> None:
    """Answer reward requests over HTTP until SIGTERM or Ctrl-C.

    The command prints its address when it is ready. POST /v1/rewards takes conversations.
    vLLM, SGLang, TEI and OpenRLHF have their own paths (docs/server.md).
    """
    try:
        _require_extra()
        if reward_model is not None and model_option is not None:
            raise ConfigError("the reward model is given twice; pass REWARD_MODEL or --reward-model.")
        model = reward_model if reward_model is not None else model_option
        options = override_values(option or [])
        if taken := sorted(options.keys() & {"policy_tokenizer", "reward_model", "apply_chat_template"}):
            raise ConfigError(f"--option {taken[0]}=... has its own name: see gym-rm serve --help.")
        server_options = _server_options(
            {name: options.pop(name) for name in OF_SERVER if name in options},
            {
                "max_body_bytes": max_body_bytes,
                "max_conversations": max_conversations,
                "max_conversation_tokens": max_conversation_tokens,
                "max_request_tokens": max_request_tokens,
                "max_queue": max_queue,
                "request_timeout": request_timeout,
                "drain_timeout": drain_timeout,
            },
            key=_key(key, key_file),
            policy_tokenizer=policy_tokenizer,
            apply_chat_template=chat_template,
            allow_weight_updates=allow_weight_updates,
        )
        _serve(model, options, server_options, host, port, threads)
    except (GymRMError, OSError) as error:
        fail(error, code=2)


def _serve(
    model: str | None, options: dict[str, Any], server_options: Any, host: str, port: int, threads: int | None
) -> None:
    from gym_rm.server.options import check_host
    from gym_rm.server.serve import RewardServer

    check_host(host, server_options.key)
    _allow_connections()
    prepare_loading(model, threads)
    scorer = load_scorer(model, **options)
    choose_threads(scorer, threads)  # before the known conversations are scored
    server = RewardServer(scorer, server_options, host=host, port=port)
    warn_if_embedded(scorer)
    typer.echo(f"listening at {server.url}")
    typer.echo(f"try: {curl_line(server.url, with_key=server_options.key is not None)}")
    answered = server.serve_forever()
    closing = threading.Thread(target=getattr(scorer, "close", bool), daemon=True)
    closing.start()
    closing.join(None if answered else SECONDS_TO_CLOSE)
    if not answered:
        warn("accepted requests were not answered within --drain-timeout.")
        os._exit(1)  # a scorer that is still running would keep the process


def _allow_connections() -> None:
    """Raise the limit of open files, which is often 1024, so that every client can keep its connection open."""
    if resource is None:
        return
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


def _require_extra() -> None:
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"gym-rm serve needs {module}, but importing it failed: {error}. Install it with pip install "
                "'gym-rm[server]'."
            ) from error


def _key(given: str | None, file: Path | None) -> str | None:
    """Return the key from the file, the option or the environment, in this order."""
    if given is not None and file is not None:
        raise ConfigError("the key is given twice; pass --key or --key-file.")
    if file is not None:
        text = file.read_text(encoding="utf-8").strip()
        if not text:
            raise ConfigError(f"the key file {str(file)!r} is empty.")
        return text
    if given is not None:
        warn(f"others can see --key in the list of processes; {KEY_VARIABLE} and --key-file hide it.")
        return given
    return os.environ.get(KEY_VARIABLE) or None


def _server_options(plain: dict[str, Any], limits: dict[str, Any], **settings: Any) -> Any:
    from gym_rm.server.options import Limits, ServerOptions

    given = {name: value for name, value in limits.items() if value is not None}
    return ServerOptions(**plain, limits=Limits(**given), **settings)
