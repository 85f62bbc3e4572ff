"""What a command spent its time on."""

from __future__ import annotations

from jobs.driver.progress import Phases


def test_seconds_are_added_up_by_phase_in_the_order_of_the_first_time() -> None:
    now = 110.0
    phases = Phases(clock=lambda: now, began=100.0)
    done = {
        "checking the job: opening the data": 2.5,
        "starting Ray": 4.0,
        "preparing the workers' job": 1.0,
        "starting workers": 2.0,
        "setting up the workers": 0.5,
        "measuring memory": 1.5,
        "measuring precisions": 0.25,
        "training": 30.0,
        "exporting": 0.01,
        "writing the report": 2.0,
    }
    for what, seconds in done.items():
        phases.begin(what)
        phases.begin(what)  # the display says so again and again
        now += seconds
    phases.end()
    now += 5
    phases.end()
    assert phases.seconds == {
        "checking the job": 12.5, "starting Ray": 4.0, "starting workers": 3.5, "measuring": 1.75, "training": 30.0,
        "exporting": 0.009999999999990905, "report": 2.0,
    }  # fmt: skip
    assert phases.line({"eval": 2.5, "save": 0.04, "compute": 20.0}) == (
        "54 s: checking the job 12.5, starting Ray 4.0, starting workers 3.5, measuring 1.8, "
        "training 30.0 (evaluating 2.5), report 2.0"
    )


def test_what_follows_the_first_training_is_a_restart_until_the_next() -> None:
    """A cluster that was lost is connected to again."""
    now = 0.0
    phases = Phases(clock=lambda: now, began=0.0)
    done = [
        ("starting Ray", 4.0), ("starting workers", 2.0), ("training", 10.0), ("stopping Ray", 0.5),
        ("starting Ray", 6.0), ("preparing the workers' job", 1.0), ("setting up the workers", 3.0),
        ("training", 20.0), ("exporting", 1.0), ("stopping Ray", 0.5), ("writing the report", 2.0),
    ]  # fmt: skip
    for what, seconds in done:
        phases.begin(what)
        now += seconds
    phases.end()
    assert phases.seconds["restarting the workers"] == 10.0 and phases.seconds["training"] == 30.0
    assert phases.line({"save": 2.0}) == (
        "50 s: starting Ray 4.0, starting workers 2.0, training 30.0 (saving 2.0), stopping Ray 1.0, "
        "restarting the workers 10.0, exporting 1.0, report 2.0"
    )


def test_a_restart_lasts_until_the_workers_train_again() -> None:
    now = 0.0
    phases = Phases(clock=lambda: now, began=0.0)
    done = [
        ("starting workers", 2.0), ("setting up the workers", 1.0), ("restarting the workers", 3.0),
        ("starting workers", 4.0), ("setting up the workers", 5.0), ("measuring memory", 6.0),
        ("restarting the workers", 7.0), ("setting up the workers", 1.0), ("training", 10.0),
    ]  # fmt: skip
    for what, seconds in done:
        phases.begin(what)
        now += seconds
    phases.end()
    assert phases.seconds == {"starting workers": 3.0, "restarting the workers": 26.0, "training": 10.0}
