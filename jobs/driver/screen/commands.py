"""Lines of the terminal that are more than prose: labelled rows, and commands to copy."""

from __future__ import annotations

import textwrap

from rich.console import Console


def print_row(console: Console, lead: str, text: str) -> None:
    """Print a text after a label; what a terminal breaks off stands below the text, and not below the label."""
    if console.is_terminal or console.is_jupyter:
        console.print(
            textwrap.fill(
                text, console.width, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False,
                break_on_hyphens=False,
            ),
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    else:
        console.print(lead + text, markup=False, highlight=False, soft_wrap=True)


def print_command(console: Console, lead: str, command: str) -> None:
    """Print a command after a few words; on a line of its own where a terminal would otherwise break it."""
    own_line = console.is_terminal and len(lead) + len(command) > console.width
    for text in [lead.rstrip(), command] if own_line else [lead + command]:
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
