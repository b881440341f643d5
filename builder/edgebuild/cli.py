"""The command line of edgebuild: a group whose commands are imported only when they are called.

`edgebuild --profile orin.yaml` without a command name builds: the options of `build` are accepted at the top.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import select
import sys
from typing import NoReturn

import click

from edgebuild import __version__
from edgebuild.errors import EdgebuildError

# command name -> "module:attribute", imported on use so that `--help` stays quick
COMMANDS = {
    "build": "edgebuild.commands.build:build",
    "resume": "edgebuild.commands.build:resume",
    "plan": "edgebuild.commands.plan:plan",
    "traffic": "edgebuild.commands.traffic:traffic",
    "profiles": "edgebuild.commands.profiles:profiles",
    "inspect": "edgebuild.commands.artifact:inspect",
    "verify": "edgebuild.commands.artifact:verify",
    "train-mtp": "edgebuild.commands.train:train_mtp",
    "simulate": "edgebuild.commands.simulate:simulate",
    "report": "edgebuild.commands.report:report",
    "tune": "edgebuild.commands.tune:tune",
}


class LazyGroup(click.Group):
    """A click group that imports a command's module when the command is asked for, and builds by default."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        target = COMMANDS.get(name)
        if target is None:
            return None
        module, attribute = target.split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
        if near and name not in COMMANDS and not ctx.resilient_parsing:  # click compares with loaded commands: none
            ctx.fail(f"No such command {name!r} (did you mean {near[0]}?)")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first.startswith("-") and first not in {"--help", "-h", "--version"}:
            args = ["build", *args]
        return super().parse_args(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgebuild")
def cli() -> None:
    """Compile a language model for one device and one kind of traffic.

    \b
    edgebuild --profile cpu --model DIR|FILE.gguf --traffic FILE --output DIR
    """


def main() -> None:
    """Entry point: an error becomes one line on stderr and its exit code; Ctrl-C becomes 130.

    What nobody expected is one line too, and exit code 1; EDGEBUILD_DEBUG=1 shows its traceback. Exit code 141: the
    reader of our output went away.
    """
    from edgert.errors import EdgertError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a command
    try:
        cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        click.echo("edgebuild: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (EdgebuildError, EdgertError) as error:
        click.echo(f"edgebuild: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("edgebuild: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        _leave_the_pipe()
    except SystemExit as done:  # click and rich make this of a broken pipe, code 1
        if done.code == 1 and (isinstance(done.__context__, BrokenPipeError) or _nobody_reads()):
            _leave_the_pipe()
        raise
    except Exception as error:
        if os.environ.get("EDGEBUILD_DEBUG"):
            raise
        what = " ".join(str(error).split())[:500]
        click.echo(f"edgebuild: {type(error).__name__}: {what} (EDGEBUILD_DEBUG=1 shows where)", err=True)
        sys.exit(1)


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader went away."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _leave_the_pipe() -> NoReturn:
    """Whoever read our output went away: end quietly, as `head` expects of its writers."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout once more
    sys.exit(141)
