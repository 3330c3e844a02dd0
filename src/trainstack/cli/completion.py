"""`trainstack completion SHELL` prints the script that completes commands and options.

The script has all words in it: a shell that asked the program would wait for the import of torch at each key.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainstack.cli.main import COMMANDS, READ_WORDS, _parser, module_of
from trainstack.cli.printing import print_json, print_lines

_ABOUT = COMMANDS["completion"]


class _Words(NamedTuple):
    """The words after a command, each with its help."""

    command: str
    commands: dict[str, str]
    options: dict[str, str]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "completion",
        help=_ABOUT,
        description=_ABOUT,
        epilog="bash and zsh: source <(trainstack completion bash); fish: trainstack completion fish | source",
    )
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SCRIPTS), help=", ".join(_SCRIPTS))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = _SCRIPTS[args.shell](list(_all_words()))
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print_lines(script.rstrip())
    return 0


def _all_words() -> Iterator[_Words]:
    """The words of `trainstack`, of each command, and of each action of a command."""
    yield _words_of("", _parser(None))
    for command in COMMANDS:
        if command in READ_WORDS:
            yield _words_of(command, module_of(command).make_parser(command))
            continue
        parser = _actions_of(_parser(command))[command]
        actions = _actions_of(parser)
        yield _words_of(command, parser)
        for name, action in actions.items():
            yield _words_of(f"{command} {name}", action)


def _actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _words_of(command: str, parser: argparse.ArgumentParser) -> _Words:
    helps: dict[str, str] = {}
    options: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
        elif action.help != argparse.SUPPRESS:
            options |= {one: action.help or "" for one in action.option_strings if one.startswith("--")}
    return _Words(command, {name: helps[name] for name in _actions_of(parser)}, options)


def _for_bash(words: list[_Words]) -> str:
    cases = "\n".join(f'    "{one.command}") words="{" ".join([*one.commands, *one.options])}" ;;' for one in words)
    commands = " | ".join(f'"{one.command}"' for one in words if one.command)
    return f"""\
_trainstack() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="" words="" next index
  for ((index = 1; index < COMP_CWORD; index++)); do
    next="${{command:+$command }}${{COMP_WORDS[index]}}"
    case "$next" in {commands}) command="$next" ;; esac
  done
  case "$command" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _trainstack trainstack
"""


def _for_zsh(words: list[_Words]) -> str:
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{_for_bash(words)}"


def _for_fish(words: list[_Words]) -> str:
    lines = []
    for one in words:
        seen = [f"__fish_seen_subcommand_from {name}" for name in one.command.split()]
        if one.commands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(one.commands)}")
        begin = f"complete -c trainstack -n '{'; and '.join(seen)}'"
        lines += [f"{begin} -a {name} -d {_quoted(text)}" for name, text in one.commands.items()]
        lines += [f"{begin} -l {name[2:]} -d {_quoted(text)}" for name, text in one.options.items()]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    short = " ".join(text.replace("%%", "%").split())[:80]
    return "'" + short.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _for_bash, "zsh": _for_zsh, "fish": _for_fish}
