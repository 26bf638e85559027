"""The characters of the screen, Unicode or ASCII, and the symbol and style of each state."""

from typing import NamedTuple


class Glyphs(NamedTuple):
    spark: str
    used: str
    cached: str
    free: str
    states: dict[str, str]
    chosen: str
    tagged: str
    alert: str
    rule: str
    ellipsis: str
    down: str
    up: str


STATE_WORDS = ("ready", "connecting", "starting", "draining", "paused", "degraded", "stalled", "dead", "lost")
UNICODE = Glyphs(
    spark=" ▁▂▃▄▅▆▇█",
    used="█",
    cached="▒",
    free="·",
    states=dict(zip(STATE_WORDS, "●◌◌◐‖◒▲✖?", strict=True)),
    chosen="▸",
    tagged="◆",
    alert="▲",
    rule="─",
    ellipsis="…",
    down="▼",
    up="▲",
)
ASCII = Glyphs(
    spark=" .:-=+*%#",
    used="#",
    cached="+",
    free=".",
    states=dict(zip(STATE_WORDS, "*oo~=%!X?", strict=True)),
    chosen=">",
    tagged="*",
    alert="!",
    rule="-",
    ellipsis="~",
    down="v",
    up="^",
)
STATE_STYLES = {
    "ready": "good",
    "connecting": "dim",
    "starting": "warn",
    "draining": "warn",
    "paused": "warn",
    "degraded": "bad",
    "stalled": "bad",
    "dead": "bad",
    "lost": "bad",
}
