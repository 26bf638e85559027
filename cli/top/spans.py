"""Lines of styled text: lists of (text, style), measured in terminal cells.

Styles are names, which screen.py turns into colours, or ignores.
"""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
Line = list[Span]


def text_of(lines: Sequence[Line]) -> str:
    """The lines as plain text."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def length(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def shorten(text: str, width: int, ellipsis: str) -> str:
    """`text` in at most `width` cells."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + ellipsis if width > 0 else ""


def elide(text: str, width: int, ellipsis: str) -> str:
    """`text` in at most `width` cells, shortened in the middle, because names often differ at the end."""
    if cell_len(text) <= width or width < 3:
        return shorten(text, width, ellipsis)
    head = set_cell_size(text, width // 2)
    tail = set_cell_size(text[::-1], width - width // 2 - 1)[::-1]
    return head + ellipsis + tail


def pad(text: str, width: int, right: bool, ellipsis: str) -> str:
    """`text` in exactly `width` cells."""
    text = shorten(text, width, ellipsis)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def clip(line: Line, width: int, ellipsis: str) -> Line:
    """The line, cut to `width` cells where it is longer."""
    if length(line) <= width:
        return line
    clipped: Line = []
    room = width
    for text, style in line:
        if cell_len(text) >= room:
            clipped.append((shorten(text, room, ellipsis) if cell_len(text) > room else text, style))
            break
        clipped.append((text, style))
        room -= cell_len(text)
    return clipped


def packed(name: str, items: list[Line], width: int) -> list[Line]:
    """The items in as few lines as possible; the first line is labelled `name`."""
    lines: list[Line] = []
    for item in items:
        if not lines or length(lines[-1]) + 2 + length(item) > width:
            lines.append([(f"{'' if lines else name:9}", "dim")])
            lines[-1] += item
        else:
            lines[-1] += [("  ", ""), *item]
    return lines


def beside(left: list[Line], right: list[Line], width: int) -> list[Line]:
    """Two blocks side by side, two cells apart; the left one is `width` wide."""
    height = max(len(left), len(right))
    lines = []
    for number in range(height):
        first = clip(left[number], width, "") if number < len(left) else []
        second = right[number] if number < len(right) else []
        lines.append([*first, (" " * (width + 2 - length(first)), ""), *second])
    return lines
