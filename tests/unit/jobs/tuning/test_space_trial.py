"""The process of a trial that is a complete run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.tuning.space_trials import use_environment


def test_a_trial_sees_the_gpus_of_the_command_on_cuda_and_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides them from a process that reserves none: in CUDA_VISIBLE_DEVICES, on ROCm in HIP_VISIBLE_DEVICES."""
    monkeypatch.chdir(tmp_path)
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}):
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            monkeypatch.setenv(name, "")
        use_environment(str(tmp_path), visible)
        found = {
            name: os.environ[name] for name in os.environ if name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        }
        assert found == visible
