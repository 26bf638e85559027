"""The table of subcommands: their modules, their lines in `llmserve --help` and their examples.

It imports none of them: main.py loads a command when it is needed, manual.py loads all.
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
            "llmserve launch --config prod.toml",
            "llmserve launch ./my-model --port 8000 --name prod",
            "llmserve launch model.gguf --detach",
        ),
    ),
    "stop": Entry(
        "stop", "stop", SERVE, "Drain an instance and end it.", ("llmserve stop", "llmserve stop -i prod --now")
    ),
    "ps": Entry("ps", "ps", LOOK, "List the running instances.", ("llmserve ps", "llmserve ps --json")),
    "restart": Entry(
        "restart",
        "restart",
        SERVE,
        "End an instance and launch it again.",
        ("llmserve restart", "llmserve restart --now"),
    ),
    "config": Entry(
        "config",
        "config",
        SERVE,
        "Show the options that launch would use, and their sources.",
        ("llmserve config", "llmserve config --config prod.toml --json"),
    ),
    "status": Entry(
        "status",
        "status",
        LOOK,
        "Show one instance in depth: load, memory, processes, options.",
        ("llmserve status", "llmserve status -i prod --json"),
    ),
    "top": Entry(
        "top.command",
        "top",
        LOOK,
        "Watch an instance live.",
        (
            "llmserve top",
            "llmserve top --once --json",
            "llmserve top --record busy.jsonl",
            "llmserve top --replay busy.jsonl --speed 10",
        ),
    ),
    "requests": Entry(
        "requests",
        "requests",
        LOOK,
        "List running and waiting requests.",
        ("llmserve requests", "llmserve requests --watch --show-text", "llmserve requests --json"),
    ),
    "ping": Entry(
        "ping",
        "ping",
        LOOK,
        "Measure the round trip to the scheduler.",
        ("llmserve ping", "llmserve ping --count 1000"),
    ),
    "logs": Entry("logs", "logs", LOOK, "Print the log of an instance.", ("llmserve logs -n 50", "llmserve logs -f")),
    "doctor": Entry(
        "doctor",
        "doctor",
        LOOK,
        "Diagnose problems on this machine.",
        ("llmserve doctor", "llmserve doctor --fix"),
    ),
    "abort": Entry(
        "abort",
        "abort",
        ACT,
        "Abort requests, by name or in bulk.",
        ("llmserve abort cmpl-1f2e", "llmserve abort --older-than 5m", "llmserve abort --all --yes"),
    ),
    "flush-cache": Entry(
        "flush_cache",
        "flush_cache",
        ACT,
        "Empty the prefix cache.",
        ("llmserve flush-cache", "llmserve flush-cache --wait 30"),
    ),
    "update-weights": Entry(
        "update_weights",
        "update_weights",
        ACT,
        "Swap the weights without a restart.",
        ("llmserve update-weights ./checkpoint-2000 --dry-run", "llmserve update-weights ./checkpoint-2000"),
    ),
    "pause": Entry(
        "pause",
        "pause",
        ACT,
        "Pause generation, keeping the requests.",
        ("llmserve pause", "llmserve pause --mode drain"),
    ),
    "resume": Entry("pause", "resume", ACT, "Resume after a pause or a drain.", ("llmserve resume",)),
    "drain": Entry(
        "pause", "drain", ACT, "Refuse new requests and let the others end.", ("llmserve drain --timeout 60",)
    ),
    "chat": Entry(
        "chat",
        "chat",
        USE,
        "Chat with the running model.",
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
    "bench": Entry(
        "bench.command",
        "bench",
        USE,
        "Measure a server under load.",
        (
            "llmserve bench -n 64 -c 16",
            "llmserve bench --rate 2 --shared-prefix 0.9 --input-words 1000",
            "llmserve bench --suite --url http://127.0.0.1:8000 --json",
        ),
    ),
    "generate-docs": Entry("manual", "generate_docs", USE, "Write the man pages and completions.", hidden=True),
}
