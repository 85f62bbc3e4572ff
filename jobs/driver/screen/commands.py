"""Commands that a user copies from the terminal."""

from __future__ import annotations

from rich.console import Console


def print_command(console: Console, lead: str, command: str) -> None:
    """Print a command after a few words; on a line of its own where a terminal would otherwise break it."""
    own_line = console.is_terminal and len(lead) + len(command) > console.width
    for text in [lead.rstrip(), command] if own_line else [lead + command]:
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
