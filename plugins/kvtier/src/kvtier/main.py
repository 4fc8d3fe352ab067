"""``kvtier [--debug] [--version] COMMAND``: finds the command, runs it, and turns errors into one message.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 129 a terminal that is gone, 130 interrupted, 143
terminated. Only the chosen command is imported; torch never is, unless the command needs it.
"""

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.commands import Command, list_commands, load_command
from kvtier_core.errors import ConfigError, KvtierError, PluginError, UnsupportedModelError
from kvtier_core.masking import mask_text
from kvtier_core.settings import read_blocklist

OWN_COMMANDS = {
    "certify": ("kvtier.certify.command", "compare an engine's answers with and without kvtier"),
    "config": ("kvtier.show_config", "show every setting and where it came from"),
    "doctor": ("kvtier.doctor", "try every configured tier with one block"),
    "list": ("kvtier.list_types", "list the installed plugins"),
    "new-tier": ("kvtier.new_tier.command", "write a package for a new tier type"),
    "run": ("kvtier.run_command", "complete a file of prompts with a local model"),
    "serve": ("kvtier.serve.command", "serve a local model to clients of OpenAI's interface"),
}
"""Commands of this package, with the module of each. A plugin's command of the same name is not reachable."""

FAILURE = 1
USAGE = 2
INTERRUPTED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_USER_ERRORS = (ConfigError, PluginError, UnsupportedModelError)
_WHAT_TO_DO = (
    "see that what it reads can be read and what it writes to, the output too, can be written (kvtier --debug COMMAND "
    "shows where)"
)
_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; *argv* is what follows ``kvtier`` (``sys.argv`` when ``None``). Returns the exit status."""
    debug = False
    _prepare_output()
    try:
        parser = _parser()
        options = parser.parse_args(argv)
        debug = options.debug
        _set_up_log(debug=debug)
        if options.command is None:
            parser.print_help(sys.stderr)
            return USAGE
        return _run(options.command, options.arguments, debug=debug)
    except KvtierError as error:
        if debug:
            raise
        print(f"kvtier: error: {mask_text(str(error))}", file=sys.stderr)
        return USAGE if isinstance(error, _USER_ERRORS) else FAILURE
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return INTERRUPTED
    except _Terminated as end:
        with contextlib.suppress(OSError):  # the terminal may be what went
            print("kvtier: terminated", file=sys.stderr)
        return 128 + end.number
    except OSError as error:
        _give_output_up()
        is_unread = isinstance(error, BrokenPipeError)  # the reader went away (``kvtier list | head``)
        if debug and not is_unread:
            raise
        if not is_unread:
            print(f"kvtier: error: {mask_text(str(error))}: {_WHAT_TO_DO}", file=sys.stderr)
        return FAILURE


def _prepare_output() -> None:
    if sys.stdout is None:  # closed before the start: a file that is opened would get its number
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as stderr is: what can't be shown is no reason to stop


def _give_output_up() -> None:
    """Keep the interpreter's last flush of the output from complaining about it again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminated(BaseException):
    """A plain kill, or a terminal that is gone.

    Not ``SystemExit``: while a plugin is imported, that would be taken for the plugin's own.
    """

    def __init__(self, number: int) -> None:
        self.number = number


def _terminate(number: int, _frame: object) -> None:
    raise _Terminated(number)


@contextmanager
def _unwinding_when_terminated() -> Iterator[None]:
    """Let a signal that ends a process end a command's processes and remove its directories first, as Ctrl-C does.

    A signal that is ignored (``nohup``) or handled by a caller stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # no other one gets signals
        yield
        return
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import kvtier_core  # noqa: PLC0415

        print(f"kvtier {kvtier_core.__version__}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Looks for plugins' commands only when help is asked for."""

    def format_help(self) -> str:
        self.epilog = _commands_text()
        return super().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvtier",
        description="Tiered storage for the KV cache of language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show log messages, and tracebacks of errors")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="what to do; see below")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="see kvtier COMMAND --help"
    )
    return parser


def _commands_text() -> str:
    try:
        blocked = read_blocklist()
    except ConfigError:
        blocked = frozenset()  # help is shown all the same; whichever command is run will say what is wrong
    plugins = {
        name: f"(from {origin})"
        for name, origin in list_commands(blocked).items()
        if name not in OWN_COMMANDS
    }
    commands = {name: text for name, (_, text) in OWN_COMMANDS.items()} | plugins
    width = max(len(name) for name in commands)
    return "commands:\n" + "\n".join(f"  {name:<{width}}  {commands[name]}" for name in sorted(commands))


def _run(name: str, arguments: Sequence[str], *, debug: bool) -> int:
    if name in OWN_COMMANDS:
        command: Command = importlib.import_module(OWN_COMMANDS[name][0])
    else:
        blocked = read_blocklist(_config_file(name, arguments))
        command = load_command(name, tuple(OWN_COMMANDS), blocked)
    parser = argparse.ArgumentParser(prog=f"kvtier {name}", description=command.help, allow_abbrev=False)
    command.add_arguments(parser)
    args = parser.parse_args(arguments)
    args.debug = debug
    with _unwinding_when_terminated():
        status = command.run(args)
    sys.stdout.flush()  # here, where a reader that went away is handled, and not when the interpreter ends
    return status


def _config_file(name: str, arguments: Sequence[str]) -> Path | None:
    """The file of ``--config``, which every command that takes settings has; known before the command is imported."""
    parser = argparse.ArgumentParser(prog=f"kvtier {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    file: Path | None = parser.parse_known_args(arguments)[0].config
    return file


def _set_up_log(*, debug: bool) -> None:
    level = "debug" if debug else os.environ.get("KVTIER_LOG", "warning")
    if level not in _LEVELS:
        raise ConfigError(f"KVTIER_LOG: must be one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("kvtier")
    log.handlers[:] = [handler]
    log.setLevel(level.upper())


if __name__ == "__main__":
    sys.exit(main())
