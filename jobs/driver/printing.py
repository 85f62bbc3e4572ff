"""Lines on a terminal or in a pipe: a text as it is, a text after a label, a command to copy."""

from __future__ import annotations

import textwrap

from rich.console import Console


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a text without any formatting, on one line however long it is."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_warning(console: Console, text: str) -> None:
    """Print a warning, which a terminal breaks between words."""
    console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=not console.is_terminal)


def print_row(console: Console, lead: str, text: str) -> None:
    """Print a text after a label; what a terminal breaks off stands below the text, and not below the label."""
    if console.is_terminal or console.is_jupyter:
        below = " " * len(lead)
        text = textwrap.fill(
            text, console.width, initial_indent=lead, subsequent_indent=below, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        print_line(console, text)
    else:
        print_line(console, lead + text)


def print_command(console: Console, lead: str, command: str) -> None:
    """Print a command after a few words; on a line of its own where a terminal would otherwise break it."""
    own_line = console.is_terminal and len(lead) + len(command) > console.width
    for text in [lead.rstrip(), command] if own_line else [lead + command]:
        if text:
            print_line(console, text)
