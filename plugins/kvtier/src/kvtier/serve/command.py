"""``kvtier serve``: serves one local model to clients of OpenAI's interface, reusing whatever the tiers hold.

Decides what is printed, and how the server ends: SIGTERM or Ctrl-C lets answers under way and their stores end first.
"""

import argparse
import asyncio
import signal
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from kvtier.arguments import add_engine_arguments, positive
from kvtier.engines import find_engine, hand_over, load_model
from kvtier_core import ConfigError, PluginError, load_settings
from kvtier_core.engine import why_nothing_lasts
from kvtier_core.plugins.discovery import ENGINE_GROUP
from kvtier_core.settings import read_blocklist

if TYPE_CHECKING:
    from kvtier.serve.server import Server

help = "serve a local model to clients of OpenAI's interface, reusing stored KV"  # noqa: A001 - the command protocol

_CONTEXT = 4096
_HIGHEST_PORT = 65535
_ENDS = (signal.SIGTERM, signal.SIGINT)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 (any that is free) to {_HIGHEST_PORT}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default 127.0.0.1); nobody is asked for a key",
    )
    parser.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="default 8000; 0 for any that is free"
    )
    parser.add_argument(
        "--context",
        type=positive,
        default=_CONTEXT,
        metavar="N",
        help=f"tokens of a prompt with its answer (default {_CONTEXT}, and no more than the model has)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; 0 when it ended in order.

    Raises ``ConfigError`` or ``PluginError`` where it can't start, ``KvtierError`` when the tiers do not take
    everything in time at the end.
    """
    try:
        from kvtier.serve.server import Server  # noqa: PLC0415 - needs a library of the extra
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise PluginError("kvtier serve needs aiohttp: pip install 'kvtier[serve]'") from error
    offer = find_engine(ENGINE_GROUP, args.engine, read_blocklist(args.config))
    settings = load_settings(file=args.config)
    nothing = why_nothing_lasts(settings)
    if nothing is not None:
        print(f"kvtier: {nothing}", file=sys.stderr)
    with closing(load_model(offer, args.model)) as model:
        max_tokens = min(args.context, model.context_tokens)
        with model.open_engine(max_tokens=max_tokens, settings=settings) as engine:
            name = args.model.absolute().stem
            with closing(Server(model, engine, name=name, max_tokens=max_tokens)) as server:
                asyncio.run(_serve(server, name, args.host, args.port))
            print("kvtier: waiting for the tiers", file=sys.stderr)
            hand_over(engine)
    return 0


async def _serve(server: "Server", name: str, host: str, port: int) -> None:
    from kvtier.serve.server import run_until  # noqa: PLC0415

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        ended.set()
        for number in _ENDS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once, without a word

    for number in _ENDS:
        loop.add_signal_handler(number, end)
    try:
        await run_until(
            ended,
            server.app,
            host,
            port,
            lambda address: print(f"serving {name} at {address}", flush=True),
        )
    except OSError as error:
        raise ConfigError(
            f"can't listen at {host} port {port}: {error.strerror or error}: end what listens there, or choose another "
            "--host or --port"
        ) from error
