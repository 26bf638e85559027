"""The table of subcommands: which module each is in, its line in `llmserve --help` and its examples.

It imports none of them: main.py loads a command when it is needed, docs.py all of them.
"""

from typing import NamedTuple

SERVE, LOOK, ACT, USE = "Serve", "Look", "Act", "Use"


class Entry(NamedTuple):
    """One subcommand: `function` in the module llmserve.cli.`module`."""

    module: str
    function: str
    panel: str
    help: str
    examples: tuple[str, ...] = ()
    hidden: bool = False


COMMANDS: dict[str, Entry] = {
    "launch": Entry(
        "launch",
        "launch",
        SERVE,
        "Serve a model over HTTP.",
        (
            "llmserve launch",
            "llmserve launch ./my-model --port 8000 --name prod",
            "llmserve launch model.gguf --detach",
        ),
    ),
    "stop": Entry(
        "stop", "stop", SERVE, "Drain an instance and end it.", ("llmserve stop", "llmserve stop -i prod --now")
    ),
    "ps": Entry("ps", "ps", LOOK, "List the running instances.", ("llmserve ps", "llmserve ps --json")),
    "chat": Entry(
        "chat",
        "chat",
        USE,
        "Talk with the running model.",
        (
            "llmserve chat",
            "llmserve chat 'Why is the sky blue?'",
            "git diff | llmserve chat 'Write a commit message for this.'",
        ),
    ),
    "generate": Entry(
        "generate",
        "generate",
        USE,
        "Continue a prompt.",
        ("llmserve generate 'Once upon a time' --max-tokens 50", "llmserve generate - < prompt.txt > story.txt"),
    ),
}
