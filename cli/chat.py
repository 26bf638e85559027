"""`llmserve chat`: a conversation with the running instance, or one answer to a message or a pipe."""

from collections.abc import Callable
from typing import Annotated

import typer

from llmserve.cli import answer
from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_server
from llmserve.cli.console import Console

Ask = Callable[[list[dict[str, str]]], answer.Answer]
"""Makes the Answer to the messages of a conversation."""
HELP = """\
/system TEXT  set the system prompt and begin anew    /clear  begin anew
/quit         leave (or Ctrl-D)                       Ctrl-C  end the answer"""


def chat(
    ctx: typer.Context,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE",
            help="Answer this message and exit; - reads it from standard input. Piped input is appended.",
        ),
    ] = None,
    instance: InstanceOption = None,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")] = None,
    max_tokens: answer.MaxTokensOption = None,
    temperature: answer.TemperatureOption = None,
    top_p: answer.TopPOption = None,
    seed: answer.SeedOption = None,
    stop: answer.StopOption = None,
    api_key_file: answer.ApiKeyFileOption = None,
    timeout: answer.GapOption = 600.0,
    json: JsonOption = False,
) -> None:
    """Chat with the running model.

    On a terminal this is a conversation; with a message or piped input it prints one answer on standard output.
    """
    console = console_of(ctx)
    record = find_server(instance)
    key = answer.api_key(console, api_key_file)
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or None}

    def ask(messages: list[dict[str, str]]) -> answer.Answer:
        return answer.Answer(console, record, "/v1/chat/completions", {"messages": messages, **options}, key, timeout)

    conversation, terminal = Conversation(system), console.stdin.isatty()
    parts = ["" if message == "-" else message, answer.piped(console) if message == "-" or not terminal else ""]
    single = "\n\n".join(part for part in parts if part and part.strip())
    if single:
        result = ask(conversation.with_user(single))
        if json:
            for _ in result:
                pass
            console.json(result.as_json())
        else:
            result.show()
    elif not terminal or message is not None or json:
        raise CommandError("there is no message: give one as an argument or pipe it in", ExitCode.USAGE)
    else:
        talk(console, conversation, ask, record.served_model_names[0])


class Conversation:
    """The messages so far, the system prompt first."""

    def __init__(self, system: str | None) -> None:
        self.messages: list[dict[str, str]] = []
        self.restart(system)

    def restart(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def with_user(self, text: str) -> list[dict[str, str]]:
        return [*self.messages, {"role": "user", "content": text}]

    def add(self, user: str, assistant: str) -> None:
        self.messages = [*self.with_user(user), {"role": "assistant", "content": assistant}]


def talk(console: Console, conversation: Conversation, ask: Ask, model: str) -> None:
    """Runs the conversation on a terminal, until Ctrl-D or /quit. A failed answer does not end it."""
    import readline  # noqa: F401  (gives input() its line editing and history)

    console.err.print(f"Talking with [bold]{model}[/]. /help lists commands; Ctrl-D leaves.", style="dim")
    prompt = "\001\x1b[1;36m\002>>> \001\x1b[0m\002" if console.color else ">>> "
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            console.note("")
            return
        except KeyboardInterrupt:
            console.note("")
            continue
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit", "/bye"):
            return
        if command == "/help":
            console.note(HELP)
        elif command == "/clear":
            conversation.restart(conversation.system)
        elif command == "/system":
            conversation.restart(rest.strip() or None)
        elif command.startswith("/"):
            console.note(f"there is no {command}\n{HELP}")
        elif line:
            turn(console, conversation, ask, line)


def turn(console: Console, conversation: Conversation, ask: Ask, text: str) -> None:
    """Asks for one answer and shows it. After Ctrl-C, the text that has come stays in the conversation."""
    result = ask(conversation.with_user(text))
    try:
        result.show()
    except KeyboardInterrupt:
        console.note("(ended)" if result.text else "\n(ended)")
    except CommandError as error:
        console.error(str(error))
    else:
        console.err.print(result.summary(), style="dim")
    if result.text:
        conversation.add(text, result.text)
