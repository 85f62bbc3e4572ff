"""A JOB.yaml on the disk, read as text or refused."""

from __future__ import annotations

from pathlib import Path

from raytrain.errors import InputError


def read_job(path: Path) -> str:
    """The text of a JOB.yaml. Errors: InputError naming the file."""
    key = str(path)
    if path.is_dir():
        resume = f"to go on with a run: --resume {key}" if (path / "job.yaml").exists() else ""
        raise InputError(key, seen="a folder", expected="a YAML file", remedy=resume)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(key, seen="no such file", expected="a YAML file") from error
    except UnicodeDecodeError as error:
        seen = f"a byte that is no UTF-8, at {error.start}"
        raise InputError(key, seen=seen, expected="a text file in UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(key, seen=str(error), expected="a YAML file that can be read") from error
